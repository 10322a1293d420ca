"""`python -m eval report FOLDER...`: a page, charts and a summary of records, for people.

    <out>/index.html                 everything in one file, charts and style included: no network, no other file
    <out>/<record>-<picture>.png     the charts as files
    <out>/summary.md                 verdicts and tables
    <out>/records/<record>/record.json     a copy of each record

Names of arms, paths and texts of models may contain markup: the template escapes them.
"""

from __future__ import annotations

import argparse
import base64
import datetime
import io
import re
import shutil
import struct
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from PIL import Image

from eval.errors import CommandError
from eval.progress import tracked
from eval.recorded import Recorded, read_recorded
from eval.report.chapter import Chapter, Picture, colours, create_chapter
from eval.report.charts import Look
from eval.report.tables import Table

DPI = 150
MAX_FIRST = 8
"""Maximum number of verdict sentences at the top. A replay's are shown completely: the last ones limit the first."""


def main(argv: Sequence[str]) -> int:
    """Write the report and print its path."""
    options = _parser().parse_args(argv)
    stamp = datetime.datetime.now().strftime("%Y-%m-%dT%H%M%S")
    out = options.out or Path("runs") / f"{stamp}-report"
    runs = [read_recorded(path) for path in options.records]
    try:
        write_report(runs, out)
    except OSError as error:
        raise CommandError(f"{out} cannot be written: {error}") from None
    print(f"page: {out / 'index.html'}\nsummary: {out / 'summary.md'}")
    return 0


def write_report(runs: Sequence[Recorded], out: Path) -> None:
    """Fill the folder `out`, which is new, empty or holds an older report.

    Raises:
        CommandError: `out` is something else.
    """
    if out.exists() and not (out / "index.html").exists() and (not out.is_dir() or any(out.iterdir())):
        raise CommandError(f"{out} is not the folder of a report: name one that is new or empty")
    out.mkdir(parents=True, exist_ok=True)
    names, places = _unique([run.name for run in runs]), colours(runs)
    chapters = [create_chapter(run, name) for run, name in zip(runs, names, strict=True)]
    pictures: dict[int, list[dict[str, Any]]] = {place: [] for place in range(len(chapters))}
    to_draw = [(place, picture) for place, chapter in enumerate(chapters) for picture in chapter.pictures]
    for place, picture in tracked("pictures", to_draw):
        light, dark = (draw(picture, Look(places[place], dark=dark)) for dark in (False, True))
        (out / f"{_file_name(names[place])}-{_file_name(picture.name)}.png").write_bytes(light)
        pictures[place].append(_on_page(picture, light, dark))
    (out / "index.html").write_text(render(chapters, pictures), encoding="utf-8")
    (out / "summary.md").write_text(summary(chapters), encoding="utf-8")
    for run, name in zip(runs, names, strict=True):
        folder = out / "records" / _file_name(name)
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(run.folder / "record.json", folder / "record.json")


def draw(picture: Picture, look: Look) -> bytes:
    """The chart as PNG."""
    buffer = io.BytesIO()
    with look.style():
        picture.draw(look).savefig(buffer, format="png", dpi=DPI)
    # A chart has few colours: a palette reduces the page to a third.
    small = io.BytesIO()
    with Image.open(buffer) as image:
        image.convert("RGB").quantize(128).save(small, format="png", optimize=True)
    return small.getvalue()


def render(chapters: Sequence[Chapter], pictures: Mapping[int, Sequence[Mapping[str, Any]]]) -> str:
    """The page."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, keep_trailing_newline=True
    )
    shown = [
        {
            **_fields(chapter),
            "num_first": len(chapter.verdict) if chapter.kind == "replay" else MAX_FIRST,
            "anchor": f"record-{place + 1}",
            "pictures": pictures[place],
        }
        for place, chapter in enumerate(chapters)
    ]
    date = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC")
    return environment.get_template("page.html.jinja").render(chapters=shown, date=date)


def summary(chapters: Sequence[Chapter]) -> str:
    """Verdicts, figures and caveats as Markdown."""
    lines = ["# Evaluation of chunk reuse", ""]
    for chapter in chapters:
        state = "complete" if chapter.is_complete else "**partial: the run was interrupted**"
        lines += [f"## {_markdown(chapter.name)}", "", f"{chapter.kind}, {state}", ""]
        lines += [f"- {_markdown(text)}" for text in chapter.verdict]
        lines += ["", *(f"- {name}: {_markdown(value)}" for name, value in chapter.facts), ""]
        for picture in chapter.pictures:
            lines += [f"### {_markdown(picture.title)}", "", _markdown(picture.reading), ""]
            file = f"{_file_name(chapter.name)}-{_file_name(picture.name)}.png"
            lines += [f"![{_markdown(picture.title)}]({file})", "", *_markdown_table(picture.table), ""]
        for table in filter(None, [chapter.servers, *chapter.tables]):
            lines += [f"### {_markdown(table.caption)}", "", *_markdown_table(table), ""]
        if chapter.caveats:
            lines += ["### Caveats", "", *(f"- {_markdown(text)}" for text in chapter.caveats), ""]
    return "\n".join(lines)


# Private, in order of use


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m eval report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD", help="a run's folder or its record.json")
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (default: runs/<date>-report)")
    return parser


def _unique(names: Iterable[str]) -> list[str]:
    """Make names unique: equal names of different folders get a number."""
    taken: list[str] = []
    for name in names:
        number, unique = 1, name
        while _file_name(unique) in map(_file_name, taken):
            number += 1
            unique = f"{name} ({number})"
        taken.append(unique)
    return taken


def _file_name(name: str) -> str:
    return re.sub(r"[^\w.+-]+", "-", name, flags=re.ASCII).strip("-.") or "record"


def _on_page(picture: Picture, light: bytes, dark: bytes) -> dict[str, Any]:
    width, height = struct.unpack(">II", light[16:24])
    return {
        "title": picture.title,
        "reading": picture.reading,
        "alt": f"Chart: {picture.title}. {picture.reading} The figures are in the table below.",
        "table": picture.table,
        "light": base64.b64encode(light).decode(),
        "dark": base64.b64encode(dark).decode(),
        "width": width,
        "height": height,
    }


def _fields(chapter: Chapter) -> dict[str, Any]:
    return {name: getattr(chapter, name) for name in chapter.__slots__}


def _markdown(text: str) -> str:
    """The text on one line, with markup escaped."""
    return re.sub(r"([\\`*_\[\]<>|#!~$])", r"\\\1", " ".join(text.split()))


def _markdown_table(table: Table) -> list[str]:
    lines = ["| " + " | ".join(_markdown(name) for name in table.head) + " |"]
    lines.append("|" + "".join("---|" if place < table.num_text else "--:|" for place in range(len(table.head))))
    return lines + ["| " + " | ".join(_markdown(value) for value in row) + " |" for row in table.rows]
