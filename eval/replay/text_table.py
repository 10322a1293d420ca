"""Tables on the terminal without a package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def text_table(table: Mapping[str, Any]) -> str:
    """A table of the results, one line per row, columns aligned, its note below.

    Args:
        table: `rows`, each {column: text} with the columns of the first, and optionally `note`.
    """
    rows: Sequence[Mapping[str, str]] = table["rows"]
    lines = [[*rows[0]], *([row[column] for column in rows[0]] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    said = ["  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([*said, *([table["note"]] if table.get("note") else [])])
