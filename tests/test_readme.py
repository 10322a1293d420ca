"""READMEs and scripts say what the code says.

python tests/test_readme.py     # writes the generated tables into their pages
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from eval.roofline.command import summary_rows
from sglang_chunkcache.config import flag_fields, flag_name, help_texts
from sglang_chunkcache.front.guard.lethal import REQUEST_RULES, SAMPLING_RULES, SEEN
from sglang_chunkcache.front.metrics import FIGURES
from sglang_chunkcache.wire.report import Fallback

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("radix_ext", "retrieval", "sglang_chunkcache", "eval", "tests", "launch")
PAGES = [
    ROOT / "README.md",
    ROOT / ".ci" / "run",
    *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("README.md"))),
    *(page for folder in FOLDERS for page in sorted((ROOT / folder).rglob("*.sh"))),
]


def flag_rows() -> list[str]:
    """A table with a row per knob."""
    rows = ["| flag | default | what it sets |", "|---|---|---|"]
    for knob in flag_fields():
        default = "none" if knob.default is None else str(knob.default).replace("\n", "\\n")
        default = f"'{default}'" if "\\n" in default else default
        choices = ", ".join(f"`{choice}`" for choice in knob.metadata["choices"] or ())
        what, _ = help_texts()[knob.name]
        sets = f"{what}: {choices}" if choices else what
        rows.append(f"| `{flag_name(knob.name)}` | `{default}` | {sets} |")
    return rows


def guard_rows() -> list[str]:
    """A table with a row per rule; rules that say the same share one."""
    rows = ["| field | must | otherwise, in the scheduler |", "|---|---|---|"]
    fields: dict[tuple[str, str], list[str]] = {}
    for rule in [*REQUEST_RULES.values(), *SAMPLING_RULES.values()]:
        only = "" if rule.versions == SEEN else f" ({', '.join(rule.versions)})"
        fields.setdefault((rule.must, rule.ends + only), []).append(f"`{rule.field}`")
    return rows + [
        f"| {', '.join(names)} | {must} | {ends} |" for (must, ends), names in fields.items()
    ]


def roofline_rows() -> list[str]:
    """As `python -m eval roofline --model-shape llama-3.1-8b --machine h100` prints it."""
    rows = summary_rows("h100", "llama-3.1-8b", (2048, 8192, 32_768), 0.15)
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    return [f"| {' | '.join(map(str, line))} |" for line in lines]


def metric_rows() -> list[str]:
    """A table with a row per metric, whoever makes it."""
    pytest.importorskip("torch")
    from sglang_chunkcache.fusion import keeping
    from sglang_chunkcache.scheduler import host_metrics, waiting
    from sglang_chunkcache.storage import metrics as storage

    rows = ["| metric, after `chunkcache:` | labels | what it says |", "|---|---|---|"]
    ends = {"Counter": "_total", "Summary": "_sum`, `_count"}
    for name, (kind, labels, text) in FIGURES.items():
        rows.append(row(name + ends.get(kind, ""), labels.split(), text))
    for prefix, gauges, counters, labels in (
        ("", {}, waiting.COUNTERS, ""),
        ("host_", host_metrics.GAUGES, host_metrics.COUNTERS, ""),
        ("store_", keeping.GAUGES, {}, ""),
        ("storage_", storage.GAUGES, storage.COUNTERS, "tier"),
    ):
        made = {name: told[-1] for name, told in gauges.items()}
        made |= {f"{name}_total": told[-1] for name, told in counters.items()}
        for name, text in made.items():
            last = [label for label in ("kind", "reason") if f"by {label}" in text]
            rows.append(row(prefix + name, [*labels.split(), *last], text))
    return rows


def row(name: str, labels: list[str], text: str) -> str:
    told = text.replace("|", r"\|")
    return f"| `{name}` | {', '.join(f'`{label}`' for label in labels)} | {told} |"


TABLES = {
    "metrics": (ROOT / "sglang_chunkcache" / "front" / "README.md", metric_rows),
    "guard": (ROOT / "sglang_chunkcache" / "front" / "README.md", guard_rows),
    "flags": (ROOT / "sglang_chunkcache" / "front" / "README.md", flag_rows),
    "roofline": (ROOT / "eval" / "README.md", roofline_rows),
}
"""Name in the markers -> the page and what is generated into it."""


def generated(text: str, name: str, rows: list[str]) -> str:
    """The page's text with these rows between the markers of that name."""
    page, count = re.subn(
        rf"(?s)(<!-- {name}: [^\n]*-->\n).*?(<!-- end of {name} -->)",
        lambda found: f"{found[1]}{chr(10).join(rows)}\n{found[2]}",
        text,
    )
    assert count == 1, f"{count} places for the table of {name}"
    return page


@pytest.mark.parametrize("name", TABLES)
def test_generated_table_is_that_of_the_code(name: str) -> None:
    """A flag or a reason that the page does not have, or has with another text, misleads."""
    page, rows = TABLES[name]
    text = page.read_text(encoding="utf-8")
    assert text == generated(text, name, rows()), "python tests/test_readme.py writes it anew"


def test_no_other_rank_tells_metrics() -> None:
    """What a new tier tells is in no table unless `metric_rows` knows it."""
    sources = [path.read_text() for path in sorted((ROOT / "sglang_chunkcache").rglob("*.py"))]
    prefixes = {name for text in sources for name in re.findall(r'"(chunkcache:[a-z_]*)"', text)}
    assert prefixes == {f"chunkcache:{name}" for name in ("", "host_", "store_", "storage_")}


def test_every_fallback_is_explained() -> None:
    """Each has a row, in the order of the code: what it means and what to do, in sentences."""
    page = (ROOT / "sglang_chunkcache" / "front" / "README.md").read_text(encoding="utf-8")
    table = page.split("<!-- fallbacks:")[1].split("<!-- end of fallbacks -->")[0]
    rows = [line.strip("| ").split(" | ") for line in table.splitlines()[3:]]
    assert [name for name, _, _ in rows] == [f"`{reason.value}`" for reason in Fallback]
    for _, *texts in rows:
        for text in texts:
            assert text[0].isupper(), text
            assert text.endswith((".", ").")), text


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    lines = re.sub(r"(?ms)^```.*?^```", "", page.read_text(encoding="utf-8")).splitlines()
    titles = (line.lstrip("#").strip().lower() for line in lines if line.startswith("#"))
    return {re.sub(r"[^\w\- ]", "", title).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    """Relative links name files and headings that exist, paths from the root one of our files."""
    text = page.read_text(encoding="utf-8")
    for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", text):
        file = page.parent / target if target else page
        assert file.exists(), target
        assert not anchor or anchor in headings(file), f"{target}#{anchor}"
    paths = re.findall(rf"(?<![\w/.])(?:{'|'.join(FOLDERS)})/[\w/.-]+\.(?:py|md|sh)\b", text)
    assert [name for name in paths if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_modules(page: Path) -> None:
    """A command that moved would fail for the reader only."""
    command = r"-m ((?:retrieval|sglang_chunkcache|eval)(?:\.[a-z_]+)*)"
    named = re.findall(command, page.read_text(encoding="utf-8"))
    assert [name for name in named if find_spec(name) is None] == []


if __name__ == "__main__":
    for name, (page, rows) in TABLES.items():
        page.write_text(generated(page.read_text(encoding="utf-8"), name, rows()), encoding="utf-8")
