"""Layers that come while a forward computes:
on a thread, and on CUDA's streams as far as they can be told without them."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread, current_thread, main_thread

import pytest
import torch

from radix_ext import IntegrityError
from radix_ext.costs import Phase, Work
from sglang_chunkcache.scheduler.layer_loads import LayerLoads
from sglang_chunkcache.scheduler.pricing import Pricing
from tests.kit.pricing import make_pricing
from tests.polling import DEADLINE_S, until

NUM_LAYERS, WORK = 5, Work(1, 7)


class Copies:
    """`Copy` that notes which thread has copied which layer,
    and waits or fails where it is told."""

    def __init__(self, *, held: int | None = None, failing: int | None = None) -> None:
        self.done: list[tuple[int, bool]] = []
        """(layer, beside the forward)"""
        self.gate, self._held, self.failing = Event(), held, failing

    def __call__(self, layers: range) -> None:
        is_beside = current_thread() is not main_thread()
        for layer in layers:
            if layer == self._held:
                assert self.gate.wait(DEADLINE_S)
            if layer == self.failing and is_beside:
                raise RuntimeError("no memory")
            self.done.append((layer, is_beside))

    def open_later(self) -> None:
        time.sleep(0.2)
        self.gate.set()

    @property
    def layers(self) -> list[int]:
        return [layer for layer, _ in self.done]


def started(copies: Copies, num_ahead: int, clock: Pricing | None = None) -> LayerLoads:
    loads = LayerLoads(NUM_LAYERS, is_cuda=False)
    loads.start(copies, Phase.LOAD, WORK, num_ahead=num_ahead, clock=clock or make_pricing())
    return loads


def forward(loads: LayerLoads) -> None:
    """Attention asks twice a layer, for keys and values."""
    for layer in range(NUM_LAYERS):
        loads.wait_until(layer)
        loads.wait_until(layer)


@pytest.mark.parametrize("num_ahead", range(NUM_LAYERS + 1))
def test_layers_are_copied_once_in_order(num_ahead: int) -> None:
    """The first in line, the rest beside."""
    copies, idle = Copies(), LayerLoads(NUM_LAYERS, is_cuda=False)
    forward(idle)
    assert not idle.finish()
    loads = started(copies, num_ahead)
    assert copies.done[:num_ahead] == [(layer, False) for layer in range(num_ahead)]
    forward(loads)
    assert not loads.finish()
    assert copies.done == [(layer, layer >= num_ahead) for layer in range(NUM_LAYERS)]


def test_reader_waits_for_its_layer_and_for_no_later_one() -> None:
    copies = Copies(held=3)
    loads = started(copies, 1)
    seen: list[list[int]] = []

    def read() -> None:
        for layer in range(NUM_LAYERS):
            loads.wait_until(layer)
            seen.append(copies.layers[: layer + 1])

    reader = Thread(target=read)
    reader.start()
    until(lambda: len(seen) == 3)
    reader.join(0.1)
    assert reader.is_alive()
    assert len(seen) == 3
    copies.gate.set()
    reader.join(DEADLINE_S)
    assert seen == [list(range(layer + 1)) for layer in range(NUM_LAYERS)]
    loads.finish()


def test_failed_layers_are_copied_again_by_who_needs_them(caplog: pytest.LogCaptureFixture) -> None:
    """Not by who needs those before. The time of such a load is none of a load's."""
    copies, clock = Copies(failing=3), make_pricing()
    loads = started(copies, 1, clock)
    forward(loads)
    assert copies.done == [(0, False), (1, True), (2, True), (3, False), (4, False)]
    assert loads.finish()
    assert [each.levelno for each in caplog.records] == [logging.WARNING]
    assert "no memory" in caplog.text
    clock.poll()
    assert clock.model.num_observed[Phase.LOAD] == 0
    copies.failing = None
    loads.start(copies, Phase.LOAD, WORK, num_ahead=1, clock=clock)
    forward(loads)
    assert not loads.finish()
    clock.poll()
    assert clock.model.num_observed[Phase.LOAD] == 1


def test_what_fails_twice_is_raised_to_each_reader() -> None:
    """No reader gets what is not there. What fails in line is raised at once."""
    loads, first = LayerLoads(NUM_LAYERS, is_cuda=False), 0

    def copy(layers: range) -> None:
        if layers[-1] >= first:
            raise RuntimeError(f"layer {layers[0]}")

    def start() -> None:
        loads.start(copy, Phase.LOAD, WORK, num_ahead=1, clock=make_pricing())

    with pytest.raises(RuntimeError, match="layer 0"):
        start()
    first = 2
    start()
    loads.wait_until(1)
    for layer in (2, 2, 4):
        with pytest.raises(RuntimeError, match="layer 2"):
            loads.wait_until(layer)


