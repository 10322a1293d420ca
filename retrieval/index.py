"""One generation of an index directory, open for searching, and the checks of what it holds.
Files: see manifest.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from retrieval.dense import Segment, best_of, create_segment, is_exact, read_faiss, search_segments
from retrieval.errors import CorruptIndexError
from retrieval.manifest import (
    PASSAGES,
    VECTORS,
    FileEntry,
    FileState,
    Manifest,
    check_files,
    read_manifest,
    removed_rows,
    state_of,
)
from retrieval.settings import IndexSettings, read_settings
from retrieval.store import PassageStore
from retrieval.vectors import VectorFile

if TYPE_CHECKING:
    from retrieval.bm25 import Bm25Index
    from retrieval.encoder import Encoder

PROBE_ROWS = 1000
PROPOSALS = 10
"""Candidates from compressed segments per wanted row; the stored vectors rank them."""
RESCORED = 64
"""Queries at a time: 64 with 100 candidates of 768 dimensions take 20 MB."""
MIN_PROBE_COSINE = 0.99
"""Between the stored vector of a text and a new one.
Other devices and dtypes stay above it, other models are far below."""
_OPEN_TRIES = 5
"""A build may replace a generation and delete its files between reading the manifest and opening
them."""

Found = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Scores [n, k] and rows [n, k], best first; -inf and -1 where there are fewer."""


