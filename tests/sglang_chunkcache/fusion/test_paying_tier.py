"""Loading against computing: a storage that does not pay is not used, is tried now and then,
and says so. The clock is ours."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("sglang")

from radix_ext.costs import NOMINAL, Line, Phase, extend_work
from sglang_chunkcache.fusion import tier as module
from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.wire.report import Fallback
from tests.reference.fused_scheduler import FusedScheduler
from tests.reference.scheduler import FakeReq
from tests.sglang_chunkcache.fusion.test_promise import A, B, C, fused, report
from tests.sglang_chunkcache.fusion.test_tier import Disk, disk, held, store

__all__ = ["disk"]  # the fixture

A_TOKEN = {**NOMINAL, Phase.EXTEND: Line(each=1.0)}
"""Computing takes a second a token, and nothing a call."""


@pytest.fixture
def server(disk: Disk) -> FusedScheduler:
    """One that has just started on a storage with A, B and C.
    What a load sleeps passes on the clock."""
    store(disk.server(), A, B, C)
    disk.stop()

    def sleep(seconds: float) -> None:
        disk.now += seconds

    disk.storage.sleep = sleep
    scheduler = disk.server()
    scheduler.fuser.pricing.costs = A_TOKEN
    return scheduler


def take(disk: Disk, seconds: float) -> None:
    """Each load from now on."""
    size = max(len(data) for data in disk.storage.held.values())
    disk.storage.become("slowed", ms_per_mib=1000 * seconds * (1 << 20) / size)


def asked(disk: Disk, scheduler: FusedScheduler, *chunks: list[int]) -> FakeReq:
    """A request that waits, once the store has nothing."""
    scheduler.store.clear()
    scheduler.evict(100)
    req = fused(*chunks)
    scheduler.cache.arrived(req)
    disk.settle()
    return req


def figures(disk: Disk) -> dict[str, Any]:
    found = disk.settle()
    return {name: found[name] for name in ("loaded", "unpaid", "pays")}


@pytest.mark.parametrize(("seconds", "pays"), [(0.9 * len(A), True), (1.1 * len(A), False)])
def test_what_takes_longer_to_load_than_to_compute_is_computed(
    disk: Disk, server: FusedScheduler, seconds: float, pays: bool
) -> None:
    """From the second time on: the first load shows what loads take."""
    take(disk, seconds)
    asked(disk, server, A)
    assert figures(disk) == {"loaded": 1, "unpaid": 0, "pays": True}
    asked(disk, server, A)
    assert figures(disk) == {"loaded": 1 + pays, "unpaid": 1 - pays, "pays": pays}
    assert bool(held(server, A)) is pays


def test_storage_that_does_not_pay_says_so(disk: Disk, server: FusedScheduler) -> None:
    """In the answer, when it is explained, and in the stats: what a load of a mebibyte takes."""
    take(disk, 100.0)
    assert disk.tier.storage.stats()["load_ms_per_mib"] is None
    asked(disk, server, A)
    size = next(len(data) for data in disk.storage.held.values())
    assert disk.tier.storage.stats()["load_ms_per_mib"] == pytest.approx(
        100_000 * (1 << 20) / size, rel=0.2
    )
    req = asked(disk, server, A)
    server.serve(req, answer=[50])
    assert Fallback.STORAGE_SLOW in report(req).fallbacks
    server.evict(100)
    explained = fused(A)
    state(explained).is_asked_only = True
    server.match(explained)
    found = server.fuser.explain(explained)
    assert found is not None
    assert Fallback.STORAGE_SLOW in found.fallbacks
    assert figures(disk)["unpaid"] == 1, "to explain counts nothing"


def test_storage_that_pays_says_nothing(disk: Disk, server: FusedScheduler) -> None:
    """Nor does one whose entry is not there."""
    take(disk, 0.1)
    asked(disk, server, A)
    req = asked(disk, server, A)
    server.serve(req, answer=[50])
    assert Fallback.STORAGE_SLOW not in report(req).fallbacks


@pytest.mark.parametrize("every", [1, 3])
def test_slow_storage_is_tried_now_and_then(
    disk: Disk, server: FusedScheduler, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    """And is used again when it has become fast."""
    monkeypatch.setattr(module, "TRIED_EVERY", every)
    take(disk, 100.0)
    asked(disk, server, A)
    for number in range(1, 7):
        asked(disk, server, A)
        assert figures(disk) == {"loaded": 1 + number // every, "unpaid": number, "pays": False}
    take(disk, 0.1)
    num_asked = 0
    while not disk.tier.storage.stats()["pays"]:
        asked(disk, server, A)
        num_asked += 1
    assert num_asked <= 8 * every, "the median of eight loads"


def test_request_that_moves_whatever_it_takes_loads_whatever_it_takes(
    disk: Disk, server: FusedScheduler
) -> None:
    """As `--chunkcache-move always` does, and a server that has measured nothing."""
    take(disk, 100.0)
    asked(disk, server, A)
    server.fuser.pricing.costs = None
    asked(disk, server, A)
    assert figures(disk) == {"loaded": 2, "unpaid": 0, "pays": True}


def test_each_chunk_is_weighed_alone(disk: Disk, server: FusedScheduler) -> None:
    """What is late in a prompt attends to more, so the same load pays there and not at its
    start."""
    req = fused(B, C)
    server.cache.arrived(req)
    spans = state(req).spans
    assert spans is not None
    first, last = (extend_work(span.start, span.end).pairs for span in spans.spans)
    server.fuser.pricing.costs = {**NOMINAL, Phase.EXTEND: Line(attended=1.0)}
    take(disk, (first + last) / 2)
    disk.settle()
    asked(disk, server, A)
    asked(disk, server, B, C)
    assert [bool(held(server, chunk)) for chunk in (B, C)] == [False, True]
