"""KV that comes into the pool in layers while a forward computes (Cache-Craft 3.4.2, algorithm 2).

    before the forward   |0|1|                        in line: `num_ahead` layers, so that none has
                                                      to be waited for
    beside it                |2|3|4|5|                on a copy stream; without CUDA on a thread
    the forward              |--0--|--1--|--2--|...   a getter of the pool waits for its layer

`LayerLoads` is SGLang's layer transfer counter: the getters of a KV pool ask `wait_until` before
they give a layer away. SGLang's own, `LayerDoneCounter`, waits for events of the device, and
`torch.cpu.Event` waits for nothing. Knows layers, no slots.

Invariants:
- One pass at a time goes on beside. It begins with `start` and ends with `finish`, or with
  `settle`, before the next forward.
- Layers are copied in ascending order: whoever has waited for one has waited for all before it.
- What was copied beside has been waited for when the forward is over. Otherwise its attention has
  read what was not there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from threading import Event, Thread
from typing import Any

import torch

from radix_ext import IntegrityError
from radix_ext.costs import Phase, Work
from radix_ext.preloading import layers_ahead
from sglang_chunkcache.scheduler.pricing import Interval, Pricing, Timer

logger = logging.getLogger(__name__)

WORTH_HIDING_S = 0.002
"""Of a load. A shorter one is over before a thread has begun, and its time says little."""
Copy = Callable[[range], None]
"""Copies layers, on the current stream. Called again after it has failed, so twice is as once."""
Stall = Callable[[], AbstractContextManager[None]]


class LayerLoads:
    """Of one pool. All calls come from the thread, and on the stream, that forwards run on."""

    @classmethod
    def of(cls, pool: Any) -> LayerLoads:
        """The pool's own: its getters wait for loads from now on."""
        # Host memory and moved KV share one pool's loads: whoever comes first registers them.
        if not isinstance(pool.layer_transfer_counter, cls):
            is_cuda = torch.device(pool.device).type == "cuda"
            pool.register_layer_transfer_counter(cls(pool.layer_num, is_cuda=is_cuda))
        loads: LayerLoads = pool.layer_transfer_counter
        return loads

    def __init__(self, num_layers: int, *, is_cuda: bool) -> None:
        self.num_layers, self.is_cuda = num_layers, is_cuda
        self._stall: Stall = nullcontext
        self._stream: Any = None
        self._overlapped: _OnThread | _OnStream | None = None
        self._unread: set[int] = set()
        """Layers that were copied beside this forward and not waited for yet."""
        self._has_failed = False

    def start(self, copy: Copy, phase: Phase, work: Work, *, num_ahead: int, clock: Pricing) -> int:
        """Copy `num_ahead` layers, and begin with the rest; all of them while another pass goes on.
        How many are there now. What raises is raised, and nothing is copied afterwards."""
        num_ahead = num_ahead if self._overlapped is None else self.num_layers
        with clock.timed(phase, work) as timer:
            if num_ahead:
                copy(range(num_ahead))
            rest = range(num_ahead, self.num_layers)
            if rest and self.is_cuda:
                self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]
                self._overlapped = _OnStream(copy, rest, self._stream, clock.overlapped(timer))
            elif rest:
                self._overlapped = _OnThread(copy, rest, timer, clock.overlapped(timer))
            if rest:
                self._stall, self._unread = partial(clock.stall, timer), set(rest)
        return num_ahead

    def wait_until(self, layer: int) -> None:
        """SGLang's call, by the pool's getters: what the current stream, or this thread,
        does next finds layers `[0, layer]`."""
        if self._overlapped is not None:
            self._unread.discard(layer)
            self._has_failed |= self._overlapped.wait(layer, self._stall)

    def finish(self) -> bool:
        """The forward is over: what comes next finds all layers. Whether copies were made again.
        Raises IntegrityError: it has read layers, too early, for which nobody has waited."""
        unread = sorted(self._unread)
        has_failed = self.settle()
        if unread:
            raise IntegrityError(
                f"no attention has waited for layers {unread}, which were loaded beside it"
            )
        return has_failed

    def settle(self) -> bool:
        """Nothing is copied any more, read or not. Whether copies were made again."""
        if self._overlapped is None:
            return False
        try:
            # Layers are copied in ascending order, so the last one's wait is for all.
            self.wait_until(self.num_layers - 1)
            return self._has_failed
        finally:
            # Also where the copy raises: the next forward would wait for a pass that is over.
            self._has_failed, self._overlapped, self._stall = False, None, nullcontext
            self._unread.clear()


def copied_ahead(num_layers: int, *, load: float, compute: float) -> int:
    """Layers to copy before a forward (Cache-Craft, eq. 16): all where hiding gains nothing."""
    if load < WORTH_HIDING_S:
        return num_layers
    return layers_ahead(num_layers, load=load, compute=compute)


class _OnThread:
    """Host memory to host memory. The reader copies again what fails, or raises."""

    def __init__(self, copy: Copy, layers: range, timer: Timer, interval: Interval) -> None:
        self._copy, self._layers, self._timer, self._interval = copy, layers, timer, interval
        self._is_there = {layer: Event() for layer in layers}
        self._failed_from: int | None = None
        Thread(target=self._run, name="chunkcache-layers", daemon=True).start()

    def wait(self, layer: int, stall: Stall) -> bool:
        """Until the layer is there. Whether that failed at first."""
        event = self._is_there.get(layer)
        if event is None:  # it was copied in line
            return False
        if not event.is_set():
            with stall():
                event.wait()
        # Read behind the event, which the thread sets after it: no lock.
        if self._failed_from is None or self._failed_from > layer:
            return False
        # All that the thread has left out: it ends with its first failure.
        self._copy(range(self._failed_from, self._layers.stop))
        self._failed_from = None
        return True

    # as the forward's thread: a pool made in this mode can be written in no other
    @torch.inference_mode()
    def _run(self) -> None:
        self._interval.mark()
        for layer in self._layers:
            try:
                self._copy(range(layer, layer + 1))
            except Exception:
                logger.warning(
                    "chunk cache: copying layer %d failed, its reader copies it again",
                    layer,
                    exc_info=True,
                )
                self._timer.phase = None  # the time of half a load is none of a load's
                self._failed_from = layer
                break
            self._is_there[layer].set()
        self._interval.mark()
        # Also behind a failure: readers of the layers that are missing would wait for ever.
        for event in self._is_there.values():
            event.set()


class _OnStream:
    """All is queued at once, behind the current stream and so the last reader of the slots."""

    def __init__(self, copy: Copy, layers: range, stream: Any, interval: Interval) -> None:
        # its tensors belong to the current stream, which waits before they are freed
        self._copy = copy
        self._stalls: set[int] = set()
        self._is_there: dict[int, Any] = {}
        stream.wait_stream(torch.cuda.current_stream())
        try:
            with torch.cuda.stream(stream):
                interval.mark()
                for layer in layers:
                    copy(range(layer, layer + 1))
                    event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
                    event.record()
                    self._is_there[layer] = event
                interval.mark()
        except Exception:  # what was queued is done before anything else writes there
            torch.cuda.current_stream().wait_stream(stream)
            raise

    def wait(self, layer: int, stall: Stall) -> bool:
        """What the current stream does next finds the layer. It cannot fail."""
        event = self._is_there.get(layer)
        if event is not None:
            # Waits again if it has waited: it may be another stream than before.
            with nullcontext() if layer in self._stalls else stall():
                torch.cuda.current_stream().wait_event(event)
            self._stalls.add(layer)
        return False
