"""What a trace has of which a page can be drawn: one pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from eval.replay.trace import TraceRequest

MAX_SLOTS, REQUESTS_PER_SLOT = 60, 25
"""At most, and at least on average: shares of few requests jump."""
HOUR_S, DAY_S = 3600, 86_400
SLOTS_S = (60, 300, 900, 1800, HOUR_S, 2 * HOUR_S, 6 * HOUR_S, 12 * HOUR_S, DAY_S, 7 * DAY_S)


@dataclass(slots=True)
class Survey:
    """Of the requests with chunks: what differs between them. Of heads and chunks of a log also
    what they are without times, ids, ranks and scores."""

    num_requests: int = 0
    has_times: bool = True
    first_s: float = math.inf
    last_s: float = -math.inf
    num_in_text: int = 0
    has_questions: bool = True
    heads: set[int] = field(default_factory=set)
    fronts: set[str] = field(default_factory=set)
    plain_fronts: set[str] = field(default_factory=set)
    chunks: set[str] = field(default_factory=set)
    plain_chunks: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)
    users: set[str | None] = field(default_factory=set)
    salts: set[str | None] = field(default_factory=set)

    @property
    def slot(self) -> float:
        """Width of a slot of the page's chart, in seconds, or in requests without times."""
        most = min(MAX_SLOTS, max(4, self.num_requests // REQUESTS_PER_SLOT))
        length = self.last_s - self.first_s if self.has_times else self.num_requests
        nice = (each for each in SLOTS_S if self.has_times and length / each < most)
        return next(nice, max(1, math.ceil(length / most)))


def survey(trace: Iterable[TraceRequest]) -> Survey:
    """Of the whole trace."""
    told = Survey()
    for request in trace:
        if not request.chunks:
            continue
        told.num_requests += 1
        told.heads.add(hash(request.head))
        told.has_times &= request.timestamp is not None
        if request.timestamp is not None:
            told.first_s = min(told.first_s, request.timestamp)
            told.last_s = max(told.last_s, request.timestamp)
        logged = request.logged
        told.has_questions &= logged is not None and logged.question is not None
        if logged is not None:
            told.fronts.add(logged.front)
            told.plain_fronts.add(logged.plain_front)
            told.chunks.update(chunk.id for chunk in request.chunks)
            told.plain_chunks.update(chunk.id for chunk in logged.plain_chunks)
            told.models.add(logged.model)
            told.users.add(logged.user)
            told.salts.add(logged.salt)
            told.num_in_text += logged.text_front is not None
    told.has_times &= told.last_s > told.first_s
    return told
