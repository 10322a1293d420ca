"""An index directory: what is in it, which generation of it is served, and whether it is whole.

    settings.json           how passages are cut, encoded and indexed; written first, never changed
    manifest.json           the generation that is served: its files with sizes and checksums; replaced in one rename
    passages.sqlite         PassageStore: texts by row
    vectors.f16             VectorFile: vectors by row
    encoder.npz             state of the embedded encoder, if that is used
    dense-G.faiss           segments of generation G or earlier
    removed-G.npy           rows that are not found any more
    bm25-G/                 tantivy's index

Files with a generation in their name never change. The two that have none only grow, and the manifest says up to which row they
count. So a directory can be served while it is extended, and a build that dies at any point leaves the last generation whole.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

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
"""Raised when an older version could not read what this one writes."""
SETTINGS, MANIFEST, PASSAGES, VECTORS = "settings.json", "manifest.json", "passages.sqlite", "vectors.f16"
PROBE_ROWS = 1000
PROPOSALS = 10
"""Rows that compressed segments propose for each one that is wanted."""
RESCORED = 64
"""Queries at a time: 64 with 100 proposals of 768 numbers take 20 MB."""
MIN_PROBE_COSINE = 0.99
"""Between a text's vector then and now: other devices and dtypes stay above, other models far below."""
_OPEN_TRIES = 5
"""A generation may be replaced, and its files deleted, between reading the manifest and opening them."""


