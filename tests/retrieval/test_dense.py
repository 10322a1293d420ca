"""Segments against brute force: every factory, hidden rows, a later segment,
searches side by side."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from retrieval.dense import (
    Segment,
    auto_factory,
    create_faiss,
    read_faiss,
    search_segments,
    write_faiss,
)
from retrieval.errors import CorruptIndexError, RetrievalError
from tests.retrieval.small_index import quiet

DIM, NUM_ROWS, NUM_LISTS = 16, 600, 8
GENERATOR = np.random.default_rng(0)
VECTORS = GENERATOR.standard_normal((NUM_ROWS, DIM), dtype=np.float32)
QUERIES = GENERATOR.standard_normal((5, DIM), dtype=np.float32)
EXACT = ["Flat", "IVF8,Flat"]
FACTORIES = [*EXACT, "IVF8,PQ4x4", "IVF1,PQ4x4", "HNSW8", "SQ8", "OPQ4,IVF8,PQ4x4", "PCA8,Flat"]
FACTORIES += ["IVF8,SQ8"]
NONE = np.zeros(0, np.int64)
Found = tuple[NDArray[np.float32], NDArray[np.int64]]


class Rows:
    """Those of a vector file, not rounded."""

    def __init__(self, vectors: NDArray[np.float32]) -> None:
        self.vectors, self.dim = vectors, vectors.shape[1]

    def read(self, first: int, last: int) -> NDArray[np.float32]:
        return self.vectors[first:last]

    def read_rows(self, rows: NDArray[np.int64]) -> NDArray[np.float32]:
        return self.vectors[rows]


def make_faiss(factory: str, vectors: NDArray[np.float32] = VECTORS) -> Any:
    """All `vectors` in batches of 100."""
    rows: Any = Rows(vectors)
    with patch("retrieval.dense.ADD_ROWS", 100):
        return create_faiss(factory, rows, 0, len(vectors), seed=0, progress=quiet)


def search(
    index: Any, *, k: int, nprobe: int = NUM_LISTS, hidden: NDArray[np.int64] = NONE
) -> Found:
    return search_segments((Segment(index, 0, hidden),), QUERIES, k=k, nprobe=nprobe)


@pytest.fixture(scope="module")
def indexes() -> dict[str, Any]:
    return {factory: make_faiss(factory) for factory in FACTORIES}


def check_exact(found: Found, k: int, hidden: NDArray[np.int64] = NONE) -> None:
    """As brute force finds; -1 and -inf where there are fewer than k."""
    all_scores = np.pad(QUERIES @ VECTORS.T, ((0, 0), (0, 3)), constant_values=-np.inf)
    all_scores[:, hidden] = -np.inf
    rows = np.argsort(-all_scores, axis=1, kind="stable")[:, :k]
    scores = np.take_along_axis(all_scores, rows, axis=1)
    check_equal(found, (scores, np.where(np.isneginf(scores), -1, rows)))


def check_equal(found: Found, expected: Found) -> None:
    assert np.array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[0], expected[0], atol=1e-4)
    assert [str(each.dtype) for each in found] == ["float32", "int64"]


@pytest.mark.parametrize("factory", EXACT)
@pytest.mark.parametrize("k", [1, 7, NUM_ROWS, NUM_ROWS + 3])
def test_equals_brute_force(indexes: dict[str, Any], factory: str, k: int) -> None:
    check_exact(search(indexes[factory], k=k), k)


@pytest.mark.parametrize("factory", EXACT)
@pytest.mark.parametrize("num_base", [1, 300, 599])
def test_a_later_segment_is_merged(factory: str, num_base: int) -> None:
    """As if its rows had always been there; hidden rows are hidden in both."""
    hidden = np.arange(0, NUM_ROWS, 3)
    base = make_faiss(factory if num_base >= NUM_LISTS else "Flat", VECTORS[:num_base])
    later = make_faiss("Flat", VECTORS[num_base:])
    segments = (Segment(base, 0, hidden), Segment(later, num_base, hidden))
    for k in (5, NUM_ROWS):
        check_exact(search_segments(segments, QUERIES, k=k, nprobe=NUM_LISTS), k, hidden)


@pytest.mark.parametrize("factory", FACTORIES)
def test_hidden_rows_are_never_found(indexes: dict[str, Any], factory: str) -> None:
    hidden = np.flatnonzero(np.arange(NUM_ROWS) % 7)
    _, rows = search(indexes[factory], k=50, nprobe=200, hidden=hidden)
    assert (rows >= 0).any()
    assert not np.isin(rows, hidden).any()
    _, rows = search(indexes[factory], k=3, nprobe=200, hidden=np.arange(NUM_ROWS))
    assert (rows == -1).all()


@pytest.mark.parametrize("factory", FACTORIES)
def test_is_the_same_from_a_file(indexes: dict[str, Any], factory: str, tmp_path: Path) -> None:
    """Mapped into memory, also when the file has been unlinked meanwhile."""
    write_faiss(indexes[factory], tmp_path / "dense")
    mapped = read_faiss(tmp_path / "dense")
    (tmp_path / "dense").unlink()
    hidden = np.arange(0, NUM_ROWS, 2)
    check_equal(
        *(search(index, k=9, nprobe=4, hidden=hidden) for index in (mapped, indexes[factory]))
    )


@pytest.mark.parametrize("factory", FACTORIES)
def test_approximate_ones_are_near(indexes: dict[str, Any], factory: str) -> None:
    """The larger the nearer: half of the ten best are among the 50 first."""
    scores, rows = search(indexes[factory], k=50, nprobe=100)
    assert (np.diff(scores) <= 0).all()
    best = np.argsort(-QUERIES @ VECTORS.T, axis=1)[:, :10]
    assert np.mean([len(np.intersect1d(*both)) for both in zip(rows, best, strict=True)]) >= 5


def test_equal_scores_stand_by_row() -> None:
    """In one segment and over two: the same question has the same answer every time."""
    same = np.ones((10, DIM), np.float32)
    first, second, whole = (
        Segment(make_faiss("Flat", same[start:end]), start, NONE)
        for start, end in [(0, 4), (4, 10), (0, 10)]
    )
    for segments in ((first, second), (second, first), (whole,)):
        _, rows = search_segments(segments, same[:1], k=10, nprobe=1)
        assert rows.tolist() == [list(range(10))]


def test_nothing_to_search() -> None:
    segment = Segment(make_faiss("Flat"), 0, NONE)
    assert search_segments((segment,), QUERIES[:0], k=2, nprobe=1)[1].shape == (0, 2)


def test_searches_with_other_parameters_run_at_once(indexes: dict[str, Any]) -> None:
    """nprobe belongs to a search, not to the index."""
    segment = Segment(indexes["IVF8,Flat"], 0, NONE)

    def rows_of(nprobe: int) -> Any:
        return search_segments((segment,), QUERIES, k=20, nprobe=nprobe)[1].tolist()

    nprobes = [1, NUM_LISTS]
    expected = [rows_of(nprobe) for nprobe in nprobes]
    assert expected[0] != expected[1]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(rows_of, nprobes * 200)) == expected * 200


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("Nonsense", "factory 'Nonsense' for 16 dimensions"),
        ("IVF8,PQ5", "factory 'IVF8,PQ5'"),
        ("PQ4x4", "IndexPQ is not supported"),
        ("IVF1,PQ4", "factory 'IVF1,PQ4' over 20"),
        ("IVF8,PQ4x4,RFlat", "not supported"),
        ("LSH", "factory"),
    ],
)
def test_factories_that_do_not_work(factory: str, message: str) -> None:
    with pytest.raises(RetrievalError, match=message) as caught:
        make_faiss(factory, VECTORS[:20] if factory == "IVF1,PQ4" else VECTORS)
    assert "\n" not in str(caught.value)


def test_auto_factory() -> None:
    """Exact while that is fast; then a power of two near 4 sqrt(n) lists."""
    assert [auto_factory(n) for n in (1, 100_000)] == ["Flat", "Flat"]
    assert [auto_factory(n) for n in (1_000_000, 38_000_000)] == ["IVF4096,Flat", "IVF32768,Flat"]


@pytest.mark.parametrize("factory", ["Flat", "IVF8,PQ4x4", "HNSW8"])
def test_damaged_files_are_told(indexes: dict[str, Any], factory: str, tmp_path: Path) -> None:
    path = tmp_path / "dense.faiss"
    write_faiss(indexes[factory], path)
    whole = path.read_bytes()
    cut = [whole[:num_bytes] for num_bytes in (0, 3, 40, len(whole) // 2)]
    for content in (*cut, b"\0" * 1000, b"IxFI" + b"\xff" * 1000):
        path.write_bytes(content)
        with pytest.raises(CorruptIndexError, match=r"dense\.faiss: "):
            read_faiss(path)


def test_opening_reads_nothing(tmp_path: Path) -> None:
    """A file of 100 MB is mapped: a server is there at once, and two share one copy in memory."""
    index = faiss.IndexFlatIP(1000)
    index.add(np.zeros((25_000, 1000), np.float32))
    write_faiss(index, tmp_path / "dense")
    del index
    before = _anonymous_mib()
    mapped = read_faiss(tmp_path / "dense")
    segment = Segment(mapped, 0, np.arange(10))
    search_segments((segment,), np.ones((1, 1000), np.float32), k=1, nprobe=1)
    assert _anonymous_mib() - before < 50


def _anonymous_mib() -> float:
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024
