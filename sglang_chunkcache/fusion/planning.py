"""What a request that asks for moved KV finds at its admission: an exact prefix, then fused nodes
of its recipe, then a plan for what follows (radix_ext/moved_plan.py). Nothing is taken."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection
from dataclasses import replace
from itertools import takewhile
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.base_prefix_cache import MatchResult

from radix_ext import ChunkId, FusionRequest, text_before
from radix_ext.costs import explores
from radix_ext.exact_growth import exact_gaps
from radix_ext.moved_plan import Limits, ReusePlan, make_plan
from radix_ext.sources import ChunkSources
from sglang_chunkcache import compat
from sglang_chunkcache.fusion.fill import FusionPass
from sglang_chunkcache.fusion.outcome import outcome_of
from sglang_chunkcache.scheduler.chunk_key import ChunkKey, Fused
from sglang_chunkcache.scheduler.node import ChunkIdentity, state
from sglang_chunkcache.wire.report import Fallback
from sglang_chunkcache.wire.spans import RequestSpans

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.radix_cache import TreeNode

    from sglang_chunkcache.scheduler.chunk_tree import ChunkTree

logger = logging.getLogger(__name__)

TRIED_UP_TO = 1.5
"""A plan that is estimated to take longer than this multiple of computing is never tried."""


class _Growing:
    """Chunks that an exact chain grows by with requests under way, after the node where it ends:
    whoever follows, before those are inserted, would compute them once more."""

    def __init__(self) -> None:
        self._now, self._before = set[tuple[int, ChunkId]](), set[tuple[int, ChunkId]]()

    def __contains__(self, growth: tuple[int, ChunkId]) -> bool:
        return growth in self._now or growth in self._before

    def add(self, node: TreeNode, plan: ReusePlan, spans: RequestSpans) -> None:
        """By the first gap of this plan, if it is a chunk before all that is moved."""
        leading = takewhile(lambda piece: piece.source is None, plan.pieces)
        for index in [piece.span for piece in leading if piece.span is not None][:1]:
            self._now.add((node.id, spans.spans[index].chunk))

    def forward(self) -> None:
        """One is over. SGLang inserts a batch's requests before the next but one."""
        self._now, self._before = set(), self._now


class Planner:
    """Of one rank.

    Args:
        fusion_pass: has the calibration and the prices.
    """

    def __init__(
        self, tree: ChunkTree, sources: ChunkSources, fusion_pass: FusionPass, limits: Limits
    ) -> None:
        self._tree, self._sources = tree, sources
        self._fusion_pass, self._limits = fusion_pass, limits
        self._num_skipped = 0
        self.growing = _Growing()

    def match(
        self, req: Req, key: ChunkKey, spans: RequestSpans, result: MatchResult
    ) -> MatchResult:
        """Extend an exact match by fused nodes of the request's recipe and by what can be moved.
        Takes nothing."""
        assert spans.fusion is not None
        fusion = self._fusion_pass.calibration.resolve(spans.fusion)
        started = time.perf_counter()
        node, exact = result.last_device_node, compat.num_matched(result)
        if fusion.plain and exact:  # chunks of an exact chain were computed after others
            values, node = self._tree._match_prefix_helper(
                self._tree.root_node, key[: spans.spans[0].end]
            )
            exact = sum(map(len, values))
        start = exact
        if any(span.start == exact for span in key.spans):
            cheaper = None if fusion.always else fusion.cheaper
            for choice in filter(None, (fusion, cheaper)):
                values, last = self._tree._match_prefix_helper(
                    node, key[exact:].fused_by(choice.recipe)
                )
                if values:
                    node, start = last, exact + sum(map(len, values))
                    state(req).fused = Fused(exact, choice.recipe)
                    fusion = choice  # what follows is keyed by the same recipe
                    break
        try:
            gaps = self._exact_gaps(key, spans, exact, node) if start == exact else frozenset()
            plan = self._plan(req, key, fusion, start, gaps)
            if not state(req).is_asked_only and self._is_tried(plan, fusion):
                plan = self._plan(req, key, replace(fusion, always=True), start, gaps)
        except Exception:  # nothing is taken yet, and the scheduler must not die of a plan
            logger.exception("chunk cache: no plan, the prompt is computed")
            plan = ReusePlan((), (Fallback.PLAN_FAILED,))
        outcome = state(req).promise = outcome_of(req)
        outcome.exact, outcome.fused_hit, outcome.plan, outcome.move = (
            exact,
            start - exact,
            plan,
            None,
        )
        outcome.declined.clear()
        outcome.extends.clear()
        outcome.is_alone = True
        outcome.is_uncalibrated = fusion.quality is not None and fusion.above is None
        outcome.lookup_s += time.perf_counter() - started
        promised = plan.end - plan.start if plan.pieces else 0
        return compat.rematched(self._tree, result, node, start, host_hit_length=promised)

    # Private, in order of use

    def _exact_gaps(
        self, key: ChunkKey, spans: RequestSpans, start: int, node: TreeNode
    ) -> frozenset[int]:
        """What the prompt's exact chain grows by, from `start` on, which is the node's end:
        nothing, if it does so already."""

        def can_move(chunk: ChunkId) -> bool:
            return bool(
                self._sources.candidates(
                    ChunkIdentity(chunk, key.extra_key, key.cache_salt), spans.namespace
                )
            )

        gaps = exact_gaps(
            spans.spans,
            start=start,
            limit=len(key),
            promoted_len=spans.promoted_len,
            num_chunks=spans.exact_gaps,
            can_move=can_move,
        )
        is_grown = gaps and (node.id, spans.spans[min(gaps)].chunk) in self.growing
        return frozenset() if is_grown else gaps

    def _plan(
        self, req: Req, key: ChunkKey, fusion: FusionRequest, start: int, exact: Collection[int]
    ) -> ReusePlan:
        """The plan of what follows the cached prefix `[0, start)`."""
        spans = state(req).spans
        assert spans is not None
        return make_plan(
            spans.spans,
            start=start,
            limit=len(key),
            candidates=lambda chunk, head: self._sources.candidates(
                ChunkIdentity(chunk, key.extra_key, key.cache_salt), head, alone=fusion.plain
            ),
            fusion=fusion,
            limits=self._limits,
            heads=text_before(spans.namespace, spans.spans, req.origin_input_ids),
            exact=exact,
            num_tokens=len(req.origin_input_ids),
            costs=self._fusion_pass.pricing.costs,
            may_be_cheaper=state(req).fused is None,
        )

    def _is_tried(self, plan: ReusePlan, fusion: FusionRequest) -> bool:
        """Whether this plan's first choice, which is estimated not to pay,
        is carried out all the same."""
        if plan.estimate is None or (plan.pieces and plan.fusion is fusion):
            return False
        if plan.estimate.planned > TRIED_UP_TO * plan.estimate.computed:
            return False
        self._num_skipped += 1
        return explores(self._num_skipped)
