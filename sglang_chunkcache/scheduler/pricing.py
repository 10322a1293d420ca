"""What the phases before a first token take on this machine: measured at the start, observed in
service, agreed between ranks.

The scheduler plans by `costs`, which changes every `REFRESH` prefills. All ranks of a
tensor-parallel group take rank 0's, at the same batch, so that they decide alike.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from radix_ext.costs import NOMINAL, CostModel, Costs, Line, Phase, Work, extend_work, spread

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

REFRESH = 8
"""Prefills between two fits: a fit takes a third of a millisecond."""


class Stretch:
    """Time between two marks on the current stream; without CUDA, on this thread."""

    def __init__(self, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._marks: list[Any] = []

    def mark(self) -> None:
        """It begins, or ends. Queues an event on CUDA, and waits for nothing."""
        mark: Any = time.perf_counter()
        if self._is_cuda:
            event: Any = torch.cuda.Event
            mark = event(enable_timing=True)
            mark.record()
        self._marks.append(mark)

    @property
    def seconds(self) -> float | None:
        """None: not over yet. Does not wait."""
        if len(self._marks) < 2 or (self._is_cuda and not self._marks[1].query()):
            return None
        begin, end = self._marks
        taken: float = begin.elapsed_time(end) / 1000 if self._is_cuda else end - begin
        return taken


@dataclass(eq=False)
class Watch:
    """Work under way, or done: in stretches, less those in which it waited for other work."""

    phase: Phase | None
    """None: several phases, of which none is told apart, or nothing to learn from."""
    work: Work
    stretches: list[Stretch]
    stalls: list[Stretch] = field(default_factory=list)
    around: tuple[Watch, ...] = ()
    """Those that were open when it began: it is a part of them."""

    @property
    def seconds(self) -> float | None:
        """None: not known yet. Does not wait."""
        took, waited = ([each.seconds for each in part] for part in (self.stretches, self.stalls))
        if None in took or None in waited:
            return None
        return sum(filter(None, took)) - sum(filter(None, waited))


class Pricing:
    """The costs of one rank. Without `start` there are none, and plans move what can be moved.

    Args:
        runner: SGLang's ModelRunner: its device and ranks.
    """

    def __init__(self, runner: Any) -> None:
        self.model = CostModel()
        self.costs: Costs | None = None
        self.agreed: Costs = NOMINAL
        """As at the last refresh, whether plans go by them or not."""
        self._group, self._is_cuda = runner.tp_group, torch.device(runner.device).type == "cuda"
        self._running: deque[Watch] = deque()
        self._open: list[Watch] = []
        self._num_prefills = 0
        self._plan_errors: deque[float] = deque(maxlen=256)

    def start(self) -> None:
        """Plan by what was measured."""
        self.costs = self._agree()

    @contextmanager
    def watch(self, phase: Phase | None, work: Work) -> Iterator[Watch]:
        """Observe what the block takes, unless it raises or does nothing. Queues two events on CUDA
        and waits for none.

        `poll` learns from the seconds, once they are known; without a phase nothing is.
        """
        stretch = self._stretch()
        watch = Watch(phase, work, [stretch], around=tuple(self._open))
        stretch.mark()
        self._open.append(watch)
        try:
            yield watch
        finally:
            self._open.remove(watch)
        if work.calls:
            stretch.mark()
            self._running.append(watch)

    def beside(self, watch: Watch) -> Stretch:
        """More of what is watched, on another stream or thread:
        it marks where that begins and ends, which may be later."""
        watch.stretches.append(self._stretch())
        return watch.stretches[-1]

    @contextmanager
    def stall(self, load: Watch) -> Iterator[None]:
        """In the block the current stream, or this thread, waits for a load: that is no part of
        what is watched around it, but of what the load is a part of."""
        stretch = self._stretch()
        stretch.mark()
        yield
        stretch.mark()
        for watch in self._open:
            if watch not in load.around:
                watch.stalls.append(stretch)

    def watch_extend(self, batch: ScheduleBatch) -> AbstractContextManager[Watch]:
        """`watch` of a batch's prefill."""
        return self.watch(Phase.EXTEND, prefill_work(batch))

    def poll(self) -> None:
        """Learn from what is done. Waits for nothing."""
        while self._running and (seconds := self._running[0].seconds) is not None:
            watch = self._running.popleft()
            if watch.phase is not None:
                self.model.observe(watch.phase, watch.work, max(seconds, 1e-9))

    def refresh(self) -> None:
        """A prefill is over. All ranks call it for the same ones."""
        self.poll()
        self._num_prefills += 1
        if self._num_prefills % REFRESH == 0:
            self._agree()
            self.costs = self.agreed if self.costs is not None else None

    def compare(self, estimate: float, actual: float) -> None:
        """What a plan was estimated to take, and took, in seconds."""
        self._plan_errors.append(abs(estimate - actual) / actual)

    def stats(self) -> dict[str, Any]:
        """For `/chunkcache/stats`: of each phase the line and the error of its estimates, `plan`:
        of whole plans. Empty without costs."""
        if self.costs is None:
            return {}
        return {
            **self.model.stats(),
            "plan": {"observed": len(self._plan_errors), **spread(self._plan_errors)},
        }

    def _stretch(self) -> Stretch:
        return Stretch(is_cuda=self._is_cuda)

    def _agree(self) -> Costs:
        self.agreed = self.model.fit()
        if self._group.world_size > 1:
            told = {phase.value: tuple(line) for phase, line in self.agreed.items()}
            lines = self._group.broadcast_object(told, src=0)
            self.agreed = {Phase(name): Line(*line) for name, line in lines.items()}
        return self.agreed


def prefill_work(batch: ScheduleBatch) -> Work:
    """Of SGLang's extend of the batch."""
    works = [
        extend_work(start, start + n)
        for start, n in zip(batch.prefix_lens, batch.extend_lens, strict=True)
    ]
    return Work(1, sum(work.tokens for work in works), sum(work.pairs for work in works))
