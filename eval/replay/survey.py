"""What a trace has of which a page can be drawn: one pass."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from eval.replay.trace import TraceRequest

MAX_SLOTS, REQUESTS_PER_SLOT = 60, 25
"""At most, and at least on average: shares of few requests jump."""
SLOT_WIDTHS = (60, 300, 900, 1800, 3600, 7200, 6 * 3600, 12 * 3600, 86_400, 7 * 86_400, 30 * 86_400)
"""Seconds."""


@dataclass(slots=True)
class Survey:
    """Of the requests with chunks. `num_*` of heads, users and salts are different ones; of a log
    also with what a mistake leaves out."""

    num_requests: int = 0
    num_chunks: int = 0
    first_s: float = math.inf
    last_s: float = -math.inf
    has_times: bool = True
    num_heads: int = 0
    num_models: int = 0
    num_fronts: int = 0
    num_plain_fronts: int = 0
    num_salts: int = 0
    num_users: int = 0
    num_labelled: int = 0
    """Of the chunks, those that are others' texts but for ranks and scores."""
    num_in_text: int = 0
    has_questions: bool = True

    @property
    def slot(self) -> float:
        """Width of a slot of the page's charts, in seconds, or in requests without times."""
        most = min(MAX_SLOTS, max(4, self.num_requests // REQUESTS_PER_SLOT))
        if not self.has_times:
            return max(1, math.ceil(self.num_requests / most))
        length = self.last_s - self.first_s
        fitting = (each for each in SLOT_WIDTHS if length / each <= most)
        return next(fitting, math.ceil(length / most))


def survey(trace: Iterable[TraceRequest]) -> Survey:
    """Of the whole trace."""
    told = Survey()
    heads, models, fronts, plain = set[int](), set[str](), set[str](), set[str]()
    chunks, bare = set[str](), set[str]()
    salts, users = set[str | None](), set[str]()
    for request in trace:
        if not request.chunks:
            continue
        told.num_requests += 1
        chunks.update(chunk.id for chunk in request.chunks)
        heads.add(hash(request.head))
        if request.timestamp is None:
            told.has_times = False
        else:
            told.first_s = min(told.first_s, request.timestamp)
            told.last_s = max(told.last_s, request.timestamp)
        logged = request.logged
        told.has_questions &= logged is not None and logged.question is not None
        if logged is not None:
            models.add(logged.model)
            fronts.add(logged.front)
            plain.add(logged.plain_front)
            salts.add(logged.salt)
            users |= {logged.user} if logged.user else set()
            bare.update(chunk.id for chunk in logged.plain_chunks)
            told.num_in_text += logged.text_front is not None
    told.has_times &= told.last_s > told.first_s
    told.num_chunks, told.num_heads, told.num_models = len(chunks), len(heads), len(models)
    told.num_fronts, told.num_plain_fronts = len(fronts), len(plain)
    told.num_labelled = len(chunks) - len(bare) if bare else 0
    told.num_salts, told.num_users = len(salts), len(users)
    return told
