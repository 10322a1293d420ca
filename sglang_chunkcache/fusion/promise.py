"""Fused reuse on the scheduler's side: from an arriving request to its report. fill.py computes.

    arrived   the storage begins to load (tier.py)
    match     at admission: a plan for what follows the cached prefix (planning.py)
    commit    the plan's slots (promises.py)
    before    `FusionPass` fills the slots of the batch's promises
    keep      chunks that have earned it are queued for the store (keeping.py)
    after     and are scored and copied into it (capture.py)

Every way out of this path ends in an ordinary prefill and is counted by its reason. Decisions
follow from requests, the tree and prices: measured costs, of rank 0 for its group.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.base_prefix_cache import MatchResult
from sglang.srt.mem_cache.radix_cache import TreeNode

from radix_ext.costs import Work
from radix_ext.moved_plan import Limits
from radix_ext.sources import ChunkSources
from sglang_chunkcache.config import MAX_COPIES
from sglang_chunkcache.fusion.calibration_trial import Calibrator
from sglang_chunkcache.fusion.fill import FusionPass
from sglang_chunkcache.fusion.keeping import StoreKeeper
from sglang_chunkcache.fusion.outcome import (
    NO_PLAN,
    in_ms,
    outcome_of,
    reasons_of,
    selector_of,
    sources_of,
)
from sglang_chunkcache.fusion.planning import Planner
from sglang_chunkcache.fusion.promises import Promises
from sglang_chunkcache.fusion.tail import given
from sglang_chunkcache.fusion.tier import StorageTier
from sglang_chunkcache.rank_metrics import NO_METRICS, RankMetrics
from sglang_chunkcache.scheduler.chunk_key import ChunkKey
from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.wire.report import Explanation, Fallback, Report
from sglang_chunkcache.wire.spans import RequestSpans
from sglang_chunkcache.wire.state import CalibrationPrompt

if TYPE_CHECKING:
    import torch
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_chunkcache.scheduler.chunk_tree import ChunkTree

logger = logging.getLogger(__name__)


class Fuser:
    """Of one rank. `Tiers` and `ChunkRadixCache` call it, in this order for one request.

    Args:
        fingerprint: of the weights, when called. None: unknown, each reset counts as a change.
        calibrator: None: nothing can be calibrated.
        tier, metrics, in_host_memory: as in `StoreKeeper`.
        gate: what the start-up gate has measured.
    """

    def __init__(
        self,
        tree: ChunkTree,
        fusion_pass: FusionPass,
        limits: Limits,
        *,
        fingerprint: Callable[[], int | None],
        calibrator: Calibrator | None = None,
        tier: StorageTier | None = None,
        metrics: RankMetrics = NO_METRICS,
        in_host_memory: Callable[[TreeNode], bool] | None = None,
        gate: dict[str, Any] | None = None,
    ) -> None:
        store = fusion_pass.host.index
        self.tree, self.fusion_pass, self.store, self.tier = tree, fusion_pass, store, tier
        self.pricing, self.outward = fusion_pass.pricing, fusion_pass.outward
        sharing = fusion_pass.sharing
        shared = None if sharing is None else sharing.copies
        self.sources = ChunkSources(tree.copies, store, max_copies=MAX_COPIES, shared=shared)
        self.planner = Planner(tree, self.sources, fusion_pass, limits)
        self.promises = Promises(tree, self.sources, fusion_pass, limits)
        self.keeper = StoreKeeper(
            tree.copies, store, self.sources, fusion_pass, tier, metrics, in_host_memory
        )
        self._fingerprint, self._weights = fingerprint, fingerprint()
        self.calibrator, self._gate = calibrator, gate or {}
        if calibrator is not None:
            fusion_pass.calibrated(calibrator.kept(self._weights))
        if tier is not None:
            tier.storage.start(self._weights, fusion_pass.calibration.heads)
        self.fallbacks: Counter[Fallback] = Counter()

    def arrived(self, req: Req, spans: RequestSpans) -> None:
        """Ask the storage for what the request's chunks have there and nowhere else."""
        if self.tier is not None and spans.fusion is not None and state(req).loads is None:
            state(req).loads = self.tier.ask(req, spans, self.sources, self.pricing.costs)

    def match(
        self, req: Req, key: ChunkKey, spans: RequestSpans, result: MatchResult
    ) -> MatchResult:
        """As `Planner.match`, with what has come from the storage by now."""
        if self.tier is not None and not state(req).is_asked_only:
            self.arrived(req, spans)
            self.tier.storage.poll()
            self.tier.storage.waits.planned(state(req).loads)
        return self.planner.match(req, key, spans, result)

    def estimate_loads(
        self, req: Req, key: ChunkKey, spans: RequestSpans, result: MatchResult
    ) -> None:
        """Before it is decided whether the request waits for what the storage sends it: what that
        would save, by the plans with and without it."""
        asked = state(req).loads
        if self.tier is None or asked is None or asked.until is not None or not asked.is_coming:
            return
        if asked.is_looked_up:  # what else would come is not known
            return
        with self.tier.storage.guard("the request may wait for too little"):
            saved_s = self.planner.saved_s(req, key, spans, result, asked.variants)
            asked.saved_s = asked.saved_s if saved_s is None else saved_s

    def num_saved(self, req: Req) -> int:
        """Rows that its promise will not take, since others hold them: with one copy of a chunk."""
        sharing = self.fusion_pass.sharing
        return 0 if sharing is None else sharing.num_saved(sharing.find(req, outcome_of(req).plan))

    def commit(self, req: Req, node: TreeNode) -> torch.Tensor | None:
        """As `Promises.commit`; the sources of what is promised are used."""
        slots = self.promises.commit(req, node)
        spans, plan = state(req).spans, outcome_of(req).plan
        assert spans is not None
        # the neighbours of a chunk to preprocess would outlive what they are moved for
        if slots is not None:
            self.planner.grows(node, plan, spans)
        if slots is not None and not spans.is_preprocessing:
            self.sources.count_uses(plan)
            if self.tier is not None:
                self.tier.count_uses(plan, req.extra_key, req.cache_salt)
        return slots

    @contextmanager
    def watch(self, batch: ScheduleBatch, hidden: torch.Tensor | None) -> Iterator[None]:
        """Learn what the batch's extend takes. `hidden`: computed already, as by `given`."""
        if hidden is not None:
            # It says nothing of an extend, but is a part of its requests' time.
            with (
                given(self.fusion_pass.runner, hidden),
                self.pricing.timed(None, Work(1)) as extend,
            ):
                yield
        else:
            with self.outward.watch(batch), self.pricing.time_extend(batch) as extend:
                yield
        for req in batch.reqs:
            if state(req).promise is not None:
                outcome_of(req).extends.append(extend)
                outcome_of(req).is_alone &= len(batch.reqs) == 1

    def after(self, *, first_tokens_wait: bool, is_ahead: bool) -> None:
        """A forward is queued: as `StoreKeeper.after`."""
        self.planner.growing.append(set())
        if first_tokens_wait or is_ahead:
            self.pricing.refresh()
        self.keeper.after(first_tokens_wait=first_tokens_wait, is_ahead=is_ahead)

    def report(self, req: Req) -> Report:
        outcome, asked = outcome_of(req), state(req).loads
        move = outcome.move
        plan = move.plan if move else NO_PLAN
        ms = {"lookup": 1000 * outcome.lookup_s, **(move.ms if move else {})}
        self.pricing.poll()
        seconds = [extend.seconds for extend in outcome.extends if extend.seconds is not None]
        if seconds and len(seconds) == len(outcome.extends):
            ms["extend"] = 1000 * sum(seconds)
            filling = move.filling.seconds if move and move.filling and outcome.is_alone else None
            if plan.estimate and filling is not None:
                self.pricing.compare(plan.estimate.planned, filling + sum(seconds))
        fallbacks = [
            *reasons_of(outcome.plan),
            *outcome.declined,
            *(move.fallbacks if move else ()),
            *_if(asked is not None and asked.is_skipped, Fallback.STORAGE_SLOW),
            *_if(move is not None and outcome.is_uncalibrated, Fallback.UNCALIBRATED),
        ]
        self.fallbacks.update(fallbacks)
        recomputed = move.recomputed_len if move else 0
        return Report(
            exact=outcome.exact,
            relocated=outcome.fused_hit + plan.moved_len - recomputed,
            recomputed=recomputed,
            fused_hit=outcome.fused_hit,
            gap=plan.gap_len if move else 0,
            sources=sources_of(plan),
            focused=None if move is None or move.focused is None else tuple(move.focused),
            fallbacks=tuple(fallbacks),
            ms=ms,
            estimated_ms=in_ms(outcome.plan),
            selector=selector_of(req, plan),
            shared=int(move.shared.sum()) if move else 0,
        )

    def explain(self, req: Req) -> Explanation | None:
        """The plan of a request that was only matched, if any. To preprocess, the storage loads."""
        if state(req).promise is None:
            return None
        outcome, spans = outcome_of(req), state(req).spans
        plan, cached = outcome.plan, outcome.exact + outcome.fused_hit
        assert spans is not None
        is_skipped = self.tier is not None and self.tier.is_skipped(
            req, spans, self.sources, self.pricing.costs
        )
        is_kept = must_wait = False
        if spans.is_preprocessing:
            is_kept, must_wait = self.keeper.look_ahead(req, spans)
        return Explanation(
            outcome.exact,
            outcome.fused_hit,
            plan.end if plan.pieces else cached,
            sources_of(plan),
            (*reasons_of(plan), *_if(is_skipped, Fallback.STORAGE_SLOW)),
            in_ms(plan),
            selector_of(req, plan),
            is_kept=is_kept,
            must_wait=must_wait,
        )

    def calibrate(self, prompts: Sequence[CalibrationPrompt]) -> None:
        """Measure where this model keeps its evidence, and select by that from now on. What was
        scored is scored anew when it is stored again, since heads may be others.

        Raises:
            ValueError, BusyError: as `Calibrator.num_slots`, or weights that are not those of the
                cache.
        """
        if self.calibrator is None:
            raise ValueError("nothing to calibrate with")
        if self._fingerprint() != self._weights:
            raise ValueError("the weights have changed since the cache was emptied: flush it first")
        free = self.tree.token_to_kv_pool_allocator.available_size()
        needed = self.calibrator.num_slots(prompts, free + self.tree.evictable_size())
        self.tree.make_room(needed)
        self.fusion_pass.calibrated(self.calibrator.measure(prompts, self._weights))
        self.keeper.captures.put_arrived()
        self.store.held.forget_scores()
        self.tree.copies.forget_scores()
        if self.fusion_pass.sharing is not None:
            self.fusion_pass.sharing.clear()
        if self.tier is not None:
            self.tier.storage.naming.reads(self.fusion_pass.calibration.heads)

    def reset(self) -> None:
        """The tree is gone: so are pending promises, waiting captures and the store, but for what
        was preprocessed with these very weights. SGLang resets for `/flush_cache` and after weight
        updates alike, and does not say which. The storage keeps all it has: what other weights have
        computed has other names."""
        self.promises.reset()
        self.keeper.captures.clear()
        before, self._weights = self._weights, self._fingerprint()
        keeps = self._weights is not None and self._weights == before
        self.store.clear(keep=lambda variant: variant.preprocessed and keeps)
        if self._weights != before and self.calibrator is not None:
            self.fusion_pass.calibrated(self.calibrator.kept(self._weights))
            if not self.fusion_pass.calibration.figures:
                logger.warning(
                    "chunk cache: no calibration is known for these weights, selection reads the"
                    " papers' layers"
                )
        if self.tier is not None:
            self.tier.storage.start(self._weights, self.fusion_pass.calibration.heads)

    def doubt_weights(self) -> None:
        """They change, so what comes into the store until `reset` may be of any."""
        self._weights = None

    def stats(self) -> dict[str, Any]:
        """For `/chunkcache/stats`."""
        num_failed = self.keeper.captures.num_failed
        return {
            "store": self.keeper.stats(),
            "sources": len(self.tree.copies),
            "moves": self.fusion_pass.stats(),
            "costs": self.pricing.stats(),
            "gate": self._gate,
            "calibration": self.fusion_pass.calibration.as_dict(),
            "watched_tokens": self.outward.num_measured,
            "fallbacks": self.fallbacks + Counter({Fallback.CAPTURE_FAILED: num_failed}),
        }


def _if(is_so: bool, reason: Fallback) -> tuple[Fallback, ...]:
    return (reason,) if is_so else ()
