"""The records in eval/results: those that changed are of the one format, each is named by a page,
and none is missing that a page names. One record of each schema is in tests/eval/records."""

import re
import subprocess
from fnmatch import filter as filter_names
from fnmatch import fnmatch
from pathlib import Path

import pytest

from eval.recorded import KINDS, Recorded, read_recorded
from eval.run import SCHEMA

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "eval/results"
SCHEMAS = Path(__file__).parent / "records"
FOLDERS = sorted(path.name for path in RESULTS.iterdir() if path.is_dir())
PAGES = (
    ROOT / "eval/LOG.md",
    *(path for path in ROOT.rglob("README.md") if ".venv" not in path.parts),
)
NAME = re.compile(r"20\d\d-\d\d-\d\dT\d{4}-[a-z0-9*-]*[a-z0-9*]")
"""A record's name on a page; an asterisk stands for any end."""
MAX_BYTES = 3_000_000
"""Of all records."""


def named() -> set[str]:
    return {name for page in PAGES for name in NAME.findall(page.read_text(encoding="utf-8"))}


def changed() -> list[str]:
    """Records that differ from the commit before, or are new, where git is there."""
    found = list[str]()
    for command in ("diff --name-only --diff-filter=AM HEAD~1", "ls-files --others"):
        full = ["git", *command.split(), "--", "eval/results/*/record.json"]
        done = subprocess.run(full, cwd=ROOT, capture_output=True, text=True, check=False)
        found += [Path(line).parent.name for line in done.stdout.splitlines()]
    return found


def check(run: Recorded) -> None:
    """`compare` and `report` read it: kind, settings, results;
    a bench's name, tables as lists of rows, and sentences."""
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


def test_changed_records_are_of_the_one_format() -> None:
    for name in changed():
        run = read_recorded(RESULTS / name)
        check(run)
        assert run.record["schema"] == SCHEMA, name
        assert [path.name for path in (RESULTS / name).glob("*.json")] == ["record.json"]


@pytest.mark.parametrize("schema", range(1, SCHEMA + 1))
def test_record_of_each_schema_is_read(schema: int) -> None:
    """2026-11-23T2200-tiers-waits as it was written, with its samples, and as it is now, alone:
    the same figures and values."""
    run = read_recorded(SCHEMAS / f"schema-{schema}")
    check(run)
    assert run.results == read_recorded(RESULTS / "2026-11-23T2200-tiers-waits").results
    assert (len(run.samples), len(run.measured)) == (25, 20)
    assert run.arms == ["compute", "host", "disk", "disk, wait 0", "disk, wait 1"]
    assert run.measured[0]["metrics"] == {"ttft_s": 19.28675425900019}


def test_record_is_named_by_a_page() -> None:
    """A record on which no figure rests is not kept."""
    names = named()
    unnamed = [folder for folder in FOLDERS if not any(fnmatch(folder, name) for name in names)]
    assert unnamed == []


def test_named_records_exist() -> None:
    """A figure whose record is missing cannot be checked."""
    assert [name for name in sorted(named()) if not filter_names(FOLDERS, name)] == []


def test_records_are_small() -> None:
    """A clone has them all."""
    assert sum(path.stat().st_size for path in RESULTS.glob("*/record.json")) <= MAX_BYTES
