"""What was asked of the storage for a request, and how long the request waits for it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from radix_ext import ChunkId
from radix_ext.loading import LoadTimes, WaitPolicy, came_at, sizes_to_last
from radix_ext.variants import Variant
from sglang_chunkcache.storage.jobs import Load, Lookup


@dataclass(eq=False)
class PendingLoads:
    """What is loaded and looked up for one request."""

    loads: list[Load] = field(default_factory=list)
    lookup: Lookup | None = None
    is_planned: bool = False  # what comes from now on is late
    goes_on: list[Callable[[], None]] = field(default_factory=list)  # load what found no room
    left: list[int] = field(default_factory=list)  # bytes of the loads that these would make
    is_skipped: bool = False  # something was not loaded, since computing it is faster
    is_prefetch: bool = False  # the request may come. False: it is here
    tenant: tuple[str | None, ...] = ()  # whose it is: extra_key and cache_salt
    variants: defaultdict[ChunkId, list[Variant]] = field(default_factory=lambda: defaultdict(list))
    """What of chunks is to be moved, with what `goes_on` would load."""
    saved_s: float = 0.0
    """What its coming is estimated to save of the time to the first token, loading aside."""
    end: int | None = None  # of what was asked for, in the prompt. None: it is not one stretch
    until: float | None = None  # when its request waits no longer. None: it did not wait yet

    @property
    def jobs(self) -> list[Load | Lookup]:
        return [job for job in (self.lookup, *self.loads) if job is not None]

    @property
    def is_looked_up(self) -> bool:
        """Whether more may be found than is loaded."""
        return self.lookup is not None and not self.lookup.is_done

    @property
    def is_coming(self) -> bool:
        return bool(self.goes_on) or not all(job.is_done for job in self.jobs)

    def take_rest(self) -> list[Callable[[], None]]:
        """What `goes_on` has, which is empty then."""
        rest, self.goes_on, self.left = self.goes_on, [], []
        return rest


class Waits:
    """Of one rank. `times`: of its loads."""

    def __init__(self, policy: WaitPolicy, times: LoadTimes, clock: Callable[[], float]) -> None:
        self.policy, self.times, self._clock = policy, times, clock
        self.num_late = self.num_left = 0

    def awaits(self, asked: Iterable[PendingLoads], under_way: Collection[Load]) -> bool:
        """Whether a request, which could be admitted, waits for what was asked for it. If not, it
        is `planned` next. `under_way`: all loads, in order."""
        parts = [each for each in asked if not each.is_planned]
        coming, now = [each for each in parts if each.is_coming], self._clock()
        if any(each.until is not None for each in parts):
            is_waiting = not self.is_over(parts)
            if not is_waiting:
                self.policy.ended(in_vain=bool(coming))
            return is_waiting
        if not coming:
            return False
        # what a lookup finds is loaded, too
        is_known = not any(each.is_looked_up for each in coming)
        own = [job for each in coming for job in each.loads] if is_known else under_way
        left = [size for each in coming for size in each.left]
        wait_s = self.policy.seconds(
            self.times.all_seconds(sizes_to_last(under_way, own, left)),
            max(each.saved_s for each in coming),
            now,
            partial(_came_at, coming) if is_known else None,
        )
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
        self.num_left += len(asked.left)
        asked.take_rest()
        for load in asked.loads:
            if not load.is_done and not load.is_late:
                load.is_late = True
                self.num_late += 1


def _came_at(asked: Sequence[PendingLoads]) -> float | None:
    is_left = any(each.goes_on for each in asked)
    return None if is_left else came_at([job for each in asked for job in each.jobs])
