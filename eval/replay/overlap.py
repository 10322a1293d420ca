"""Upper bounds of reuse: what the requests of a trace share, before any order, cache size or
eviction.

A trace is streamed: each class takes one request after the other and keeps what later requests are
compared with.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeAlias

from radix_ext import Chunk, ChunkId
from radix_ext.errors import check_at_least

MAX_WINDOWS = 16
MEASURED_STRIDE = 5
"""Of an estimate's windows the second half is measured, every fifth request:
neighbours share too much to tell more."""

_Prefixes: TypeAlias = "dict[ChunkId, _Prefixes]"


class Overlap:
    """CRAFT 3.1's two measures of a trace as retrieved: how much prefixes share, and how much sets
    share.

    Each request is compared with all before it while the trace has at most `window` requests. That
    takes a bit for each pair of chunk and request, so a longer trace is estimated: from up to 16
    windows of `window` requests, evenly spread, every fifth request of the second half is compared
    with those before it in its window. An estimate is too low by what only older requests share.

    Args:
        num_requests: of the whole trace.
    Raises:
        LimitError: window < 1.
    """

    def __init__(self, num_requests: int, *, window: int) -> None:
        check_at_least("window", window, 1)
        self.is_estimate = num_requests > window
        self.num_measured = 0
        self._window = min(window, num_requests)
        num_windows = min(MAX_WINDOWS, num_requests // window) if self.is_estimate else 1
        self._stratum = max(1, num_requests // num_windows)
        self._end = num_windows * self._stratum
        self._prefix = self._total = 0.0
        self._index = 0
        self._past = _Past()

    def step(self, ids: Sequence[ChunkId]) -> None:
        """The next request: its distinct chunks in retriever order."""
        # A window is the end of its stratum, so that of one window the first requests are only
        # compared with.
        position = self._index % self._stratum - (self._stratum - self._window)
        is_used = position >= 0 and self._index < self._end
        self._index += 1
        if not is_used:
            return
        if position == 0:
            self._past = _Past()
        if self._is_measured(position):
            self.num_measured += 1
            prefix, total = self._past.shared(ids)
            self._prefix += prefix / max(1, len(ids))
            self._total += total / max(1, len(ids))
        self._past.add(ids)

    @property
    def prefix(self) -> float:
        """The mean over all requests i but the first of max_{j<i} LCP(R_i, R_j) / len(R_i);
        0 for fewer than two."""
        return self._prefix / max(1, self.num_measured)

    @property
    def total(self) -> float:
        """The same of max_{j<i} |R_i ∩ R_j| / len(R_i)."""
        return self._total / max(1, self.num_measured)

    def _is_measured(self, position: int) -> bool:
        if not self.is_estimate:
            return position > 0
        return position >= self._window / 2 and position % MEASURED_STRIDE == 0


class Recurrence:
    """Cache-Craft 2.4's reuse density (fig. 6b): how many of the last `WINDOW` requests begin with
    the same k chunks in the same order, which is what a prefix cache finds."""

    WINDOW, MAX_K = 1000, 5

    def __init__(self) -> None:
        self._last: deque[Sequence[ChunkId]] = deque()
        self._count: Counter[tuple[ChunkId, ...]] = Counter()
        self._rows = {k: [0, 0, 0] for k in range(1, self.MAX_K + 1)}

    def step(self, ids: Sequence[ChunkId]) -> None:
        """The next request: its distinct chunks in retriever order."""
        for tuple_ in self._tuples(ids):
            found, row = self._count[tuple_], self._rows[len(tuple_)]
            row[:] = row[0] + 1, row[1] + found, row[2] + (found > 0)
        self._last.append(ids)
        self._count.update(self._tuples(ids))
        if len(self._last) > self.WINDOW:
            left = [*self._tuples(self._last.popleft())]
            self._count.subtract(left)
            for tuple_ in left:
                if not self._count[tuple_]:
                    del self._count[tuple_]

    @property
    def density(self) -> list[dict[str, float]]:
        """Per k: mean number of such earlier requests, and the share of requests with any."""
        return [
            {"k": k, "earlier": earlier / num, "found": found / num}
            for k, (num, earlier, found) in self._rows.items()
            if num
        ]

    def _tuples(self, ids: Sequence[ChunkId]) -> Iterator[tuple[ChunkId, ...]]:
        return (tuple(ids[:k]) for k in range(1, min(len(ids), self.MAX_K) + 1))


class Seen:
    """Chunks that an earlier request retrieved too: what reuse at any position could find."""

    def __init__(self) -> None:
        self._ids: set[ChunkId] = set()

    def step(self, request: Sequence[Chunk]) -> tuple[int, int]:
        """(chunks, tokens) of the next request that are not new."""
        lengths = [chunk.num_tokens for chunk in request if chunk.id in self._ids]
        self._ids.update(chunk.id for chunk in request)
        return len(lengths), sum(lengths)


class _Past:
    """Earlier requests, numbered in their order."""

    def __init__(self) -> None:
        self._prefixes: _Prefixes = {}
        self._retrieved_by: dict[ChunkId, int] = {}  # bit j: request j has the chunk
        self._next_bit = 1

    def add(self, ids: Iterable[ChunkId]) -> None:
        node = self._prefixes
        for chunk in ids:
            node = node.setdefault(chunk, {})
            self._retrieved_by[chunk] = self._retrieved_by.get(chunk, 0) | self._next_bit
        self._next_bit <<= 1

    def shared(self, ids: Sequence[ChunkId]) -> tuple[int, int]:
        """(longest common prefix, most common chunks) of these distinct chunks with an earlier
        request."""
        node, length = self._prefixes, 0
        while length < len(ids) and ids[length] in node:
            node = node[ids[length]]
            length += 1
        return length, _most_shared([self._retrieved_by.get(chunk, 0) for chunk in ids])


def _most_shared(bit_sets: Sequence[int]) -> int:
    """The largest number of these bit sets that have one bit in common,
    by adding all bits up at once, column-wise."""
    columns: list[int] = []  # columns[n]: bit 2**n of every sum
    for carry in bit_sets:
        for n, column in enumerate(columns):
            columns[n], carry = column ^ carry, column & carry
        if carry:
            columns.append(carry)
    most, candidates = 0, -1
    # From the highest digit down: requests whose sum lacks a digit that others have cannot win.
    for n in reversed(range(len(columns))):
        if candidates & columns[n]:
            candidates &= columns[n]
            most += 1 << n
    return most
