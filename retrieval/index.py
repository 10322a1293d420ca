"""An index directory, open for searching, and the checks of what it holds. Files: see
manifest.py."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from retrieval.dense import EXACT, Found, Segment, best_of, read_faiss, search_segments
from retrieval.errors import CorruptIndexError
from retrieval.manifest import (
    NOTHING,
    PASSAGES,
    VECTORS,
    Manifest,
    State,
    entry_of,
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


@dataclass(frozen=True, eq=False)
class Directory:
    """An open index directory. `manifest`: of the generation that is served, or NOTHING."""

    folder: Path
    settings: IndexSettings
    manifest: Manifest
    store: PassageStore
    vectors: VectorFile

    def check(self, *, verify: bool, known: Manifest = NOTHING) -> None:
        """Refuse files, vectors and passages that are not the generation's, by sizes and, with
        `verify`, checksums. What `known` has was checked before. Raises CorruptIndexError."""
        manifest, store, vectors = self.manifest, self.store, self.vectors
        for name, entry in manifest.files.items():
            if known.files.get(name) == entry:
                continue
            path = self.folder / name
            try:
                size, wanted = path.stat().st_size, entry.num_bytes
                if size != wanted:
                    raise CorruptIndexError(f"{path}: {size} bytes, but {wanted} were written")
                if verify and entry_of(path) != entry:
                    raise CorruptIndexError(f"{path}: damaged, its checksum differs")
            except OSError as error:
                raise CorruptIndexError(f"{path}: {error.strerror}") from None
        if vectors.num_rows < manifest.num_rows:
            raise CorruptIndexError(f"{vectors.path}: holds fewer than {manifest.num_rows} vectors")
        if store.num_rows < manifest.num_rows:
            numbers = f"{store.num_rows} of {manifest.num_rows}"
            raise CorruptIndexError(f"{store.path}: holds {numbers} passages")
        if manifest.num_rows and not store.get([0])[0].content.startswith(manifest.probe):
            raise CorruptIndexError(f"{store.path} belongs to another index")
        first = 0
        for last, checksum in manifest.vectors if verify else ():
            if (last, checksum) not in known.vectors and vectors.checksum(first, last) != checksum:
                what = f"the checksum of rows [{first}, {last}) differs"
                raise CorruptIndexError(f"{vectors.path}: damaged, {what}")
            first = last

    def check_encoder(self, encoder: Encoder) -> None:
        """Refuse another encoder than the one that built the index: its results would be
        meaningless. Encodes the first text again whose vector is not zero.
        Raises CorruptIndexError."""
        vectors = self.vectors
        if encoder.dim != vectors.dim:
            what = f"the vectors have {vectors.dim} dimensions, but the encoder gives {encoder.dim}"
            raise CorruptIndexError(f"{vectors.path}: {what}")
        probes = vectors.read(0, min(PROBE_ROWS, vectors.num_rows))
        # A text without a word has the zero vector by any embedded encoder.
        row = int(probes.any(axis=1).argmax())
        then, now = probes[row], encoder.encode_passages([self.store.get([row])[0].content])[0]
        lengths = float(np.linalg.norm(then) * np.linalg.norm(now))
        both_zero = float(not then.any() and not now.any())
        cosine = float(then @ now) / lengths if lengths else both_zero
        if cosine < MIN_PROBE_COSINE:
            what = f"the vector of row {row} has cosine {cosine:.3f} to this one's"
            raise CorruptIndexError(f"{vectors.path}: written by another encoder ({what})")


@dataclass(frozen=True, eq=False)
class Index(Directory):
    """One generation, open for searching. Immutable, so any thread may search.
    `segments` by the names of their files; `state` of the files before they were opened."""

    segments: Mapping[str, Segment]
    bm25: Bm25Index | None
    removed: NDArray[np.int64]
    state: State

    @classmethod
    def open(cls, folder: Path, *, verify: bool, earlier: Index | None = None) -> Index:
        """Open the directory's current generation.

        Args:
            verify: compare every file with its checksum. Sizes are always compared.
            earlier: an open generation of the same directory; what both have is not opened again.
        Raises:
            CorruptIndexError: no index directory, damaged, or of another format.
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
    def num_rows(self) -> int:
        """Number of rows, removed ones included."""
        return self.manifest.num_rows

    @property
    def num_live(self) -> int:
        """Number of passages that can be found."""
        return self.num_rows - len(self.removed)

    def search_dense(self, queries: NDArray[np.float32], *, k: int, nprobe: int) -> Found:
        """See `dense.search_segments`. A segment of compressed vectors only proposes candidates;
        they are scored with the stored vectors, so that scores of all segments are comparable."""
        segments = self.segments.values()
        if all(EXACT.fullmatch(entry.factory) for entry in self.manifest.segments):
            return search_segments(segments, queries, k=k, nprobe=nprobe)
        parts: list[Found] = []
        for start in range(0, max(1, len(queries)), RESCORED):
            some = queries[start : start + RESCORED]
            _, rows = search_segments(segments, some, k=PROPOSALS * k, nprobe=nprobe)
            # Where nothing was found, -1, row 0 stands in until scores are masked. Each vector is
            # read once.
            distinct, places = np.unique(np.maximum(rows, 0), return_inverse=True)
            stored = self.vectors.read_rows(distinct)[places.reshape(rows.shape)]
            scores = np.einsum("nd,nkd->nk", some, stored)
            parts.append(best_of(np.where(rows < 0, np.float32(-np.inf), scores), rows, k=k))
        scores, rows = (np.concatenate(each) for each in zip(*parts, strict=True))
        return scores, rows

    @classmethod
    def _open(
        cls, folder: Path, manifest: Manifest, state: State, *, verify: bool, earlier: Index | None
    ) -> Index:
        known = earlier.manifest if earlier else NOTHING
        settings = read_settings(folder)
        vectors = VectorFile(folder / VECTORS, dim=settings.dim)
        # Rows never change, so it serves all generations.
        store = earlier.store if earlier else PassageStore(folder / PASSAGES, writable=False)
        # Once: it reads the whole file, of which later generations have most.
        if verify and not earlier:
            store.check()
        Directory(folder, settings, manifest, store, vectors).check(verify=verify, known=known)
        removed = removed_rows(folder, manifest)
        segments: dict[str, Segment] = {}
        for part in manifest.segments:
            path = folder / part.file
            is_same = known.files.get(part.file) == manifest.files[part.file]
            opened = earlier.segments[part.file].index if earlier and is_same else read_faiss(path)
            if opened.ntotal != part.num_rows:
                raise CorruptIndexError(f"{path}: does not hold {part.num_rows} vectors")
            segments[part.file] = Segment(opened, part.first_row, removed)
        bm25 = None
        if manifest.bm25 and settings.bm25_language:
            # only here: an index without BM25 does not need tantivy
            from retrieval.bm25 import Bm25Index

            place = folder / manifest.bm25
            bm25 = Bm25Index.open(place, language=settings.bm25_language)
            # a folder that is being deleted opens as empty
            if bm25.num_docs != manifest.num_rows - len(removed):
                raise CorruptIndexError(f"{place}: holds {bm25.num_docs} passages")
        # Now, while the file is this index's: a map outlives a file that is replaced later.
        vectors.map()
        return cls(folder, settings, manifest, store, vectors, segments, bm25, removed, state)
