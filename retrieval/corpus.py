"""Reads documents: files and folders of text, Markdown and JSON Lines.

One document is in memory at a time. Ids are stable: the path relative to the source folder, or the
row's own id. `clean` replaces characters that a tokenizer, a database or a terminal cannot handle.
Ids that occur twice are not detected here.

What cannot be read does not end the reading: `Corpus` goes on, so that all of it is named at once.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any, cast

from retrieval.errors import RetrievalError
from retrieval.passage import Document

TEXT_SUFFIXES = (".txt", ".md")
ROW_SUFFIXES = (".jsonl", ".jsonl.gz")

MAX_DOCUMENT_BYTES = 1 << 28
"""A text file or row of more than 256 MiB is refused as a mistake:
it would be held in memory as a whole."""

_BOMS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),  # begins with UTF-16's
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
_LONGEST_BOM = 4
# control characters except whitespace
_CONTROLS = re.compile("[\x00-\x08\x0e-\x1f\x7f-\x84\x86-\x9f]")
_SURROGATES = re.compile("[\ud800-\udfff]")
_FENCE_OR_HEADING = re.compile(r"^(?: {0,3}(```|~~~)|#[ \t]+(.*))", re.MULTILINE)
_CLOSING_HASHES = re.compile(r"(?:^|[ \t])#+$")


@dataclass
class Reading:
    """What a corpus held, complete once its documents have been read.

    Attributes:
        files: number of files that were read, in whole or in part.
        unreadable: what was wrong, a line for each file or folder that could not be read, or not in
            whole.
        num_empty: files without text.
        num_other: files of other kinds, hidden ones apart.
        unread: names of files and folders that are there and may hold documents that were not read:
            unreadable or empty ones, and links that lead nowhere (to a disk that is not mounted).
    """

    files: int = 0
    unreadable: list[str] = field(default_factory=list)
    num_empty: int = 0
    num_other: int = 0
    unread: set[str] = field(default_factory=set)


@dataclass
class _Faults:
    """Of one file: the first, and how many. A file may have millions."""

    first: str = ""
    num: int = 0

    def note(self, fault: str) -> None:
        self.first, self.num = self.first or fault, self.num + 1


class Corpus:
    """The documents of files and folders, those without text left out.

    Folders are read recursively in the order of names, without hidden and other files; links are
    followed, but no folder is read twice. A .txt or .md file is a document; its id is its path in
    the folder (a single file's is its name). A Markdown file's title is its first heading of level
    1. A line of JSON Lines is `{"text", "title"?, "id"?}`, other fields ignored; without `id` its
       id is `FILE:LINE`, lines counted from 1. Text is UTF-8, or what a byte-order mark says:
       UTF-8, UTF-16, UTF-32.

    Args:
        skip_unreadable: leave out files, and rows of JSON Lines, that cannot be read.
        may_be_missing: take a source that does not exist, or has no documents, for one that is
            empty.
    Raises:
        RetrievalError: a source does not exist, or is a file of another kind.
    """

    def __init__(
        self, sources: Sequence[str | Path], *, skip_unreadable: bool, may_be_missing: bool = False
    ) -> None:
        self.reading = Reading()
        self._skips, self._may_be_missing = skip_unreadable, may_be_missing
        self._sources = [Path(source) for source in sources]
        for path in self._sources:
            if not path.exists() and not may_be_missing:
                raise RetrievalError(f"no such file or folder: {path}")
            if path.is_file() and not _is_corpus_file(path.name):
                raise RetrievalError(
                    f"{path}: not one of {', '.join(TEXT_SUFFIXES + ROW_SUFFIXES)}"
                )

    def documents(self) -> Iterator[Document]:
        """Read all sources, once.

        Raises:
            RetrievalError: at the end: all that cannot be read, unless it is skipped, each file
                with its first bad line; or a source without documents.
        """
        reading, empty = self.reading, list[Path]()
        for source in self._sources:
            is_empty = True
            for path, name in self._files(source):
                reading.files += 1
                has_text = False
                for document in self._read(path, name):
                    has_text = True
                    yield document
                is_empty = is_empty and not has_text
                if not has_text and name not in reading.unread:
                    reading.num_empty += 1
                    reading.unread.add(name)
            if is_empty:
                empty.append(source)
        if reading.unreadable and not self._skips:
            raise RetrievalError(_named(reading.unreadable))
        if empty and not self._may_be_missing:
            suffixes, bad = ", ".join(TEXT_SUFFIXES + ROW_SUFFIXES), _lines_of(reading.unreadable)
            raise RetrievalError(
                f"no documents in {empty[0]}: looked for {suffixes} that contain text{bad}"
            )

    # Private, in order of use

    def _files(self, source: Path) -> Iterator[tuple[Path, str]]:
        """Each file to read, and its path relative to the source with forward slashes."""
        if source.is_file():
            yield source, clean(source.name)
            return

        def name_of(path: str | Path) -> str:
            # Bytes of a name that are not UTF-8 come as lone surrogates, which SQLite refuses.
            return clean(Path(path).relative_to(source).as_posix())

        def refuse(error: OSError) -> None:
            self._refuse(name_of(error.filename), f"{error.filename}: {error.strerror}")

        seen: set[tuple[int, int]] = set()
        for folder, subfolders, files in os.walk(
            source, onerror=refuse if source.exists() else None, followlinks=True
        ):
            status = os.stat(folder)
            # A link to a parent folder would never end.
            if (status.st_dev, status.st_ino) in seen:
                subfolders.clear()
                continue
            seen.add((status.st_dev, status.st_ino))
            # In place: `os.walk` enters what this list has.
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            for name in sorted(name for name in files if not name.startswith(".")):
                path = Path(folder, name)
                try:
                    mode = path.stat().st_mode
                except PermissionError as error:  # of a folder that can be listed and not entered
                    refuse(error)
                except OSError:
                    # A link that leads nowhere, perhaps to a disk that is away: pruning must spare
                    # its documents.
                    self.reading.unread.add(name_of(path))
                else:
                    # To open a named pipe would be to wait for its writer.
                    if _is_corpus_file(name) and S_ISREG(mode):
                        yield path, name_of(path)
                    else:
                        self.reading.num_other += 1

    def _read(self, path: Path, name: str) -> Iterator[Document]:
        """The file's documents that have text; what is wrong with it is noted."""
        faults = _Faults()
        try:
            with cast(
                IO[bytes], gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb")
            ) as file:
                is_rows = path.name.lower().endswith(ROW_SUFFIXES)
                read = (
                    _read_rows(file, path, name, faults)
                    if is_rows
                    else _read_text(file, path, name)
                )
                yield from (document for document in read if document.text.strip())
        except OSError as error:
            faults.note(f"{path}: {error.strerror or error}")
        except RetrievalError as error:
            faults.note(str(error))
        if faults.num:
            more = f" (and in {faults.num - 1} more rows)" if faults.num > 1 else ""
            self._refuse(name, faults.first + more)

    def _refuse(self, name: str, reason: str) -> None:
        self.reading.unread.add(name)
        self.reading.unreadable.append(reason)


def clean(text: str) -> str:
    """The text with one kind of line break, no control characters and no halves of surrogate
    pairs."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _CONTROLS.sub(" ", text)
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def _is_corpus_file(name: str) -> bool:
    return name.lower().endswith(TEXT_SUFFIXES + ROW_SUFFIXES)


def _named(unreadable: Sequence[str]) -> str:
    """One line, or one for each; how to go on without them."""
    if len(unreadable) == 1:
        return f"{unreadable[0]} (--skip-unreadable goes on without)"
    return (
        f"{len(unreadable)} files cannot be read (--skip-unreadable goes on"
        f" without):{_lines_of(unreadable)}"
    )


def _lines_of(unreadable: Sequence[str]) -> str:
    return "".join(f"\n  {each}" for each in unreadable)


def _read_text(file: IO[bytes], path: Path, name: str) -> Iterator[Document]:
    data = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        raise RetrievalError(
            f"{path}: larger than {MAX_DOCUMENT_BYTES >> 20} MiB; give its parts as rows of JSON"
            " Lines"
        )
    bom, encoding = _encoding(data)
    text = clean(_decode(data.removeprefix(bom), encoding, path, 1))
    title = _markdown_title(text) if path.suffix.lower() == ".md" else ""
    yield Document(id=name, title=title, text=text, file=name)


def _markdown_title(text: str) -> str:
    fenced = False
    for match in _FENCE_OR_HEADING.finditer(text):
        if match[1]:
            fenced = not fenced
        elif not fenced and (title := _CLOSING_HASHES.sub("", match[2].strip()).strip()):
            return title
    return ""


def _read_rows(file: IO[bytes], path: Path, name: str, faults: _Faults) -> Iterator[Document]:
    """The documents of the rows that can be read; what is wrong with the others is noted."""
    for number, line in _lines(file, path):
        place = f"{path}:{number}"
        try:
            if len(line) > MAX_DOCUMENT_BYTES:
                raise RetrievalError(f"{place}: a line of more than {MAX_DOCUMENT_BYTES >> 20} MiB")
            text = (
                line
                if isinstance(line, str)
                else _decode(line.removeprefix(codecs.BOM_UTF8), "utf-8", path, number)
            )
            if text.strip():
                yield _document(_parse(text, place), place, f"{name}:{number}", name)
        except RetrievalError as error:
            faults.note(str(error))


def _lines(file: IO[bytes], path: Path) -> Iterator[tuple[int, bytes | str]]:
    """Each line with its number, up to just above MAX_DOCUMENT_BYTES of it:
    bytes, or text of what is not UTF-8."""
    number = 1
    try:
        bom, encoding = _encoding(file.read(_LONGEST_BOM))
        file.seek(len(bom))
        with (
            file
            if encoding == "utf-8"
            else io.TextIOWrapper(file, encoding=encoding, newline="\n") as lines
        ):
            # Only "\n" ends a row, in every encoding: a text may hold "\r" or U+2028.
            for number in count(1):
                if not (line := lines.readline(MAX_DOCUMENT_BYTES + 1)):
                    return
                yield number, line
                while len(line) > MAX_DOCUMENT_BYTES and line[-1:] not in ("\n", b"\n"):
                    line = lines.readline(MAX_DOCUMENT_BYTES + 1)  # to its end
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RetrievalError(f"{path}:{number}: not gzip, or damaged: {error}") from error
    except UnicodeDecodeError as error:
        raise RetrievalError(f"{path}:{number}: not {encoding.upper()}: {error.reason}") from error


def _encoding(data: bytes) -> tuple[bytes, str]:
    """The byte-order mark with which the data begins, if any, and the encoding."""
    return next(
        ((bom, encoding) for bom, encoding in _BOMS if data.startswith(bom)), (b"", "utf-8")
    )


def _decode(data: bytes, encoding: str, path: Path, first_line: int) -> str:
    try:
        return data.decode(encoding)
    except UnicodeDecodeError as error:
        line = first_line + data[: error.start].decode(encoding, "replace").count("\n")
        why = f"byte 0x{data[error.start]:02x}" if encoding == "utf-8" else error.reason
        raise RetrievalError(f"{path}:{line}: not {encoding.upper()}: {why}") from error


def _parse(line: str, place: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RetrievalError(f"{place}: not JSON: {error}") from error
    if not isinstance(row, dict):
        raise RetrievalError(f"{place}: a row must be an object, got {type(row).__name__}")
    if row.get("text") is None:
        raise RetrievalError(
            f'{place}: a row must have a "text"; got the fields {", ".join(row) or "none"}'
        )
    return row


def _document(row: dict[str, Any], place: str, default_id: str, file: str) -> Document:
    """A document from the fields `id`, `title` and `text`, each of which may be missing or None."""
    for name in ("title", "text"):
        if not isinstance(row.get(name), str | None):
            raise RetrievalError(
                f"{place}: the {name} must be a string, got {type(row[name]).__name__}"
            )
    row_id = row.get("id")
    # A bool is an int in Python.
    if row_id == "" or isinstance(row_id, bool) or not isinstance(row_id, str | int | None):
        raise RetrievalError(
            f"{place}: the id must be an integer or a non-empty string, got {row_id!r}"
        )
    return Document(
        id=default_id if row_id is None else clean(str(row_id)),
        title=" ".join(clean(row.get("title") or "").split()),
        text=clean(row.get("text") or ""),
        file=file,
    )
