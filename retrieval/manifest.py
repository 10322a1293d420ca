"""An index directory's files, and the manifest that says which of them are served.

    settings.json     how passages are cut, encoded and indexed; written first, never changed
    manifest.json     the served generation: its files with sizes and checksums; replaced in one
                      rename
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
"""Incremented when older versions cannot read the directory.
Format 1 has no `analyzer`, and is read."""
ANALYZER = 2
"""Version of how BM25 cuts text into words; incremented when it changes. An index that an older one
has made is searched with that one, until the next build indexes its texts anew."""
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

    @property
    def is_outdated(self) -> bool:
        """Whether an older analyzer than today's has cut the texts of BM25."""
        return self.bm25 is not None and self.analyzer < ANALYZER

    def to_json(self) -> str:
        """The content of the manifest file."""
        fields = asdict(self)
        return (
            json.dumps(
                {"format": FORMAT, "xxh3": _digest(fields), **fields}, indent=1, ensure_ascii=False
            )
            + "\n"
        )

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read the result of `to_json`.
        Raises ValueError, KeyError or TypeError for anything else."""
        fields = json.loads(text)
        if (written := fields.pop("format")) not in (1, FORMAT):
            raise ValueError(f"not of format {FORMAT}")
        if fields.pop("xxh3") != _digest(fields):
            raise ValueError("damaged, its checksum differs")
        if written == 1:
            fields["analyzer"] = 1
        if not 1 <= fields["analyzer"] <= ANALYZER:
            raise ValueError(
                f"its analyzer is of version {fields['analyzer']}, this release has {ANALYZER}"
            )
        fields["segments"] = tuple(SegmentEntry(**entry) for entry in fields["segments"])
        fields["vectors"] = tuple((row, checksum) for row, checksum in fields["vectors"])
        fields["files"] = {name: FileEntry(**entry) for name, entry in fields["files"].items()}
        return cls(**fields)


class FileState(NamedTuple):
    """What tells a file that was replaced or written over without reading it.
    A replaced file has another inode."""

    inode: int
    mtime_ns: int
    num_bytes: int


def read_manifest(folder: Path) -> Manifest:
    """The manifest of the directory's current generation. Raises CorruptIndexError."""
    path = folder / MANIFEST
    if not path.is_file():
        started = (folder / SETTINGS).is_file()
        raise CorruptIndexError(
            f"{folder}: the build has not finished; run it again to continue"
            if started
            else f"{folder}: no index there; `python -m retrieval build` makes one"
        )
    try:
        return Manifest.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptIndexError(
            f"{path}: not a manifest that this version reads: {error}"
        ) from None


def removed_rows(folder: Path, manifest: Manifest) -> NDArray[np.int64]:
    """Rows that the generation hides, ascending. Raises CorruptIndexError."""
    if manifest.removed is None:
        return np.zeros(0, np.int64)
    try:
        return np.asarray(np.load(folder / manifest.removed), np.int64)
    except (OSError, ValueError, EOFError) as error:
        raise CorruptIndexError(f"{folder / manifest.removed}: {error}") from None


def state_of(folder: Path) -> dict[str, FileState]:
    """The state of the directory's files now, by name: of the manifest, of what it names, of texts
    and vectors.

    Texts and vectors grow while they are served, so only their inodes count. Missing files are left
    out.
    """
    try:
        named = read_manifest(folder).files
    except (CorruptIndexError, OSError):
        named = {}
    found: dict[str, FileState] = {}
    for name in (MANIFEST, PASSAGES, VECTORS, *named):
        with suppress(OSError):
            stat = (folder / name).stat()
            grows = name in (PASSAGES, VECTORS)
            found[name] = FileState(
                stat.st_ino, *((0, 0) if grows else (stat.st_mtime_ns, stat.st_size))
            )
    return found


def entry_of(path: Path) -> FileEntry:
    """A file's size and checksum."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
    return FileEntry(path.stat().st_size, digest.hexdigest())


def check_files(
    folder: Path, manifest: Manifest, known: Mapping[str, FileEntry], *, verify: bool
) -> None:
    """Raise CorruptIndexError if a file of the generation has changed. Files in `known` were
    checked before.

    Args:
        verify: compare checksums too; sizes are always compared.
    """
    for name, entry in manifest.files.items():
        if known.get(name) == entry:
            continue
        path = folder / name
        try:
            size = path.stat().st_size
            if size != entry.num_bytes:
                raise CorruptIndexError(f"{path}: {size} bytes, but {entry.num_bytes} were written")
            if verify and entry_of(path) != entry:
                raise CorruptIndexError(f"{path}: damaged, its checksum differs")
        except OSError as error:
            raise CorruptIndexError(f"{path}: {error.strerror}") from None


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by one rename; the new content is on disk when this returns."""
    draft = path.with_name(path.name + ".draft")
    draft.write_text(text, encoding="utf-8")
    sync(draft)
    draft.replace(path)
    sync(path.parent)  # the rename itself is an entry of the folder


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
