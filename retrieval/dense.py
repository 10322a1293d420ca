"""Vectors in FAISS: one trained base segment, at most one small segment of later rows, and rows
that are hidden.

    rows   0 ............................ base ............ n0 ... later ... n
           the factory string that was asked for            Flat

Segment files never change: adding rows writes a new later segment, removing rows clears a bit of
each. So every search has a consistent view, and FAISS maps the files into memory instead of reading
them. Knows rows, not passages. Similarity is the inner product.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.progress import Progress
from retrieval.vectors import VectorFile

TRAIN_VECTORS_PER_LIST = 64
"""FAISS asks for at least 39 for each of an IVF index's lists, and uses no more than 256."""
MIN_TRAIN_VECTORS = 65_536
"""For quantisers that are not lists; 256 per centroid of a product quantiser."""
ADD_ROWS = 65_536
EXACT = re.compile(r"(IVF\d+(_HNSW\d+)?,|HNSW\d+,)?Flat|HNSW\d+")
"""Factories of indexes that hold the vectors themselves, so that scores are inner products."""
MAX_FLAT_ROWS = 100_000
"""`auto` searches up to this many rows exactly:
about 10 ms a query on one core at 384 dimensions."""

Found = tuple[NDArray[np.float32], NDArray[np.int64]]
"""Scores [n, k] and rows [n, k], best first, equal scores by row; -inf and -1 where there are
fewer."""


def auto_factory(num_rows: int) -> str:
    """Exact for a small corpus, else about 4 sqrt(n) lists (FAISS' guideline)."""
    if num_rows <= MAX_FLAT_ROWS:
        return "Flat"
    return f"IVF{2 ** round(np.log2(4 * np.sqrt(num_rows)))},Flat"


def sample_rows(num_rows: int, size: int, seed: int) -> NDArray[np.int64]:
    """Distinct rows of `[0, num_rows)`, ascending; all of them if `size` allows."""
    if size >= num_rows:
        return np.arange(num_rows)
    return np.sort(np.random.default_rng(seed).choice(num_rows, size, replace=False))


def check_factory(factory: str, dim: int) -> Any:
    """An empty index. Raises RetrievalError: FAISS does not know the factory, or this module
    cannot search it."""
    try:
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        reason = _reason(error)
        raise RetrievalError(f"factory {factory!r} for {dim} dimensions: {reason}") from None
    # Refuses what cannot be searched before anything is trained.
    search_parameters(index, k=1, nprobe=1, selector=None)
    return index


def create_faiss(
    factory: str, vectors: VectorFile, first: int, last: int, *, seed: int, progress: Progress
) -> Any:
    """Train an index on a sample of the rows `[first, last)`, and add them all.

    Args:
        progress: called with "train" when that begins, with "add" and the rows added so far.
    Raises:
        RetrievalError: FAISS does not know the factory, this module cannot search it, or it needs
            more vectors.
    """
    progress("train", 0, None)
    index, num_rows = check_factory(factory, vectors.dim), last - first
    if not index.is_trained:
        num_lists = _num_lists(index)
        if num_rows < num_lists:
            raise RetrievalError(
                f"factory {factory!r} needs at least {num_lists} passages, there are {num_rows}"
            )
        size = max(TRAIN_VECTORS_PER_LIST * num_lists, MIN_TRAIN_VECTORS)
        try:
            index.train(vectors.read_rows(first + sample_rows(num_rows, size, seed)))
        except RuntimeError as error:
            what = f"factory {factory!r} over {num_rows} passages"
            raise RetrievalError(f"{what}: {_reason(error)}") from None
    for at in range(first, last, ADD_ROWS):
        progress("add", index.ntotal, num_rows)
        index.add(vectors.read(at, min(at + ADD_ROWS, last)))
    progress("add", index.ntotal, num_rows)
    return index


