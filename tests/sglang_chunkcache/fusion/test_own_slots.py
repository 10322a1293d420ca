"""In which stream slots change hands, on a device module that only keeps a list: no GPU is needed to see the order.

The scheduler's stream has the free list, the rows and the tree; the pass runs in its own and waits.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch

from radix_ext import FusionRequest
from tests.reference.fused_scheduler import FusedScheduler
from tests.reference.scheduler import FakeReq, config, marked

HEAD, A, D, B, QUESTION = [90, 91], [1, 2, 3, 4], [6, 6, 6, 6], [1, 2, 5], [30, 31]
HALF = FusionRequest("query", 0.5, "half")
TAKEN = [
    "unshare in scheduling",
    "write in scheduling",
    "forward waits for scheduling",
    "compute in forward",
]
"""Critical tokens get slots, then they are computed."""


class FakeStream:
    def __init__(self, name: str, queued: list[str]) -> None:
        self.name, self.queued = name, queued

    def wait_stream(self, other: FakeStream) -> None:
        self.queued.append(f"{self.name} waits for {other.name}")


class FakeDevice:
    """As `torch.cuda`, with a list of what was queued, and in which stream."""

    def __init__(self) -> None:
        self.queued: list[str] = []
        self.current = self.scheduling = FakeStream("scheduling", self.queued)
        self.forward = FakeStream("forward", self.queued)

    def current_stream(self) -> FakeStream:
        return self.current

    @contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def listed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def queue(*args: Any, **kwargs: Any) -> Any:
            self.queued.append(f"{name} in {self.current.name}")
            return call(*args, **kwargs)

        return queue


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> FakeDevice:
    device = FakeDevice()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    return device


def rag(*chunks: Sequence[int], reuse: FusionRequest | None = None) -> FakeReq:
    ids, spans = list(HEAD), []
    for chunk in chunks:
        spans.append((len(ids), len(ids) + len(chunk)))
        ids += chunk
    return FakeReq([*ids, *QUESTION], marked(spans, fusion=reuse))


def promise(reuse: FusionRequest = HALF) -> tuple[FusedScheduler, FakeReq]:
    """head | D | B, whose B has the slots of the B after A; not filled yet."""
    scheduler = FusedScheduler(100, config(reuse="fused"))
    scheduler.serve(rag(A, B))
    req = rag(D, B, reuse=reuse)
    assert scheduler.add(req, 100) == len(HEAD + D + B)
    return scheduler, req


def forward(scheduler: FusedScheduler, device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Run the batch, the fuser in the forward's stream; what was queued there and from there."""
    before = scheduler.fuser.before

    def in_forward(batch: Any) -> None:
        device.queued.clear()
        with monkeypatch.context() as patch, device.stream(device.forward):
            for owner, name in (
                (scheduler.allocator, "alloc"),
                (scheduler.allocator, "free"),
                (scheduler.rows, "write"),
                (scheduler.cache, "unshare"),
            ):
                patch.setattr(owner, name, device.listed(name, getattr(owner, name)))
            patch.setattr(scheduler.contents, "compute", device.listed("compute", scheduler.contents.compute))
            before(batch)

    monkeypatch.setattr(scheduler.fuser, "before", in_forward)
    scheduler.forward()
    return device.queued


def test_slots_change_hands_in_the_schedulers_stream(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the scheduler hands out a slot twice, or the pass reads rows that are not written yet."""
    scheduler, req = promise()
    queued = forward(scheduler, device, monkeypatch)
    assert queued == [*TAKEN, "free in scheduling", "forward waits for scheduling"]
    scheduler.check([req])


def test_more_is_taken_there_too(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failing pass takes what was not reserved."""
    scheduler, req = promise(FusionRequest("none", 0.0, "none"))
    scheduler.fusion_pass.fails = True
    queued = forward(scheduler, device, monkeypatch)
    assert queued == ["alloc in scheduling", *TAKEN, "free in scheduling", "forward waits for scheduling"]
    scheduler.check([req])


def test_nothing_to_take_keeps_nobody_waiting(device: FakeDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what was reserved goes back."""
    scheduler, req = promise(FusionRequest("none", 0.0, "none"))
    queued = forward(scheduler, device, monkeypatch)
    assert queued == ["compute in forward", "free in scheduling", "forward waits for scheduling"]
    scheduler.check([req])


def test_what_queued_work_may_read_stays_as_it_is() -> None:
    """Probes in the pass's stream read the promise's first row; without an owner its memory would go to the scheduler's next
    tensor. The node's old slots are not overwritten."""
    scheduler, req = promise()
    (pending,) = scheduler.fuser._pending
    row, node = weakref.ref(pending.move.slots), pending.last
    value, slots = node.value, node.value.tolist()
    scheduler.forward()
    gc.collect()
    assert row() is not None
    assert row() is not pending.move.slots
    assert value.tolist() == slots != node.value.tolist()
    scheduler.check([req])
