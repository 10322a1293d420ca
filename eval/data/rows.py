"""Reads JSON Lines of data sets and traces: rows with file and line number for error messages, and
checked fields.

Standard library only, as `python -m eval replay` needs it.
"""

from __future__ import annotations

import gzip
import json
import math
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import error as ZlibError

from eval.errors import CommandError

Row = Mapping[str, Any]
MAX_COUNT = 10_000_000
"""A higher count of tokens must be a mistake: a hash, a byte offset, a time."""


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """("file, line number", object) of every non-blank line, or of every item of a list if the name
    ends in `.json`.

    Unpacks a file whose name ends in `.gz`. Raises CommandError.
    """
    number = 0
    try:
        read = gzip.open if path.suffix == ".gz" else open
        # editors may begin a file with a byte order mark
        with read(path, "rt", encoding="utf-8-sig") as file:
            for number, line in enumerate(json.load(file) if path.suffix == ".json" else file, 1):
                if isinstance(line, str) and line.isspace():
                    continue
                # With its line break a cut line's error would be in column 1 of the next one.
                row = json.loads(line.rstrip()) if isinstance(line, str) else line
                if not isinstance(row, dict):
                    raise CommandError(f"{path}, line {number}: must be a JSON object")
                yield f"{path}, line {number}", row
    except FileNotFoundError:
        raise CommandError(f"{path} does not exist") from None
    except json.JSONDecodeError as error:
        raise CommandError(
            # `number` is 0 while `json.load` reads a whole list, and its lines are the error's.
            f"{path}, line {number or error.lineno}, column {error.colno}: {error.msg}"
        ) from None
    except (OSError, EOFError, UnicodeDecodeError, ZlibError, RecursionError) as error:
        raise CommandError(f"{path} cannot be read after line {number}: {error}") from None


def text_of(row: Row, name: str, where: str) -> str:
    """A field that is a non-blank string. Raises CommandError."""
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise CommandError(f"{where}: {name} must be a non-empty string")
    return value


def name_of(row: Row, name: str, where: str) -> str:
    """A field that is an id: a non-blank string, or an integer, which becomes a string.
    Raises CommandError."""
    value = row.get(name)
    # `isinstance` would take true, a bool, for an integer.
    return str(value) if type(value) is int else text_of(row, name, where)


def new_name(row: Row, where: str, taken: Container[str], prefix: str = "") -> str:
    """`prefix` and the row's id. Raises CommandError if it is among those taken."""
    name = prefix + name_of(row, "id", where)
    if name in taken:
        raise CommandError(f"{where}: id {row['id']!r} occurs twice")
    return name


def number_of(row: Row, name: str, where: str) -> float:
    """A field that is a finite number. Raises CommandError."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise CommandError(f"{where}: {name} must be a finite number")
    return value


def count_of(row: Row, name: str, where: str) -> int:
    """A field that is a number of tokens. Raises CommandError."""
    value = row.get(name)
    if type(value) is not int or not 0 <= value <= MAX_COUNT:
        raise CommandError(f"{where}: {name} must be an integer from 0 to {MAX_COUNT:,}")
    return value


def names_of(row: Row, name: str, where: str) -> tuple[str, ...]:
    """A list of strings or integers as strings; missing or null: empty. Raises CommandError."""
    values = row.get(name)
    if values is None:
        return ()
    if not isinstance(values, list) or any(type(v) not in (str, int) for v in values):
        raise CommandError(f"{where}: {name} must be a list of strings or integers")
    return tuple(map(str, values))
