"""One request's promised region, on its way from the promise to the report: what promise.py asks for and fill.py fills."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from radix_ext import FusionRequest
from radix_ext.moved_plan import Piece, ReusePlan
from sglang_chunkcache.wire.report import Fallback

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import TreeNode

    from radix_ext import Span
    from sglang_chunkcache.fusion.own_slots import OwnSlots
    from sglang_chunkcache.scheduler.pricing import Watch
    from sglang_chunkcache.wire.spans import RequestSpans


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
    shared: frozenset[int] = frozenset()
    """Span indices of the pieces that were promised with their source's slots."""
    own_slots: OwnSlots | None = None
    """Theirs; None: all are copied."""
    recomputed_len: int = 0
    shared_len: int = 0
    """Tokens whose slots are the source's, in the end."""
    focused: list[int] | None = None
    """Span indices of the chunks the question looks at; None: not asked for."""
    fallbacks: list[Fallback] = field(default_factory=list)
    ms: dict[str, float] = field(default_factory=dict)
    """Phase -> milliseconds of the whole batch, as the host sees them (queued work on a GPU is not waited for)."""
    outward: Any = None
    """What the chunks among its gaps attended to while they were computed (outward.py). None: not measured."""
    filling: Watch | None = None
    """What filling it took, on the device. None: it was filled with others, or is not filled yet."""

    @property
    def moved(self) -> list[Piece]:
        return [piece for piece in self.plan.pieces if piece.source is not None]

    @property
    def copied(self) -> list[Piece]:
        """The moved pieces that have slots of their own."""
        return [piece for piece in self.moved if piece.span not in self.shared]

    def claim(self, positions: list[int]) -> list[int]:
        """Make `positions` (ascending) the request's own to write; those for which there is no slot are left out."""
        writable = self._claim(positions, evicts=False)
        if len(writable) < len(positions):
            self.recomputed_len -= len(positions) - len(writable)
            self.fallbacks.append(Fallback.NO_OWN_SLOTS)
        return writable

    def claim_all(self) -> list[int]:
        """As `claim`, of the whole region, evicting for it. What is left out holds its moved KV, which is whole."""
        positions = list(range(self.plan.start, self.plan.end))
        writable = self._claim(positions, evicts=True)
        self.recomputed_len = self.plan.moved_len - (len(positions) - len(writable))
        return writable

    def _claim(self, positions: list[int], *, evicts: bool) -> list[int]:
        if self.own_slots is None:
            return positions
        self.slots, refused = self.own_slots.own(self.slots, positions, evicts=evicts)
        left = set(refused)
        return [position for position in positions if position not in left]


def move_of(req: Req, plan: ReusePlan, spans: RequestSpans, row: Tensor, shared: Mapping[int, TreeNode]) -> Move:
    """The request's plan with its slots. shared: sources by span index, of the pieces that have their source's slots."""
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
        shared=frozenset(shared),
    )


def rows_of(plan: ReusePlan, slots: Tensor, shared: Mapping[int, TreeNode]) -> list[Tensor]:
    """The slots of each piece: its source's where they are shared, the next of `slots` elsewhere."""
    rows, at = [], 0
    for piece in plan.pieces:
        if piece.span is not None and piece.span in shared:
            rows.append(shared[piece.span].value)
        else:
            rows.append(slots[at : at + piece.end - piece.start])
            at += piece.end - piece.start
    return rows
