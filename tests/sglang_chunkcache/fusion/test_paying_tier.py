"""Loading against computing: a storage that does not pay is not used, is tried now and then,
and says so. The clock is ours."""

from __future__ import annotations

import pytest

from radix_ext import costs
from radix_ext.costs import NOMINAL, Line, Phase, extend_work
from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.wire.report import Fallback
from tests.kit.fused import Disk, Rank, disk
from tests.kit.requests import HEAD, A, B, C, D, asks, fused
from tests.reference.scheduler import FakeReq

__all__ = ["disk"]  # the fixture

A_TOKEN = {**NOMINAL, Phase.EXTEND: Line(each=1.0)}
"""Computing takes a second a token, and nothing a call."""


@pytest.fixture
def server(disk: Disk) -> Rank:
    """One that has just started on a storage with A, B and C.
    What a load sleeps passes on the clock."""

    def sleep(seconds: float) -> None:
        disk.now += seconds

    rank = disk.restarted(A, B, C)
    disk.storage.sleep = sleep
    rank.fuser.pricing.costs = A_TOKEN
    return rank


def take(disk: Disk, seconds: float) -> None:
    """Each load from now on."""
    size = max(len(data) for data in disk.storage.held.values())
    disk.storage.become("slowed", ms_per_mib=1000 * seconds * (1 << 20) / size)


def asked(disk: Disk, server: Rank, *chunks: list[int]) -> FakeReq:
    """A request that waits, once the store has nothing."""
    server.forget()
    req = fused(*chunks)
    server.cache.arrived(req)
    disk.settle()
    return req


def figures(disk: Disk) -> tuple[int, int, bool]:
    """Loads, loads that were not made since they do not pay, and whether they would."""
    found = disk.settle()
    return found["loaded"], found["skipped"], found["pays"]


@pytest.mark.parametrize(("seconds", "pays"), [(0.9 * len(A), True), (1.1 * len(A), False)])
def test_what_takes_longer_to_load_than_to_compute_is_computed(
    disk: Disk, server: Rank, seconds: float, pays: bool
) -> None:
    """From the second time on: the first load shows what loads take."""
    take(disk, seconds)
    asked(disk, server, A)
    assert figures(disk) == (1, 0, True)
    asked(disk, server, A)
    assert figures(disk) == (1 + pays, 1 - pays, pays)
    assert bool(server.held(A)) is pays


@pytest.mark.parametrize(("ratio", "waits"), [(0.2, True), (0.6, False)])
def test_request_waits_where_load_and_recomputation_are_sooner_than_computing(
    disk: Disk, server: Rank, ratio: float, waits: bool
) -> None:
    """The load is estimated to take half as long as computing."""
    storage = disk.tier.storage
    storage.waits.policy.share = 1.0
    storage.waits.times.observe(max(map(len, disk.storage.held.values())), 0.5 * len(A))
    disk.storage.gate.clear()
    server.forget()
    req = fused(A, fusion=asks("query", ratio))
    server.cache.arrived(req)
    assert (server.add(req, 100) is None) is waits
    disk.storage.gate.set()
    disk.settle()
    found = server.add(req, 100) if waits else None
    assert found == (len(HEAD + A) if waits else None)


def test_storage_that_does_not_pay_says_so(disk: Disk, server: Rank) -> None:
    """In the answer, when it is explained, and in the stats: what a load of a mebibyte takes."""
    take(disk, 100.0)
    assert disk.tier.storage.stats()["load_ms_per_mib"] is None
    asked(disk, server, A)
    size = next(len(data) for data in disk.storage.held.values())
    rate = disk.tier.storage.stats()["load_ms_per_mib"]
    assert rate == pytest.approx(100_000 * (1 << 20) / size, rel=0.2)
    assert Fallback.STORAGE_SLOW in server.ask(asked(disk, server, A)).fallbacks
    server.evict(100)
    explained = fused(A)
    state(explained).is_asked_only = True
    server.match(explained)
    found = server.fuser.explain(explained)
    assert found is not None
    assert Fallback.STORAGE_SLOW in found.fallbacks
    assert figures(disk)[1] == 1, "to explain counts nothing"


@pytest.mark.parametrize("every", [1, 3])
def test_slow_storage_is_tried_now_and_then(
    disk: Disk, server: Rank, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    monkeypatch.setattr(costs, "EXPLORATION_PERIOD", every)
    take(disk, 100.0)
    asked(disk, server, A)
    for number in range(1, 7):
        asked(disk, server, A)
        assert figures(disk) == (1 + number // every, number, False)
    take(disk, 0.1)
    num_asked = 0
    while not disk.tier.storage.stats()["pays"]:
        asked(disk, server, A)
        num_asked += 1
    assert num_asked <= 8 * every, "the median of eight loads"


def test_request_that_moves_whatever_it_takes_loads_whatever_it_takes(
    disk: Disk, server: Rank
) -> None:
    """As `--chunkcache-move always` does, and a server that has measured nothing."""
    take(disk, 100.0)
    asked(disk, server, A)
    server.fuser.pricing.costs = None
    asked(disk, server, A)
    assert figures(disk) == (2, 0, True)


def test_each_chunk_is_weighed_alone(disk: Disk, server: Rank) -> None:
    """Where loading all takes longer. What is late in a prompt attends to more, so the same load
    pays there alone."""
    assert loaded_of_two(disk, server, 0.6) == [False, True]


def test_all_are_loaded_where_that_is_sooner_than_computing_all(disk: Disk, server: Rank) -> None:
    """Though computing the first one alone would be: behind a hole the others may not be moved."""
    assert loaded_of_two(disk, server, 0.45) == [True, True]


def loaded_of_two(disk: Disk, server: Rank, share: float) -> list[bool]:
    """Whether C and B are loaded where each load takes this share of computing both."""
    req = fused(C, B)
    server.cache.arrived(req)
    spans = state(req).spans
    assert spans is not None
    computed = sum(extend_work(span.start, span.end).pairs for span in spans.spans)
    server.fuser.pricing.costs = {**NOMINAL, Phase.EXTEND: Line(attended=1.0)}
    take(disk, share * computed)
    disk.settle()
    asked(disk, server, A)
    asked(disk, server, C, B)
    return [bool(server.held(chunk)) for chunk in (C, B)]


def test_nothing_is_loaded_that_no_plan_would_move(disk: Disk, server: Rank) -> None:
    """Behind a longer gap than a plan computes."""
    disk.tier._max_gap_tokens = len(B) - 1
    asked(disk, server, D, C)
    assert not server.held(C), "the storage has no D"
    disk.tier._max_gap_tokens = len(D)
    asked(disk, server, D, C)
    assert server.held(C)
