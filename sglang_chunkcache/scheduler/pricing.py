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
from sglang_chunkcache import compat

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

REFRESH = 8
"""Prefills between two fits: a fit takes a third of a millisecond."""


class Interval:
    """Time between two marks on the current stream; without CUDA, on this thread."""

    def __init__(self, *, is_cuda: bool) -> None:
        self._is_cuda = is_cuda
        self._marks: list[Any] = []

    def mark(self) -> None:
        """It begins, or ends. Queues an event on CUDA, and waits for nothing."""
        if self._is_cuda:
            self._marks.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
            self._marks[-1].record()
        else:
            self._marks.append(time.perf_counter())

    @property
    def seconds(self) -> float | None:
        """None: not over yet. Does not wait."""
        # Asked of the end only: the stream reaches the beginning before it.
        if len(self._marks) < 2 or (self._is_cuda and not self._marks[1].query()):
            return None
        begin, end = self._marks
        taken: float = begin.elapsed_time(end) / 1000 if self._is_cuda else end - begin
        return taken


@dataclass(eq=False)
class Timer:
    """Work under way, or done: in intervals, less those in which it waited for other work."""

    phase: Phase | None
    """None: several phases, of which none is told apart, or nothing to learn from."""
    work: Work
    intervals: list[Interval]
    stalls: list[Interval] = field(default_factory=list)
    around: tuple[Timer, ...] = ()  # those that were open when it began: it is a part of them

    @property
    def seconds(self) -> float | None:
        """None: not known yet. Does not wait."""
        took, waited = ([each.seconds for each in part] for part in (self.intervals, self.stalls))
        if None in took or None in waited:
            return None
        return sum(filter(None, took)) - sum(filter(None, waited))


class Pricing:
    """The costs of one rank. Without `start` there are none, and plans move what can be moved."""

    def __init__(self, runner: Any) -> None:
        self.model = CostModel()
        self.costs: Costs | None = None
        self.agreed: Costs = NOMINAL  # as at the last refresh, whether plans go by them or not
        self._group = compat.parallel(runner, "tp_group")
        self._is_cuda = torch.device(runner.device).type == "cuda"
        self._running: deque[Timer] = deque()
        self._open: list[Timer] = []
        self._num_prefills = 0
        self._plan_errors: deque[float] = deque(maxlen=256)

    def start(self) -> None:
        """Plan by what was measured."""
        self._agree()
        self.costs = self.agreed

    @contextmanager
    def timed(self, phase: Phase | None, work: Work) -> Iterator[Timer]:
        """Observe what the block takes, unless it raises or does nothing: `poll` learns from it,
        unless it has no phase. Queues two events on CUDA and waits for none."""
        interval = Interval(is_cuda=self._is_cuda)
        # A copy: what opens or closes later is none of its surroundings.
        timer = Timer(phase, work, [interval], around=tuple(self._open))
        interval.mark()
        self._open.append(timer)
        try:
            yield timer
        finally:
            self._open.remove(timer)
        if work.calls:
            interval.mark()
            self._running.append(timer)

    def overlapped(self, timer: Timer) -> Interval:
        """More of what is watched, on another stream or thread, which marks its begin and end."""
        timer.intervals.append(Interval(is_cuda=self._is_cuda))
        return timer.intervals[-1]

    @contextmanager
    def stall(self, load: Timer) -> Iterator[None]:
        """In the block the current stream, or this thread, waits for a load: that is no part of
        what is watched around it, but of what the load is a part of."""
        interval = Interval(is_cuda=self._is_cuda)
        interval.mark()
        yield
        interval.mark()
        for timer in self._open:
            if timer not in load.around:
                timer.stalls.append(interval)

    def time_extend(self, batch: ScheduleBatch) -> AbstractContextManager[Timer]:
        return self.timed(Phase.EXTEND, prefill_work(batch))

    def times(self, start: int, end: int) -> tuple[float, float]:
        """Seconds to compute these slots of a prompt, and to copy them from host memory."""
        work = extend_work(start, end)._replace(calls=0)  # there is an extend either way
        copy = Work(1, work.tokens)
        return self.agreed[Phase.EXTEND].seconds(work), self.agreed[Phase.LOAD].seconds(copy)

    def poll(self) -> None:
        """Learn from what is done. Waits for nothing."""
        while self._running and (seconds := self._running[0].seconds) is not None:
            timer = self._running.popleft()
            if timer.phase is not None:
                # Less its stalls, a phase may have taken nothing, by which the model would divide.
                self.model.observe(timer.phase, timer.work, max(seconds, 1e-9))

    def refresh(self) -> None:
        """A prefill is over. All ranks call it for the same ones."""
        self.poll()
        self._num_prefills += 1
        # By number, not by time: `_agree` is collective, so ranks must come to it together.
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
        plan = {"observed": len(self._plan_errors), **spread(self._plan_errors)}
        return {**self.model.stats(), "plan": plan}

    def _agree(self) -> None:
        self.agreed = self.model.fit()
        if self._group.world_size > 1:
            told = {phase.value: tuple(line) for phase, line in self.agreed.items()}
            lines = self._group.broadcast_object(told, src=0)
            self.agreed = {Phase(name): Line(*line) for name, line in lines.items()}


def prefill_work(batch: ScheduleBatch) -> Work:
    pieces = zip(batch.prefix_lens, batch.extend_lens, strict=True)
    works = [extend_work(start, start + length) for start, length in pieces]
    return Work(1, sum(work.tokens for work in works), sum(work.pairs for work in works))
