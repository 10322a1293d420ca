"""What is loaded from a slower tier, where that pays, and how long a request waits for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import accumulate, combinations
from math import inf
from statistics import median
from typing import Any, Protocol

from radix_ext.chunk import ChunkId
from radix_ext.variants import Variant

MEMORY = 8  # loads that count: the median of them has followed after five whose time is another one


def worth_loading(
    variants: Iterable[Variant],
    before: Collection[ChunkId],
    head: str,
    *,
    max_variants: int,
    alone: bool = False,
    is_elsewhere: bool = False,
) -> list[Variant]:
    """Of one chunk's variants those to load, best first: preprocessed ones, then what has seen most
    of the chunks before it.

    Where one was computed behind this head, others are left out. Among equals the shorter prefix
    comes first, then the latest one.

    Args:
        before: the chunks before it in the request.
        head: names the text before it there that is no chunk.
        alone: only what was computed behind this head and no chunk, and was not preprocessed.
        is_elsewhere: only what was computed behind this head: others can be had without a load.
    """
    known = frozenset(before)
    found = list(variants)
    behind = [variant for variant in found if variant.head == head]
    if alone:
        found = [variant for variant in behind if variant.is_alone]
    elif behind or is_elsewhere:
        found = behind

    def score(variant: Variant) -> tuple[bool, int, int, int]:
        seen = len(known.intersection(variant.prefix))
        return variant.preprocessed, seen, -len(variant.prefix), variant.last_used

    return sorted(found, key=score, reverse=True)[:max_variants]


def load_in_order(
    chunks: Sequence[Any],
    load: Callable[[Any], bool | None],
    begun: dict[int, bool | None],
    *,
    max_gap_tokens: int,
) -> list[int]:
    """Load of what a prompt misses, in its order, what a plan could move: what is not loaded is
    computed, and behind more of that than `max_gap_tokens` nothing is moved.

    Args:
        chunks: each with its `num_tokens`.
        load: begins with a chunk. False: it finds no room yet; None: computing it is sooner, or
            there is nothing to load.
        begun: what `load` has said, by index. Only what found no room is asked for again.

    Returns:
        Which find no room yet.
    """
    left, gap_len = list[int](), 0
    for index, chunk in enumerate(chunks):
        if begun.get(index, False) is False:
            begun[index] = load(chunk)
        if begun[index] is False:
            left.append(index)
        gap_len += chunk.num_tokens if begun[index] is None else 0
        if gap_len > max_gap_tokens:
            break
    return left


def loading_pays(load_s: float | None, compute_s: float | None) -> bool:
    """Whether loading takes no longer than computing. What is not known (None, 0) is tried."""
    return not load_s or not compute_s or load_s <= compute_s


def pay_together(load_s: Sequence[float | None], computed_s: Sequence[float | None]) -> bool:
    """Whether all of a prompt's loads are estimated to take no longer than computing what they
    bring. One by one the first chunks of a long prompt are computed sooner than the last ones, and
    behind many that are computed nothing is moved."""
    if None in load_s or None in computed_s:
        return True
    return loading_pays(sum(filter(None, load_s)), sum(filter(None, computed_s)))


def num_fitting(lens: Iterable[int], room: int) -> int:
    """How many of a chain's nodes, the first ones, are loaded into so much room."""
    return sum(end <= room for end in accumulate(lens))


class LoadTimes:
    """What loads take, by what the last ones took: a fixed part and seconds a byte.

    The line through medians (Theil and Sen), which no single load that was held up can bend. Pure:
    it reads no clock.
    """

    def __init__(self) -> None:
        self._seen: deque[tuple[int, float]] = deque(maxlen=MEMORY)
        self._fixed = self._each = 0.0

    def observe(self, num_bytes: int, seconds: float) -> None:
        """A load of `num_bytes`, more than 0, took so long."""
        self._seen.append((num_bytes, seconds))
        pairs = [
            (right[1] - left[1]) / (right[0] - left[0])
            for left, right in combinations(self._seen, 2)
            if left[0] != right[0]
        ]
        # Of one size nobody can tell the parts apart: all to the bytes. Of nearly one size noise
        # makes any slope: at most that.
        whole = median(taken / size for size, taken in self._seen)
        self._each = min(max(0.0, median(pairs)), whole) if pairs else whole
        self._fixed = max(0.0, median(taken - self._each * size for size, taken in self._seen))

    def seconds(self, num_bytes: int) -> float | None:
        """An estimate. None: nothing was loaded yet."""
        return self._fixed + self._each * num_bytes if self._seen else None

    def all_seconds(self, sizes: Sequence[int]) -> float | None:
        """Of several loads, one after the other."""
        return self._fixed * len(sizes) + self._each * sum(sizes) if self._seen else None

    def bytes_within(self, seconds: float) -> float | None:
        """How many come in so much time, by one load. None: as of `seconds`."""
        if not self._seen:
            return None
        return max(0.0, seconds - self._fixed) / self._each if self._each else inf


class Transfer(Protocol):
    """A load, or what comes before one: one after the other, by one clock."""

    @property
    def size(self) -> int: ...
    @property
    def is_done(self) -> bool: ...
    @property
    def ended(self) -> float: ...


def sizes_to_last(
    under_way: Iterable[Transfer], own: Collection[Transfer], left: Sequence[int]
) -> list[int]:
    """Bytes that are loaded, in this order, until all of one's `own` has come: none behind its last
    one, unless more of it is `left` to be asked for."""
    jobs = list(under_way)
    while jobs and not left and jobs[-1] not in own:
        jobs.pop()
    return [*(job.size for job in jobs), *left]


def came_at(jobs: Collection[Transfer]) -> float | None:
    """When all of them had come. None: they have not."""
    if not all(job.is_done for job in jobs):
        return None
    return max((job.ended for job in jobs), default=0.0)


MAX_WAIT_S = 10.0  # also where nobody has measured yet what computing takes


class WaitPolicy:
    """How long a request that could be admitted waits for its loads.

    At most a share of what they save, so a wait in vain costs no more than that, and only where
    they are estimated to be here by then, as late as those were that a request looked for before.
    While these are overdue nobody waits: loads come in order. Pure: it reads no clock.
    """

    def __init__(self, share: float) -> None:
        self.share = share
        self.num_waits = self.num_in_vain = 0
        self._late_s = 0.0
        self._sought: tuple[float, Callable[[], float | None]] | None = None  # due, and came at

    def seconds(
        self,
        load: float | None,
        saved: float,
        now: float,
        came_at: Callable[[], float | None] | None,
    ) -> float:
        """How long to wait. `load`: what the loads are estimated to take from now on;
        None: nothing was loaded yet. `came_at`: when all had come, or None, they have not. None: of
        what comes too much is unknown to learn from."""
        late_s = self._lateness(now)
        most = min(MAX_WAIT_S, self.share * saved)
        if not most:
            return 0.0
        if self._sought is None and came_at is not None:
            # of the first loads nobody knows more than how long they are waited for
            self._sought = now + (most if load is None else load), came_at
        if (load or 0.0) + late_s > most:
            return 0.0
        self.num_waits += 1
        return most

    def ended(self, *, in_vain: bool) -> None:
        self.num_in_vain += in_vain

    def _lateness(self, now: float) -> float:
        if self._sought is None:
            return self._late_s
        due, came_at = self._sought
        came = came_at()
        if came is None:
            return self._late_s if now < due else inf
        self._late_s, self._sought = max(0.0, came - due), None
        return self._late_s