def test_thread_that_cannot_start_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nobody had asked for a load: prices are learnt, the next load works."""

    def refuse(thread: Thread) -> None:
        raise RuntimeError("can't start new thread")

    clock, copies, loads = make_pricing(), Copies(), LayerLoads(NUM_LAYERS, is_cuda=False)
    with monkeypatch.context() as patched:
        patched.setattr(Thread, "start", refuse)
        with clock.timed(None, Work(1)) as around, pytest.raises(RuntimeError, match="new thread"):
            loads.start(copies, Phase.LOAD, WORK, num_ahead=1, clock=clock)
    assert not loads.finish()
    assert around.seconds is not None
    loads.start(copies, Phase.LOAD, WORK, num_ahead=1, clock=clock)
    forward(loads)
    assert not loads.finish()
    clock.poll()
    assert clock.model.num_observed[Phase.LOAD] == 1


def test_forward_that_did_not_ask_is_an_error() -> None:
    """It has read what was not there. What comes next finds all of it."""
    copies = Copies()
    loads = started(copies, 1)
    loads.wait_until(2)
    with pytest.raises(IntegrityError, match=r"layers \[1, 3, 4\]"):
        loads.finish()
    assert copies.layers == list(range(NUM_LAYERS))
    assert not loads.finish()


def test_waiting_is_not_computing() -> None:
    """The load's time is that of its copies, the prefill's without what it has waited for them."""
    clock, copies = make_pricing(), Copies(held=4)
    opener = Thread(target=copies.open_later)
    loads = started(copies, 1, clock)
    with clock.timed(Phase.EXTEND, Work(1, 10, 100)) as extend:
        opener.start()
        forward(loads)
    loads.finish()
    clock.poll()
    assert extend.seconds is not None
    assert 0 <= extend.seconds < 0.1
    assert clock.model.num_observed == {**dict.fromkeys(Phase, 0), Phase.LOAD: 1, Phase.EXTEND: 1}
    assert clock.model.fit()[Phase.LOAD].seconds(WORK) > 0.1


class Cuda:
    """torch.cuda's streams and events: a log of what is queued where."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.current = "forward"

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream.name
        try:
            yield
        finally:
            self.current = before


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self._cuda, self.name = cuda, name

    def wait_stream(self, other: Stream) -> None:
        self._cuda.log.append((self.name, "waits for all of", other.name))

    def wait_event(self, event: EventOf) -> None:
        self._cuda.log.append((self.name, "waits for", event.after))


class EventOf:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda, self.after = cuda, ""

    def record(self) -> None:
        self.after = " ".join(self._cuda.log[-1]) if self._cuda.log else ""


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    made = Cuda()
    monkeypatch.setattr(torch.cuda, "Stream", lambda: Stream(made, "copy"))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: Stream(made, made.current))
    monkeypatch.setattr(torch.cuda, "stream", made.stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda **_: EventOf(made))
    return made


def started_on_stream(cuda: Cuda, *, failing: int | None = None) -> LayerLoads:
    loads, clock = LayerLoads(3, is_cuda=True), make_pricing(device="cuda")

    def copy(layers: range) -> None:
        if layers[0] == failing:
            raise RuntimeError("no memory")
        cuda.log.extend((cuda.current, f"copies {layer}") for layer in layers)

    try:
        loads.start(copy, Phase.LOAD, WORK, num_ahead=1, clock=clock)
    except RuntimeError:
        assert failing is not None
    return loads


def test_copies_on_a_stream_are_behind_the_forward_stream_and_before_its_readers(
    cuda: Cuda,
) -> None:
    """A copy has the last reader of its slots behind it, a layer's readers wait for that layer,
    also on another stream, and what comes after the forward for all."""
    loads = started_on_stream(cuda)
    assert cuda.log == [
        ("forward", "copies 0"),
        ("copy", "waits for all of", "forward"),
        ("copy", "copies 1"),
        ("copy", "copies 2"),
    ]
    cuda.log.clear()
    loads.wait_until(0)
    loads.wait_until(1)
    with cuda.stream(Stream(cuda, "side")):
        loads.wait_until(1)
    loads.wait_until(2)
    loads.finish()
    assert cuda.log == [
        ("forward", "waits for", "copy copies 1"),
        ("side", "waits for", "copy copies 1"),
        ("forward", "waits for", "copy copies 2"),
        ("forward", "waits for", "copy copies 2"),
    ]


def test_copies_that_fail_on_a_stream_are_over_before_what_comes_next(cuda: Cuda) -> None:
    """Those that were queued would come into slots that are computed instead."""
    loads = started_on_stream(cuda, failing=2)
    assert cuda.log[-2:] == [("copy", "copies 1"), ("forward", "waits for all of", "copy")]
    assert not loads.finish()
