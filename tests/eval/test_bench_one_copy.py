"""Rows that a batch takes with one copy of a chunk, by hand."""

from pathlib import Path

import pytest

pytest.importorskip("torch")

from eval.bench import one_copy
from eval.recorded import read_recorded
from radix_ext import Chunk, ChunkId

A, B, C = (Chunk(ChunkId(name), 20) for name in "ABC")


def rows(ratio: float | None, *requests: list[Chunk]) -> int:
    pool = one_copy.Pool(1000, ratio)
    for chunks in requests:
        assert pool.admit(chunks, 5)
    assert pool.slot_map.violations() == []
    return pool.slot_map.num_used


def test_chunk_takes_rows_once() -> None:
    """A prefix is free either way; a chunk elsewhere costs its recomputed share, an answer its
    own."""
    assert rows(None, [A, B], [A, C], [B, A]) == 20 * 5 + 15
    assert rows(0.15, [A, B], [A, C], [B, A]) == 20 * 3 + 6 + 15
    assert rows(0.15, [A, B], [B, A], [B, A]) == 20 * 2 + 6 + 15, "a moved chain is a prefix, too"
    assert rows(0.0, [A, B, C], [C, B, A]) == 20 * 3 + 10


def test_request_without_room_takes_nothing() -> None:
    """What is refused must not count."""
    pool = one_copy.Pool(42, 0.15)
    assert pool.admit([A, B], 0)
    assert not pool.admit([B, A], 0), "it needs 6 rows"
    assert (pool.slot_map.num_free, pool.slot_map.num_reserved) == (2, 0)


def test_bench_tells_each_batch_size(tmp_path: Path) -> None:
    """And more requests fit where chunks recur."""
    argv = ["--generate", "40", "--batch", "2", "16", "--most", "1", "--out", str(tmp_path)]
    assert one_copy.main(argv) == 0
    (found,) = read_recorded(tmp_path).results["tables"]
    assert [row["batch"] for row in found["rows"]] == [2, 16]
    assert found["rows"][1]["ratio"] > found["rows"][0]["ratio"] >= 0.99
