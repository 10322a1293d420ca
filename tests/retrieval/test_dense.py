"""Segments against brute force: every factory, hidden rows, a later segment,
searches side by side."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
from numpy.typing import NDArray

from retrieval.dense import (
    Segment,
    auto_factory,
    create_faiss,
    create_segment,
    read_faiss,
    search_segments,
    write_faiss,
)
from retrieval.errors import CorruptIndexError, RetrievalError

DIM, NUM_ROWS, NUM_LISTS = 16, 600, 8
GENERATOR = np.random.default_rng(0)
VECTORS = GENERATOR.standard_normal((NUM_ROWS, DIM), dtype=np.float32)
QUERIES = GENERATOR.standard_normal((5, DIM), dtype=np.float32)
FACTORIES = [
    "Flat",
    "IVF8,Flat",
    "IVF8,PQ4x4",
    "IVF1,PQ4x4",
    "HNSW8",
    "SQ8",
    "OPQ4,IVF8,PQ4x4",
    "PCA8,Flat",
    "IVF8,SQ8",
]
EXACT = ["Flat", "IVF8,Flat"]
NONE = np.zeros(0, np.int64)


def make_faiss(factory: str, vectors: NDArray[np.float32] = VECTORS) -> Any:
    """All `vectors` in batches of 100."""
    batches = (vectors[first : first + 100] for first in range(0, len(vectors), 100))
    return create_faiss(
        factory, vectors.shape[1], len(vectors), lambda n: vectors[:n], batches, lambda done: None
    )


@pytest.fixture(scope="module")
def indexes() -> dict[str, Any]:
    """Trained once."""
    return {factory: make_faiss(factory) for factory in FACTORIES}


def brute_force(
    k: int, hidden: NDArray[np.int64] = NONE
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    scores = QUERIES @ VECTORS.T
    scores[:, hidden] = -np.inf
    rows = np.argsort(-scores, axis=1, kind="stable")[:, :k]
    scores = np.take_along_axis(scores, rows, axis=1)
    return scores, np.where(np.isneginf(scores), -1, rows)


def check_equal(
    found: tuple[NDArray[np.float32], NDArray[np.int64]],
    expected: tuple[NDArray[np.float32], NDArray[np.int64]],
) -> None:
    assert np.array_equal(found[1], expected[1])
    np.testing.assert_allclose(found[0], expected[0], atol=1e-4)
    assert [str(each.dtype) for each in found] == ["float32", "int64"]


@pytest.mark.parametrize("factory", EXACT)
@pytest.mark.parametrize("k", [1, 7, NUM_ROWS, NUM_ROWS + 3])
def test_equals_brute_force(indexes: dict[str, Any], factory: str, k: int) -> None:
    """All lists visited; -1 and -inf where there are fewer than k."""
    found = search_segments(
        (create_segment(indexes[factory], 0, NONE),), QUERIES, k=k, nprobe=NUM_LISTS
    )
    scores, rows = brute_force(k)
    missing = ((0, 0), (0, max(0, k - NUM_ROWS)))
    check_equal(
        found,
        (
            np.pad(scores, missing, constant_values=-np.inf),
            np.pad(rows, missing, constant_values=-1),
        ),
    )


@pytest.mark.parametrize("factory", EXACT)
@pytest.mark.parametrize("num_base", [1, 300, 599])
def test_a_later_segment_is_merged(factory: str, num_base: int) -> None:
    """Rows that were added later are found as if they had always been there,
    and hidden rows are hidden in both."""
    hidden = np.arange(0, NUM_ROWS, 3)
    base = make_faiss(factory if num_base >= NUM_LISTS else "Flat", VECTORS[:num_base])
    later = make_faiss("Flat", VECTORS[num_base:])
    segments = (create_segment(base, 0, hidden), create_segment(later, num_base, hidden))
    for k in (5, NUM_ROWS):
        check_equal(
            search_segments(segments, QUERIES, k=k, nprobe=NUM_LISTS), brute_force(k, hidden)
        )


@pytest.mark.parametrize("factory", FACTORIES)
def test_hidden_rows_are_never_found(indexes: dict[str, Any], factory: str) -> None:
    """Whatever the kind of index, and although they are still in the file."""
    hidden = np.flatnonzero(np.arange(NUM_ROWS) % 7)
    segment = create_segment(indexes[factory], 0, hidden)
    _, rows = search_segments((segment,), QUERIES, k=50, nprobe=200)
    found = rows[rows >= 0]
    assert len(found)
    assert not np.isin(found, hidden).any()
    _, rows = search_segments(
        (create_segment(indexes[factory], 0, np.arange(NUM_ROWS)),), QUERIES, k=3, nprobe=200
    )
    assert (rows == -1).all()


@pytest.mark.parametrize("factory", FACTORIES)
def test_is_the_same_from_a_file(indexes: dict[str, Any], factory: str, tmp_path: Path) -> None:
    """Mapped into memory, also when the file has been unlinked meanwhile."""
    write_faiss(indexes[factory], tmp_path / "dense")
    mapped = read_faiss(tmp_path / "dense")
    (tmp_path / "dense").unlink()
    hidden = np.arange(0, NUM_ROWS, 2)
    found = [
        search_segments((create_segment(index, 0, hidden),), QUERIES, k=9, nprobe=4)
        for index in (mapped, indexes[factory])
    ]
    check_equal(found[0], found[1])


@pytest.mark.parametrize("factory", FACTORIES)
def test_approximate_ones_are_near(indexes: dict[str, Any], factory: str) -> None:
    """Scores are inner products, the larger the nearer:
    half of the ten best are among the 50 first."""
    scores, rows = search_segments(
        (create_segment(indexes[factory], 0, NONE),), QUERIES, k=50, nprobe=100
    )
    assert (np.diff(scores) <= 0).all()
    best = brute_force(10)[1]
    assert np.mean([len(np.intersect1d(rows[at], best[at])) for at in range(len(QUERIES))]) >= 5


def test_equal_scores_stand_by_row() -> None:
    """In one segment and over two: the same question has the same answer every time."""
    same = np.ones((10, DIM), np.float32)
    halves = (
        create_segment(make_faiss("Flat", same[:4]), 0, NONE),
        create_segment(make_faiss("Flat", same[4:]), 4, NONE),
    )
    for segments in (halves[::-1], halves, (create_segment(make_faiss("Flat", same), 0, NONE),)):
        _, rows = search_segments(segments, same[:1], k=10, nprobe=1)
        assert rows.tolist() == [list(range(10))]


def test_nothing_to_search() -> None:
    """No segment, and no query."""
    scores, rows = search_segments((), QUERIES, k=2, nprobe=1)
    assert (rows == -1).all()
    assert np.isneginf(scores).all()
    _, rows = search_segments(
        (create_segment(make_faiss("Flat"), 0, NONE),), QUERIES[:0], k=2, nprobe=1
    )
    assert rows.shape == (0, 2)


def test_searches_with_other_parameters_run_at_once(indexes: dict[str, Any]) -> None:
    """nprobe belongs to a search, not to the index:
    concurrent searches do not change each other's recall."""
    segment = create_segment(indexes["IVF8,Flat"], 0, NONE)
    expected = {
        nprobe: search_segments((segment,), QUERIES, k=20, nprobe=nprobe)[1]
        for nprobe in (1, NUM_LISTS)
    }
    assert not np.array_equal(expected[1], expected[NUM_LISTS])
    wrong: list[int] = []

    def search(nprobe: int) -> None:
        for _ in range(100):
            if not np.array_equal(
                search_segments((segment,), QUERIES, k=20, nprobe=nprobe)[1], expected[nprobe]
            ):
                wrong.append(nprobe)

    threads = [
        threading.Thread(target=search, args=(nprobe,)) for nprobe in (1, NUM_LISTS, 1, NUM_LISTS)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("Nonsense", "factory 'Nonsense' for 16 dimensions"),
        ("", "factory ''"),
        ("IVF8,PQ5", "factory 'IVF8,PQ5'"),
        ("PQ4x4", "IndexPQ is not supported"),
        ("IVF4096,Flat", "needs at least 4096 passages, there are 600"),
        ("IVF1,PQ4", "factory 'IVF1,PQ4' over 20"),
        ("NSG16", "not supported"),
        ("IDMap,Flat", "not supported"),
        ("IVF8,PQ4x4,RFlat", "not supported"),
        ("LSH", "factory"),
    ],
)
def test_factories_that_do_not_work(factory: str, message: str) -> None:
    """A line that names the factory, whatever is wrong with it."""
    with pytest.raises(RetrievalError, match=message) as caught:
        make_faiss(factory, VECTORS[:20] if factory == "IVF1,PQ4" else VECTORS)
    assert "\n" not in str(caught.value)


def test_auto_factory() -> None:
    """Exact while that is fast; then a power of two near 4 sqrt(n) lists."""
    assert [auto_factory(n) for n in (1, 100_000)] == ["Flat", "Flat"]
    assert [auto_factory(n) for n in (1_000_000, 38_000_000)] == ["IVF4096,Flat", "IVF32768,Flat"]


@pytest.mark.parametrize("factory", ["Flat", "IVF8,PQ4x4", "HNSW8"])
def test_damaged_files_are_told(indexes: dict[str, Any], factory: str, tmp_path: Path) -> None:
    """Empty, cut short or something else."""
    path = tmp_path / "dense.faiss"
    write_faiss(indexes[factory], path)
    whole = path.read_bytes()
    for content in (
        b"",
        whole[:3],
        whole[:40],
        whole[: len(whole) // 2],
        b"\0" * 1000,
        b"IxFI" + b"\xff" * 1000,
    ):
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
    segment: Segment = create_segment(mapped, 0, np.arange(10))
    search_segments((segment,), np.ones((1, 1000), np.float32), k=1, nprobe=1)
    assert _anonymous_mib() - before < 50


def _anonymous_mib() -> float:
    """Memory of this process that is no file's."""
    with open("/proc/self/status") as lines:
        return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024
