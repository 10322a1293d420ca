"""Reads documents: files and folders of text, Markdown and JSON Lines.

One document is in memory at a time. `clean` replaces characters that a tokenizer, a database or a
terminal cannot handle. What cannot be read does not end the reading, so that all of it is named at
once.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path
from stat import S_ISREG
from typing import IO, cast

from retrieval.errors import RetrievalError
from retrieval.passage import Document

TEXT_SUFFIXES = (".txt", ".md")
ROW_SUFFIXES = (".jsonl", ".jsonl.gz")
SUFFIXES = TEXT_SUFFIXES + ROW_SUFFIXES

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


class Corpus:
    """The documents of files and folders, those without text left out.

    Folders are read recursively in the order of names, without hidden and other files; links are
    followed, but no folder is read twice. A .txt or .md file is a document; its id is its path in
    the folder (a single file's is its name). A Markdown file's title is its first heading of level
    1. A line of JSON Lines is `{"text", "title"?, "id"?}`, other fields ignored; without `id` its
    id is `FILE:LINE`, lines counted from 1. Text is UTF-8, or what a byte-order mark says: UTF-8,
    UTF-16, UTF-32.

    Args:
        skip_unreadable: leave out files, and rows of JSON Lines, that cannot be read.
        may_be_missing: a source may be missing or empty.
    Attributes: complete once the documents have been read.
        num_files, num_empty, num_other: files that were read, in whole or in part; of them, those
            without text; files of other kinds, hidden ones apart.
        unreadable: what was wrong, a line for each file or folder that could not be read, or not in
            whole.
        unread: names of files and folders that are there and may hold documents that were not read:
            unreadable or empty ones, and links that lead nowhere (to a disk that is not mounted).
    Raises:
        RetrievalError: a source does not exist, or is a file of another kind.
    """

    def __init__(
        self, sources: Sequence[str | Path], *, skip_unreadable: bool, may_be_missing: bool = False
    ) -> None:
        self.num_files = self.num_empty = self.num_other = 0
        self.unreadable: list[str] = []
        self.unread: set[str] = set()
        self._skips, self._may_be_missing = skip_unreadable, may_be_missing
        self._sources = [Path(source) for source in sources]
        for path in self._sources:
            if not path.exists() and not may_be_missing:
                raise RetrievalError(f"no such file or folder: {path}")
            if path.is_file() and not path.name.lower().endswith(SUFFIXES):
                raise RetrievalError(f"{path}: not one of {', '.join(SUFFIXES)}")

    def documents(self) -> Iterator[Document]:
        """Read all sources, once.

        Raises:
            RetrievalError: at the end: all that cannot be read, unless it is skipped, each file
                with its first bad line; or a source without documents.
        """
        empty: list[Path] = []
        for source in self._sources:
            is_empty = True
            for path, name in self._files(source):
                self.num_files += 1
                has_text = False
                for document in self._read(path, name):
                    has_text = True
                    yield document
                is_empty = is_empty and not has_text
                if not has_text and name not in self.unread:
                    self.num_empty += 1
                    self.unread.add(name)
            if is_empty:
                empty.append(source)
        bad = "".join(f"\n  {each}" for each in self.unreadable)
        if self.unreadable and not self._skips:
            how = "(--skip-unreadable goes on without)"
            if len(self.unreadable) == 1:
                raise RetrievalError(f"{self.unreadable[0]} {how}")
            raise RetrievalError(f"{len(self.unreadable)} files cannot be read {how}:{bad}")
        if empty and not self._may_be_missing:
            what = f"looked for {', '.join(SUFFIXES)} that contain text"
            raise RetrievalError(f"no documents in {empty[0]}: {what}{bad}")

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
                    self.unread.add(name_of(path))
                else:
                    # To open a named pipe would be to wait for its writer.
                    if name.lower().endswith(SUFFIXES) and S_ISREG(mode):
                        yield path, name_of(path)
                    else:
                        self.num_other += 1

    def _read(self, path: Path, name: str) -> Iterator[Document]:
        """The file's documents that have text; what is wrong with it is noted."""
        fault, num_faults = "", 0  # a file may have millions
        kind = path.name.lower()
        open_file = cast(Callable[..., IO[bytes]], gzip.open if kind.endswith(".gz") else open)
        try:
            with open_file(path, "rb") as file:
                read = _read_rows if kind.endswith(ROW_SUFFIXES) else _read_text
                for each in read(file, path, name):
                    if isinstance(each, RetrievalError):
                        fault, num_faults = fault or str(each), num_faults + 1
                    elif each.text.strip():
                        yield each
        except (OSError, RetrievalError) as error:
            reason = str(error)
            if isinstance(error, OSError):
                reason = f"{path}: {error.strerror or error}"
            fault, num_faults = fault or reason, num_faults + 1
        if num_faults:
            more = f" (and in {num_faults - 1} more rows)" if num_faults > 1 else ""
            self._refuse(name, fault + more)

    def _refuse(self, name: str, reason: str) -> None:
        self.unread.add(name)
        self.unreadable.append(reason)


def clean(text: str) -> str:
    """With one kind of line break, no control characters and no halves of surrogate pairs."""
    if "\r" in text:
        text = text.replace("\r\n", "\n").replace("\r", "\n")
    text = _CONTROLS.sub(" ", text)
    return text if text.isascii() else _SURROGATES.sub("\ufffd", text)


def _read_text(file: IO[bytes], path: Path, name: str) -> Iterator[Document | RetrievalError]:
    data = file.read(MAX_DOCUMENT_BYTES + 1)
    if len(data) > MAX_DOCUMENT_BYTES:
        what = f"larger than {MAX_DOCUMENT_BYTES >> 20} MiB"
        raise RetrievalError(f"{path}: {what}; give its parts as rows of JSON Lines")
    bom, encoding = _encoding(data)
    try:
        text = clean(data.removeprefix(bom).decode(encoding))
    except UnicodeDecodeError as error:
        line = 1 + error.object[: error.start].decode(encoding, "replace").count("\n")
        raise RetrievalError(f"{path}:{line}: {_undecoded(error)}") from error
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


def _read_rows(file: IO[bytes], path: Path, name: str) -> Iterator[Document | RetrievalError]:
    """The rows' documents, or what is wrong with them."""
    for number, line in _lines(file, path):
        try:
            if len(line) > MAX_DOCUMENT_BYTES:
                raise RetrievalError(f"a line of more than {MAX_DOCUMENT_BYTES >> 20} MiB")
            if isinstance(line, bytes):
                line = line.removeprefix(codecs.BOM_UTF8).decode()
            if line.strip():
                yield _document(line, f"{name}:{number}", name)
        except (RetrievalError, UnicodeDecodeError) as error:
            what = _undecoded(error) if isinstance(error, UnicodeDecodeError) else error
            yield RetrievalError(f"{path}:{number}: {what}")


def _lines(file: IO[bytes], path: Path) -> Iterator[tuple[int, bytes | str]]:
    """Each line with its number, cut above MAX_DOCUMENT_BYTES: bytes, or text if not UTF-8."""
    number = 1
    try:
        bom, encoding = _encoding(file.read(_LONGEST_BOM))
        file.seek(len(bom))
        is_utf8 = encoding == "utf-8"
        with file if is_utf8 else io.TextIOWrapper(file, encoding, newline="\n") as lines:
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
        raise RetrievalError(f"{path}:{number}: {_undecoded(error)}") from error


def _encoding(data: bytes) -> tuple[bytes, str]:
    """The byte-order mark with which the data begins, if any, and the encoding."""
    return next((each for each in _BOMS if data.startswith(each[0])), (b"", "utf-8"))


def _undecoded(error: UnicodeDecodeError) -> str:
    is_utf8 = error.encoding == "utf-8"
    why = f"byte 0x{error.object[error.start]:02x}" if is_utf8 else error.reason
    return f"not {error.encoding.upper()}: {why}"


def _document(line: str, default_id: str, file: str) -> Document:
    """Of a row with `text`, and perhaps `id` and `title`."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise RetrievalError(f"not JSON: {error}") from error
    if not isinstance(row, dict):
        raise RetrievalError(f"a row must be an object, got {type(row).__name__}")
    if row.get("text") is None:
        named = ", ".join(row) or "none"
        raise RetrievalError(f'a row must have a "text"; got the fields {named}')
    for name in ("title", "text"):
        if not isinstance(row.get(name), str | None):
            raise RetrievalError(f"the {name} must be a string, got {type(row[name]).__name__}")
    row_id = row.get("id")
    # A bool is an int in Python.
    if row_id == "" or isinstance(row_id, bool) or not isinstance(row_id, str | int | None):
        raise RetrievalError(f"the id must be an integer or a non-empty string, got {row_id!r}")
    return Document(
        id=default_id if row_id is None else clean(str(row_id)),
        title=" ".join(clean(row.get("title") or "").split()),
        text=clean(row["text"]),
        file=file,
    )
