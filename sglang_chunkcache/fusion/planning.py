"""What a request that asks for moved KV finds at its admission: an exact prefix, then fused nodes
of its recipe, then a plan for what follows (radix_ext/moved_plan.py). Nothing is taken."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from itertools import takewhile
from typing import TYPE_CHECKING

from sglang.srt.mem_cache.base_prefix_cache import MatchResult

from radix_ext import ChunkId, FusionRequest, text_before
from radix_ext.costs import explores
from radix_ext.exact_growth import exact_gaps, grown
from radix_ext.moved_plan import Candidate, Limits, ReusePlan, make_plan, seconds_saved
from radix_ext.sources import NOTHING, ChunkSources, Coming
from sglang_chunkcache import compat
from sglang_chunkcache.fusion.fill import FusionPass
from sglang_chunkcache.fusion.outcome import Outcome, outcome_of
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
"""Plans that are estimated to take longer than this multiple of computing are tried more rarely,
for the same share of the time. If they never were, prices measured on a busy machine would stay."""


class Planner:
    """Of one rank, by the pass's calibration and prices."""

    def __init__(
        self, tree: ChunkTree, sources: ChunkSources, fusion_pass: FusionPass, limits: Limits
    ) -> None:
        self._tree, self._sources = tree, sources
        self._fusion_pass, self._limits = fusion_pass, limits
        self._num_skipped = 0.0  # the rarely tried count as parts
        self.growing = deque([set[tuple[int, ChunkId]]()], maxlen=2)
        """Chunks that exact chains grow by with requests under way, after the nodes where they end:
        whoever follows, before those are inserted, would compute them once more. A set a forward,
        since SGLang inserts a batch's requests before the next but one."""

    def match(
        self, req: Req, key: ChunkKey, spans: RequestSpans, result: MatchResult
    ) -> MatchResult:
        """Extend an exact match by fused nodes of the request's recipe, and by a plan."""
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
            grows = spans.grows and start == exact
            plan = self._plan(req, key, fusion, start, node, grows=grows)
            if not state(req).is_asked_only and self._is_tried(plan, fusion):
                plan = self._plan(req, key, replace(fusion, always=True), start, node)
        except Exception:  # nothing is taken yet, and the scheduler must not die of a plan
            logger.exception("chunk cache: no plan, the prompt is computed")
            plan = ReusePlan((), (Fallback.PLAN_FAILED,))
        state(req).promise = Outcome(
            exact,
            start - exact,
            plan,
            lookup_s=outcome_of(req).lookup_s + time.perf_counter() - started,
            is_uncalibrated=fusion.quality is not None and fusion.above is None,
        )
        promised = plan.end - plan.start if plan.pieces else 0
        return compat.rematched(self._tree, result, node, start, host_hit_length=promised)

    def saved_s(
        self,
        req: Req,
        key: ChunkKey,
        spans: RequestSpans,
        result: MatchResult,
        coming: Coming,
    ) -> float | None:
        """What these variants, in the store, would take off the time to the first token, by what
        else is there now. None: plans are not estimated."""
        assert spans.fusion is not None
        fusion = self._fusion_pass.calibration.resolve(spans.fusion)
        node, start = result.last_device_node, compat.num_matched(result)

        def plan(coming: Coming) -> ReusePlan:
            return self._plan(req, key, fusion, start, node, coming, grows=spans.grows)

        return seconds_saved(plan(coming), instead_of=plan(NOTHING))

    def grows(self, node: TreeNode, plan: ReusePlan, spans: RequestSpans) -> None:
        """By the first gap of this plan, if it is a chunk before all that is moved."""
        leading = takewhile(lambda piece: piece.source is None, plan.pieces)
        for index in [piece.span for piece in leading if piece.span is not None][:1]:
            self.growing[-1].add((node.id, spans.spans[index].chunk))

    def _plan(
        self,
        req: Req,
        key: ChunkKey,
        fusion: FusionRequest,
        start: int,
        node: TreeNode,
        coming: Coming = NOTHING,
        *,
        grows: bool = False,
    ) -> ReusePlan:
        """The plan of what follows the cached prefix `[0, start)`, which ends with the node."""
        spans = state(req).spans
        assert spans is not None
        # for both plans
        candidates = cache(partial(self._candidates, key, coming, alone=fusion.plain))
        make = partial(
            make_plan,
            spans.spans,
            start=start,
            limit=len(key),
            candidates=candidates,
            fusion=fusion,
            limits=self._limits,
            heads=text_before(spans.namespace, spans.spans, req.origin_input_ids),
            num_tokens=len(req.origin_input_ids),
            costs=self._fusion_pass.pricing.costs,
            may_be_cheaper=state(req).fused is None,
        )
        if not grows:
            return make()
        gaps = partial(self._exact_gaps, candidates, key, spans, start, node)
        return grown(lambda exact: make(exact=exact), gaps)

    def _exact_gaps(
        self,
        candidates: Callable[[ChunkId, str], list[Candidate]],
        key: ChunkKey,
        spans: RequestSpans,
        start: int,
        node: TreeNode,
    ) -> frozenset[int]:
        """What the exact chain may grow by from `start`, the node's end, if it does not already."""
        gaps = exact_gaps(
            spans.spans,
            start=start,
            limit=len(key),
            promoted_len=spans.promoted_len,
            can_move=lambda chunk: bool(candidates(chunk, spans.namespace)),
        )
        growth = (node.id, spans.spans[min(gaps)].chunk) if gaps else None
        return frozenset() if any(growth in each for each in self.growing) else gaps

    def _candidates(
        self,
        key: ChunkKey,
        coming: Coming,
        chunk: ChunkId,
        head: str,
        *,
        alone: bool = False,
    ) -> list[Candidate]:
        identity = ChunkIdentity(chunk, key.extra_key, key.cache_salt)
        also = coming.get(chunk, ())
        return self._sources.candidates(identity, head, alone=alone, coming=also)

    def _is_tried(self, plan: ReusePlan, fusion: FusionRequest) -> bool:
        """Whether this plan's first choice, estimated not to pay, is carried out all the same."""
        estimate = plan.estimate
        if estimate is None or (plan.pieces and plan.fusion is fusion):
            return False
        before, longer = int(self._num_skipped), estimate.planned - estimate.computed
        usual = (TRIED_UP_TO - 1) * estimate.computed
        self._num_skipped += 1.0 if longer <= usual else usual / longer
        return int(self._num_skipped) > before and explores(int(self._num_skipped))
