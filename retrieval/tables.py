"""Finds Markdown tables: a header row, a delimiter row with as many cells, and the lines below that
have a bar.

| name | limit |   <- start
|------|------:|      header: both lines
| a    | 1     |   <- body
| b    | 2     |
               ^ end
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

HEADING = re.compile(r"#{1,6}[ \t]+\S")
"""At a line's start; it is no row, whatever bars it has."""

# Possessive: where a letter follows, a line of dashes is not given back one by one.
_DELIMITER_LINE = re.compile(r"^[ \t:|-]++$", re.MULTILINE)
_CELL = re.compile(r"[ \t]*:?-+:?[ \t]*")
_BAR = re.compile(r"(?<!\\)\|")  # an escaped bar is a cell's text


class Table(NamedTuple):
    """A table with at least one row below its header. Positions are in characters of the text.

    Attributes:
        header: its header and delimiter rows, each with a line break.
        start: where the header begins; of a table that goes on from an earlier part of the text,
            where its rows begin.
        body, end: where the first row begins, after blanks, and where the last one ends.
        is_open: whether it reaches the text's end, so that the rest may follow in a later part.
    """

    header: str
    start: int
    body: int
    end: int
    is_open: bool


def find_tables(text: str, header: str = "") -> list[Table]:
    """All tables, ascending. `header`: of the table that the text goes on with,
    if its first line is a row."""
    tables: list[Table] = []
    if "|" not in text:
        return tables
    if header and (rows := _rows(text, 0)):
        tables.append(Table(header, rows[0], rows[0], *rows[1:]))
    for delimiter in _DELIMITER_LINE.finditer(text):
        first = text.rfind("\n", 0, max(0, delimiter.start() - 1)) + 1
        # In the rows of a table a line of dashes is one of them.
        if delimiter.start() == 0 or (tables and first < tables[-1].end):
            continue
        above = text[first : delimiter.start() - 1]
        if not _is_row(above) or _cells(above) != _cells(delimiter[0], delimits=True):
            continue
        if rows := _rows(text, delimiter.end() + 1):
            start = first + len(above) - len(above.lstrip())
            tables.append(Table(f"{text[start : delimiter.end()]}\n", start, *rows))
    return tables


def table_at(tables: Sequence[Table], position: int) -> Table | None:
    """The table in which a position lies."""
    index = bisect_right(tables, position, key=lambda table: table.end)
    return tables[index] if index < len(tables) and tables[index].start <= position else None


def _cells(line: str, *, delimits: bool = False) -> int | None:
    """Number of a row's cells; None for a line that does not delimit, if it should."""
    cells = _BAR.split(line.strip().removeprefix("|").removesuffix("|"))
    if delimits and ("|" not in line or not all(_CELL.fullmatch(cell) for cell in cells)):
        return None
    return len(cells)


def _is_row(line: str) -> bool:
    return "|" in line and not HEADING.match(line.lstrip())


def _rows(text: str, first: int) -> tuple[int, int, bool] | None:
    """Start, end and `is_open` of the rows from the line at `first` on; None if that is no row."""
    at, start, end = first, -1, -1
    while at < len(text):
        stop = text.find("\n", at)
        stop = len(text) if stop < 0 else stop
        row = text[at:stop]
        if not _is_row(row):
            return (start, end, False) if end >= 0 else None
        if end < 0:
            start = at + len(row) - len(row.lstrip())
        end, at = at + len(row.rstrip()), stop + 1
    return (start, end, True) if end >= 0 else None
