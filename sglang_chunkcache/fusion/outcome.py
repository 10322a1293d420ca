"""What became of a request that asked for moved KV, and how that is told to the front."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from radix_ext.moved_plan import ReusePlan
from sglang_chunkcache.fusion.move import Move
from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.scheduler.pricing import Timer
from sglang_chunkcache.wire.report import Fallback, Source

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req


NO_PLAN = ReusePlan(())


@dataclass
class Outcome:
    """What became of one request that asked for moved KV."""

    exact: int = 0
    fused_hit: int = 0
    plan: ReusePlan = NO_PLAN
    move: Move | None = None
    declined: list[Fallback] = field(default_factory=list)
    lookup_s: float = 0.0
    extends: list[Timer] = field(default_factory=list)
    """The forwards of its prompt's pieces."""
    is_alone: bool = True
    """In all of them."""
    is_uncalibrated: bool = False
    """It asks for a quality of which nothing is known."""


def outcome_of(req: Req) -> Outcome:
    """The request's, a new one where nothing was matched yet."""
    found: Outcome | None = state(req).promise
    return found or Outcome()


def in_ms(plan: ReusePlan) -> dict[str, float]:
    seconds = plan.estimate._asdict() if plan.estimate is not None else {}
    return {name: 1000 * value for name, value in seconds.items()}


def selector_of(req: Req, plan: ReusePlan) -> str | None:
    """What has chosen the recomputed tokens: of the plan, or of the fused KV that was found."""
    spans, fused = state(req).spans, state(req).fused
    if spans is None or spans.fusion is None:
        return None
    asked = spans.fusion
    # A plan that recomputes nothing has chosen nothing.
    if plan.fusion is not None and plan.recomputed_len:
        chosen = plan.fusion
    elif fused is not None:
        cheaper = asked.cheaper
        # By its end: the front's `asked` lacks the calibration, which `fused` names before that.
        by_cheaper = cheaper is not None and fused.recipe.endswith(
            cheaper.recipe.removeprefix(asked.recipe)
        )
        chosen = cheaper if cheaper and by_cheaper else asked
    else:
        return None
    is_unfocused = chosen.selector == asked.selector and chosen.focus != asked.focus
    return f"{chosen.selector} without focus" if is_unfocused else chosen.selector


def reasons_of(plan: ReusePlan) -> tuple[Fallback, ...]:
    return tuple(Fallback[reason.upper()] for reason in plan.fallbacks)


def sources_of(plan: ReusePlan) -> tuple[Source, ...]:
    """One per piece."""
    return tuple(
        Source(piece.start, piece.end, piece.span, "gap")
        if piece.source is None
        else Source(
            piece.start,
            piece.end,
            piece.span,
            piece.source.where,
            len(piece.source.facts.prefix),
            piece.overlap,
            piece.cfo,
            piece.other_head,
        )
        for piece in plan.pieces
    )
