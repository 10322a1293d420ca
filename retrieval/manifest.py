"""An index directory's files, and the manifest that says which of them are served.

    settings.json     how passages are cut, encoded and indexed; written first, never changed
    manifest.json     the served generation: files, sizes, checksums; replaced in one rename
    passages.sqlite   PassageStore: texts by row
    vectors.f16       VectorFile: vectors by row
    encoder.npz       state of the embedded encoder, if it is used
    dense-G.faiss     segments of generation G or earlier
    removed-G.npy     rows that are hidden from searches
    bm25-G/           tantivy's index

Files with a generation G in their name never change. `passages.sqlite` and `vectors.f16` only grow,
and the manifest says how many of their rows are valid. So a directory can be served while it is
extended, and a build that dies at any point leaves the last generation intact.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.settings import SETTINGS

FORMAT = 2
"""Incremented when other versions cannot read the directory."""
ANALYZER = 2
"""Version of how BM25 cuts text into words; incremented when it changes."""
MANIFEST, PASSAGES, VECTORS = "manifest.json", "passages.sqlite", "vectors.f16"


@dataclass(frozen=True)
class SegmentEntry:
    """A FAISS file and its rows."""

    file: str
    first_row: int
    num_rows: int
    factory: str


@dataclass(frozen=True)
class FileEntry:
    """Size of a file and XXH3 of its bytes when it was written. Detects damage, not forgery."""

    num_bytes: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """One generation.

    Attributes:
        generation: its number; each published change increments it.
        probe: the beginning of the first row's text, to detect the store of another index.
        vectors: (last row + 1, XXH3) of the range of the vector file that each generation added.
        analyzer: version of BM25's analyzer.
    """

    generation: int
    num_rows: int
    segments: tuple[SegmentEntry, ...]
    removed: str | None
    bm25: str | None
    probe: str
    vectors: tuple[tuple[int, str], ...]
    analyzer: int
    files: Mapping[str, FileEntry]

    def to_json(self) -> str:
        """The content of the manifest file."""
        fields = asdict(self)
        whole = {"format": FORMAT, "xxh3": _digest(fields), **fields}
        return json.dumps(whole, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read the result of `to_json`.
        Raises ValueError, KeyError or TypeError for anything else."""
        fields = json.loads(text)
        if fields.pop("format") != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
        if fields.pop("xxh3") != _digest(fields):
            raise ValueError("damaged, its checksum differs")
        if (version := fields["analyzer"]) != ANALYZER:
            raise ValueError(f"its analyzer is of version {version}, this release has {ANALYZER}")
        fields["segments"] = tuple(SegmentEntry(**entry) for entry in fields["segments"])
        fields["vectors"] = tuple((row, checksum) for row, checksum in fields["vectors"])
        fields["files"] = {name: FileEntry(**entry) for name, entry in fields["files"].items()}
        return cls(**fields)


NOTHING = Manifest(0, 0, (), None, None, "", (), ANALYZER, {})
"""Of a directory whose first generation is being built."""


class FileState(NamedTuple):
    """Tells, unread, a file that was replaced, by its inode, or written over."""

    inode: int
    mtime_ns: int
    num_bytes: int


State = Mapping[str, FileState]
"""By the names of an index directory's files."""


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the directory's current generation. Raises CorruptIndexError."""
    path = folder / MANIFEST
    if not path.is_file():
        what = "no index there; `python -m retrieval build` makes one"
        if (folder / SETTINGS).is_file():
            what = "the build has not finished; run it again to continue"
        raise CorruptIndexError(f"{folder}: {what}")
    try:
        return Manifest.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"not a manifest that this version reads: {error}"
        raise CorruptIndexError(f"{path}: {reason}") from None


def removed_rows(folder: Path, manifest: Manifest) -> NDArray[np.int64]:
    """Rows that the generation hides, ascending. Raises CorruptIndexError."""
    if manifest.removed is None:
        return np.zeros(0, np.int64)
    try:
        return np.asarray(np.load(folder / manifest.removed), np.int64)
    except (OSError, ValueError, EOFError) as error:
        raise CorruptIndexError(f"{folder / manifest.removed}: {error}") from None


def state_of(folder: Path) -> State:
    """The state now, by name, of the manifest, what it names, texts and vectors, without missing
    files. Texts and vectors grow while they are served, so only their inodes count."""
    named: Mapping[str, FileEntry] = {}
    with suppress(CorruptIndexError, OSError):
        named = read_manifest(folder).files
    found: dict[str, FileState] = {}
    for name in (MANIFEST, PASSAGES, VECTORS, *named):
        with suppress(OSError):
            stat = (folder / name).stat()
            grows = name in (PASSAGES, VECTORS)
            size = (0, 0) if grows else (stat.st_mtime_ns, stat.st_size)
            found[name] = FileState(stat.st_ino, *size)
    return found


def entry_of(path: Path) -> FileEntry:
    """A file's size and checksum."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
    return FileEntry(path.stat().st_size, digest.hexdigest())


@contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A hidden file beside `path` to write to, which replaces it in one rename when the block ends;
    the new content is on disk then."""
    draft = path.with_name(f".{path.name}.draft")
    yield draft
    sync(draft)
    draft.replace(path)
    sync(path.parent)  # the rename itself is an entry of the folder


def write_atomically(path: Path, text: str) -> None:
    """See `replaced`."""
    with replaced(path) as draft:
        draft.write_text(text, encoding="utf-8")


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Lock a directory for one writer.
    Raises RetrievalError if it is locked; a process that dies releases its lock."""
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RetrievalError(f"{folder}: another process is building it") from None
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # now, even if a child process has inherited the file


def _digest(fields: Mapping[str, Any]) -> str:
    # Tuples become lists in JSON, so it is the same before writing and after reading.
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())
