"""One request's promised region: what promise.py asks for and fill.py fills."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from radix_ext import FusionRequest
from radix_ext.moved_plan import Piece, ReusePlan
from sglang_chunkcache.wire.report import Fallback

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from radix_ext import Span
    from sglang_chunkcache.scheduler.pricing import Timer
    from sglang_chunkcache.wire.spans import RequestSpans


@dataclass(frozen=True, eq=False)
class Tail:
    """All that a request computes behind its promised region."""

    token_ids: Tensor
    """[n] int64, CPU."""
    slots: Tensor
    """[n] int64, on the pool's device."""


@dataclass(eq=False)
class Move:
    """One request's promised region, and afterwards what became of it."""

    plan: ReusePlan
    fusion: FusionRequest
    slots: Tensor
    """[plan.end] int64: the slots of the whole prompt up to there."""
    token_ids: array[int]
    """[plan.end]"""
    question_ids: array[int]
    question_start: int
    row_index: Callable[[], int]
    """The request's row in `req_to_token`, once it has one."""
    spans: Sequence[Span] = ()
    """The request's chunks."""
    tail: Tail | None = None
    """What the pass computes behind the region. None: SGLang's forward does."""
    num_reserved: int = 0
    """Rows of the pool for what is recomputed (sharing.py)."""
    shared: Tensor = field(default_factory=partial(torch.zeros, 0, dtype=torch.bool))
    """[plan.end] bool: has a row that others had before; empty: none has."""
    is_lost: bool = False
    """It could not be filled, not even by computing it."""
    recomputed_len: int = 0
    whole: frozenset[int] = frozenset()
    """Where moved chunks begin that are sources from now on, since all of them was recomputed."""
    focused: list[int] | None = None
    """Span indices of the chunks the question looks at; None: not asked for."""
    fallbacks: list[Fallback] = field(default_factory=list)
    ms: dict[str, float] = field(default_factory=dict)
    """Phase -> milliseconds of the whole batch on the host, which waits for no queued work."""
    outward: Any = None
    """What the chunks among its gaps attended to (outward.py). None: not measured."""
    filling: Timer | None = None
    """What filling it took, on the device. None: filled with others, or not yet."""

    @property
    def moved(self) -> list[Piece]:
        return [piece for piece in self.plan.pieces if piece.source is not None]


def move_of(req: Req, plan: ReusePlan, spans: RequestSpans, row: Tensor) -> Move:
    """The request's plan with its slots."""
    assert plan.fusion is not None
    return Move(
        plan=plan,
        fusion=plan.fusion,
        slots=row,
        token_ids=req.origin_input_ids[: plan.end],
        question_ids=req.origin_input_ids[spans.spans[-1].end :],
        question_start=spans.spans[-1].end,
        row_index=lambda: req.kv.req_pool_idx,
        spans=spans.spans,
    )
