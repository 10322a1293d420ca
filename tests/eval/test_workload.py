"""Arrival times, blocks and the order of conversations: pure functions of a seed."""

from __future__ import annotations

import itertools
import statistics

import pytest

from eval.errors import CommandError
from eval.serve.workload import Load, arrivals, cut, interleave
from eval.task import Request

MANY = [None] * 20_000


def gaps(load: Load, seed: int = 0) -> list[float]:
    """Between neighbours among many arrivals."""
    offsets = arrivals(load, MANY, seed=seed)
    assert offsets is not None
    return [late - early for early, late in itertools.pairwise(offsets)]


@pytest.mark.parametrize("rate", [0.5, 4.0])
def test_poisson_gaps_have_mean_and_variance_of_an_exponential(rate: float) -> None:
    """Mean 1 / rate, variance 1 / rate^2."""
    found = gaps(Load("poisson", rate=rate))
    assert statistics.fmean(found) == pytest.approx(1 / rate, rel=0.03)
    assert statistics.variance(found) == pytest.approx(1 / rate**2, rel=0.08)


def test_same_seed_gives_the_same_arrivals_and_longer_lists_begin_alike() -> None:
    """All arms get the same load, from 0 on, and a longer run repeats the shorter one."""
    load = Load("poisson", rate=3.0)
    long, short = arrivals(load, MANY[:20], seed=1), arrivals(load, MANY[:10], seed=1)
    assert long is not None
    assert long[:10] == short != arrivals(load, MANY[:10], seed=2)
    assert (long[0], len(long), sorted(long)) == (0, 20, long)


def test_trace_keeps_its_times_divided_by_speed() -> None:
    assert arrivals(Load("trace", speed=2.0), [5.0, 6.0, 10.0], seed=0) == [0.0, 0.5, 2.5]


def test_trace_without_times_or_with_falling_ones_is_refused() -> None:
    with pytest.raises(CommandError, match="arrival_s"):
        arrivals(Load("trace"), [0.0, None], seed=0)
    with pytest.raises(CommandError, match="arrival times decrease"):
        arrivals(Load("trace"), [1.0, 0.5], seed=0)


def test_closed_loop_has_no_arrivals() -> None:
    assert arrivals(Load("closed", clients=3), MANY[:5], seed=0) is None


@pytest.mark.parametrize(
    ("count", "warm_up", "block", "sizes"),
    [
        (25, 0, 10, [10, 10, 5]),
        (25, 4, 10, [4, 10, 10, 1]),
        (25, 12, 10, [10, 2, 10, 3]),
        (25, 0, 0, [25]),
        (25, 5, 0, [5, 20]),
        (3, 9, 2, [2, 1]),
        (0, 0, 10, []),
    ],
)
def test_blocks_cover_everything_once_and_none_straddles_the_warm_up(
    count: int, warm_up: int, block: int, sizes: list[int]
) -> None:
    """A block with both would mix measured and unmeasured requests in one stretch of load."""
    blocks = cut(count, warm_up=warm_up, block=block)
    assert [len(numbers) for numbers in blocks] == sizes
    assert [number for numbers in blocks for number in numbers] == list(range(count))


def turns(*ids: str) -> list[Request]:
    """Requests of conversations named by the letter of their ids; "-" for none."""
    return [Request(name, "?", conversation=None if name[0] == "-" else name[0]) for name in ids]


@pytest.mark.parametrize(
    ("at_once", "order"),
    [
        (1, ["a1", "a2", "a3", "b1", "b2", "-1", "c1"]),
        (2, ["a1", "b1", "a2", "b2", "a3", "-1", "c1"]),
        (9, ["a1", "b1", "-1", "c1", "a2", "b2", "a3"]),
    ],
)
def test_conversations_take_turns(at_once: int, order: list[str]) -> None:
    """One conversation after the other would leave concurrent clients nothing to do but wait."""
    listed = turns("a1", "a2", "a3", "b1", "b2", "-1", "c1")
    assert [request.id for request in interleave(listed, at_once)] == order
