"""Which rank serves a request: CRAFT's round-robin baseline, or the rank that already holds the
most of its prompt.

A router knows the prompt tokens in flight per rank (`begin` and `end`) and, per request, the tokens
that each rank has cached, of its conversation's history (homes.py) among others. It knows no tree
and no clock. Choosing changes nothing; only `begin` does.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import MappingProxyType

from radix_ext.errors import LimitError

NOTHING: Mapping[int, int] = MappingProxyType({})

_HISTORIES_AHEAD = 4
"""Of 64 simulated conversations on 4 ranks, with pauses from none to a minute, at most 8% of the
turns leave their rank by it, and 13% by 2; without pauses the busiest rank is as far above the mean
by either (eval/LOG.md)."""


class Router(ABC):
    """Chooses among ranks `[0, num_ranks)` and counts the prompt tokens each has in flight."""

    def __init__(self, num_ranks: int) -> None:
        self.num_ranks = num_ranks
        self._in_flight = [0] * num_ranks
        # Below any that began, and ascending: ranks without a request come first, in rank order.
        self._last_begun = [*range(-num_ranks, 0)]

    @abstractmethod
    def choose(
        self, cached_tokens: Mapping[int, int], history_tokens: Mapping[int, int] = NOTHING
    ) -> int:
        """Name the rank for a request of which rank r holds `cached_tokens[r]` tokens (absent:
        none), and of its conversation's earlier turns `history_tokens[r]`, among these.

        Of equal candidates the one that was not chosen for longest, in rank order at first.
        """

    def begin(self, rank: int, num_tokens: int) -> None:
        """A prompt is on its way to `rank`."""
        self._in_flight[rank] += num_tokens
        self._last_begun[rank] = max(self._last_begun) + 1

    def end(self, rank: int, num_tokens: int) -> None:
        """It is answered, failed or was aborted. Raises LimitError if more ends than began."""
        # A request that ended twice would make its rank look idle for as long as the front runs.
        if num_tokens > self._in_flight[rank]:
            raise LimitError(
                f"rank {rank} has {self._in_flight[rank]} tokens in flight but {num_tokens} ended"
            )
        self._in_flight[rank] -= num_tokens

    @property
    def in_flight(self) -> tuple[int, ...]:
        """Prompt tokens in flight, by rank."""
        return tuple(self._in_flight)


class RoundRobin(Router):
    """Each rank in turn, whatever it holds (CRAFT 4.2, the paper's baseline)."""

    def choose(
        self, cached_tokens: Mapping[int, int], history_tokens: Mapping[int, int] = NOTHING
    ) -> int:
        # By what was begun: a request that is only explained takes no turn.
        return (self._last_begun.index(max(self._last_begun)) + 1) % self.num_ranks


class KvAware(Router):
    """The rank with most cached tokens, unless its tokens in flight exceed `max_load_ratio` x the
    mean over all ranks.

    That alone would drive every second request away from its chunks while little is in flight: of
    two ranks, one with a single request has twice the mean. So a rank counts as overloaded only if
    its lead over the least loaded rank is also longer than what it has cached, that is, if waiting
    there costs more than computing elsewhere.

    A conversation's history is worth more patience. Computed on another rank it serves no other
    request, and most of what a rank with histories has in flight is cached there, so that nobody
    waits for it. So a rank that has the history is overloaded only if it is also above the mean by
    `_HISTORIES_AHEAD` times what it has of it.

    Then the next best that is not overloaded; at least one rank never is: max_load_ratio >= 1.
    Equal cached tokens go to the less loaded rank, equal load by turns, so that cold requests
    spread over the ranks' caches.
    """

    def __init__(self, num_ranks: int, *, max_load_ratio: float) -> None:
        super().__init__(num_ranks)
        self.max_load_ratio = max_load_ratio

    def choose(
        self, cached_tokens: Mapping[int, int], history_tokens: Mapping[int, int] = NOTHING
    ) -> int:
        mean, least = sum(self._in_flight) / self.num_ranks, min(self._in_flight)
        candidates = [
            rank
            for rank, load in enumerate(self._in_flight)
            if load <= self.max_load_ratio * mean
            or load - least <= cached_tokens.get(rank, 0)
            or load - mean <= _HISTORIES_AHEAD * history_tokens.get(rank, 0)
        ]

        def preference(rank: int) -> tuple[int, int, int]:
            return -cached_tokens.get(rank, 0), self._in_flight[rank], self._last_begun[rank]

        return min(candidates, key=preference)
