"""Reads documents: files and folders of text, Markdown and JSON Lines.

One document is in memory at a time. Ids are stable: the path relative to the source folder, or the row's own id. `clean`
replaces characters that a tokenizer, a database or a terminal cannot handle. Ids that occur twice are not detected here.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

from retrieval.errors import RetrievalError
from retrieval.passage import Document

TEXT_SUFFIXES = (".txt", ".md")
ROW_SUFFIXES = (".jsonl", ".jsonl.gz")

MAX_DOCUMENT_BYTES = 1 << 28
"""A text file or row of more than 256 MiB is refused as a mistake: it would be held in memory as a whole."""

_BOM = b"\xef\xbb\xbf"
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]")  # control characters except whitespace
_SURROGATES = re.compile("[\ud800-\udfff]")
_FENCE_OR_HEADING = re.compile(r"^(?: {0,3}(```|~~~)|#[ \t]+(.*))", re.MULTILINE)
_CLOSING_HASHES = re.compile(r"(?:^|[ \t])#+$")


def read_documents(source: str | Path) -> Iterator[Document]:
    """The documents of a file or folder, those without text left out.

    Folders are read recursively in the order of names, without hidden and other files; links are followed, but no folder is read
    twice. A .txt or .md file is a document; its id is its path in the folder (a single file's is its name). A Markdown file's
    title is its first heading of level 1. A line of JSON Lines is `{"text", "title"?, "id"?}`, other fields ignored; without
    `id` its id is `FILE:LINE`, lines counted from 1.

    Raises:
        RetrievalError: no such source; while iterating: a file or row cannot be read (names file and line), or no document.
    """
    path = Path(source)
    if not path.exists():
        raise RetrievalError(f"no such file or folder: {path}")
    if path.is_file() and not _is_corpus_file(path.name):
        raise RetrievalError(f"{path}: not one of {', '.join(TEXT_SUFFIXES + ROW_SUFFIXES)}")
    return _with_text(path)


def clean(text: str) -> str:
    """The text with one kind of line break, no control characters and no halves of surrogate pairs."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _CONTROLS.sub(" ", text)
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def _with_text(source: Path) -> Iterator[Document]:
    empty = True
    for path, name in _corpus_files(source):
        read = _read_rows if name.lower().endswith(ROW_SUFFIXES) else _read_text
        try:
            for document in read(path, clean(name)):
                if document.text.strip():
                    empty = False
                    yield document
        except OSError as error:
            raise RetrievalError(f"{path}: {error.strerror or error}") from error
    if empty:
        suffixes = ", ".join(TEXT_SUFFIXES + ROW_SUFFIXES)
        raise RetrievalError(f"no documents in {source}: looked for {suffixes} that contain text")


def _is_corpus_file(name: str) -> bool:
    return name.lower().endswith(TEXT_SUFFIXES + ROW_SUFFIXES)


def _corpus_files(source: Path) -> Iterator[tuple[Path, str]]:
    """Each file to read, and its path relative to the source with forward slashes."""
    if source.is_file():
        yield source, source.name
        return
    seen: set[tuple[int, int]] = set()
    for folder, subfolders, files in os.walk(source, onerror=_refuse, followlinks=True):
        status = os.stat(folder)
        if (status.st_dev, status.st_ino) in seen:
            subfolders.clear()
            continue
        seen.add((status.st_dev, status.st_ino))
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        for name in sorted(files):
            path = Path(folder, name)
            if _is_corpus_file(name) and not name.startswith(".") and path.is_file():
                yield path, path.relative_to(source).as_posix()


def _refuse(error: OSError) -> None:
    raise RetrievalError(f"{error.filename}: {error.strerror}") from error


def _read_text(path: Path, name: str) -> Iterator[Document]:
    with path.open("rb") as file:
        data = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise RetrievalError(
            f"{path}: larger than {MAX_DOCUMENT_BYTES >> 20} MiB; give its parts as rows of JSON Lines"
        )
    text = clean(_decode(data.removeprefix(_BOM), path, 1))
    yield Document(id=name, title=_markdown_title(text) if path.suffix.lower() == ".md" else "", text=text)


def _markdown_title(text: str) -> str:
    fenced = False
    for match in _FENCE_OR_HEADING.finditer(text):
        if match[1]:
            fenced = not fenced
        elif not fenced and (title := _CLOSING_HASHES.sub("", match[2].strip()).strip()):
            return title
    return ""


def _read_rows(path: Path, name: str) -> Iterator[Document]:
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
        for number in count(1):
            place = f"{path}:{number}"
            try:
                line = file.readline(MAX_DOCUMENT_BYTES + 1)
            except (gzip.BadGzipFile, EOFError, zlib.error) as error:
                raise RetrievalError(f"{place}: not gzip, or damaged: {error}") from error
            if not line:
                return
            if len(line) > MAX_DOCUMENT_BYTES:
                raise RetrievalError(f"{place}: a line of more than {MAX_DOCUMENT_BYTES >> 20} MiB")
            if line.strip():
                row = _parse(_decode(line.removeprefix(_BOM), path, number), place)
                yield _document(row, place, f"{name}:{number}")


def _decode(data: bytes, path: Path, first_line: int) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        line = first_line + data.count(b"\n", 0, error.start)
        raise RetrievalError(f"{path}:{line}: not UTF-8: byte 0x{data[error.start]:02x}") from error


def _parse(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RetrievalError(f"{place}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise RetrievalError(f"{place}: a row must be an object, got {type(row).__name__}")
    if row.get("text") is None:
        raise RetrievalError(f'{place}: a row must have a "text"; got the fields {", ".join(row) or "none"}')
    return row


def _document(row: dict[str, Any], place: str, default_id: str) -> Document:
    """A document from the fields `id`, `title` and `text`, each of which may be missing or None."""
    for field in ("title", "text"):
        if not isinstance(row.get(field), str | None):
            raise RetrievalError(f"{place}: the {field} must be a string, got {type(row[field]).__name__}")
    row_id = row.get("id")
    if row_id == "" or isinstance(row_id, bool) or not isinstance(row_id, str | int | None):
        raise RetrievalError(f"{place}: the id must be an integer or a non-empty string, got {row_id!r}")
    return Document(
        id=default_id if row_id is None else clean(str(row_id)),
        title=" ".join(clean(row.get("title") or "").split()),
        text=clean(row.get("text") or ""),
    )
