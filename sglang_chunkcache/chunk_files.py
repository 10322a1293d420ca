"""The files that commands read, one JSON object a line, perhaps gzipped: chunks with neighbours, of
which `python -m sglang_chunkcache.preprocess` tells the format, and questions with right answers.

    {"question": "...", "chunks": ["...", ...], "answers": ["...", ...]}
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sglang_chunkcache.errors import ServerError


class Example(NamedTuple):
    question: str
    chunks: tuple[str, ...]
    answers: tuple[str, ...]


def read_corpus(path: Path) -> dict[str, str]:
    """Texts by id, in the file's order. Raises ServerError naming file and line."""
    texts: dict[str, str] = {}
    for where, row in _rows(path):
        name, text = _id_of(row, where, texts), row.get("text")
        if not isinstance(text, str) or not text:
            raise ServerError(f"{where}: text must be a text that is not empty")
        texts[name] = text
    if not texts:
        raise ServerError(f"{path}: no chunks")
    return texts


def read_neighbors(path: Path, known: Iterable[str]) -> dict[str, list[str]]:
    """Ids of the neighbours, nearest first, by id; the strings are those `known`.
    Raises ServerError naming file and line."""
    # json.loads makes a new string of each id. Lists of these share the corpus's strings.
    names = {name: name for name in known}
    neighbors: dict[str, list[str]] = {}
    for where, row in _rows(path):
        name, listed = _id_of(row, where, neighbors), row.get("neighbors")
        if name not in names:
            raise ServerError(f"{where}: id {name!r} is not in the corpus")
        if not isinstance(listed, list) or not all(_is_id(item) for item in listed):
            raise ServerError(f"{where}: neighbors must be a list of ids")
        # An id may be a number in one file and a text in the other.
        ids = [str(item) for item in listed]
        if unknown := next((item for item in ids if item not in names), None):
            raise ServerError(f"{where}: neighbor {unknown!r} is not in the corpus")
        # A search by a chunk's own text finds the chunk itself first.
        neighbors[names[name]] = [names[item] for item in dict.fromkeys(ids) if item != name]
    return neighbors


def read_examples(path: Path) -> list[Example]:
    """Raises ServerError naming file and line."""
    examples = []
    for where, row in _rows(path):
        if not row.keys() >= {*Example._fields}:
            raise ServerError(f"{where}: needs question, chunks and answers")
        question, chunks, answers = (row[name] for name in Example._fields)
        if not isinstance(chunks, list) or not isinstance(answers, list):
            raise ServerError(f"{where}: chunks and answers must be lists")
        texts = [question, *chunks, *answers]
        if not chunks or not answers or not all(isinstance(text, str) and text for text in texts):
            raise ServerError(
                f"{where}: question, chunks and answers must be texts that are not empty"
            )
        examples.append(Example(question, tuple(chunks), tuple(answers)))
    # The server would calibrate on made-up questions instead, without a word.
    if not examples:
        raise ServerError(f"{path}: no examples")
    return examples


# Private, in order of use


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, object) for every line that is not empty."""
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    row = json.loads(line)
                # json.loads raises RecursionError for brackets nested too deeply.
                except (ValueError, RecursionError) as error:
                    raise ServerError(f"{where}: not JSON: {error}") from None
                if not isinstance(row, dict):
                    raise ServerError(f"{where}: must be a JSON object")
                yield where, row
    # gzip raises EOFError where a file was cut off, zlib.error where it is damaged: no OSErrors.
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ServerError(f"{path}: {error}") from None


def _id_of(row: Mapping[str, Any], where: str, seen: Container[str]) -> str:
    if not _is_id(row.get("id")):
        raise ServerError(f"{where}: id must be a text or a number")
    if (name := str(row["id"])) in seen:
        raise ServerError(f"{where}: id {name!r} occurs twice")
    return name


def _is_id(value: object) -> bool:
    # True is an int to Python, and no id.
    return isinstance(value, str | int) and not isinstance(value, bool) and value != ""
