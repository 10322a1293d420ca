"""What loads are estimated to take, against the line they were drawn from and against all pairs by
hand."""

from __future__ import annotations

import math
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_ext import Chunk, ChunkId
from radix_ext.backlog import Backlog, Bounds
from radix_ext.loading import MEMORY, LoadTimes, load_in_order, pay_together

SIZES = st.lists(st.integers(1, 1 << 30), min_size=MEMORY, max_size=MEMORY, unique=True)


def times_of(seen: list[tuple[int, float]]) -> LoadTimes:
    made = LoadTimes()
    for num_bytes, seconds in seen:
        made.observe(num_bytes, seconds)
    return made


def naive(seen: list[tuple[int, float]], num_bytes: int) -> float:
    """By sorting: the middle of all pairs' slopes, at most that of all through zero,
    then of what is left."""

    def middle(values: list[float]) -> float:
        ordered, half = sorted(values), len(values) // 2
        return ordered[half] if len(values) % 2 else (ordered[half - 1] + ordered[half]) / 2

    seen = seen[-MEMORY:]
    slopes = [
        (b - a) / (y - x) for i, (x, a) in enumerate(seen) for y, b in seen[i + 1 :] if x != y
    ]
    whole = middle([taken / size for size, taken in seen])
    each = min(whole, max(0.0, middle(slopes))) if slopes else whole
    return max(0.0, middle([taken - each * size for size, taken in seen])) + each * num_bytes


def test_one_size_tells_a_rate_and_none_nothing() -> None:
    times = times_of([(100, 2.0), (100, 2.2), (100, 1.9)])
    assert times.seconds(50) == pytest.approx(1.0)
    assert LoadTimes().seconds(100) is None


@given(
    SIZES,
    st.floats(0, 10),
    st.floats(0, 1e-3),
    st.sets(st.integers(0, MEMORY - 1), max_size=2),
    st.floats(1, 1e4),
)
def test_line_is_found_through_loads_that_were_held_up(
    sizes: list[int], fixed: float, each: float, held_up: set[int], by: float
) -> None:
    """Two of eight say nothing of the others."""
    seen = [
        (size, fixed + each * size + (by if i in held_up else 0.0)) for i, size in enumerate(sizes)
    ]
    found = times_of(seen).seconds(1 << 20)
    assert found == pytest.approx(fixed + each * (1 << 20), rel=1e-6, abs=1e-6 * (1 + by))


@given(
    st.lists(st.tuples(st.integers(1, 1000), st.floats(1e-3, 1e3)), min_size=1, max_size=20),
    st.integers(1, 1000),
)
def test_estimate_equals_the_naive_one(seen: list[tuple[int, float]], num_bytes: int) -> None:
    assert times_of(seen).seconds(num_bytes) == pytest.approx(
        naive(seen, num_bytes), rel=1e-9, abs=1e-9
    )


def test_sizes_that_hardly_differ_say_nothing_of_the_slope() -> None:
    """Chunks of 250 tokens or so, in 7 ms each, give or take one."""
    seen = [
        (3_670_309, 6.8),
        (3_641_637, 6.7),
        (3_612_965, 5.3),
        (3_641_637, 6.2),
        (3_627_301, 8.3),
        (3_655_973, 7.6),
    ]
    for order in permutations(seen):
        assert 5.0 < (times_of(list(order)).seconds(3_650_000) or 0.0) < 8.5


def test_bytes_within_is_the_inverse() -> None:
    assert LoadTimes().bytes_within(1.0) is None
    times = times_of([(size, 0.1 + size / 100) for size in (10, 20, 30)])
    assert times.bytes_within(times.seconds(25) or 0.0) == pytest.approx(25)
    assert times.bytes_within(0.05) == 0
    assert times_of([(10, 1.0), (20, 1.0)]).bytes_within(1.0) == math.inf


def test_loads_go_on_in_the_order_of_the_prompt() -> None:
    """What found no room is asked for again, and nothing else."""
    answers: dict[str, list[bool | None]] = {
        "a": [True],
        "b": [None],
        "c": [False, False, True],
        "d": [False, None],
        "e": [True],
    }
    chunks = [Chunk(ChunkId(name), 10) for name in answers]
    begun: dict[int, bool | None] = {}
    left = [
        load_in_order(chunks, lambda chunk: answers[chunk.id].pop(0), begun, max_gap_tokens=20)
        for _ in range(3)
    ]
    assert left == [[2, 3], [2], []]
    assert [*begun.values()] == [True, None, True, None, True]
    assert not any(answers.values())


def test_nothing_is_loaded_behind_a_gap_that_is_too_long() -> None:
    chunks = [Chunk(ChunkId(str(i)), 10) for i in range(3)]
    begun: dict[int, bool | None] = {}
    assert load_in_order(chunks, lambda chunk: None, begun, max_gap_tokens=15) == []
    assert [*begun] == [0, 1]


def test_loads_pay_together_or_where_nobody_knows() -> None:
    assert pay_together([3.0, 3.0], [1.0, 5.0])
    assert not pay_together([3.0, 3.1], [1.0, 5.0])
    assert pay_together([3.0, None], [1.0, 1.0])
    assert pay_together([3.0], [None])


def test_slow_loads_do_not_end_all_loads() -> None:
    """One at a time is made, whatever it takes: else nothing would tell that they are faster."""
    backlog = Backlog(Bounds(num=64, seconds=4.0, unknown_bytes=512, memory_bytes=1 << 40))
    for num_bytes in range(1, 9):
        backlog.times.observe(num_bytes << 20, 5 + 0.01 * num_bytes)
    assert backlog.max_bytes == 0
    assert (backlog.is_full, backlog.has_spare, backlog.has_room(1, 1)) == (False, True, True)
    backlog.begin(1)
    assert (backlog.is_full, backlog.has_spare, backlog.has_room(1, 1)) == (True, False, False)
