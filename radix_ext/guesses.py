"""Loads for requests that may come: how much a tenant may have under way, and whether what came was wanted.

    hint        a client names chunks ahead of its request        search    the first lists of an index, before all of them
    next_turn   what resembles the chunks of an answer, while the user reads

A chunk that was loaded on a guess is used when a request asks for it within `LIFE` requests, and wasted else.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Hashable
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

LIFE = 256
"""Requests. A guess that comes true later was no guess: the chunk would have been loaded for others."""
WORTH = 0.25
"""Of the loads of a kind the share that must be used: a wasted one takes time of the disk, and the place of what is asked for
less."""
JUDGED = 64
"""Loads of a kind that are looked at, the last ones; fewer than a quarter of them say nothing."""


class Guess(StrEnum):
    """Why a request is expected."""

    HINT = "hint"
    SEARCH = "search"
    NEXT_TURN = "next_turn"


class _Open(NamedTuple):
    guess: Guess
    since: int
    """Number of the request that came last."""


@dataclass
class GuessCounts:
    """Of one kind, since the start."""

    loads: int = 0
    """Chunks."""
    used: int = 0
    wasted: int = 0
    over: int = 0
    """Not loaded: the tenant has too much under way."""


@dataclass
class _Kind:
    counts: GuessCounts = field(default_factory=GuessCounts)
    last: deque[bool] = field(default_factory=lambda: deque(maxlen=JUDGED))
    """Whether a load was used, the last ones."""


class Guesses:
    """Of one rank. `max_bytes`: that a tenant may have under way."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._under_way: Counter[Hashable] = Counter()
        self._loading: dict[Hashable, bool] = {}
        """Whether a request has asked for what is under way."""
        self._open: OrderedDict[Hashable, _Open] = OrderedDict()
        """Loaded, and neither used nor wasted yet. The oldest first."""
        self._kinds = {guess: _Kind() for guess in Guess}
        self._num_requests = 0

    def has_room(self, guess: Guess, tenant: Hashable, num_bytes: int) -> bool:
        """Whether so much more may be under way for the tenant. One load may, whatever its size."""
        under_way = self._under_way.get(tenant, 0)
        has_room = not under_way or under_way + num_bytes <= self.max_bytes
        self._kinds[guess].counts.over += not has_room
        return has_room

    def begin(self, tenant: Hashable, num_bytes: int, chunk: Hashable) -> None:
        """A load of so many bytes has started, of which `end` tells."""
        self._under_way[tenant] += num_bytes
        self._loading[chunk] = False

    def end(self, guess: Guess, tenant: Hashable, num_bytes: int, chunk: Hashable, *, has_come: bool) -> None:
        """It is over."""
        self._under_way[tenant] -= num_bytes
        if not self._under_way[tenant]:
            del self._under_way[tenant]
        is_used = self._loading.pop(chunk, False)  # False: of two prefixes, the one that came second
        if not has_come or chunk in self._open:
            return
        self._kinds[guess].counts.loads += 1
        if is_used:
            self._settle(guess, is_used=True)
        else:
            self._open[chunk] = _Open(guess, self._num_requests)

    @property
    def num_bytes(self) -> int:
        """Under way for all tenants."""
        return self._under_way.total()

    def asked(self, chunk: Hashable) -> None:
        """A request asks for the chunk, which may still be under way."""
        if chunk in self._loading:
            self._loading[chunk] = True
        if (found := self._open.pop(chunk, None)) is not None:
            self._settle(found.guess, is_used=True)

    def next_request(self) -> None:
        """A request was counted."""
        self._num_requests += 1
        while self._open and self._num_requests - next(iter(self._open.values())).since > LIFE:
            self._settle(self._open.popitem(last=False)[1].guess, is_used=False)

    def pays(self, guess: Guess) -> bool:
        """Whether enough of the last ones were used. Too few say nothing."""
        last = self._kinds[guess].last
        return len(last) < JUDGED // 4 or sum(last) >= WORTH * len(last)

    def stats(self) -> dict[str, Any]:
        """Counts by kind, of those that there were."""
        kinds = ((guess.value, kind.counts) for guess, kind in self._kinds.items())
        return {name: asdict(counts) for name, counts in kinds if counts != GuessCounts()}

    def _settle(self, guess: Guess, *, is_used: bool) -> None:
        kind = self._kinds[guess]
        kind.last.append(is_used)
        kind.counts.used += is_used
        kind.counts.wasted += not is_used