@dataclass(frozen=True, eq=False)
class Index:
    """One generation of an index directory, open for searching.
    Immutable, so any thread may search."""

    folder: Path
    settings: IndexSettings
    manifest: Manifest
    store: PassageStore
    vector_file: VectorFile
    faiss_indexes: Mapping[str, Any]
    segments: tuple[Segment, ...]
    bm25: Bm25Index | None
    removed: NDArray[np.int64]
    state: Mapping[str, FileState]
    """See `state_of`, of the files before they were opened."""

    @classmethod
    def open(cls, folder: Path, *, verify: bool, earlier: Index | None = None) -> Index:
        """Open the directory's current generation.

        Args:
            verify: compare every file with its checksum. Sizes are always compared.
            earlier: an open generation of the same directory; files that both have are not opened
                again.
        Raises:
            CorruptIndexError: the folder is not an index directory, is damaged, or has another
                format.
        """
        for num_left in reversed(range(_OPEN_TRIES)):
            # The state first: what changes between the two looks new at the next refresh.
            state, manifest = state_of(folder), read_manifest(folder)
            try:
                return cls._open(folder, manifest, state, verify=verify, earlier=earlier)
            except CorruptIndexError:
                # If no build has replaced the generation meanwhile, it is damage.
                if not num_left or read_manifest(folder) == manifest:
                    raise
        raise AssertionError  # the last try returns or raises

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
        return self.settings.dim

    def search_dense(self, queries: NDArray[np.float32], *, k: int, nprobe: int) -> Found:
        """See `dense.search_segments`. A segment of compressed vectors only proposes candidates;
        they are scored with the stored vectors, so that scores of all segments are comparable."""
        if all(is_exact(entry.factory) for entry in self.manifest.segments):
            return search_segments(self.segments, queries, k=k, nprobe=nprobe)
        starts = range(0, max(1, len(queries)), RESCORED)
        parts = [
            self._rescored(queries[start : start + RESCORED], k=k, nprobe=nprobe)
            for start in starts
        ]
        return np.concatenate([scores for scores, _ in parts]), np.concatenate(
            [rows for _, rows in parts]
        )

    def vectors(self, first: int, last: int) -> NDArray[np.float32]:
        """[last - first, dim] float32: the vectors of rows `[first, last)`,
        removed ones included."""
        return self.vector_file.read(first, last)

    def is_live(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which of `rows` can be found."""
        return (rows >= 0) & (rows < self.num_rows) & ~np.isin(rows, self.removed)

    def check_encoder(self, encoder: Encoder) -> None:
        """See the function of this name."""
        check_encoder(self.store, self.vector_file, encoder)

    # Private, in order of use

    def _rescored(self, queries: NDArray[np.float32], *, k: int, nprobe: int) -> Found:
        _, rows = search_segments(self.segments, queries, k=PROPOSALS * k, nprobe=nprobe)
        # Where nothing was found, -1, row 0 stands in until scores are masked. Each vector is read
        # once.
        distinct, places = np.unique(np.maximum(rows, 0), return_inverse=True)
        stored = self.vector_file.read_rows(distinct)
        scores = np.einsum("nd,nkd->nk", queries, stored[places.reshape(rows.shape)])
        return best_of(np.where(rows < 0, np.float32(-np.inf), scores), rows, k=k)

    @classmethod
    def _open(
        cls,
        folder: Path,
        manifest: Manifest,
        state: Mapping[str, FileState],
        *,
        verify: bool,
        earlier: Index | None,
    ) -> Index:
        known: Mapping[str, FileEntry] = earlier.manifest.files if earlier else {}
        check_files(folder, manifest, known, verify=verify)
        settings = read_settings(folder)
        indexes: dict[str, Any] = {}
        for segment in manifest.segments:
            is_same = known.get(segment.file) == manifest.files[segment.file]
            indexes[segment.file] = (
                earlier.faiss_indexes[segment.file]
                if earlier and is_same
                else read_faiss(folder / segment.file)
            )
            if indexes[segment.file].ntotal != segment.num_rows:
                raise CorruptIndexError(
                    f"{folder / segment.file}: does not hold {segment.num_rows} vectors"
                )
        vectors = VectorFile(folder / VECTORS, dim=settings.dim)
        # Rows never change, so it serves all generations.
        store = earlier.store if earlier else PassageStore(folder / PASSAGES, writable=False)
        # Once: it reads the whole file, of which later generations have most.
        if verify and not known:
            store.check()
        check_rows(store, vectors, manifest)
        if verify:
            _check_sums(vectors, manifest, earlier.manifest.vectors if earlier else ())
        removed = removed_rows(folder, manifest)
        bm25 = None
        if manifest.bm25 and settings.bm25_language:
            # only here: an index without BM25 does not need tantivy
            from retrieval.bm25 import Bm25Index

            place, version = folder / manifest.bm25, manifest.analyzer
            bm25 = Bm25Index.open(place, language=settings.bm25_language, version=version)
            # a folder that is being deleted opens as empty
            if bm25.num_docs != manifest.num_rows - len(removed):
                raise CorruptIndexError(f"{folder / manifest.bm25}: holds {bm25.num_docs} passages")
        # Now, while the file is this index's: a map outlives a file that is replaced later.
        vectors.map()
        segments = tuple(
            create_segment(indexes[part.file], part.first_row, removed)
            for part in manifest.segments
        )
        return cls(
            folder, settings, manifest, store, vectors, indexes, segments, bm25, removed, state
        )


def check_rows(store: PassageStore, vectors: VectorFile, manifest: Manifest) -> None:
    """Raise CorruptIndexError if the passages and vectors are not those of the generation."""
    if vectors.num_rows < manifest.num_rows:
        raise CorruptIndexError(f"{vectors.path}: holds fewer than {manifest.num_rows} vectors")
    if store.num_rows < manifest.num_rows:
        raise CorruptIndexError(
            f"{store.path}: holds {store.num_rows} of {manifest.num_rows} passages"
        )
    if not store.get([0])[0].content.startswith(manifest.probe):
        raise CorruptIndexError(f"{store.path} belongs to another index")


def check_encoder(store: PassageStore, vectors: VectorFile, encoder: Encoder) -> None:
    """Refuse another encoder than the one that built the index: its results would be meaningless.

    Encodes one text again, the first whose vector is not zero, and compares the vectors.

    Raises:
        CorruptIndexError: the vectors differ.
    """
    if encoder.dim != vectors.dim:
        raise CorruptIndexError(
            f"{vectors.path}: the vectors have {vectors.dim} dimensions, but the encoder gives"
            f" {encoder.dim}"
        )
    then = vectors.read(0, min(PROBE_ROWS, vectors.num_rows))
    # A text without a word has the zero vector by any embedded encoder.
    row = int(then.any(axis=1).argmax())
    now = encoder.encode_passages([store.get([row])[0].content])[0]
    lengths = float(np.linalg.norm(then[row]) * np.linalg.norm(now))
    cosine = (
        float(then[row] @ now) / lengths
        if lengths
        else float(not then[row].any() and not now.any())
    )
    if cosine < MIN_PROBE_COSINE:
        raise CorruptIndexError(
            f"{vectors.path}: written by another encoder (the vector of row {row} has cosine"
            f" {cosine:.3f} to this one's)"
        )


def _check_sums(
    vectors: VectorFile, manifest: Manifest, checked: tuple[tuple[int, str], ...]
) -> None:
    first = 0
    for last, checksum in manifest.vectors:
        if (last, checksum) not in checked and vectors.checksum(first, last) != checksum:
            raise CorruptIndexError(
                f"{vectors.path}: damaged, the checksum of rows [{first}, {last}) differs"
            )
        first = last
