"""Scheduler side of fused reuse: plans moves, allocates slots, has them filled, reports. It
computes nothing; see fill.py.

    match    at admission: exact prefix -> fused nodes of the same recipe -> a plan for what
             follows; nothing is taken
    commit   once a batch: locks the sources, allocates slots, inserts empty fused nodes after the
             prefix
    before   `FusionPass` fills the slots of the batch's promises, then the sources are unlocked
    after    chunks that have earned it are scored and copied into the store (capture.py)

Every way out of this path ends in an ordinary prefill and is counted by its reason. All decisions
follow from requests and the tree, never from clocks.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchResult
from sglang.srt.mem_cache.radix_cache import TreeNode

from radix_ext import ChunkId, FusionRequest, IntegrityError, text_before
from radix_ext.cfo import Scored
from radix_ext.costs import EXPLORATION_PERIOD
from radix_ext.exact_growth import exact_gaps
from radix_ext.moved_plan import Limits, ReusePlan, has_room, make_plan
from radix_ext.sources import ChunkSources, DeviceCopy, HostCopy
from radix_ext.variant_index import VariantIndex
from radix_ext.variants import Identity, Variant
from sglang_chunkcache.config import MAX_COPIES
from sglang_chunkcache.fusion.calibration_trial import Calibrator
from sglang_chunkcache.fusion.capture import Captures
from sglang_chunkcache.fusion.fill import FusionPass
from sglang_chunkcache.fusion.metrics import StoreMetrics
from sglang_chunkcache.fusion.move import Move, move_of
from sglang_chunkcache.fusion.outcome import (
    Outcome,
    in_ms,
    outcome_of,
    reasons_of,
    selector_of,
    sources_of,
)
from sglang_chunkcache.fusion.tier import StorageTier
from sglang_chunkcache.scheduler.chunk_key import ChunkKey, Fused
from sglang_chunkcache.scheduler.host_slots import HostSlots
from sglang_chunkcache.scheduler.node import ChunkIdentity, facts, identity_of, state
from sglang_chunkcache.wire.report import Explanation, Fallback, Report
from sglang_chunkcache.wire.spans import RequestSpans
from sglang_chunkcache.wire.state import CalibrationPrompt, Cleared

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_chunkcache.scheduler.chunk_cache import ChunkRadixCache

logger = logging.getLogger(__name__)


KINDS = ("captured", "preprocessed", "exact")
"""Of KV in the store."""
TRIED_UP_TO = 1.5
"""Unless it is estimated to take longer than this multiple of computing."""


@dataclass(eq=False)
class _Pending:
    req: Req
    move: Move
    last: TreeNode
    """The last of its nodes. All nodes above are filled with it."""
    taken: ExitStack
    """Locks of sources in the tree, until the move is filled."""
    held: ExitStack
    """Those in the host pool."""


class Fuser:
    """The promise side of one rank, a `scheduler.promiser.Promiser`.

    Args:
        extend_reserve: tokens that SGLang may take for the extends of one batch. They stay free or
            evictable.
        fingerprint: of the model's weights, as they are when it is called. None: unknown, each
            reset counts as a change.
        store: its `watch` is taken.
        tier: below the store. None: what leaves the store is gone.
        metrics: told what `stats` says of the store. None: Prometheus is told nothing.
    """

    def __init__(
        self,
        cache: ChunkRadixCache,
        fusion_pass: FusionPass,
        store: VariantIndex,
        limits: Limits,
        *,
        extend_reserve: int,
        fingerprint: Callable[[], int | None],
        calibrator: Calibrator | None = None,
        tier: StorageTier | None = None,
        metrics: StoreMetrics | None = None,
    ) -> None:
        self.cache, self.fusion_pass, self.store, self.limits = cache, fusion_pass, store, limits
        self.extend_reserve = extend_reserve
        self.sources = ChunkSources(cache.copies, store, max_copies=MAX_COPIES)
        self.captures = Captures(cache.copies, fusion_pass, store)
        self.shares_pool = cache.host is not None and cache.host.index is store
        """Whether exact chains in host memory are variants of the store, too."""
        self.pricing, self.outward = fusion_pass.pricing, fusion_pass.outward
        self._fingerprint, self._weights = fingerprint, fingerprint()
        self.calibrator = calibrator
        if calibrator is not None:
            fusion_pass.calibration = calibrator.kept(self._weights)
        self.tier, self._metrics = tier, metrics
        self._kv_bytes, self._saved_bytes = (dict.fromkeys(KINDS, 0) for _ in range(2))
        store.watchers.append(self._store_changed)
        if tier is not None:
            tier.storage.start(self._weights, fusion_pass.calibration.heads)
        self.gate: dict[str, Any] = {}
        self.fallbacks: Counter[Fallback] = Counter()
        self._pending: list[_Pending] = []
        self._num_skipped = 0
        self._was_put_off = False

    # SGLang's calls, in a request's order

    def arrived(self, req: Req, spans: RequestSpans) -> None:
        """Ask the storage for what the request's chunks have there and nowhere else."""
        if self.tier is not None and spans.fusion is not None and state(req).loads is None:
            state(req).loads = self.tier.ask(
                req, spans, spans.fusion, self.sources, self.pricing.costs
            )

    def match(
        self, req: Req, key: ChunkKey, spans: RequestSpans, result: MatchResult
    ) -> MatchResult:
        """Extend an exact match by fused nodes of the request's recipe and by what can be moved.
        Takes nothing."""
        assert spans.fusion is not None
        fusion = self.fusion_pass.calibration.resolve(spans.fusion)
        started = time.perf_counter()
        if self.tier is not None and not state(req).is_asked_only:
            self.arrived(req, spans)
            self.tier.storage.poll()
            self.tier.storage.planned(state(req).loads)
        node, found = result.last_device_node, [result.device_indices]
        if fusion.plain and len(found[0]):  # chunks of an exact chain were computed after others
            found, node = self.cache._match_prefix_helper(
                self.cache.root_node, key[: spans.spans[0].end]
            )
        exact = sum(map(len, found))
        if any(span.start == exact for span in key.spans):
            cheaper = None if fusion.always else fusion.cheaper
            for choice in filter(None, (fusion, cheaper)):
                values, last = self.cache._match_prefix_helper(
                    node, key[exact:].fused_by(choice.recipe)
                )
                if values:
                    node, found = last, [*found, *values]
                    state(req).fused = Fused(exact, choice.recipe)
                    fusion = choice  # what follows is keyed by the same recipe
                    break
        indices = (
            torch.cat(found) if len(found) > 1 else found[0] if found else result.device_indices[:0]
        )
        try:
            gaps = self._exact_gaps(key, spans, exact) if len(indices) == exact else frozenset()
            plan = self._plan(req, key, fusion, len(indices), gaps)
            if not state(req).is_asked_only and self._is_tried(plan, fusion):
                plan = self._plan(req, key, replace(fusion, always=True), len(indices), gaps)
        except Exception:  # nothing is taken yet, and the scheduler must not die of a plan
            logger.exception("chunk cache: no plan, the prompt is computed")
            plan = ReusePlan((), (Fallback.PLAN_FAILED,))
        outcome = state(req).promise = outcome_of(req)
        outcome.exact, outcome.fused_hit, outcome.plan, outcome.move = (
            exact,
            len(indices) - exact,
            plan,
            None,
        )
        outcome.declined.clear()
        outcome.extends.clear()
        outcome.is_alone = True
        outcome.is_uncalibrated = fusion.quality is not None and fusion.above is None
        outcome.lookup_s += time.perf_counter() - started
        return result._replace(
            device_indices=indices,
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
            host_hit_length=plan.end - plan.start if plan.pieces else 0,
        )

    def commit(self, req: Req, node: TreeNode) -> tuple[torch.Tensor, TreeNode]:
        """Take the slots of the request's plan. Empty: declined, to be computed."""
        outcome, spans = outcome_of(req), state(req).spans
        plan = outcome.plan
        assert spans is not None
        if not self._is_filled(node):
            return self._decline(outcome, Fallback.NOT_FILLED, node)
        if self._is_full(plan):
            return self._decline(outcome, Fallback.PASS_FULL, node)
        key = self._key(req, plan, spans)
        sources = [
            piece.source.node for piece in plan.pieces if isinstance(piece.source, DeviceCopy)
        ]
        # not to be expected: SGLang matches right before it asks
        if key[plan.start :].child_key() in node.children:
            return self._decline(outcome, Fallback.ALREADY_CACHED, node)
        if not self.sources.are_there(plan):
            return self._decline(outcome, Fallback.SOURCE_GONE, node)
        num_after = len(req.origin_input_ids) + len(req.output_ids) - plan.end
        with self._locked(node), ExitStack() as taken, ExitStack() as held:
            for blob in slots_of(plan):
                blob.hold()
                held.callback(blob.let_go)
            for source in sources:
                self.cache.inc_lock_ref(source)
                taken.callback(self.cache.dec_lock_ref, source)
            slots = self._allocate(plan.end - plan.start, num_after, taken)
            if slots is None:
                return self._decline(outcome, Fallback.NO_ROOM, node)
            row = torch.cat([req.prefix_indices, slots])
            move = move_of(req, plan, spans, row)
            last = self._insert(key, row, plan, spans.namespace, req.priority or 0)
            outcome.move = move
            self._pending.append(_Pending(req, move, last, taken.pop_all(), held.pop_all()))
        state(req).fused = key.fused
        if not spans.is_preprocessing:  # else neighbours would outlive what they are moved for
            self.sources.count_uses(plan)
            if self.tier is not None:
                self.tier.count_uses(plan, req.extra_key, req.cache_salt)
        return row[plan.start :], last

    def before(self, batch: ScheduleBatch) -> None:
        """Fill what was promised to this batch's requests."""
        if not self._pending:
            return
        here = {id(outcome_of(req).move) for req in batch.reqs}
        if lost := [p for p in self._pending if id(p.move) not in here]:
            raise IntegrityError(
                [f"{len(lost)} promised prompts are not in the batch that should fill them"]
            )
        pending, self._pending = self._pending, []
        self.fusion_pass.run([each.move for each in pending])
        for each in pending:
            state(each.req).outward = each.move.outward
            each.taken.close()
            each.held.close()
            node = each.last
            # by the path: others may have split its token nodes since
            while node is not self.cache.root_node:
                if not facts(node).is_filled:
                    self.cache.fill(node)
                node = node.parent

    def keep(self, req: Req, path: Sequence[TreeNode]) -> None:
        """Tell the store what was asked for, and queue the request's chunks that have earned it.

        A chunk that was to be preprocessed after neighbours is none of them if some were computed
        in context, as all are after a failed pass.
        """
        spans, move = state(req).spans, outcome_of(req).move
        assert spans is not None
        chunks = [node for node in path if facts(node).chunk is not None]
        self.outward.tell(req, chunks)
        if not spans.is_preprocessing:
            asked = [
                (identity, facts(node).head, facts(node).prefix)
                for node in chunks
                if (identity := identity_of(node))
            ]
            self.store.ask(asked)
            if self.tier is not None:
                self.tier.count_asked(asked)
        else:
            is_filled = move is not None and Fallback.PASS_FAILED not in move.fallbacks
            moved = {
                piece.span
                for piece in (move.plan.pieces if move and is_filled else ())
                if piece.source is not None
            }
            if not moved.issuperset(range(1, len(spans.spans) - 1)):
                return
        scored = spans.fusion.scored if spans.fusion else Scored.NOTHING
        keep: Collection[int] = spans.keep
        host = self.cache.host
        if self.shares_pool and host is not None and not self.captures.at_least(scored):
            # else it would be copied and written twice, as a chunk and as a part of its chain
            keep = [i for i in keep if i < len(chunks) and not host.takes(chunks[i])]
        self.captures.add(chunks, keep, is_preprocessing=spans.is_preprocessing, scored=scored)

    @contextmanager
    def watch(self, batch: ScheduleBatch) -> Iterator[None]:
        """Learn what the batch's extend takes."""
        if not batch.forward_mode.is_extend():
            yield
            return
        with self.outward.watch(batch), self.pricing.time_extend(batch) as extend:
            yield
        for req in batch.reqs:
            if state(req).promise is not None:
                outcome_of(req).extends.append(extend)
                outcome_of(req).is_alone &= len(batch.reqs) == 1

    def after(self, *, first_tokens_wait: bool = False, is_ahead: bool = False) -> None:
        """Score and store some of what waits: after decoding, and after a prefill only if the
        forward before was one, too.

        After one that was ahead of requests all of it: there as much comes with each forward, and
        nothing else makes room.
        """
        if first_tokens_wait or is_ahead:
            self.pricing.refresh()
        is_put_off = first_tokens_wait and not self._was_put_off
        self._was_put_off = is_put_off
        if is_put_off:
            return
        if self._metrics is not None and self._metrics.is_due:
            self._store_stats()
        if num_failed := self.captures.drain() if is_ahead else self.captures.run():
            self.fallbacks[Fallback.CAPTURE_FAILED] += num_failed

    def report(self, req: Req) -> Report:
        """What the front may tell the client."""
        outcome = outcome_of(req)
        move = outcome.move
        ms = {"lookup": 1000 * outcome.lookup_s, **(move.ms if move else {})}
        self.pricing.poll()
        seconds = [extend.seconds for extend in outcome.extends if extend.seconds is not None]
        if seconds and len(seconds) == len(outcome.extends):
            ms["extend"] = 1000 * sum(seconds)
            filling = move.filling.seconds if move and move.filling and outcome.is_alone else None
            if move and move.plan.estimate and filling is not None:
                self.pricing.compare(move.plan.estimate.planned, filling + sum(seconds))
        fallbacks = (
            *reasons_of(outcome.plan),
            *outcome.declined,
            *(move.fallbacks if move else ()),
        )
        if (asked := state(req).loads) is not None and asked.is_skipped:
            fallbacks = (*fallbacks, Fallback.STORAGE_SLOW)
        if move and outcome.is_uncalibrated:
            fallbacks = (*fallbacks, Fallback.UNCALIBRATED)
        self.fallbacks.update(fallbacks)
        recomputed = move.recomputed_len if move else 0
        return Report(
            exact=outcome.exact,
            relocated=outcome.fused_hit + (move.plan.moved_len if move else 0) - recomputed,
            recomputed=recomputed,
            fused_hit=outcome.fused_hit,
            gap=move.plan.gap_len if move else 0,
            sources=sources_of(move.plan) if move else (),
            focused=None if move is None or move.focused is None else tuple(move.focused),
            fallbacks=fallbacks,
            ms=ms,
            estimated_ms=in_ms(outcome.plan),
            selector=selector_of(req, move.plan if move else None),
        )

    def explain(self, req: Req) -> Explanation | None:
        """The plan of a request that was only matched.
        For a chunk to preprocess the storage loads."""
        if state(req).promise is None:
            return None
        outcome, spans = outcome_of(req), state(req).spans
        plan, cached = outcome.plan, outcome.exact + outcome.fused_hit
        assert spans is not None
        assert spans.fusion is not None
        costs = self.pricing.costs
        is_skipped = self.tier is not None and self.tier.is_skipped(
            req, spans, spans.fusion, self.sources, costs
        )
        is_kept, must_wait = (
            self._look_ahead(req, spans) if spans.is_preprocessing else (False, False)
        )
        return Explanation(
            outcome.exact,
            outcome.fused_hit,
            plan.end if plan.pieces else cached,
            sources_of(plan),
            (*reasons_of(plan), *([Fallback.STORAGE_SLOW] if is_skipped else [])),
            in_ms(plan),
            selector_of(req, plan),
            is_kept=is_kept,
            must_wait=must_wait,
        )

    def calibrate(self, prompts: Sequence[CalibrationPrompt]) -> None:
        """Measure where this model keeps its evidence, and select by that from now on. What was
        scored is scored anew when it is stored again, since heads may be others.

        Raises:
            ValueError: as `Calibrator.num_slots`, or weights that are not those of the cache.
            RuntimeError: too few request rows.
        """
        if self.calibrator is None:
            raise ValueError("nothing to calibrate with")
        if self._fingerprint() != self._weights:
            raise ValueError("the weights have changed since the cache was emptied: flush it first")
        free = self.cache.token_to_kv_pool_allocator.available_size()
        needed = self.calibrator.num_slots(prompts, free + self.cache.evictable_size())
        if needed > free:
            self.cache.evict(EvictParams(num_tokens=needed - free))
        self.fusion_pass.calibration = self.calibrator.measure(prompts, self._weights)
        self.captures.put_arrived()
        self.store.held.forget_scores()
        self.cache.copies.forget_scores()
        if self.tier is not None:
            self.tier.storage.heads = self.fusion_pass.calibration.heads

    def reset(self) -> None:
        """The tree is gone: so are pending promises, waiting captures and the store, but for what
        was preprocessed with these very weights. SGLang resets for `/flush_cache` and after weight
        updates alike, and does not say which. The storage keeps all it has: what other weights have
        computed has other names."""
        for each in self._pending:
            each.held.close()
        self._pending.clear()  # not closed: the locks went with the tree
        self.captures.clear()
        before, self._weights = self._weights, self._fingerprint()
        is_sure = self._weights is not None and (self.tier is None or not self.tier.storage.is_off)
        keeps = self._weights == before and is_sure
        self.store.clear(keep=lambda variant: variant.preprocessed and keeps)
        if self._weights != before and self.calibrator is not None:
            self.fusion_pass.calibration = self.calibrator.kept(self._weights)
            if not self.fusion_pass.calibration.figures:
                logger.warning(
                    "chunk cache: no calibration is known for these weights, selection reads the"
                    " papers' layers"
                )
        if self.tier is not None:
            self.tier.storage.start(self._weights, self.fusion_pass.calibration.heads)

    def clear_store(self) -> Cleared:
        """Empty the store, preprocessed chunks and those that wait for it included. Exact chains
        stay."""
        self.captures.clear()
        before = self.store.stats()
        self.store.clear(keep=lambda variant: variant.is_exact)
        after = self.store.stats()
        return Cleared(
            before.num_chunks - after.num_chunks,
            before.num_variants - after.num_variants,
            before.num_bytes - after.num_bytes,
        )

    def stats(self) -> dict[str, Any]:
        """For `/chunkcache/stats`."""
        return {
            "store": self._store_stats(),
            "sources": len(self.cache.copies),
            "moves": self.fusion_pass.stats(),
            "costs": self.pricing.stats(),
            "gate": self.gate,
            "calibration": self.fusion_pass.calibration.as_dict(),
            "watched_tokens": self.outward.num_measured,
            "fallbacks": {**self.cache.fallbacks, **self.fallbacks},
        }

    # Private, in order of use

    def _store_changed(self, identity: Identity, variant: Variant, is_here: bool) -> None:
        kind = kind_of(variant)
        sign = 1 if is_here else -1
        self._kv_bytes[kind] += sign * variant.blob.nbytes
        self._saved_bytes[kind] += sign * variant.blob.saved_bytes
        if self.tier is not None and not variant.is_exact:
            self.tier.store_changed(identity, variant, is_here)

    def _store_stats(self) -> dict[str, Any]:
        found = {
            **self.store.stats()._asdict(),
            "bytes": dict(self._kv_bytes),
            "saved_bytes": dict(self._saved_bytes),
            "max_bytes": self.store.held.max_bytes,
            "max_entries": self.store.held.max_entries,
            "max_variants": self.store.max_variants,
            "token_bytes": self.fusion_pass.stored_token_bytes,
            **self.captures.stats(),
        }
        if self._metrics is not None:
            self._metrics.show(found)
        return found

    def _look_ahead(self, req: Req, spans: RequestSpans) -> tuple[bool, bool]:
        """(whether store or storage has what the chunk is to become, whether to ask again before it
        is sent).

        What the store alone has is written, if the storage has no place for it in its queue when it
        is asked again.
        """
        assert spans.fusion is not None
        heads = text_before(spans.namespace, spans.spans, req.origin_input_ids)
        chunks, scored = (
            tuple(span.chunk for span in spans.spans),
            self.captures.at_least(spans.fusion.scored),
        )
        is_behind = self.tier is not None and self.tier.storage.is_behind
        must_wait = False
        for index in spans.keep:
            identity, prefix = (
                ChunkIdentity(chunks[index], req.extra_key, req.cache_salt),
                chunks[:index],
            )
            if self.tier is not None and self.tier.has(identity, heads[index], prefix, scored):
                continue
            variant = self.store.get(identity, heads[index], prefix)
            is_kept = variant is not None and (
                variant.is_exact or variant.preprocessed == bool(prefix)
            )
            if variant is None or not is_kept or variant.scored < scored:
                is_coming = self.tier is not None and self.tier.fetch(
                    req, spans, spans.fusion, self.sources
                )
                if is_coming or self.tier is None:
                    return False, is_coming
                num_tokens = spans.spans[index].end - spans.spans[index].start
                return False, not self.tier.reserve(identity, heads[index], prefix, num_tokens)
            if self.tier is not None and not variant.is_exact:
                self.tier.write(identity, variant)
                must_wait |= is_behind
        return True, must_wait

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
            candidates=lambda chunk, head: self.sources.candidates(
                ChunkIdentity(chunk, key.extra_key, key.cache_salt), head, alone=fusion.plain
            ),
            fusion=fusion,
            limits=self.limits,
            heads=text_before(spans.namespace, spans.spans, req.origin_input_ids),
            exact=exact,
            num_tokens=len(req.origin_input_ids),
            costs=self.pricing.costs,
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
        return self._num_skipped % EXPLORATION_PERIOD == 0

    def _exact_gaps(self, key: ChunkKey, spans: RequestSpans, start: int) -> frozenset[int]:
        """What the prompt's exact chain grows by, from `start` on."""

        def can_move(chunk: ChunkId) -> bool:
            return bool(
                self.sources.candidates(
                    ChunkIdentity(chunk, key.extra_key, key.cache_salt), spans.namespace
                )
            )

        return exact_gaps(
            spans.spans,
            start=start,
            limit=len(key),
            promoted_len=spans.promoted_len,
            num_chunks=spans.exact_gaps,
            can_move=can_move,
        )

    @staticmethod
    def _is_filled(node: TreeNode) -> bool:
        """Whether nothing from here up is filled with this batch:
        the pass looks at it while it fills, the extend after that."""
        above: TreeNode | None = node
        while above is not None and facts(above).is_filled:
            above = above.parent
        return above is None

    def _is_full(self, plan: ReusePlan) -> bool:
        """Whether the batch's pass has no room for this plan; for the first it always has."""
        promised = sum(each.move.plan.num_pass_tokens for each in self._pending)
        return bool(self._pending) and promised + plan.num_pass_tokens > self.limits.max_pass_tokens

    def _key(self, req: Req, plan: ReusePlan, spans: RequestSpans) -> ChunkKey:
        """The key of the prompt up to the plan's end."""
        assert plan.fusion is not None
        fused = state(req).fused or Fused(plan.fused_from, plan.fusion.recipe)
        return ChunkKey.cut(
            req.origin_input_ids[: plan.end],
            spans.spans,
            plan.end,
            extra_key=req.extra_key,
            cache_salt=req.cache_salt,
            fused=fused,
        )

    def _decline(
        self, outcome: Outcome, reason: Fallback, node: TreeNode
    ) -> tuple[torch.Tensor, TreeNode]:
        outcome.declined.append(reason)
        return torch.empty((0,), dtype=torch.int64, device=self.cache.device), node

    @contextmanager
    def _locked(self, node: TreeNode) -> Iterator[None]:
        self.cache.inc_lock_ref(node)
        try:
            yield
        finally:
            self.cache.dec_lock_ref(node)

    def _allocate(self, num_tokens: int, num_after: int, taken: ExitStack) -> torch.Tensor | None:
        """Slots, evicting if need be; an exception on the way out of `taken` frees them.

        None where the batch's extends might then find none, which kills SGLang. `num_after` tokens
        of the request's own are left to prefill: without chunked prefill that may be more than the
        reserve.
        """
        allocator = self.cache.token_to_kv_pool_allocator
        capacity = allocator.available_size() + self.cache.evictable_size()
        if not has_room(capacity, num_tokens, reserve=self.extend_reserve, num_after=num_after):
            return None
        if (missing := num_tokens - allocator.available_size()) > 0:
            self.cache.evict(EvictParams(num_tokens=missing))
        slots: torch.Tensor | None = allocator.alloc(num_tokens)
        if slots is not None:
            taken.push(lambda error, *_: allocator.free(slots) if error else None)
        return slots

    def _insert(
        self, key: ChunkKey, row: torch.Tensor, plan: ReusePlan, head: str, priority: int
    ) -> TreeNode:
        """The last of the region's nodes, which are yet to be filled."""
        # As chunked: the request has not used these nodes yet, so nothing is a hit.
        _, path = self.cache.insert_segments(key, row, head, priority, True, are_filled=False)
        chunks = [node for node in path if facts(node).chunk is not None]
        for piece in plan.pieces:
            if piece.span is not None:
                facts(chunks[piece.span]).is_moved = piece.source is not None
        return path[-1]


def kind_of(variant: Variant) -> str:
    """Of `KINDS`."""
    if variant.is_exact:
        return "exact"
    return "preprocessed" if variant.preprocessed else "captured"


def slots_of(plan: ReusePlan) -> Iterator[HostSlots]:
    """What the plan reads in the host pool."""
    for piece in plan.pieces:
        if isinstance(piece.source, HostCopy) and isinstance(piece.source.variant.blob, HostSlots):
            yield piece.source.variant.blob
