"""Upper bounds of reuse: the papers' example, equality with the definition,
and estimates of long traces."""

import random

import pytest

from eval.replay.overlap import Overlap, Recurrence, Seen
from radix_ext import Chunk, ChunkId, LimitError
from tests.kit.letters import make_trace


def measured(trace: list[list[ChunkId]], *, window: int = 100) -> Overlap:
    overlap = Overlap(len(trace), window=window)
    for request in trace:
        overlap.step(request)
    return overlap


def test_overlap_equals_comparing_all_pairs() -> None:
    """The one-pass form against the definition."""
    trace = [[ChunkId(name) for name in request] for request in make_trace(60, seed=3)]

    def common_prefix(a: list[ChunkId], b: list[ChunkId]) -> int:
        return next(
            (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
        )

    prefix = total = 0.0
    for i in range(1, len(trace)):
        prefix += max(common_prefix(trace[i], trace[j]) for j in range(i)) / len(trace[i])
        total += max(len(set(trace[i]) & set(trace[j])) for j in range(i)) / len(trace[i])
    overlap = measured(trace, window=60)
    assert (overlap.prefix, overlap.total, overlap.num_measured) == pytest.approx(
        (prefix / 59, total / 59, 59)
    )
    for short in (trace[:1], []):
        assert (measured(short).prefix, measured(short).total) == (0, 0)


@pytest.mark.parametrize(
    ("num_requests", "num_measured"), [(101, 10), (199, 10), (350, 30), (10_000, 160)]
)
def test_long_trace_is_estimated(num_requests: int, num_measured: int) -> None:
    """Near the exact figures where neighbours tell as much as all, from every part of the trace;
    labelled."""
    rng = random.Random(1)
    trace = [[ChunkId(str(n)) for n in rng.sample(range(12), 4)] for _ in range(num_requests)]
    estimate = measured(trace)
    assert (estimate.is_estimate, estimate.num_measured) == (True, num_measured)
    exact = measured(trace[:2000], window=num_requests)
    assert exact.total - 0.2 < estimate.total <= 1
    assert abs(exact.prefix - estimate.prefix) < 0.3


def test_estimate_compares_with_the_window_only() -> None:
    """Pairs of equal requests, a window apart:
    they share everything, and the estimate sees nothing of it."""
    trace = [[ChunkId(f"{n % 100}")] for n in range(200)]
    assert measured(trace, window=200).total == 100 / 199
    assert measured(trace, window=100).total == 0


def test_seen_counts_chunks_and_tokens() -> None:
    """At any position, by any earlier request."""
    trace = [
        [Chunk(ChunkId("a"), 5), Chunk(ChunkId("b"), 7)],
        [Chunk(ChunkId("c"), 1), Chunk(ChunkId("b"), 7)],
        [],
    ]
    seen = Seen()
    assert [seen.step(request) for request in trace] == [(0, 0), (1, 7), (0, 0)]


def test_window_is_checked() -> None:
    with pytest.raises(LimitError, match="window must be at least"):
        Overlap(5, window=0)


def test_recurrence_equals_counting_in_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    """By definition; what has left the window is neither counted nor kept."""
    monkeypatch.setattr(Recurrence, "WINDOW", 7)
    trace = [[ChunkId(name) for name in request] for request in make_trace(60, seed=3)]
    recurrence = Recurrence()
    for request in trace:
        recurrence.step(request)
    expected = []
    for k in range(1, 6):
        earlier = [
            sum(other[:k] == request[:k] for other in trace[max(0, i - 7) : i])
            for i, request in enumerate(trace)
            if len(request) >= k
        ]
        if earlier:
            found = sum(count > 0 for count in earlier)
            means = sum(earlier) / len(earlier), found / len(earlier)
            expected.append(dict(zip(("k", "earlier", "found"), (k, *means), strict=True)))
    assert recurrence.density == expected
    assert expected[0]["earlier"] > expected[1]["earlier"] > 0
    assert len(recurrence._count) <= 7 * 5
