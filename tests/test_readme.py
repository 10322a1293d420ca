"""README.md says what the code says.

python tests/test_readme.py     # prints the rows of the flags table, to paste
"""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

from sglang_chunkcache.config import ChunkCacheConfig, flag_name

ROOT = Path(__file__).resolve().parents[1]


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


def test_links_lead_somewhere() -> None:
    """Relative links of the top READMEs name files that exist."""
    for page in (ROOT / "README.md", ROOT / "sglang_chunkcache" / "README.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


if __name__ == "__main__":
    print("\n".join(flag_rows()))
