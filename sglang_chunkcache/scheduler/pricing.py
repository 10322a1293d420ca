"""What the phases before a first token take on this machine: measured at the start, observed in service, agreed between ranks.

The scheduler plans by `costs`, which changes every `REFRESH` prefills. All ranks of a tensor-parallel group take rank 0's,
at the same batch, so that they decide alike.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from radix_ext.costs import NOMINAL, CostModel, Costs, Line, Phase, Work, extend_work, spread

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

REFRESH = 8
"""Prefills between two fits: a fit takes a third of a millisecond."""


@dataclass(eq=False)
class Watch:
    """Work under way on the current stream, or done."""

    phase: Phase | None
    """None: several phases, of which none is told apart."""
    work: Work
    seconds: float | None = None
    """None: not known yet."""
    events: tuple[Any, Any] | None = None
    """CUDA's, before and after it."""


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
        self._num_prefills = 0
        self._plan_errors: deque[float] = deque(maxlen=256)

    def start(self) -> None:
        """Plan by what was measured."""
        self.costs = self._agree()

    @contextmanager
    def watch(self, phase: Phase | None, work: Work) -> Iterator[Watch]:
        """Observe what the block takes, unless it raises or does nothing. Queues two events on CUDA and waits for none.

        `poll` makes the seconds known; without a phase nothing is learnt from them.
        """
        watch = Watch(phase, work)
        started = time.perf_counter()
        if self._is_cuda:
            event: Any = torch.cuda.Event
            watch.events = event(enable_timing=True), event(enable_timing=True)
            watch.events[0].record()
        yield watch
        if not work.calls:
            return
        if watch.events is None:
            watch.seconds = time.perf_counter() - started
        else:
            watch.events[1].record()
        self._running.append(watch)

    def watch_extend(self, batch: ScheduleBatch) -> AbstractContextManager[Watch]:
        """`watch` of a batch's prefill."""
        works = [extend_work(start, start + n) for start, n in zip(batch.prefix_lens, batch.extend_lens, strict=True)]
        return self.watch(Phase.EXTEND, Work(1, sum(work.tokens for work in works), sum(work.pairs for work in works)))

    def poll(self) -> None:
        """Learn from what is done. Waits for nothing."""
        while self._running:
            watch = self._running[0]
            if watch.events is not None:
                if not watch.events[1].query():
                    return
                watch.seconds = watch.events[0].elapsed_time(watch.events[1]) / 1000
            assert watch.seconds is not None
            if watch.phase is not None:
                self.model.observe(watch.phase, watch.work, max(watch.seconds, 1e-9))
            self._running.popleft()

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
        """For `/chunkcache/stats`: of each phase the line and the error of its estimates, `plan`: of whole plans. Empty without
        costs."""
        if self.costs is None:
            return {}
        return {**self.model.stats(), "plan": {"observed": len(self._plan_errors), **spread(self._plan_errors)}}

    def _agree(self) -> Costs:
        self.agreed = self.model.fit()
        if self._group.world_size > 1:
            told = {phase.value: tuple(line) for phase, line in self.agreed.items()}
            lines = self._group.broadcast_object(told, src=0)
            self.agreed = {Phase(name): Line(*line) for name, line in lines.items()}
        return self.agreed
