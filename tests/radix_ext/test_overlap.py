"""Upper bounds of reuse: the papers' example, and equality with the definition."""

import pytest

from radix_ext import Chunk, ChunkId, overlap, seen_before
from tests.radix_ext.test_replay import make_trace


def test_overlap_of_the_papers_two_requests() -> None:
    """CRAFT 3.1: [1 4 5 6 7] and [1 2 3 4 5] share a prefix of 1 and a set of 3, out of 5."""
    assert overlap([list(map(ChunkId, "14567")), list(map(ChunkId, "12345"))]) == (0.2, 0.6)


def test_overlap_equals_comparing_all_pairs() -> None:
    """The one-pass form against the definition."""
    trace = [[ChunkId(name) for name in request] for request in make_trace(60, seed=3)]

    def common_prefix(a: list[ChunkId], b: list[ChunkId]) -> int:
        return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))

    prefix = total = 0.0
    for i in range(1, len(trace)):
        prefix += max(common_prefix(trace[i], trace[j]) for j in range(i)) / len(trace[i])
        total += max(len(set(trace[i]) & set(trace[j])) for j in range(i)) / len(trace[i])
    assert overlap(trace) == pytest.approx((prefix / 59, total / 59))
    assert overlap(trace[:1]) == overlap([]) == (0, 0)


def test_seen_before_counts_chunks_and_tokens() -> None:
    """At any position, by any earlier request."""
    trace = [[Chunk(ChunkId("a"), 5), Chunk(ChunkId("b"), 7)], [Chunk(ChunkId("c"), 1), Chunk(ChunkId("b"), 7)], []]
    assert seen_before(trace) == [(0, 0), (1, 7), (0, 0)]
