"""A replay over several ranks (`--dp-size N`): each has a cache of its own, one front counts,
orders and routes for all.

The rules are the server's: `radix_ext.KvAware` over what each rank has of the chunks, and of a
conversation's history as far as the rank has served it. Requests take no time here, so `in_flight`
of them are always under way: one ends when as many have begun after it, or when its conversation
goes on. Questions and answers have no tokens, as in every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from eval.replay.exact import HostStats, Replay, ReplaySettings, RequestCount
from radix_ext import Chunk, KvAware


class RanksReplay:
    """`num_ranks` ranks; `step` as `exact.Replay`'s."""

    def __init__(
        self, settings: ReplaySettings, *, num_ranks: int, in_flight: int, max_load_ratio: float
    ) -> None:
        first = Replay(settings)
        self.ranks = [first, *(first.beside() for _ in range(num_ranks - 1))]
        self._router = KvAware(num_ranks, max_load_ratio=max_load_ratio)
        self._in_flight = in_flight
        self._under_way: dict[object, tuple[int, int]] = {}
        """Conversation, or an object of its own -> rank, prompt tokens;
        in the order of their beginning."""
        self._homes: dict[str, dict[int, int]] = {}
        """Conversation -> rank -> tokens of the history that it has served."""
        self._prompt_lens: dict[str, int] = {}
        self._served = [[0, 0, 0] for _ in self.ranks]
        """By rank: requests, their chunks, of these found cached."""
        self._num_later = self._num_left = 0
        self._loads, self._num_loads, self._sum_ratios = [0] * num_ranks, 0, 0.0

    def step(
        self,
        request: Sequence[Chunk],
        conversation: str | None = None,
        *,
        is_last_turn: bool = False,
        head: str | None = None,
    ) -> RequestCount:
        """Route one request, and have its rank serve it."""
        # Requests without a conversation need a name that equals no other.
        name: object = object() if conversation is None else conversation
        self._end(name)
        homes = self._homes.pop(conversation, {}) if conversation is not None else {}
        cached = {
            # Of a later turn `worth` knows the first turn's chunks, `homes` the whole history.
            rank: max(replay.worth(request, conversation, head=head), homes.get(rank, 0))
            for rank, replay in enumerate(self.ranks)
        }
        rank = self._router.choose(cached, homes)
        self._num_later += bool(homes)
        self._num_left += cached[rank] < max(homes.values(), default=0)
        count = self.ranks[rank].step(request, conversation, is_last_turn=is_last_turn, head=head)
        prompt_len = count.num_tokens - count.num_dropped_tokens
        if conversation is not None:
            prompt_len += self._prompt_lens.pop(conversation, 0)
            # Popped above and not put back: conversations that have ended take no memory.
            if not is_last_turn:
                self._prompt_lens[conversation], self._homes[conversation] = (
                    prompt_len,
                    {**homes, rank: prompt_len},
                )
        self._begin(name, rank, prompt_len)
        served = self._served[rank]
        served[:] = served[0] + 1, served[1] + count.num_chunks, served[2] + count.num_hits
        return count

    @property
    def num_evicted(self) -> int:
        """Of all ranks."""
        return sum(replay.num_evicted for replay in self.ranks)

    @property
    def peak_nodes(self) -> int:
        """Of the rank that had most."""
        return max(replay.peak_nodes for replay in self.ranks)

    @property
    def peak_tokens(self) -> int:
        """Likewise."""
        return max(replay.peak_tokens for replay in self.ranks)

    @property
    def host_stats(self) -> HostStats | None:
        """Sums over all ranks; None without a host tier."""
        found = [stats for replay in self.ranks if (stats := replay.host_stats) is not None]
        return HostStats(*map(sum, zip(*found, strict=True))) if found else None

    def order_us(self, q: float) -> float:
        """Of the rank where it takes longest."""
        return max(replay.order_us(q) for replay in self.ranks)

    @property
    def figures(self) -> dict[str, Any]:
        """For the sample: `by_rank` has requests, chunks, found cached and mean tokens in flight;
        `left` are later turns that another rank served than the one with most of the history;
        `busiest` is the largest of the ranks' means over their mean, `busiest_now` the mean of the
        same at each moment when `in_flight` requests are under way."""
        mean = sum(self._loads) / len(self._loads)
        columns = ("requests", "chunks", "hits", "tokens_in_flight")
        # A trace shorter than `in_flight` has no moment with so many under way.
        moments = max(1, self._num_loads)
        return {
            "by_rank": [
                dict(zip(columns, (*served, load / moments), strict=True))
                for served, load in zip(self._served, self._loads, strict=True)
            ],
            "later_turns": self._num_later,
            "left": self._num_left,
            "busiest": max(self._loads) / mean if mean else 1.0,
            "busiest_now": self._sum_ratios / moments,
        }

    # Private, in order of use

    def _begin(self, name: object, rank: int, num_tokens: int) -> None:
        self._under_way[name] = rank, num_tokens
        self._router.begin(rank, num_tokens)
        # While the ranks fill up, their loads say nothing of a busy server.
        if len(self._under_way) < self._in_flight:
            return
        loads = self._router.in_flight
        self._loads = [a + b for a, b in zip(self._loads, loads, strict=True)]
        self._num_loads += 1
        # Requests without chunks have no tokens, so all loads may be 0.
        self._sum_ratios += max(loads) * len(loads) / sum(loads) if any(loads) else 1.0
        self._end(next(iter(self._under_way)))

    def _end(self, name: object) -> None:
        if (ended := self._under_way.pop(name, None)) is not None:
            self._router.end(*ended)


def ranks_table(
    entries: Sequence[Mapping[str, Any]], settings: Callable[[Mapping[str, Any]], dict[str, str]]
) -> dict[str, Any]:
    """One row per cell. `settings` gives its first columns."""
    rows = []
    for entry in entries:
        ranks, by_rank = entry["ranks"], entry["ranks"]["by_rank"]
        num_requests = max(1, sum(rank["requests"] for rank in by_rank))
        later = ranks["later_turns"]
        rows.append(
            {
                **settings(entry["cell"]),
                "requests by rank": " ".join(
                    f"{rank['requests'] / num_requests:.0%}" for rank in by_rank
                ),
                "found by rank": " ".join(
                    f"{rank['hits'] / max(1, rank['chunks']):.1%}" for rank in by_rank
                ),
                "later turns": f"{later:,}",
                "left their rank": f"{ranks['left']:,} ({ranks['left'] / max(1, later):.1%})",
                "busiest / mean": f"{ranks['busiest']:.2f}",
                "at each moment": f"{ranks['busiest_now']:.2f}",
            }
        )
    note = (
        "Found: chunks of the rank's requests. Left: later turns served by another rank than the"
        " one with most of the history. Busiest: tokens in flight, of the rank with most over the"
        " trace, then of that at each moment. Warm-up too."
    )
    return {"title": "Ranks", "rows": rows, "note": note}