@dataclass(frozen=True)
class IndexSettings:
    """What a directory is built with; the same for as long as it lives.

    Attributes:
        tokens: what passages are measured in, as `load_tokens` takes it; `tokens_name` is what it called itself.
        is_split: whether documents are cut; otherwise every document is a passage.
        max_tokens, overlap_tokens: of a passage, where documents are cut.
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
        """Names of the settings that differ. A tokenizer or a model may have moved: a fingerprint tells the one,
        `check_encoder` the other."""
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
    """A file as it was written: size, and XXH3 of its bytes (against damage, not against forgery)."""

    num_bytes: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """One generation.

    Attributes:
        probe: the beginning of the first row's text, by which another index's store is seen.
        vectors: (row, XXH3) of the stretches of the vector file that each generation added, by their end.
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
        """As it is written."""
        fields = asdict(self)
        return json.dumps({"format": FORMAT, "xxh3": _digest(fields), **fields}, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Manifest:
        """Raises ValueError, KeyError or TypeError for anything else than what `to_json` writes."""
        fields = json.loads(text)
        if fields.pop("format") != FORMAT:
            raise ValueError(f"not of format {FORMAT}")
        if fields.pop("xxh3") != _digest(fields):
            raise ValueError("damaged, its checksum is another one")
        return cls(
            **{
                **fields,
                "segments": tuple(SegmentEntry(**entry) for entry in fields["segments"]),
                "vectors": tuple((row, checksum) for row, checksum in fields["vectors"]),
                "files": {name: FileEntry(**entry) for name, entry in fields["files"].items()},
            }
        )


class Index:
    """One generation of an index directory, open for searching. Nothing in it changes, so any thread may search."""

    def __init__(
        self,
        folder: Path,
        settings: IndexSettings,
        manifest: Manifest,
        store: PassageStore,
        faiss_indexes: Mapping[str, Any],
        bm25: Bm25Index | None,
        removed: NDArray[np.int64],
    ) -> None:
        self.folder, self.settings, self.manifest = folder, settings, manifest
        self.store, self.bm25, self.removed = store, bm25, removed
        self.faiss_indexes = faiss_indexes
        self._vectors = VectorFile(folder / VECTORS, dim=self.dim)
        self._vectors.map()
        self.segments: tuple[Segment, ...] = tuple(
            create_segment(faiss_indexes[entry.file], entry.first_row, removed) for entry in manifest.segments
        )

    @classmethod
    def open(cls, folder: Path, *, verify: bool, earlier: Index | None = None) -> Index:
        """Open the generation that is there now.

        Args:
            verify: whether the bytes of every file are compared with their checksum; sizes always are.
            earlier: an open generation of the same directory; files that both have are taken over.
        Raises:
            CorruptIndexError: no index directory, a damaged one, or one of another format.
        """
        for _ in range(_OPEN_TRIES - 1):
            manifest = read_manifest(folder)
            try:
                return cls._open(folder, manifest, verify=verify, earlier=earlier)
            except CorruptIndexError:
                if read_manifest(folder).generation == manifest.generation:
                    raise
        return cls._open(folder, read_manifest(folder), verify=verify, earlier=earlier)

    @property
    def generation(self) -> int:
        """Counts up with every change that is served."""
        return self.manifest.generation

    @property
    def num_rows(self) -> int:
        """Rows `[0, num_rows)`, removed ones too."""
        return self.manifest.num_rows

    @property
    def num_live(self) -> int:
        """Passages that can be found."""
        return self.num_rows - len(self.removed)

    @property
    def dim(self) -> int:
        """Of vectors."""
        return int(self.settings.encoder["dim"])

    def search_dense(
        self, queries: NDArray[np.float32], *, k: int, nprobe: int
    ) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """See `dense.search_segments`. Where a segment holds compressed vectors, it only proposes: scores are those of the
        vectors themselves, so that rows of all segments compare."""
        if all(is_exact(entry.factory) for entry in self.manifest.segments):
            return search_segments(self.segments, queries, k=k, nprobe=nprobe)
        starts = range(0, max(1, len(queries)), RESCORED)
        parts = [self._rescored(queries[start : start + RESCORED], k=k, nprobe=nprobe) for start in starts]
        return np.concatenate([scores for scores, _ in parts]), np.concatenate([rows for _, rows in parts])

    def vectors(self, first: int, last: int) -> NDArray[np.float32]:
        """[last - first, dim] float32: the vectors of rows `[first, last)`, removed ones too."""
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
    def _open(cls, folder: Path, manifest: Manifest, *, verify: bool, earlier: Index | None) -> Index:
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
            if bm25.num_docs != num_live:  # a folder that is being deleted opens as an empty one
                raise CorruptIndexError(f"{folder / manifest.bm25}: holds {bm25.num_docs} passages")
        return cls(folder, settings, manifest, store, indexes, bm25, removed)


def _check_vectors(
    vectors: VectorFile, manifest: Manifest, checked: tuple[tuple[int, str], ...], *, verify: bool
) -> None:
    check_num_vectors(vectors, manifest)
    first = 0
    for last, checksum in manifest.vectors:
        if verify and (last, checksum) not in checked and vectors.checksum(first, last) != checksum:
            raise CorruptIndexError(f"{vectors.path}: damaged, the checksum of rows [{first}, {last}) is another one")
        first = last


def check_num_vectors(vectors: VectorFile, manifest: Manifest) -> None:
    """Raises CorruptIndexError if there are fewer than the generation has."""
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


def _digest(fields: Mapping[str, Any]) -> str:
    return xxhash.xxh3_128_hexdigest(json.dumps(fields, sort_keys=True).encode())


def read_manifest(folder: Path) -> Manifest:
    """The generation that is there now. Raises CorruptIndexError."""
    path = folder / MANIFEST
    if not path.is_file():
        started = (folder / SETTINGS).is_file()
        raise CorruptIndexError(
            f"{folder}: the build has not finished; run it again and it goes on"
            if started
            else f"{folder}: no index there; `python -m retrieval build` makes one"
        )
    try:
        return Manifest.from_json(path.read_text(encoding="utf-8"))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CorruptIndexError(f"{path}: not a manifest that this version reads: {error}") from None


def read_settings(folder: Path) -> IndexSettings:
    """What the directory is built with. Raises CorruptIndexError."""
    path = folder / SETTINGS
    try:
        settings = IndexSettings(**json.loads(path.read_text(encoding="utf-8")))
        int(settings.encoder["dim"])
        return settings
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CorruptIndexError(f"{path}: not settings that this version reads: {error}") from None


def settings_json(settings: IndexSettings) -> str:
    """As it is written."""
    return json.dumps(asdict(settings), indent=1, ensure_ascii=False) + "\n"


def write_atomically(path: Path, text: str) -> None:
    """Replace a file in one step, on disk when this returns."""
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
    """Raises CorruptIndexError if the file is not what it was."""
    try:
        size = path.stat().st_size
        if size != entry.num_bytes:
            raise CorruptIndexError(f"{path}: {size} bytes, but {entry.num_bytes} were written")
        if verify and entry_of(path) != entry:
            raise CorruptIndexError(f"{path}: damaged, its checksum is another one")
    except OSError as error:
        raise CorruptIndexError(f"{path}: {error.strerror}") from None


def check_encoder(store: PassageStore, vectors: VectorFile, encoder: Encoder) -> None:
    """An index is searched and extended with the encoder that built it, or it finds anything.

    Encodes a text again that has a vector: the first with any words in it.

    Raises:
        CorruptIndexError: the vectors differ.
    """
    if encoder.dim != vectors.dim:
        raise CorruptIndexError(
            f"{vectors.path}: vectors of {vectors.dim} numbers, but the encoder gives {encoder.dim}"
        )
    then = vectors.read(0, min(PROBE_ROWS, vectors.num_rows))
    row = int(then.any(axis=1).argmax())
    now = encoder.encode_passages([store.get([row])[0].content])[0]
    lengths = float(np.linalg.norm(then[row]) * np.linalg.norm(now))
    cosine = float(then[row] @ now) / lengths if lengths else float(not then[row].any() and not now.any())
    if cosine < MIN_PROBE_COSINE:
        raise CorruptIndexError(
            f"{vectors.path}: of another encoder (the vector of row {row} has cosine {cosine:.3f} to this one's)"
        )


def check_files(folder: Path, manifest: Manifest, known: Mapping[str, FileEntry], *, verify: bool) -> None:
    """Raises CorruptIndexError if a file of the generation is not what it was. Those of `known` have been looked at."""
    for name, entry in manifest.files.items():
        if known.get(name) != entry:
            check_file(folder / name, entry, verify=verify)


def check_store(store: PassageStore, manifest: Manifest) -> None:
    """Raises CorruptIndexError if the passages are not those of the generation."""
    if store.num_rows < manifest.num_rows:
        raise CorruptIndexError(f"{store.path}: holds {store.num_rows} of {manifest.num_rows} passages")
    if not store.get([0])[0].content.startswith(manifest.probe):
        raise CorruptIndexError(f"{store.path}: is another index's")


@contextmanager
def writer_lock(folder: Path) -> Iterator[None]:
    """Keep other writers out of a directory. Raises RetrievalError if there is one; a dead one's lock is gone with it."""
    with open(folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RetrievalError(f"{folder}: another process is building it") from None
        try:
            yield
        finally:
            fcntl.flock(file, fcntl.LOCK_UN)  # at once, even if a child process has inherited the file
