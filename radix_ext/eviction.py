"""Which node leaves a full cache first: a function of counts, which knows no tree and no clock. Its
value is a priority: the smallest is evicted first."""

from array import array
from math import log2

_MAX_AGES = 1 << 16
"""Requests whose age is known; what was used before them is as old as the first of them."""

NEW = 0.1
"""What a node of the KV pool has before its first hit, in doublings of its hits. The smaller, the
longer what was popular stays: until what changes in the pool has turned over by ten times a
doubling."""
NEW_ON_HOST = 0.25
"""Likewise in host memory, which has more room, and so turns over later, and takes what was found
once already (eval/LOG.md)."""


TURNED_AWAY = 4
"""Newcomers that are turned away fill no tier. As many as a quarter of it would hold age it as one
that has come and left, or dead nodes would stay where little may come (eval/LOG.md)."""


class Aging:
    """The rule `reused`: least frequently used with dynamic aging (LFU-DA, Arlitt et al. 2000), by
    the logarithm of the hits. One for each tier, since the tier's own evictions are its time.

        priority = age at the last access + new + log2(1 + hits)
        age      = the highest priority that has left

    So a popular node outlives its popularity by some turnovers of what changes in the pool. Where
    dead nodes fill most of it the rest turns over soon, and so they leave soon, however long a
    window of requests is. It follows from requests, evictions and what is turned away, never from a
    clock: ranks, and a replay, decide alike. Without hits it is LRU.

    Args:
        new: of a node without hits, over 0.
    """

    def __init__(self, new: float) -> None:
        self._new, self._age = new, 0.0
        self._ages = array("d")
        self._first = 0

    def priority(self, *, hits: int, last_access: int) -> float:
        """The smallest leaves first.

        Args:
            hits: requests that found the node.
            last_access: number of the request that used it last.
        """
        index = last_access - self._first
        # Ages are written by evictions: without one since that request the age is the same.
        age = self._ages[max(0, index)] if index < len(self._ages) else self._age
        return age + self._new + log2(1 + hits)

    def now(self, hits: int) -> float:
        """The priority of what is used now, for a tier that keeps it until the next use."""
        return self._age + self._new + log2(1 + hits)

    def resume(self, priority: float, hits: int) -> None:
        """An earlier tier has kept this: this one is at least as old as it was at its last use."""
        self._age = max(self._age, priority - self._new - log2(1 + hits))

    def turned_away(self, share: float) -> None:
        """What would have taken this share of the tier was not admitted. For a tier that asks for
        `now` alone: the ages of earlier requests are written by evictions."""
        self._age += self._new * TURNED_AWAY * share

    def left(self, priority: float) -> None:
        """What has kept this priority since its last use has left."""
        self._age = max(self._age, priority)

    def evicted(self, priority: float, now: int) -> None:
        """A node of that priority has left during request `now`. All that the request uses counts
        from before that. O(1), amortised."""
        # Written before the age rises, so that what `now` uses is no younger by its own evictions.
        if (missing := now + 1 - self._first - len(self._ages)) > 0:
            if missing >= _MAX_AGES:
                del self._ages[:]
            # Cut at twice the length: a cut for each eviction would move all ages each time.
            elif missing + len(self._ages) > 2 * _MAX_AGES:
                del self._ages[:-_MAX_AGES]
            self._ages.extend([self._age] * min(missing, _MAX_AGES))
            self._first = now + 1 - len(self._ages)
        self.left(priority)