def search_parameters(index: Any, *, k: int, nprobe: int, selector: Any) -> Any:
    """FAISS' parameters for one search. The index itself is not changed, so concurrent searches may
    use different ones.

    Args:
        nprobe: lists visited (IVF), or candidates kept, at least k (HNSW: efSearch); else ignored.
        selector: the rows that may be found; None: all.
    Raises:
        RetrievalError: this kind of index is not supported.
    """
    # The index within a wrapper has the type of FAISS' base class.
    index = faiss.downcast_index(index)
    if isinstance(index, faiss.IndexPreTransform):
        inner = search_parameters(index.index, k=k, nprobe=nprobe, selector=selector)
        return faiss.SearchParametersPreTransform(index_params=inner)
    if isinstance(index, faiss.IndexIVF):
        return faiss.SearchParametersIVF(sel=selector, nprobe=min(nprobe, index.nlist))
    if isinstance(index, faiss.IndexHNSW):
        return faiss.SearchParametersHNSW(sel=selector, efSearch=max(nprobe, k))
    if isinstance(index, (faiss.IndexFlat, faiss.IndexScalarQuantizer)):
        return faiss.SearchParameters(sel=selector)
    known = "use Flat, SQ…, IVF… or HNSW… (PQ64 is IVF1,PQ64)"
    raise RetrievalError(f"factory: {type(index).__name__} is not supported; {known}")


def read_faiss(path: Path) -> Any:
    """Map a segment's file into memory. Raises CorruptIndexError."""
    try:
        return faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise CorruptIndexError(f"{path}: {_reason(error)}") from None


def write_faiss(index: Any, path: Path) -> None:
    """Write a segment's file."""
    faiss.write_index(index, str(path))


class Segment:
    """Rows `[first_row, first_row + index.ntotal)` in one FAISS index, for searching.
    `removed`: rows of all segments that must not be found."""

    def __init__(self, index: Any, first_row: int, removed: NDArray[np.int64]) -> None:
        self.index, self.first_row = index, first_row
        hidden = removed[(removed >= first_row) & (removed < first_row + index.ntotal)] - first_row
        self._live = None
        if len(hidden):
            is_live = np.ones(index.ntotal, dtype=bool)
            is_live[hidden] = False
            # FAISS' bitmap counts a byte's bits from the lowest.
            self._live = np.packbits(is_live, bitorder="little")

    def search(self, queries: NDArray[np.float32], *, k: int, nprobe: int) -> Found:
        """See `search_segments`."""
        selector = None if self._live is None else faiss.IDSelectorBitmap(self._live)
        parameters = search_parameters(self.index, k=k, nprobe=nprobe, selector=selector)
        scores, rows = self.index.search(queries, k, params=parameters)
        missing = rows < 0  # with float32's lowest number as the score
        scores = np.where(missing, np.float32(-np.inf), scores)
        return scores, np.where(missing, -1, rows + self.first_row)


def search_segments(
    segments: Iterable[Segment], queries: NDArray[np.float32], *, k: int, nprobe: int
) -> Found:
    """The k best rows of all segments; FAISS chooses which of several equal ones are among the k.

    Args:
        segments: at least one.
        queries: [n, dim], C-contiguous.
    """
    found = [segment.search(queries, k=k, nprobe=nprobe) for segment in segments]
    scores, rows = (np.concatenate(parts, axis=1) for parts in zip(*found, strict=True))
    return best_of(scores, rows, k=k)


def best_of(scores: NDArray[np.float32], rows: NDArray[np.int64], *, k: int) -> Found:
    """The k best columns of each line, best first, equal scores by row."""
    best = np.lexsort((rows, -scores), axis=1)[:, :k]
    return np.take_along_axis(scores, best, axis=1), np.take_along_axis(rows, best, axis=1)


# Private, in order of use


def _num_lists(index: Any) -> int:
    try:
        return int(faiss.extract_index_ivf(index).nlist)
    except RuntimeError:
        return 1  # no IVF index in it


def _reason(error: RuntimeError) -> str:
    """FAISS' message without its source file and condition, on one line."""
    return " ".join(str(error).split("Error: ", 1)[-1].split())[:300]
