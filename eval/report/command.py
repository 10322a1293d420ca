"""`python -m eval report FOLDER...`: one page of records, for people.

    <out>/index.html   verdicts, charts and tables in one file without scripts: no network, no other file

Names of arms, paths and texts of models may contain markup: it is escaped.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup

from eval.errors import CommandError
from eval.progress import tracked
from eval.recorded import KINDS, Recorded, read_recorded
from eval.report.chapter import Chapter
from eval.report.charts import DARK, LIGHT, svg

MAX_OPEN = 4
"""With more records charts and tables are folded."""


def main(argv: Sequence[str]) -> int:
    """Write the report and print its path."""
    options = _parser().parse_args(argv)
    out = options.out or Path("runs") / f"{datetime.datetime.now():%Y-%m-%dT%H%M%S}-report"
    runs = sorted((read_recorded(path) for path in options.records), key=lambda run: KINDS.index(run.kind))
    try:
        write_report(runs, out)
    except OSError as error:
        raise CommandError(f"{out} cannot be written: {error}") from None
    print(f"page: {out / 'index.html'}")
    return 0


def write_report(runs: Sequence[Recorded], out: Path) -> None:
    """Fill the folder `out`, which is new, empty or holds an older report.

    Raises:
        CommandError: `out` is something else.
    """
    if out.exists() and not (out / "index.html").exists() and (not out.is_dir() or any(out.iterdir())):
        raise CommandError(f"{out} is not the folder of a report: name one that is new or empty")
    out.mkdir(parents=True, exist_ok=True)
    (out / "index.html").write_text(render([Chapter(run) for run in runs]), encoding="utf-8")


def render(chapters: Sequence[Chapter]) -> str:
    """The page."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    to_draw = [(chapter, picture) for chapter in chapters for picture in chapter.pictures]
    drawn: dict[Chapter, list[Markup]] = {chapter: [] for chapter in chapters}
    for number, (chapter, picture) in enumerate(tracked("charts", to_draw)):
        drawn[chapter].append(Markup(svg(picture.draw, salt=str(number))))
    return environment.get_template("page.html.jinja").render(
        chapters=chapters,
        drawn=drawn,
        date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M UTC}",
        colours=list(zip(LIGHT, DARK, strict=True)),
        is_open=len(chapters) <= MAX_OPEN,
    )


# Private, in order of use


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD", help="a run's folder or its record.json")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (default: runs/<date>-report)")
    return parser
