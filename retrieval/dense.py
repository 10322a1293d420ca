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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import faiss
import numpy as np
from numpy.typing import NDArray

from retrieval.errors import CorruptIndexError, RetrievalError

TRAIN_VECTORS_PER_LIST = 64
"""FAISS asks for at least 39 for each of an IVF index's lists, and uses no more than 256."""
MIN_TRAIN_VECTORS = 65_536
"""For quantisers that are not lists; 256 per centroid of a product quantiser."""
ADD_ROWS = 65_536
_EXACT = re.compile(r"(IVF\d+(_HNSW\d+)?,|HNSW\d+,)?Flat|HNSW\d+")
MAX_FLAT_ROWS = 100_000
"""`auto` searches up to this many rows exactly:
about 10 ms a query on one core at 384 dimensions."""


def auto_factory(num_rows: int) -> str:
    """FAISS' factory string for a corpus: exact for a small one,
    else about 4 sqrt(n) lists (FAISS' guideline)."""
    if num_rows <= MAX_FLAT_ROWS:
        return "Flat"
    return f"IVF{2 ** round(np.log2(4 * np.sqrt(num_rows)))},Flat"


def check_factory(factory: str, dim: int) -> Any:
    """Create an empty index. Raises RetrievalError:
    FAISS does not know the factory, or this module cannot search it."""
    try:
        index = faiss.index_factory(dim, factory, faiss.METRIC_INNER_PRODUCT)
    except RuntimeError as error:
        raise RetrievalError(
            f"factory {factory!r} for {dim} dimensions: {_reason(error)}"
        ) from None
    # Refuses what cannot be searched before anything is trained.
    search_parameters(index, k=1, nprobe=1, selector=None)
    return index


def create_faiss(
    factory: str,
    dim: int,
    num_rows: int,
    sample: Callable[[int], NDArray[np.float32]],
    batches: Iterator[NDArray[np.float32]],
    added: Callable[[int], None],
) -> Any:
    """Train an index on a sample and add all vectors.

    Args:
        sample: called with n, returns n vectors of the corpus, [n, dim].
        batches: all vectors in row order.
        added: called with the number of rows added so far.
    Raises:
        RetrievalError: FAISS does not know the factory, this module cannot search it, or it needs
            more vectors.
    """
    index = check_factory(factory, dim)
    if not index.is_trained:
        num_lists = _num_lists(index)
        if num_rows < num_lists:
            raise RetrievalError(
                f"factory {factory!r} needs at least {num_lists} passages, there are {num_rows}"
            )
        try:
            index.train(
                sample(min(num_rows, max(TRAIN_VECTORS_PER_LIST * num_lists, MIN_TRAIN_VECTORS)))
            )
        except RuntimeError as error:
            raise RetrievalError(
                f"factory {factory!r} over {num_rows} passages: {_reason(error)}"
            ) from None
    for batch in batches:
        index.add(batch)
        added(index.ntotal)
    return index


def search_parameters(index: Any, *, k: int, nprobe: int, selector: Any) -> Any:
    """FAISS' parameters for one search. The index itself is not changed, so concurrent searches may
    use different ones.

    Args:
        nprobe: lists visited (IVF), or candidates kept, at least k (HNSW: efSearch). Exact indexes
            ignore it.
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
    raise RetrievalError(
        f"factory: {type(index).__name__} is not supported; use Flat, SQ…, IVF… or HNSW… (PQ64 is"
        " IVF1,PQ64)"
    )


def read_faiss(path: Path) -> Any:
    """Map a segment's file into memory. Raises CorruptIndexError."""
    try:
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        raise CorruptIndexError(f"{path}: {_reason(error)}") from None
    return index


def write_faiss(index: Any, path: Path) -> None:
    """Write a segment's file."""
    faiss.write_index(index, str(path))


@dataclass(frozen=True)
class Segment:
    """Rows `[first_row, first_row + num_rows)` in one FAISS index;
    `live` has a bit for each row that may be found."""

    first_row: int
    num_rows: int
    index: Any
    live: NDArray[np.uint8] | None


def create_segment(index: Any, first_row: int, removed: NDArray[np.int64]) -> Segment:
    """Make a segment for searching. `removed`: rows of the whole index that must not be found."""
    num_rows = index.ntotal
    hidden = removed[(removed >= first_row) & (removed < first_row + num_rows)] - first_row
    if not len(hidden):
        return Segment(first_row, num_rows, index, None)
    is_live = np.ones(num_rows, dtype=bool)
    is_live[hidden] = False
    # FAISS' bitmap counts a byte's bits from the lowest.
    return Segment(first_row, num_rows, index, np.packbits(is_live, bitorder="little"))


def search_segments(
    segments: tuple[Segment, ...], queries: NDArray[np.float32], *, k: int, nprobe: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The k best rows of all segments.

    Args:
        queries: [n, dim], C-contiguous.
    Returns:
        scores [n, k] float32 and rows [n, k] int64, best first, equal scores by row (FAISS chooses
        which of several equal ones are among the k); -inf and -1 where there are fewer than k.
    """
    found = [_search(segment, queries, k=k, nprobe=nprobe) for segment in segments]
    if not found:
        return np.full((len(queries), k), -np.inf, np.float32), np.full(
            (len(queries), k), -1, np.int64
        )
    scores = np.concatenate([scores for scores, _ in found], axis=1)
    rows = np.concatenate([rows for _, rows in found], axis=1)
    return best_of(scores, rows, k=k)


def best_of(
    scores: NDArray[np.float32], rows: NDArray[np.int64], *, k: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """The k best columns of each line, best first, equal scores by row."""
    best = np.lexsort((rows, -scores), axis=1)[:, :k]
    return np.take_along_axis(scores, best, axis=1), np.take_along_axis(rows, best, axis=1)


def is_exact(factory: str) -> bool:
    """Whether an index of this factory string holds the vectors themselves,
    so that its scores are inner products."""
    return bool(_EXACT.fullmatch(factory))


# Private, in order of use


def _search(
    segment: Segment, queries: NDArray[np.float32], *, k: int, nprobe: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    live = segment.live
    selector = None if live is None else faiss.IDSelectorBitmap(live)
    parameters = search_parameters(segment.index, k=k, nprobe=nprobe, selector=selector)
    scores, rows = segment.index.search(queries, k, params=parameters)
    missing = rows < 0  # with float32's lowest number as the score
    return np.where(missing, np.float32(-np.inf), scores), np.where(
        missing, -1, rows + segment.first_row
    )


def _num_lists(index: Any) -> int:
    try:
        return int(faiss.extract_index_ivf(index).nlist)
    except RuntimeError:
        return 1  # no IVF index in it


def _reason(error: RuntimeError) -> str:
    """FAISS' message without its source file and condition, on one line."""
    return " ".join(str(error).split("Error: ", 1)[-1].split())[:300]
