"""The records in eval/results: readable, of the one format, each named by a page, and none missing that a page names."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from eval.recorded import KINDS, read_recorded

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "eval/results"
FOLDERS = sorted(path.name for path in RESULTS.iterdir() if path.is_dir())
PAGES = (ROOT / "eval/LOG.md", *(path for path in ROOT.rglob("README.md") if ".venv" not in path.parts))
NAME = re.compile(r"20\d\d-\d\d-\d\dT\d{4}-[a-z0-9*-]*[a-z0-9*]")
"""A record's name on a page; an asterisk stands for any end."""


def named() -> set[str]:
    return {name for page in PAGES for name in NAME.findall(page.read_text(encoding="utf-8"))}


@pytest.mark.parametrize("folder", FOLDERS)
def test_record_is_of_the_one_format(folder: str) -> None:
    """`compare` and `report` read it: kind, settings, results; a bench's name, tables as lists of rows, and sentences."""
    run = read_recorded(RESULTS / folder)
    assert run.kind in KINDS
    assert run.record["date"].startswith("20")
    assert all(isinstance(sentence, str) for sentence in run.results.get("verdict", []))
    for table in run.results.get("tables", []):
        assert table["title"]
        assert table["rows"]
        assert all(row.keys() == table["rows"][0].keys() for row in table["rows"])
    if run.kind in ("bench", "recall"):
        assert run.results["verdict"]
        assert run.results["tables"]
    assert (run.kind == "bench") == ("bench" in run.record["spec"])


@pytest.mark.parametrize("folder", FOLDERS)
def test_record_is_named_by_a_page(folder: str) -> None:
    """A record on which no figure rests is not kept."""
    assert any(fnmatch(folder, name) for name in named())


def test_named_records_exist() -> None:
    """A figure whose record is missing cannot be checked."""
    assert [name for name in sorted(named()) if not any(fnmatch(folder, name) for folder in FOLDERS)] == []
