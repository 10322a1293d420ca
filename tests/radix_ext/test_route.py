"""Routing policies and their in-flight bookkeeping."""

import pytest

from radix_ext import KvAware, LimitError, RoundRobin, Router


def served(router: Router) -> int:
    """The rank that the next request goes to."""
    rank = router.choose({})
    router.begin(rank, 0)
    return rank


def test_round_robin_takes_turns_whatever_is_cached() -> None:
    """CRAFT's baseline ignores what ranks hold."""
    router = RoundRobin(3)
    router.begin(0, 999)
    assert [served(router) for _ in range(5)] == [1, 2, 0, 1, 2]
    assert router.choose({1: 999}) == 0


@pytest.mark.parametrize(
    ("in_flight", "cached", "expected"),
    [
        ((0, 0, 0), {1: 40, 2: 50}, 2),
        ((200, 100, 100), {0: 90, 1: 10}, 1),  # more than 1.25 x the mean
        ((125, 75), {0: 1}, 0),  # exactly 1.25 x the mean
    ],
)
def test_kv_aware_takes_the_longest_chain_that_is_not_overloaded(
    in_flight: tuple[int, ...], cached: dict[int, int], expected: int
) -> None:
    router = KvAware(len(in_flight), max_load_ratio=1.25)
    for rank, tokens in enumerate(in_flight):
        router.begin(rank, tokens)
    assert router.choose(cached) == expected


def test_kv_aware_breaks_ties_by_load_then_turn() -> None:
    """Cold requests go to the less loaded rank and otherwise around,
    so that every rank's cache gets used."""
    router = KvAware(3, max_load_ratio=2)
    assert [served(router) for _ in range(4)] == [0, 1, 2, 0]
    router.begin(1, 10)
    assert [served(router) for _ in range(3)] == [2, 0, 2]


def test_kv_aware_leaves_no_rank_out() -> None:
    """A conversation goes back to rank 0 between any two others:
    these still go around all other ranks."""
    router, ranks = KvAware(4, max_load_ratio=1.25), []
    for _ in range(6):
        router.begin(0, 0)
        ranks.append(served(router))
    assert ranks == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize(("num_tokens", "expected"), [(160, 0), (164, 1)])
def test_kv_aware_is_patient_with_a_history(num_tokens: int, expected: int) -> None:
    """30 tokens of history are worth being up to 120 above the mean (of 40 and 41 here).
    30 that others share are not."""
    router = KvAware(4, max_load_ratio=1.25)
    router.begin(0, num_tokens)
    assert router.choose({0: 30}, {0: 30}) == expected
    assert router.choose({0: 30}) == 1


@pytest.mark.parametrize("router", [RoundRobin(3), KvAware(3, max_load_ratio=2)])
def test_choosing_changes_nothing(router: Router) -> None:
    """A request may be planned without being sent."""
    router.begin(0, 5)
    assert [router.choose({}) for _ in range(3)] == [1, 1, 1]


@pytest.mark.parametrize("router", [RoundRobin(2), KvAware(2, max_load_ratio=1)])
def test_in_flight_tokens_come_and_go(router: Router) -> None:
    """What began must end, in any order; what did not begin cannot."""
    router.begin(1, 30)
    router.begin(1, 5)
    router.end(1, 30)
    assert router.in_flight == (0, 5)
    with pytest.raises(LimitError, match="rank 1 has 5 tokens in flight but 6 ended"):
        router.end(1, 6)
