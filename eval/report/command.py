"""`python -m eval report FOLDER...`: one page of records, for people.

    <out>/index.html   verdicts, charts and tables in one file without scripts: no network, no other
                       file

Names of arms, paths and texts of models may contain markup: it is escaped.
"""

from __future__ import annotations

import argparse
import datetime
from collections.abc import Sequence
from pathlib import Path

from jinja2 import Environment, FileSystemLoader

from eval.errors import CommandError
from eval.progress import tracked
from eval.recorded import KINDS, read_recorded
from eval.report.chapter import Chapter
from eval.report.charts import embedded
from eval.run import new_folder
from retrieval.command_line import Parser

MAX_OPEN = 4
"""With more records charts and tables are folded."""


def main(argv: Sequence[str]) -> int:
    """Write the page and print its path."""
    parser = Parser(
        prog="python -m eval report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "records", nargs="+", type=Path, metavar="RECORD", help="a run's folder or its record.json"
    )
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder (default: runs/<time>-report)"
    )
    options = parser.parse_args(argv)
    page = (options.out or new_folder("report")) / "index.html"
    runs = sorted(
        (read_recorded(path) for path in options.records), key=lambda run: KINDS.index(run.kind)
    )
    try:
        # An older report may be replaced, but a user's folder must not be filled.
        if not page.exists() and page.parent.exists() and any(page.parent.iterdir()):
            raise CommandError(
                f"{page.parent} is not the folder of a report: name one that is new or empty"
            )
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(_render([Chapter(run) for run in runs]), encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{page} cannot be written: {error}") from None
    print(f"page: {page}")
    return 0


def _render(chapters: Sequence[Chapter]) -> str:
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True)
    environment.filters["embedded"] = embedded
    return environment.get_template("page.html.jinja").render(
        chapters=chapters,
        drawn=tracked("chapters", chapters),
        date=f"{datetime.datetime.now(datetime.UTC):%Y-%m-%d %H:%M UTC}",
        is_open=len(chapters) <= MAX_OPEN,
    )
