"""What is measured in one pass over a trace: a cell takes one request after the other and ends as
one sample.

A sample has counts, not requests: each list has an entry for every bin of `bin` consecutive
measured requests, so that a trace of any length takes at most MAX_BINS entries. Warm-up requests
are in no bin, requests without chunks neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import add
from typing import Any

from eval.progress import Bar
from eval.replay.breakdown import Breakdown
from eval.replay.exact import Replay
from eval.replay.grid import Cell
from eval.replay.overlap import Overlap, Recurrence, Seen
from eval.replay.ranks import RanksReplay
from eval.replay.trace import TraceFacts, TraceRequest

Sample = dict[str, Any]
MAX_BINS = 16_384
OVERLAP_WINDOW = 20_000
"""Longest trace whose overlap is computed exactly:
about a second, and at most 250 MB where no chunk is retrieved twice."""
CHUNK_COUNTS = ("chunks", "hits", "dropped", "lost")
TOKEN_COUNTS = ("tokens", "token_hits", "dropped_tokens", "lost_tokens")
HOST_COUNTS = {"chunks": "host_hits", "tokens": "host_token_hits"}
"""Of the hits, those loaded from host memory."""


def measure(cell: Any, trace: Iterable[TraceRequest], bar: Bar) -> Sample:
    """The sample of one pass over the trace."""
    for number, request in enumerate(trace, start=1):
        cell.step(request)
        if number % 256 == 0:
            bar.update(256)
    bar.update(number % 256)
    sample: Sample = cell.sample
    return sample


class Bins:
    """Sums of counts over bins of consecutive requests;
    the first `warm_up` requests are left out."""

    def __init__(self, names: Sequence[str], *, warm_up: int) -> None:
        self.num_requests = 0
        self._columns: dict[str, list[int]] = {name: [] for name in names}
        self._warm_up, self._size, self._num_bins = warm_up, 1, 0

    def add(self, counts: Iterable[int]) -> None:
        """One request's counts, in the order of the names."""
        if self._warm_up:
            self._warm_up -= 1
            return
        if self.num_requests % self._size:
            for column, count in zip(self._columns.values(), counts, strict=True):
                column[-1] += count
        else:
            # MAX_BINS is even, so pairs leave no bin over, and a new one begins afterwards, too.
            if self._num_bins == MAX_BINS:
                self._join_pairs()
            for column, count in zip(self._columns.values(), counts, strict=True):
                column.append(count)
            self._num_bins += 1
        self.num_requests += 1

    @property
    def sample(self) -> Sample:
        """The bins' part of a sample."""
        return {"bin": self._size, "num_requests": self.num_requests, **self._columns}

    def _join_pairs(self) -> None:
        for column in self._columns.values():
            # In place, since `_columns` has the list itself.
            column[:] = map(add, column[::2], column[1::2])
        self._size, self._num_bins = 2 * self._size, self._num_bins // 2


class TraceCell:
    """What a trace's requests share, whatever the cache."""

    def __init__(self, k: int | None, facts: TraceFacts, *, warm_up: int) -> None:
        self._k, self._facts = k, facts
        # `Overlap` spreads its windows over the trace, so it must know the length beforehand.
        self._overlap, self._seen = Overlap(facts.num_counted, window=OVERLAP_WINDOW), Seen()
        self._recurrence = Recurrence()
        self._bins = Bins(("chunks", "seen_chunks", "tokens", "seen_tokens"), warm_up=warm_up)

    def step(self, request: TraceRequest) -> None:
        """Compare the request with those before it."""
        chunks = request.chunks[: self._k]
        if chunks:
            ids = [chunk.id for chunk in chunks]
            self._overlap.step(ids)
            self._recurrence.step(ids)
            seen_chunks, seen_tokens = self._seen.step(chunks)
            self._bins.add(
                (len(chunks), seen_chunks, sum(chunk.num_tokens for chunk in chunks), seen_tokens)
            )

    @property
    def sample(self) -> Sample:
        """`overlap` and `heads` of the whole trace, and per bin the chunks that were retrieved
        before."""
        overlap = self._overlap
        estimated_from = overlap.num_measured if overlap.is_estimate else None
        figures = {
            "prefix": overlap.prefix,
            "total": overlap.total,
            "estimated_from": estimated_from,
            "density": self._recurrence.density,
        }
        unknown = {} if self._facts.has_lengths else {"tokens": None, "seen_tokens": None}
        facts = self._facts
        heads = {
            "requests": facts.num_counted,
            "headed": facts.num_headed,
            "heads": facts.num_heads,
        }
        return {"k": self._k, "heads": heads, "overlap": figures, **self._bins.sample, **unknown}


class ReplayCell:
    """A replay of one cell of the grid.

    Args:
        replay: what serves the requests instead of the cell's `Replay`: it has the same `step`,
            which returns `counts`.
        breakdown: what a page shows, as `breakdown` in the sample.
    """

    def __init__(
        self,
        cell: Cell,
        facts: TraceFacts,
        *,
        warm_up: int,
        replay: Any = None,
        counts: Sequence[str] = (*CHUNK_COUNTS, *TOKEN_COUNTS, *HOST_COUNTS.values()),
        breakdown: Breakdown | None = None,
    ) -> None:
        self._cell, self._facts = cell, facts
        self._replay = Replay(cell.settings) if replay is None else replay
        self._breakdown = breakdown
        # A copy, since every cell counts down from the same facts.
        self._turns_left = dict(facts.num_turns)
        self._bins = Bins(counts, warm_up=warm_up)

    def step(self, request: TraceRequest) -> None:
        """Serve the request from the cache.
        A conversation is forgotten after its last turn in the trace."""
        conversation = request.conversation
        is_last_turn = True
        if conversation in self._turns_left:
            self._turns_left[conversation] -= 1
            is_last_turn = not self._turns_left[conversation]
        chunks = request.chunks[: self._cell.k]
        count = self._replay.step(
            chunks,
            conversation,
            is_last_turn=is_last_turn,
            head=request.head,
        )
        # A turn without chunks is in no bin; serving it ends its conversation when it is the last.
        if count.num_chunks:
            self._bins.add(count)
            if self._breakdown is not None:
                self._breakdown.step(request, chunks, count=count, found=self._replay.found)

    @property
    def sample(self) -> Sample:
        """Per bin the counts of `exact.RequestCount`; those of tokens are None unless all
        lengths are known.

        `host` has what was copied and loaded in the whole trace; without a host tier neither it nor
        its hits are there.
        """
        replay, bins = self._replay, self._bins.sample
        stats = replay.host_stats
        names = bins.keys() if stats else bins.keys() - HOST_COUNTS.values()
        # Chunks without a length have one token each, so these would count chunks again.
        unknown = () if self._facts.has_lengths else (*TOKEN_COUNTS, HOST_COUNTS["tokens"])
        return {
            "cell": self._cell.label,
            **{name: None if name in unknown else bins[name] for name in bins if name in names},
            **({"host": stats._asdict()} if stats else {}),
            **({"ranks": replay.figures} if isinstance(replay, RanksReplay) else {}),
            **({"breakdown": self._breakdown.sample} if self._breakdown else {}),
            "num_evicted": replay.num_evicted,
            "peak_nodes": replay.peak_nodes,
            "peak_tokens": replay.peak_tokens if self._facts.has_lengths else None,
            "order_us_p50": round(replay.order_us(0.5), 2),
            "order_us_p99": round(replay.order_us(0.99), 2),
        }
