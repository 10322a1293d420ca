"""Reads JSON Lines of data sets: rows with file and line number for error messages, and checked fields."""

from __future__ import annotations

import gzip
import json
from collections.abc import Container, Iterator, Mapping
from pathlib import Path
from typing import Any
from zlib import error as ZlibError

from eval.errors import CommandError

Row = Mapping[str, Any]


def read_rows(path: Path) -> Iterator[tuple[str, Row]]:
    """("file, line number", object) of every non-blank line; gzip if the name ends in `.gz`. Raises CommandError."""
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") if path.suffix == ".gz" else path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if line.isspace():
                    continue
                where = f"{path}, line {number}"
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise CommandError(f"{where}: not JSON: {error}") from None
                if not isinstance(row, dict):
                    raise CommandError(f"{where}: must be a JSON object")
                yield where, row
    except FileNotFoundError:
        raise CommandError(f"{path} does not exist") from None
    except (OSError, EOFError, UnicodeDecodeError, ZlibError) as error:
        raise CommandError(f"{path} cannot be read after line {number}: {error}") from None


def read_items(path: Path) -> Iterator[tuple[str, object]]:
    """As `read_rows`; a file whose name ends in `.json` is a list of anything. Raises CommandError."""
    if path.suffix != ".json":
        yield from read_rows(path)
        return
    try:
        items = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CommandError(f"{path} does not exist") from None
    except (OSError, ValueError, RecursionError) as error:
        raise CommandError(f"{path} is not JSON: {error}") from None
    if not isinstance(items, list):
        raise CommandError(f"{path} must be a JSON list")
    for number, item in enumerate(items, 1):
        yield f"{path}, item {number}", item


def text_of(row: Row, name: str, where: str) -> str:
    """A field that is a non-blank string. Raises CommandError."""
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        raise CommandError(f"{where}: {name} must be a non-empty string")
    return value


def name_of(row: Row, name: str, where: str) -> str:
    """A field that is an id: a non-blank string, or an integer, which becomes a string. Raises CommandError."""
    value = row.get(name)
    return str(value) if type(value) is int else text_of(row, name, where)


def new_name(row: Row, where: str, taken: Container[str], prefix: str = "") -> str:
    """`prefix` and the row's id. Raises CommandError if it is among those taken."""
    name = prefix + name_of(row, "id", where)
    if name in taken:
        raise CommandError(f"{where}: id {row['id']!r} occurs twice")
    return name


def number_of(row: Row, name: str, where: str) -> float:
    """A field that is a number. Raises CommandError."""
    value = row.get(name)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CommandError(f"{where}: {name} must be a number")
    return value


def names_of(row: Row, name: str, where: str) -> tuple[str, ...]:
    """A list of strings or integers as distinct strings; missing or null: empty. Raises CommandError."""
    values = row.get(name)
    if values is None:
        return ()
    if not isinstance(values, list) or any(type(v) not in (str, int) for v in values):
        raise CommandError(f"{where}: {name} must be a list of strings or integers")
    return tuple(dict.fromkeys(map(str, values)))
