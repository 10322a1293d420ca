"""Loads for requests that may come: how much a tenant may have under way, and three counters that
tell whether they pay.

requested   loads begun   loaded   of these, those that came   used   of the chunks, those that a
                                                                      request asked for
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable

LIFE = 256
"""Requests. A chunk that is asked for later counts as not used:
it would have been loaded for others."""


class Prefetches:
    """Of one rank. `max_bytes`: that a tenant may have under way, by now."""

    def __init__(self, max_bytes: Callable[[], float]) -> None:
        self.max_bytes = max_bytes
        self._under_way: Counter[Hashable] = Counter()
        self._coming: Counter[Hashable] = Counter()  # chunk -> its loads under way
        self._awaited: set[Hashable] = set()  # of these chunks, those that a request has asked for
        self._unused: dict[Hashable, int] = {}
        """Chunk -> requests before its load began. The oldest first."""
        self._num_requests = 0
        self._counts = {"requested": 0, "loaded": 0, "used": 0}

    def has_room(self, tenant: Hashable, num_bytes: int) -> bool:
        """Whether so much more may be under way for the tenant. One load may, whatever its size."""
        under_way = self._under_way.get(tenant, 0)
        return not under_way or under_way + num_bytes <= self.max_bytes()

    def begin(self, tenant: Hashable, num_bytes: int, chunk: Hashable) -> None:
        """A load of so many bytes has started, of which `end` tells."""
        self._counts["requested"] += 1
        self._under_way[tenant] += num_bytes
        self._coming[chunk] += 1
        # Keeps its place: the first is the oldest.
        self._unused.setdefault(chunk, self._num_requests)

    def end(self, tenant: Hashable, num_bytes: int, chunk: Hashable, *, has_come: bool) -> None:
        self._counts["loaded"] += has_come
        self._under_way[tenant] -= num_bytes
        # Clients may invent tenants without end; those with nothing under way keep no entry.
        if not self._under_way[tenant]:
            del self._under_way[tenant]
        self._coming[chunk] -= 1
        if has_come and chunk in self._awaited:
            self._awaited.remove(chunk)
            self._counts["used"] += 1
        if not self._coming[chunk]:
            del self._coming[chunk]
            self._awaited.discard(chunk)
            if not has_come:
                self._unused.pop(chunk, None)

    @property
    def num_bytes(self) -> int:
        """Under way for all tenants."""
        return self._under_way.total()

    def asked(self, chunk: Hashable) -> None:
        """A request asks for the chunk. One that is still under way is used when it has come."""
        # Gone, so that a second request counts no use.
        if self._unused.pop(chunk, None) is None:
            return
        if chunk in self._coming:
            self._awaited.add(chunk)
        else:
            self._counts["used"] += 1

    def next_request(self) -> None:
        self._num_requests += 1
        while self._unused and self._num_requests - next(iter(self._unused.values())) > LIFE:
            del self._unused[next(iter(self._unused))]

    def stats(self) -> dict[str, int]:
        return dict(self._counts)
