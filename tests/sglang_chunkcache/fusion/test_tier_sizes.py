"""The storage below the store with the bytes of an 8B model: 128 KiB a token, of which only the
numbers are real."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.scheduler.reporting import prefetch
from sglang_chunkcache.storage.entry import Entry
from sglang_chunkcache.storage.held import variant_of_row
from sglang_chunkcache.storage.jobs import Load
from sglang_chunkcache.storage.key import Place
from sglang_chunkcache.storage.manifest import Row
from sglang_chunkcache.storage.worker import Worker
from sglang_chunkcache.wire.state import ExplainRequest
from tests.kit.fused import Disk, Rank, disk, identity
from tests.kit.requests import HEAD, fused
from tests.reference.scheduler import FakeReq

__all__ = ["disk"]  # the fixture

TOKEN_BYTES = 131_072
CHUNKS = [[1000 * i + j for j in range(500)] for i in range(54)]
"""FusionRAG's 27,000 tokens."""


def stored(disk: Disk, monkeypatch: pytest.MonkeyPatch, *, gb_per_s: float) -> Rank:
    """A rank whose storage has the chunks, and reads them so fast."""

    def load(worker: Worker, job: Load) -> None:
        disk.storage.gate.wait()
        job.entry, job.seconds = Entry(()), job.size / gb_per_s / 1e9
        worker.num_loaded += 1
        worker.done.append(job)

    monkeypatch.setattr(Worker, "load", load)
    rank = disk.server(storage_bytes=10**12, host_slots=60_000, capacity=100)
    for number, tokens in enumerate(CHUNKS):
        chunk = disk.tier._chunk(identity(tokens))
        place = Place(*chunk, str(HEAD), (), False)
        row = Row(f"n{number}", place, len(tokens), TOKEN_BYTES * len(tokens), 0, False)
        disk.tier.storage.index.put(chunk, variant_of_row(row))
    disk.storage.gate.clear()
    return rank


def begun(disk: Disk) -> int:
    return disk.tier.storage.loader.waiting[Load].num


def let_through(disk: Disk) -> None:
    """What is under way, and no more."""
    disk.storage.gate.set()
    assert disk.tier.storage.loader.drain(10)
    disk.storage.gate.clear()
    disk.tier.storage.poll()


def in_store(rank: Rank) -> int:
    return sum(len(rank.stored(tokens)) for tokens in CHUNKS)


# of the first loads nobody knows what they take: 256 MiB are under way
@pytest.mark.parametrize(("gb_per_s", "rounds"), [(3.3, [5, 49]), (0.5, [5, 16, 16, 16, 1])])
def test_all_of_a_long_prompt_comes_while_it_waits(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, gb_per_s: float, rounds: list[int]
) -> None:
    """Two seconds of loads are under way at a time, not as many bytes."""
    rank = stored(disk, monkeypatch, gb_per_s=gb_per_s)
    rank.cache.arrived(fused(*CHUNKS))
    for number in rounds:
        assert begun(disk) == number
        let_through(disk)
    assert in_store(rank) == 54


def test_what_is_left_is_counted(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is planned with what has come, and nothing more is loaded for it."""
    rank = stored(disk, monkeypatch, gb_per_s=0.5)
    req = fused(*CHUNKS)
    rank.cache.arrived(req)
    let_through(disk)
    rank.match(req)
    disk.storage.gate.set()
    counts = disk.settle()
    assert (in_store(rank), counts["late"], counts["left"]) == (21, 16, 33)


def test_requests_go_on_in_their_order(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one of which nothing was under way."""
    rank = stored(disk, monkeypatch, gb_per_s=0.5)
    first, second = CHUNKS[:30], CHUNKS[30:]
    for chunks in (first, second):
        rank.cache.arrived(fused(*chunks))
    assert begun(disk) == 5
    for num_first, num_second in ((5, 0), (21, 0), (30, 7)):
        let_through(disk)
        found = [sum(len(rank.stored(each)) for each in part) for part in (first, second)]
        assert found == [num_first, num_second]
    disk.storage.gate.set()
    disk.settle()
    assert in_store(rank) == 54


def test_a_hint_brings_what_a_second_brings(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    rank = stored(disk, monkeypatch, gb_per_s=3.3)
    req = fused(*CHUNKS)
    spans: Any = rank.cache._spans_of(req)
    prefetch(rank.cache, ExplainRequest(list(req.origin_input_ids), spans, None, None))
    assert begun(disk) == 1
    let_through(disk)
    assert begun(disk) == 32, "half of what the queue takes"
    disk.storage.gate.set()
    disk.settle()
    assert in_store(rank) == 54


def test_other_weights_end_it(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """What goes on would be read as theirs."""
    rank = stored(disk, monkeypatch, gb_per_s=3.3)
    req = fused(*CHUNKS)
    rank.cache.arrived(req)
    rank.weights = 1
    rank.flush()
    disk.storage.gate.set()
    assert (disk.settle()["loaded"], in_store(rank)) == (5, 0)
    asked: Any = state(req).loads
    assert not asked.is_coming, "else nobody would wait for loads any more"


def test_loads_hold_a_share_of_the_memory(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else what is there would leave for what one request asks for."""
    rank = stored(disk, monkeypatch, gb_per_s=3.3)
    waiting = disk.tier.storage.loader.waiting[Load]
    waiting.bounds = waiting.bounds._replace(memory_bytes=10 * TOKEN_BYTES * 500)
    rank.cache.arrived(fused(*CHUNKS))
    let_through(disk)
    assert begun(disk) == 5


def seconds_to_wait(disk: Disk, req: FakeReq) -> float:
    """How long it would, as if it could be admitted now."""
    asked: Any = state(req).loads
    storage = disk.tier.storage
    storage.waits.policy.share = 1.0
    with mock.patch.object(storage.waits, "_clock", return_value=0.0):
        storage.awaits([asked])
    return float(asked.until or 0.0)


@pytest.mark.parametrize(
    ("earlier", "mine", "later", "saved_s", "waits"),
    [
        # 65 ms for 500 tokens, by a disk of a gigabyte a second
        pytest.param(0, 2, 0, 0.14, True, id="in time"),
        pytest.param(0, 2, 0, 0.12, False, id="too late"),
        pytest.param(2, 1, 0, 0.21, True, id="behind two others"),
        pytest.param(2, 1, 0, 0.18, False, id="too late behind two others"),
        pytest.param(0, 1, 9, 0.08, True, id="others come behind it"),
        pytest.param(40, 1, 0, 9.0, True, id="no room in the queue yet"),
        pytest.param(40, 2, 0, 2.0, False, id="too late once there is room"),
    ],
)
def test_request_waits_for_what_comes_before_the_last_of_its_loads(
    disk: Disk,
    monkeypatch: pytest.MonkeyPatch,
    earlier: int,
    mine: int,
    later: int,
    saved_s: float,
    waits: bool,
) -> None:
    """And for that, in whatever queue it stands."""
    rank = stored(disk, monkeypatch, gb_per_s=1.0)
    disk.tier.storage.waits.times.observe(500 * TOKEN_BYTES, 500 * TOKEN_BYTES / 1e9)
    groups = CHUNKS[:earlier], CHUNKS[earlier:][:mine], CHUNKS[earlier + mine :][:later]
    first, req, last = (fused(*each) for each in groups)
    for each in (first, req, last):
        rank.cache.arrived(each)
    asked: Any = state(req).loads
    asked.saved_s = saved_s
    assert (seconds_to_wait(disk, req) > 0) is waits
    disk.storage.gate.set()
    disk.settle()
