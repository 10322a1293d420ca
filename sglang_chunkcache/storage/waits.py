"""What was asked of the storage for a request, and how long the request waits for it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from radix_ext.loading import LoadTimes, WaitPolicy
from sglang_chunkcache.storage.jobs import Load, Lookup


@dataclass(eq=False)
class PendingLoads:
    """What is loaded and looked up for one request."""

    loads: list[Load] = field(default_factory=list)
    lookup: Lookup | None = None
    is_planned: bool = False  # what comes from now on is late
    goes_on: list[Callable[[], None]] = field(default_factory=list)  # load what found no room
    num_left: int = 0  # loads that these would make
    is_skipped: bool = False  # something was not loaded, since computing it is faster
    is_prefetch: bool = False  # the request may come. False: it is here
    tenant: tuple[str | None, ...] = ()  # whose it is: extra_key and cache_salt
    saved_s: float = 0.0
    """What its coming is estimated to save of the time to the first token, loading aside."""
    end: int | None = None  # of what was asked for, in the prompt. None: it is not one stretch
    until: float | None = None  # when its request waits no longer. None: it did not wait yet

    @property
    def jobs(self) -> list[Load | Lookup]:
        return [job for job in (self.lookup, *self.loads) if job is not None]

    @property
    def is_coming(self) -> bool:
        return not all(job.is_done for job in self.jobs)

    def take_rest(self) -> list[Callable[[], None]]:
        """What `goes_on` has, which is empty then."""
        rest, self.goes_on, self.num_left = self.goes_on, [], 0
        return rest


class Waits:
    """Of one rank. `times`: of its loads."""

    def __init__(self, policy: WaitPolicy, times: LoadTimes, clock: Callable[[], float]) -> None:
        self.policy, self.times, self._clock = policy, times, clock
        self.num_late = self.num_left = 0

    def awaits(self, asked: Iterable[PendingLoads], under_way: Iterable[Load]) -> bool:
        """Whether a request, which could be admitted, waits for what was asked for it. If not, it
        is `planned` next. `under_way`: all loads that it would wait behind."""
        parts = [each for each in asked if not each.is_planned]
        coming, now = [each for each in parts if each.is_coming], self._clock()
        if any(each.until is not None for each in parts):
            is_waiting = not self.is_over(parts)
            if not is_waiting:
                self.policy.ended(in_vain=bool(coming))
            return is_waiting
        if not coming:
            return False
        loads = [self.times.seconds(job.size) for job in under_way]
        load_s = None if None in loads else sum(filter(None, loads))
        saved_s = max(each.saved_s for each in coming)
        wait_s = self.policy.seconds(load_s, saved_s, now, partial(_came_at, coming))
        for each in parts:
            each.until = now + wait_s
        return wait_s > 0

    def is_over(self, asked: Sequence[PendingLoads]) -> bool:
        """Whether all has come that a request awaits, or its time is over."""
        until = max((each.until or 0.0 for each in asked), default=0.0)
        return self._clock() >= until or not any(each.is_coming for each in asked)

    def planned(self, asked: PendingLoads | None) -> None:
        """The request is planned with what has come: the rest serves the next one."""
        if asked is None:
            return
        asked.is_planned = True
        self.num_left += asked.num_left
        asked.take_rest()
        for load in asked.loads:
            if not load.is_done and not load.is_late:
                load.is_late = True
                self.num_late += 1


def _came_at(asked: Iterable[PendingLoads]) -> float | None:
    jobs = [job for each in asked for job in each.jobs]
    return max(job.ended for job in jobs) if all(job.is_done for job in jobs) else None
