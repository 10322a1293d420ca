"""KV that comes into the pool layer by layer while a forward computes (Cache-Craft 3.4.2, algorithm 2).

    before the forward   |0|1|                        in line: `num_ahead` layers, so that none has to be waited for
    beside it                |2|3|4|5|                on a copy stream; without CUDA on a thread
    the forward              |--0--|--1--|--2--|...   a getter of the pool waits for its layer

`LayerLoads` is SGLang's layer transfer counter: the getters of a KV pool ask `wait_until` before they give a layer away. SGLang's
own, `LayerDoneCounter`, waits for events of the device, and `torch.cpu.Event` waits for nothing. Knows layers, no slots.

Invariants:
- One pass at a time, from `start` to `finish`, which are around one forward.
- Layers are copied in ascending order: whoever has waited for one has waited for all before it.
- What was copied beside has been waited for when the forward is over. Otherwise its attention has read what was not there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from threading import Event, Thread
from typing import Any, Protocol

import torch

from radix_ext import IntegrityError
from radix_ext.costs import Phase, Work
from sglang_chunkcache.scheduler.pricing import Stretch, Watch

logger = logging.getLogger(__name__)

Copy = Callable[[int], None]
"""Copies one layer, on the current stream. Called again after it has failed, so twice is as once."""


class Clock(Protocol):
    """What `Pricing` does."""

    def watch(self, phase: Phase | None, work: Work) -> AbstractContextManager[Watch]: ...
    def beside(self, watch: Watch) -> Stretch: ...
    def stall(self) -> AbstractContextManager[None]: ...


class _Pass(Protocol):
    """Layers that are copied beside a forward."""

    def wait(self, layer: int, clock: Clock) -> bool:
        """Until the layer is there. Whether that failed at first."""


class LayerLoads:
    """Of a pool of `num_layers`. All calls come from the thread, and on the stream, that forwards run on."""

    def __init__(self, num_layers: int, *, is_cuda: bool) -> None:
        self.num_layers, self._is_cuda = num_layers, is_cuda
        self._clock: Clock | None = None
        self._stream: Any = None
        self._beside: _Pass | None = None
        self._unread: set[int] = set()
        """Layers that were copied beside this forward and not waited for yet."""
        self._has_failed = False

    def start(self, copy: Copy, work: Work, *, num_ahead: int, clock: Clock) -> None:
        """Copy `num_ahead` layers, and begin with the rest. What `copy` raises here is raised."""
        assert self._beside is None, "the pass before was not finished"
        with clock.watch(Phase.LOAD, work) as watch:
            for layer in range(num_ahead):
                copy(layer)
            rest = range(num_ahead, self.num_layers)
            if not rest:
                return
            self._clock, self._unread = clock, set(rest)
            if self._is_cuda:
                self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self._beside = _OnStream(copy, rest, self._stream, clock.beside(watch))
            else:
                self._beside = _OnThread(copy, rest, watch, clock.beside(watch))

    def wait_until(self, layer: int) -> None:
        """SGLang's call, by the pool's getters: what the current stream, or this thread, does next finds layers `[0, layer]`."""
        if self._beside is not None and self._clock is not None:
            self._unread.discard(layer)
            self._has_failed |= self._beside.wait(layer, self._clock)

    def finish(self) -> bool:
        """The forward is over: what comes next finds all layers. Whether copies have failed, and were made again.

        Raises:
            IntegrityError: nobody has waited for some of the layers, so the forward has read them too early.
        """
        if self._beside is None:
            return False
        unread = sorted(self._unread)
        self.wait_until(self.num_layers - 1)
        has_failed, self._has_failed, self._beside, self._clock = self._has_failed, False, None, None
        if unread:
            raise IntegrityError([f"no attention has waited for layers {unread}, which were loaded beside it"])
        return has_failed


class _OnThread:
    """Host memory to host memory. What fails is copied again by the reader: what fails twice is raised there."""

    def __init__(self, copy: Copy, layers: range, watch: Watch, stretch: Stretch) -> None:
        self._copy, self._layers, self._watch, self._stretch = copy, layers, watch, stretch
        self._is_there = {layer: Event() for layer in layers}
        self._failed_from: int | None = None
        Thread(target=self._run, name="chunkcache-layers", daemon=True).start()

    def wait(self, layer: int, clock: Clock) -> bool:
        event = self._is_there.get(layer)
        if event is None:  # it was copied in line
            return False
        if not event.is_set():
            with clock.stall():
                event.wait()
        if self._failed_from is None or self._failed_from > layer:
            return False
        for rest in range(self._failed_from, self._layers.stop):
            self._copy(rest)
        self._failed_from = None
        return True

    def _run(self) -> None:
        self._stretch.mark()
        for layer in self._layers:
            try:
                self._copy(layer)
            except Exception:
                logger.warning(
                    "chunk cache: layer %d was not copied beside a forward, it is again", layer, exc_info=True
                )
                self._watch.phase = None  # the time of half a load is none of a load's
                self._failed_from = layer
                break
            self._is_there[layer].set()
        self._stretch.mark()
        for event in self._is_there.values():
            event.set()


class _OnStream:
    """All is queued at once: behind what the current stream has queued, so that slots have their last reader behind them."""

    def __init__(self, copy: Copy, layers: range, stream: Any, stretch: Stretch) -> None:
        self._copy = copy  # its tensors belong to the current stream, which waits before they are freed
        self._stalls: set[int] = set()
        self._is_there: dict[int, Any] = {}
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            stretch.mark()
            for layer in layers:
                copy(layer)
                event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
                self._is_there[layer] = event
            stretch.mark()

    def wait(self, layer: int, clock: Clock) -> bool:
        event = self._is_there.get(layer)
        if event is not None and layer in self._stalls:
            torch.cuda.current_stream().wait_event(event)  # it may be another stream than before
        elif event is not None:
            self._stalls.add(layer)
            with clock.stall():
                torch.cuda.current_stream().wait_event(event)
        return False
