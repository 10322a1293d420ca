"""READMEs and scripts say what the code says.

python tests/test_readme.py     # prints the rows of the flags table, to paste
"""

from __future__ import annotations

import dataclasses
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from sglang_chunkcache.config import ChunkCacheConfig, flag_name

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("radix_ext", "retrieval", "sglang_chunkcache", "eval", "tests", "launch")
PAGES = [
    ROOT / "README.md",
    ROOT / ".ci" / "run",
    *(
        page
        for folder in FOLDERS
        for pattern in ("README.md", "*.sh")
        for page in sorted((ROOT / folder).rglob(pattern))
    ),
]


def flag_rows() -> list[str]:
    """One table row per knob."""
    rows = []
    for knob in dataclasses.fields(ChunkCacheConfig):
        if knob.metadata.get("internal"):
            continue
        default = (
            "none" if knob.default is None else repr(knob.default) if knob.default == "\n\n" else str(knob.default)
        )
        choices = (
            f": {', '.join(f'`{choice}`' for choice in knob.metadata['choices'])}" if knob.metadata["choices"] else ""
        )
        rows.append(f"| `{flag_name(knob.name)}` | `{default}` | {knob.metadata['help']}{choices} |")
    return rows


def test_flags_table_is_that_of_the_config() -> None:
    """A flag that the README does not know, or knows with another default, misleads."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"^\| `--chunkcache-.*$", readme, re.MULTILINE) == flag_rows()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_paths_lead_somewhere(page: Path) -> None:
    """Relative links, and paths from the root to one of our files."""
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!https?:)([^)#]+)[^)]*\)", text)
    paths = re.findall(rf"(?<![\w/.])(?:{'|'.join(FOLDERS)})/[\w/.-]+\.(?:py|md|sh)\b", text)
    assert [name for name in links if not (page.parent / name).exists()] == []
    assert [name for name in paths if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_modules(page: Path) -> None:
    """A command that moved would fail for the reader only."""
    named = re.findall(r"-m ((?:retrieval|sglang_chunkcache|eval)(?:\.[a-z_]+)*)", page.read_text(encoding="utf-8"))
    assert [name for name in named if find_spec(name) is None] == []


if __name__ == "__main__":
    print("\n".join(flag_rows()))
