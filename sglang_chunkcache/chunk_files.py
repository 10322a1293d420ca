"""The files that commands read, one JSON object a line, perhaps gzipped: chunks with neighbours, of
which `python -m sglang_chunkcache.preprocess` tells the format, and questions with right answers.

    {"question": "...", "chunks": ["...", ...], "answers": ["...", ...]}
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta

from sglang_chunkcache.errors import ServerError

Text = Annotated[str, Meta(min_length=1)]
Id = Text | int
"""A number in one file may be a text in the other."""


class Example(msgspec.Struct, frozen=True):
    question: Text
    chunks: Annotated[tuple[Text, ...], Meta(min_length=1)]
    answers: Annotated[tuple[Text, ...], Meta(min_length=1)]


class _Chunk(msgspec.Struct):
    id: Id
    text: Text


class _Near(msgspec.Struct):
    id: Id
    neighbors: list[Id]


R = TypeVar("R", Example, _Chunk, _Near)


def read_corpus(path: Path) -> dict[str, str]:
    """Texts by id, in the file's order. Raises ServerError naming file and line."""
    texts: dict[str, str] = {}
    for where, row in _rows(path, _Chunk):
        texts[_new_id(row.id, where, texts)] = row.text
    if not texts:
        raise ServerError(f"{path}: no chunks")
    return texts


def read_neighbors(path: Path, known: Iterable[str]) -> dict[str, list[str]]:
    """Ids of the neighbours, nearest first, by id; the strings are those `known`.
    Raises ServerError naming file and line."""
    # Each line brings new strings. Lists of these share the corpus's strings.
    names = {name: name for name in known}
    neighbors: dict[str, list[str]] = {}
    for where, row in _rows(path, _Near):
        name = _new_id(row.id, where, neighbors)
        ids = [str(item) for item in row.neighbors]
        if unknown := next((item for item in (name, *ids) if item not in names), None):
            raise ServerError(f"{where}: id {unknown!r} is not in the corpus")
        # A search by a chunk's own text finds the chunk itself first.
        neighbors[names[name]] = [names[item] for item in dict.fromkeys(ids) if item != name]
    return neighbors


def read_examples(path: Path) -> list[Example]:
    """Raises ServerError naming file and line."""
    examples = [example for _, example in _rows(path, Example)]
    # The server would calibrate on made-up questions instead, without a word.
    if not examples:
        raise ServerError(f"{path}: no examples")
    return examples


# Private, in order of use


def _rows(path: Path, kind: type[R]) -> Iterator[tuple[str, R]]:
    """(file:line, row) for every line that is not empty."""
    decoder = msgspec.json.Decoder(kind)
    try:
        with (gzip.open if path.suffix == ".gz" else open)(path, "rb") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                where = f"{path}:{number}"
                try:
                    row = decoder.decode(line)
                # RecursionError: brackets nested too deeply
                except (ValueError, RecursionError) as error:
                    raise ServerError(f"{where}: {error}") from None
                yield where, row
    # gzip raises EOFError where a file was cut off, zlib.error where it is damaged: no OSErrors.
    except (OSError, EOFError, zlib.error) as error:
        raise ServerError(f"{path}: {error}") from None


def _new_id(given: str | int, where: str, seen: Container[str]) -> str:
    if (name := str(given)) in seen:
        raise ServerError(f"{where}: id {name!r} occurs twice")
    return name
