"""An index directory: its files, the generation that is served, and the checks of its integrity.

    settings.json           how passages are cut, encoded and indexed; written first, never changed
    manifest.json           the served generation: its files with sizes and checksums; replaced in one rename
    passages.sqlite         PassageStore: texts by row
    vectors.f16             VectorFile: vectors by row
    encoder.npz             state of the embedded encoder, if it is used
    dense-G.faiss           segments of generation G or earlier
    removed-G.npy           rows that are hidden from searches
    bm25-G/                 tantivy's index

Files with a generation G in their name never change. `passages.sqlite` and `vectors.f16` only grow, and the manifest says how
many of their rows are valid. So a directory can be served while it is extended, and a build that dies at any point leaves the
last generation intact.
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
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from retrieval.dense import Segment, best_of, create_segment, is_exact, read_faiss, search_segments
from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.store import PassageStore
from retrieval.vectors import VectorFile

if TYPE_CHECKING:
    from retrieval.bm25 import Bm25Index
    from retrieval.encoder import Encoder

FORMAT = 1
"""Incremented when older versions cannot read the directory."""
SETTINGS, MANIFEST, PASSAGES, VECTORS = "settings.json", "manifest.json", "passages.sqlite", "vectors.f16"
PROBE_ROWS = 1000
PROPOSALS = 10
"""Candidates from compressed segments per wanted row; the stored vectors rank them."""
RESCORED = 64
"""Queries at a time: 64 with 100 candidates of 768 dimensions take 20 MB."""
MIN_PROBE_COSINE = 0.99
"""Between the stored vector of a text and a new one. Other devices and dtypes stay above it, other models are far below."""
_OPEN_TRIES = 5
"""A build may replace a generation and delete its files between reading the manifest and opening them."""


@dataclass(frozen=True)
class IndexSettings:
    """Settings of an index directory; they never change.

    Attributes:
        tokens: the tokenizer that measures passages, a name for `load_tokens`; `tokens_name` is the tokenizer's `name`.
        is_split: whether documents are cut; otherwise every document is a passage.
        max_tokens, overlap_tokens: of a passage, if documents are cut.
        encoder: `Encoder.spec()`.
        factory: FAISS' factory string, or "auto".
        bm25_language: stemmer of the BM25 index, "none" for no stemmer, None for no BM25 index.
    """

    tokens: str
    tokens_name: str
    is_split: bool
    max_tokens: int
    overlap_tokens: int
    encoder: Mapping[str, Any]
    factory: str
    bm25_language: str | None

    def differences(self, other: IndexSettings) -> list[str]:
        """Names of the settings that differ. Paths may differ: tokenizers are compared by fingerprint, and models by
        `check_encoder`."""
        mine, theirs = ({**asdict(s), "tokens_name": s.tokens_name.rpartition("@")[2]} for s in (self, other))
        return [name for name in mine if name != "tokens" and mine[name] != theirs[name]]


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
    """

    generation: int
    num_rows: int
    segments: tuple[SegmentEntry, ...]
    removed: str | None
    bm25: str | None
    probe: str
    vectors: tuple[tuple[int, str], ...]
    files: Mapping[str, FileEntry]

    def to_json(self) -> str:
        """The content of the manifest file."""
        fields = asdict(self)
        return json.dumps({"format": FORMAT, "xxh3": _digest(fields), **fields}, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Read the result of `to_json`. Raises ValueError, KeyError or TypeError for anything else."""
        fields = json.loads(text)
        if fields.pop("format") != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
        if fields.pop("xxh3") != _digest(fields):
            raise ValueError("damaged, its checksum differs")
        return cls(
            **{
                **fields,
                "segments": tuple(SegmentEntry(**entry) for entry in fields["segments"]),
                "vectors": tuple((row, checksum) for row, checksum in fields["vectors"]),
                "files": {name: FileEntry(**entry) for name, entry in fields["files"].items()},
            }
        )


class FileState(NamedTuple):
    """What tells a file that was replaced or written over without reading it. A replaced file has another inode."""

    inode: int
    mtime_ns: int
    num_bytes: int


class Index:
    """One generation of an index directory, open for searching. Immutable, so any thread may search.

    `state`: see `state_of`, of the files before they were opened.
    """

    def __init__(
        self,
        folder: Path,
        settings: IndexSettings,
        manifest: Manifest,
        store: PassageStore,
        faiss_indexes: Mapping[str, Any],
        bm25: Bm25Index | None,
        removed: NDArray[np.int64],
        state: Mapping[str, FileState],
    ) -> None:
        self.folder, self.settings, self.manifest, self.state = folder, settings, manifest, state
        self.store, self.bm25, self.removed = store, bm25, removed
        self.faiss_indexes = faiss_indexes
        self._vectors = VectorFile(folder / VECTORS, dim=self.dim)
        self._vectors.map()
        self.segments: tuple[Segment, ...] = tuple(
            create_segment(faiss_indexes[entry.file], entry.first_row, removed) for entry in manifest.segments
        )

    @classmethod
    def open(cls, folder: Path, *, verify: bool, earlier: Index | None = None) -> Index:
        """Open the directory's current generation.

        Args:
            verify: compare every file with its checksum. Sizes are always compared.
            earlier: an open generation of the same directory; files that both have are not opened again.
        Raises:
            CorruptIndexError: the folder is not an index directory, is damaged, or has another format.
        """
        for _ in range(_OPEN_TRIES - 1):
            state, manifest = state_of(folder), read_manifest(folder)
            try:
                return cls._open(folder, manifest, state, verify=verify, earlier=earlier)
            except CorruptIndexError:
                if read_manifest(folder) == manifest:
                    raise
        return cls._open(folder, read_manifest(folder), state_of(folder), verify=verify, earlier=earlier)

    @property
    def generation(self) -> int:
        """Number of this generation; each published change increments it."""
        return self.manifest.generation

    @property
    def num_rows(self) -> int:
        """Number of rows, removed ones included."""
        return self.manifest.num_rows

    @property
    def num_live(self) -> int:
        """Number of passages that can be found."""
        return self.num_rows - len(self.removed)

    @property
    def dim(self) -> int:
        """Dimensions of the vectors."""
        return int(self.settings.encoder["dim"])

    def search_dense(
        self, queries: NDArray[np.float32], *, k: int, nprobe: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """See `dense.search_segments`. A segment of compressed vectors only proposes candidates; they are scored with the
        stored vectors, so that scores of all segments are comparable."""
        if all(is_exact(entry.factory) for entry in self.manifest.segments):
            return search_segments(self.segments, queries, k=k, nprobe=nprobe)
        starts = range(0, max(1, len(queries)), RESCORED)
        parts = [self._rescored(queries[start : start + RESCORED], k=k, nprobe=nprobe) for start in starts]
        return np.concatenate([scores for scores, _ in parts]), np.concatenate([rows for _, rows in parts])

    def vectors(self, first: int, last: int) -> NDArray[np.float32]:
        """[last - first, dim] float32: the vectors of rows `[first, last)`, removed ones included."""
        return self._vectors.read(first, last)

    def is_live(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of `rows` can be found."""
        return (rows >= 0) & (rows < self.num_rows) & ~np.isin(rows, self.removed)

    # Private, in order of use

    def _rescored(
        self, queries: NDArray[np.float32], *, k: int, nprobe: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        _, rows = search_segments(self.segments, queries, k=PROPOSALS * k, nprobe=nprobe)
        distinct, places = np.unique(np.maximum(rows, 0), return_inverse=True)
        stored = self._vectors.read_rows(distinct)
        scores = np.einsum("nd,nkd->nk", queries, stored[places.reshape(rows.shape)])
        return best_of(np.where(rows < 0, np.float32(-np.inf), scores), rows, k=k)

    @classmethod
    def _open(
        cls, folder: Path, manifest: Manifest, state: Mapping[str, FileState], *, verify: bool, earlier: Index | None
    ) -> Index:
        known = earlier.manifest.files if earlier else {}
        check_files(folder, manifest, known, verify=verify)
        settings = read_settings(folder)
        indexes: dict[str, Any] = {}
        for segment in manifest.segments:
            is_same = known.get(segment.file) == manifest.files[segment.file]
            indexes[segment.file] = (
                earlier.faiss_indexes[segment.file] if earlier and is_same else read_faiss(folder / segment.file)
            )
            if indexes[segment.file].ntotal != segment.num_rows:
                raise CorruptIndexError(f"{folder / segment.file}: does not hold {segment.num_rows} vectors")
        checked = earlier.manifest.vectors if earlier else ()
        _check_vectors(VectorFile(folder / VECTORS, dim=int(settings.encoder["dim"])), manifest, checked, verify=verify)
        store = earlier.store if earlier else PassageStore(folder / PASSAGES, writable=False)
        if verify and not known:
            store.check()
        check_store(store, manifest)
        removed = removed_rows(folder, manifest)
        bm25 = None
        if manifest.bm25 and settings.bm25_language:
            from retrieval.bm25 import Bm25Index  # only here: an index without BM25 does not need tantivy

            bm25 = Bm25Index.open(folder / manifest.bm25, language=settings.bm25_language)
            num_live = manifest.num_rows - len(removed)
            if bm25.num_docs != num_live:  # a folder that is being deleted opens as empty
                raise CorruptIndexError(f"{folder / manifest.bm25}: holds {bm25.num_docs} passages")
        return cls(folder, settings, manifest, store, indexes, bm25, removed, state)


def _check_vectors(
    vectors: VectorFile, manifest: Manifest, checked: tuple[tuple[int, str], ...], *, verify: bool
) -> None:
    check_num_vectors(vectors, manifest)
    first = 0
    for last, checksum in manifest.vectors:
        if verify and (last, checksum) not in checked and vectors.checksum(first, last) != checksum:
            raise CorruptIndexError(f"{vectors.path}: damaged, the checksum of rows [{first}, {last}) differs")
        first = last


def check_num_vectors(vectors: VectorFile, manifest: Manifest) -> None:
    """Raise CorruptIndexError if the file has fewer vectors than the generation."""
    if vectors.num_rows < manifest.num_rows:
        raise CorruptIndexError(f"{vectors.path}: holds fewer than {manifest.num_rows} vectors")


def removed_rows(folder: Path, manifest: Manifest) -> NDArray[np.int64]:
    """Rows that the generation hides, ascending. Raises CorruptIndexError."""
    if manifest.removed is None:
        return np.zeros(0, np.int64)
    try:
        return np.asarray(np.load(folder / manifest.removed), np.int64)
    except (OSError, ValueError, EOFError) as error:
        raise CorruptIndexError(f"{folder / manifest.removed}: {error}") from None


def state_of(folder: Path) -> dict[str, FileState]:
    """The state of the directory's files now, by name: of the manifest, of what it names, of texts and vectors.

    Texts and vectors grow while they are served, so only their inodes count. Missing files are left out.
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
            found[name] = FileState(stat.st_ino, *((0, 0) if grows else (stat.st_mtime_ns, stat.st_size)))
    return found


def _digest(fields: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())


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
        raise CorruptIndexError(f"{path}: not a manifest that this version reads: {error}") from None


def read_settings(folder: Path) -> IndexSettings:
    """The directory's settings. Raises CorruptIndexError."""
    path = folder / SETTINGS
    try:
        settings = IndexSettings(**json.loads(path.read_text(encoding="utf-8")))
        int(settings.encoder["dim"])
        return settings
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CorruptIndexError(f"{path}: not settings that this version reads: {error}") from None


def settings_json(settings: IndexSettings) -> str:
    """The content of the settings file."""
    return json.dumps(asdict(settings), indent=1, ensure_ascii=False) + "\n"


def write_atomically(path: Path, text: str) -> None:
    """Replace a file by one rename; the new content is on disk when this returns."""
    draft = path.with_name(path.name + ".draft")
    with open(draft, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync(path.parent)


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def entry_of(path: Path) -> FileEntry:
    """A file's size and checksum."""
    with open(path, "rb") as file:
        digest = hashlib.file_digest(file, xxhash.xxh3_128)
    return FileEntry(path.stat().st_size, digest.hexdigest())


def check_file(path: Path, entry: FileEntry, *, verify: bool) -> None:
    """Raise CorruptIndexError if the file has changed since it was written."""
    try:
        size = path.stat().st_size
        if size != entry.num_bytes:
            raise CorruptIndexError(f"{path}: {size} bytes, but {entry.num_bytes} were written")
        if verify and entry_of(path) != entry:
            raise CorruptIndexError(f"{path}: damaged, its checksum differs")
    except OSError as error:
        raise CorruptIndexError(f"{path}: {error.strerror}") from None


def check_encoder(store: PassageStore, vectors: VectorFile, encoder: Encoder) -> None:
    """Refuse another encoder than the one that built the index: its results would be meaningless.

    Encodes one text again, the first whose vector is not zero, and compares the vectors.

    Raises:
        CorruptIndexError: the vectors differ.
    """
    if encoder.dim != vectors.dim:
        raise CorruptIndexError(
            f"{vectors.path}: the vectors have {vectors.dim} dimensions, but the encoder gives {encoder.dim}"
        )
    then = vectors.read(0, min(PROBE_ROWS, vectors.num_rows))
    row = int(then.any(axis=1).argmax())
    now = encoder.encode_passages([store.get([row])[0].content])[0]
    lengths = float(np.linalg.norm(then[row]) * np.linalg.norm(now))
    cosine = float(then[row] @ now) / lengths if lengths else float(not then[row].any() and not now.any())
    if cosine < MIN_PROBE_COSINE:
        raise CorruptIndexError(
            f"{vectors.path}: written by another encoder (the vector of row {row} has cosine {cosine:.3f} to this one's)"
        )


def check_files(folder: Path, manifest: Manifest, known: Mapping[str, FileEntry], *, verify: bool) -> None:
    """Raise CorruptIndexError if a file of the generation has changed. Files in `known` were checked before."""
    for name, entry in manifest.files.items():
        if known.get(name) != entry:
            check_file(folder / name, entry, verify=verify)


def check_store(store: PassageStore, manifest: Manifest) -> None:
    """Raise CorruptIndexError if the passages are not those of the generation."""
    if store.num_rows < manifest.num_rows:
        raise CorruptIndexError(f"{store.path}: holds {store.num_rows} of {manifest.num_rows} passages")
    if not store.get([0])[0].content.startswith(manifest.probe):
        raise CorruptIndexError(f"{store.path} belongs to another index")


@contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Lock a directory for one writer. Raises RetrievalError if it is locked; a process that dies releases its lock."""
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RetrievalError(f"{folder}: another process is building it") from None
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # now, even if a child process has inherited the file
