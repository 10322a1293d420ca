"""A replay's shares along the trace, by head and by the age of chunks, for a page."""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from collections.abc import Collection
from typing import Any

from eval.replay.exact import RequestCount
from eval.replay.survey import Survey
from eval.replay.trace import TraceRequest
from radix_ext import Chunk, ChunkId

MAX_HEADS = 8
MAX_NAME = 40
"""Characters; a longer head may be a prompt's text."""
AGES_S = (
    (60.0, "under a minute"),
    (600.0, "1 to 10 minutes"),
    (3600.0, "10 to 60 minutes"),
    (6 * 3600.0, "1 to 6 hours"),
    (86_400.0, "6 to 24 hours"),
    (float("inf"), "over a day"),
)
AGES_REQUESTS = (
    (10.0, "up to 10 requests"),
    (100.0, "11 to 100 requests"),
    (1000.0, "101 to 1,000 requests"),
    (10_000.0, "1,001 to 10,000 requests"),
    (float("inf"), "over 10,000 requests"),
)
"""Time, or requests, since a chunk was last retrieved: upper bounds."""


class Breakdown:
    """Sums of chunk tokens, or of chunks where not all lengths are known; requests of the warm-up
    are in none."""

    def __init__(self, survey: Survey, *, by_tokens: bool, warm_up: int) -> None:
        self._survey, self._by_tokens, self._warm_up = survey, by_tokens, warm_up
        self._ages = AGES_S if survey.has_times else AGES_REQUESTS
        self._slots: dict[int, list[int]] = defaultdict(lambda: [0, 0, 0])
        self._heads: dict[str, list[int]] = defaultdict(lambda: [0, 0, 0])
        self._by_age = [[0, 0] for _ in range(len(self._ages) + 1)]
        self._last: dict[ChunkId, float] = {}
        self._number = 0

    def step(
        self,
        request: TraceRequest,
        chunks: Collection[Chunk],
        *,
        count: RequestCount,
        found: Collection[Chunk],
    ) -> None:
        """A request with chunks, as it was served."""
        saved = (
            count.num_token_hits + count.num_dropped_tokens - count.num_lost_tokens
            if self._by_tokens
            else count.num_hits + count.num_dropped - count.num_lost
        )
        at = float(self._number) if request.timestamp is None else request.timestamp
        at = at if self._survey.has_times else float(self._number)
        start = self._survey.first_s if self._survey.has_times else 0.0
        is_measured = self._number >= self._warm_up
        self._number += 1
        ids = {chunk.id for chunk in found}
        total = 0
        for chunk in chunks:
            size = chunk.num_tokens if self._by_tokens else 1
            total += size
            last = self._last.get(chunk.id)
            self._last[chunk.id] = at
            if is_measured:
                age = self._by_age[0 if last is None else 1 + self._bucket(at - last)]
                age[0] += size
                age[1] += size * (chunk.id in ids)
        if is_measured:
            for sums in (
                self._slots[int((at - start) // self._survey.slot)],
                self._heads[_name(request)],
            ):
                sums[:] = sums[0] + 1, sums[1] + total, sums[2] + saved

    @property
    def sample(self) -> dict[str, Any]:
        """`slots`: [number, requests, total, saved]; `heads`: [name, requests, total, saved], most
        first, the others as one; `ages`: [since, total, found]."""
        heads = sorted(self._heads.items(), key=lambda each: -each[1][1])
        others = [
            sum(column) for column in zip(*(sums for _, sums in heads[MAX_HEADS:]), strict=True)
        ]
        shown = [[name, *sums] for name, sums in heads[:MAX_HEADS]]
        if others:
            shown.append([f"{len(heads) - MAX_HEADS:,} others together", *others])
        names = ["never before", *(name for _, name in self._ages)]
        return {
            "unit": "tokens" if self._by_tokens else "chunks",
            "slots": [[number, *sums] for number, sums in sorted(self._slots.items())],
            "heads": shown,
            "ages": [[name, *sums] for name, sums in zip(names, self._by_age, strict=True)],
        }

    def _bucket(self, age: float) -> int:
        return next(index for index, (limit, _) in enumerate(self._ages) if age <= limit)


def _name(request: TraceRequest) -> str:
    """Of its head. A log's is a digest; a trace's own name is one if it may be a text."""
    if (logged := request.logged) is not None:
        salt = "" if logged.salt is None else f", tenant {_digest(logged.salt)}"
        return f"{logged.model[:MAX_NAME]} prompt {logged.front[:6]}{salt}".strip()
    if request.head is None:
        return "no head named"
    is_name = re.fullmatch(rf"[\w.,:@/-]{{1,{MAX_NAME}}}", request.head)
    return request.head if is_name else _digest(request.head)


def _digest(text: str) -> str:
    encoded = text.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(encoded, digest_size=3).hexdigest()
