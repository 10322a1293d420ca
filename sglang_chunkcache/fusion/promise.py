"""Any-position reuse on the scheduler's side: what is promised to SGLang, kept, and forgotten. Tensors are fusion_pass.py's.

    match    exact prefix -> fused nodes of the same recipe -> a plan for what follows; nothing is taken     (up to 7 times)
    commit   sources locked, slots taken or shared, fused nodes hung below the prefix                        (once a batch)
    before   the batch's extend: filled by `FusionPass`, sources unlocked
    after    chunks that have earned it are scored and copied into the store

Every way out of this path ends in an ordinary prefill and is counted by its reason. All decisions follow from requests and
the tree, never from clocks.
"""

from __future__ import annotations

import logging
import time
from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchResult
from sglang.srt.mem_cache.radix_cache import TreeNode

from radix_ext import IntegrityError
from sglang_chunkcache.fusion.fill import Capture, FusionPass
from sglang_chunkcache.fusion.move import Move
from sglang_chunkcache.fusion.own_slots import ExclusiveRows
from sglang_chunkcache.fusion.plan import Candidate, Limits, Piece, ReusePlan, make_plan, max_critical
from sglang_chunkcache.fusion.sources import DeviceCopy, HostCopy
from sglang_chunkcache.fusion.store import ChunkIdentity, ChunkStore, Variant
from sglang_chunkcache.scheduler.chunk_key import ChunkKey, Fused
from sglang_chunkcache.scheduler.copies import identity_of
from sglang_chunkcache.wire.spans import RequestSpans

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_chunkcache.scheduler.chunk_cache import ChunkRadixCache

logger = logging.getLogger(__name__)

MAX_COPIES = 8
"""Device copies of one chunk that a plan looks at, latest first: a popular chunk stands behind hundreds of chains."""

MAX_WAITING_CAPTURES = 256
"""Chunks waiting to enter the store. More are not kept this time."""

MAX_CAPTURE_TOKENS = 512
"""Of chunks scored and stored beside one forward: what the answers under way wait for."""


@dataclass
class Outcome:
    """What became of one request that asked for moved KV."""

    exact: int = 0
    fused_hit: int = 0
    plan: ReusePlan = field(default_factory=lambda: ReusePlan(()))
    move: Move | None = None
    declined: list[str] = field(default_factory=list)
    lookup_s: float = 0.0


@dataclass(eq=False)
class _Pending:
    move: Move
    sources: list[TreeNode]
    last: TreeNode
    """The last of its nodes; all above are filled with it."""


class Fuser:
    """The promise side of one rank.

    Args:
        extend_reserve: tokens that SGLang may take for the extends of one batch; they stay free or evictable.
    """

    def __init__(
        self,
        cache: ChunkRadixCache,
        fusion_pass: FusionPass,
        store: ChunkStore,
        limits: Limits,
        *,
        extend_reserve: int,
    ) -> None:
        self.cache, self.fusion_pass, self.store, self.limits = cache, fusion_pass, store, limits
        self.extend_reserve = extend_reserve
        self.max_variants = fusion_pass.config.store_variants
        self.is_scoring = fusion_pass.config.scoring == "on"
        self.gate: dict[str, Any] = {}
        self.fallbacks: Counter[str] = Counter()
        self._pending: list[_Pending] = []
        self._captures: deque[tuple[TreeNode, bool]] = deque()
        self._waiting: set[TreeNode] = set()
        self.dropped_captures = 0
        self.is_sharing = fusion_pass.config.exclusive_slots == "on"
        self.num_shared_ever = 0

    # SGLang's calls, in a request's order

    def match(self, req: Req, key: ChunkKey, spans: RequestSpans, result: MatchResult) -> MatchResult:
        """Extend an exact match by fused nodes of the request's recipe and by what can be moved. Takes nothing."""
        assert spans.reuse is not None
        started = time.perf_counter()
        exact = len(result.device_indices)
        node, found = result.last_device_node, [result.device_indices]
        if any(span.start == exact for span in key.spans):
            values, last = self.cache._match_prefix_helper(node, key[exact:].fused_by(spans.reuse.recipe))
            if values:
                node, found = last, [*found, *values]
                req.chunkcache_fused = Fused(exact, spans.reuse.recipe)
        indices = torch.cat(found) if len(found) > 1 else found[0]
        try:
            plan = make_plan(
                spans.spans,
                start=len(indices),
                limit=len(key),
                candidates=lambda chunk: self._candidates(ChunkIdentity(chunk, key.extra_key, key.cache_salt)),
                reuse=spans.reuse,
                limits=self.limits,
            )
        except Exception:  # nothing is taken yet, and the scheduler must not die of a plan
            logger.exception("chunk cache: no plan, the prompt is computed")
            plan = ReusePlan((), ("plan_failed",))
        outcome: Outcome = getattr(req, "chunkcache_outcome", None) or Outcome()
        req.chunkcache_outcome = outcome
        outcome.exact, outcome.fused_hit, outcome.plan, outcome.move = exact, len(indices) - exact, plan, None
        outcome.declined.clear()
        outcome.lookup_s += time.perf_counter() - started
        return result._replace(
            device_indices=indices,
            last_device_node=node,
            last_host_node=node,
            best_match_node=node,
            host_hit_length=plan.end - plan.start if plan.pieces else 0,
        )

    def commit(self, req: Req, node: TreeNode) -> tuple[torch.Tensor, TreeNode] | None:
        """Take the slots of the request's plan. Empty: declined, to be computed. None: not with this batch."""
        outcome: Outcome = req.chunkcache_outcome
        plan, spans = outcome.plan, req.chunkcache_spans
        waiting = sum(pending.move.plan.num_pass_tokens for pending in self._pending)
        if self._pending and waiting + plan.num_pass_tokens > self.limits.max_pass_tokens:
            return None
        if self._is_under_way(node):
            return None  # what it stands on is filled with this batch; its own evidence needs that done
        fused = req.chunkcache_fused or Fused(plan.fused_from, spans.reuse.recipe)
        ids = req.origin_input_ids[: plan.end]
        key = ChunkKey.cut(ids, spans.spans, plan.end, extra_key=req.extra_key, cache_salt=req.cache_salt, fused=fused)
        if key[plan.start :].child_key() in node.children:  # not to be expected: SGLang matches right before it asks
            return self._decline(outcome, "hung_meanwhile", node)
        sources = [piece.source.node for piece in plan.pieces if isinstance(piece.source, DeviceCopy)]
        if not all(self.cache.copies.holds(source) for source in sources):
            return self._decline(outcome, "source_gone", node)
        held = [node, *sources]
        for each in held:
            self.cache.inc_lock_ref(each)
        shared = self._shared(plan)
        num_own = plan.end - plan.start - sum(len(source.key) for source in shared.values())
        reserve = max_critical([piece for piece in plan.pieces if piece.span in shared], plan, spans.reuse)
        slots = self._allocate(num_own + reserve, len(req.origin_input_ids) + len(req.output_ids) - plan.end)
        if slots is None:
            for each in held:
                self.cache.dec_lock_ref(each)
            return self._decline(outcome, "no_room", node)
        row = torch.cat([req.prefix_indices, *_rows(plan, slots[:num_own], shared)])
        last, sharing = self._hang(key, row, plan, shared, req.priority or 0)
        exclusive = ExclusiveRows(self.cache, sharing, slots[num_own:]) if shared else None
        self.cache.dec_lock_ref(node)
        req.chunkcache_fused = fused
        outcome.move = Move(
            plan=plan,
            reuse=spans.reuse,
            slots=row,
            token_ids=ids,
            question_ids=req.origin_input_ids[spans.spans[-1].end :],
            question_start=spans.spans[-1].end,
            row_index=lambda: req.kv.req_pool_idx,
            shared=frozenset(shared),
            exclusive=exclusive,
        )
        for piece in plan.pieces:
            if isinstance(piece.source, HostCopy):
                self.store.use(piece.source.variant, piece.cfo)
        self._pending.append(_Pending(outcome.move, sources, last))
        return row[plan.start :], last

    def before(self, batch: ScheduleBatch) -> None:
        """Fill what was promised to this batch's requests."""
        if not self._pending:
            return
        here = {id(req.chunkcache_outcome.move) for req in batch.reqs if hasattr(req, "chunkcache_outcome")}
        if lost := [p for p in self._pending if id(p.move) not in here]:
            raise IntegrityError([f"{len(lost)} promised prompts are not in the batch that should fill them"])
        pending, self._pending = self._pending, []
        for each in pending:
            if each.move.exclusive is not None:
                each.move.exclusive.reqs = batch.reqs
        self.fusion_pass.run([p.move for p in pending])
        for each in pending:
            if each.move.exclusive is not None:
                each.move.exclusive.close()
                each.move.shared_len = each.move.exclusive.num_shared
                self.num_shared_ever += each.move.shared_len
            for source in each.sources:
                self.cache.dec_lock_ref(source)
            node = each.last
            while node is not self.cache.root_node:  # by the path: others may have split its token nodes since
                if not node.is_filled:
                    self.cache.fill(node)
                node = node.parent

    def keep(self, path: Sequence[TreeNode], spans: RequestSpans) -> None:
        """Queue the request's chunks that have earned it for the store."""
        chunks = [node for node in path if node.chunk is not None]
        for index in sorted(spans.keep):
            if index >= len(chunks):
                break
            node = chunks[index]
            preprocessed = spans.is_preprocessing and bool(node.prefix)  # alone it has seen no neighbour
            if node in self._waiting or not self.cache.copies.holds(node):
                continue
            variants = [variant.prefix for variant in self.store.find(identity_of(node))]
            if not spans.is_preprocessing and len(variants) >= self.max_variants and node.prefix not in variants:
                continue  # with all its variants a chunk gets no more: each new chain would cost a pass
            if not self.store.wants(identity_of(node), node.prefix, scored=self.is_scoring, preprocessed=preprocessed):
                continue
            if len(self._waiting) >= MAX_WAITING_CAPTURES:
                self.dropped_captures += 1
                continue
            self._waiting.add(node)
            self._captures.append((node, preprocessed))

    def after(self) -> None:
        """Score and store some of what waits.

        What was evicted meanwhile is dropped. Waiting locks nothing: on an idle server a prompt that needs those slots
        would wait for a forward that never comes.
        """
        captures: list[tuple[TreeNode, bool]] = []
        num_tokens = 0
        while self._captures:
            node, preprocessed = self._captures[0]
            is_gone = not self.cache.copies.holds(node)
            if not is_gone and captures and num_tokens + len(node.key) > MAX_CAPTURE_TOKENS:
                break
            self._captures.popleft()
            self._waiting.discard(node)
            if is_gone:
                self.dropped_captures += 1
                continue
            captures.append((node, preprocessed))
            num_tokens += len(node.key)
        if not captures:
            return
        try:
            results = self.fusion_pass.capture([_capture_of(node) for node, _ in captures])
        except Exception:  # the answers are there; the store can wait
            logger.exception("chunk cache: storing %d chunk(s) failed", len(captures))
            self.fallbacks["capture_failed"] += len(captures)
            return
        for (node, preprocessed), (blob, scores) in zip(captures, results, strict=True):
            node.scores = scores
            self.store.put(identity_of(node), Variant(node.prefix, blob, scores, preprocessed))

    def report(self, req: Req) -> dict[str, Any]:
        """What the front may tell the client, see `RagRequest.answer`."""
        outcome: Outcome = getattr(req, "chunkcache_outcome", None) or Outcome()
        move, reuse = outcome.move, req.chunkcache_spans.reuse
        fallbacks = [*outcome.plan.fallbacks, *outcome.declined, *(move.fallbacks if move else ())]
        self.fallbacks.update(fallbacks)
        recomputed = move.recomputed_len if move else 0
        return {
            "exact": outcome.exact,
            "relocated": outcome.fused_hit + (move.plan.moved_len if move else 0) - recomputed,
            "recomputed": recomputed,
            "fused_hit": outcome.fused_hit,
            "gap": move.plan.gap_len if move else 0,
            "shared": move.shared_len if move else 0,
            "selector": reuse.selector,
            "ratio": reuse.ratio,
            "sources": sources_of(move.plan if move else ReusePlan(())),
            "focused": move.focused if move else None,
            "fallbacks": fallbacks,
            "ms": {"lookup": 1000 * outcome.lookup_s, **(move.ms if move else {})},
        }

    @staticmethod
    def explain(outcome: Outcome) -> dict[str, Any]:
        """The plan of a request that was only matched; sources as in `report`, each with `[start, end)` in the prompt."""
        plan, cached = outcome.plan, outcome.exact + outcome.fused_hit
        return {
            "exact": outcome.exact,
            "fused_hit": outcome.fused_hit,
            "end": plan.end if plan.pieces else cached,
            "sources": [[*source, p.start, p.end] for source, p in zip(sources_of(plan), plan.pieces, strict=True)],
            "fallbacks": list(plan.fallbacks),
        }

    def reset(self) -> None:
        """The tree is gone: so are pending promises, waiting captures and, since weights may have changed, the store."""
        self._pending.clear()
        self._captures.clear()
        self._waiting.clear()
        self.store.clear()

    def stats(self) -> dict[str, Any]:
        """For `/chunkcache/stats`."""
        return {
            "store": {**self.store.stats()._asdict(), "pending": len(self._captures), "dropped": self.dropped_captures},
            "sources": len(self.cache.copies),
            "shared": {
                "tokens": self.cache.shared.num_shared,
                "bytes": self.cache.shared.num_shared * self.fusion_pass.token_bytes,
                "tokens_ever": self.num_shared_ever,
                "bytes_ever": self.num_shared_ever * self.fusion_pass.token_bytes,
            },
            "moves": self.fusion_pass.stats(),
            "gate": self.gate,
            "fallbacks": {**self.cache.fallbacks, **self.fallbacks},
        }

    # Private, in order of use

    def _candidates(self, identity: ChunkIdentity) -> list[Candidate]:
        copies: list[Candidate] = [DeviceCopy(node) for node in self.cache.copies.find(identity, MAX_COPIES)]
        return copies + [HostCopy(variant) for variant in self.store.find(identity)]

    def _shared(self, plan: ReusePlan) -> dict[int, TreeNode]:
        """The source by span index of each chunk that stays where its source stands."""
        return {
            piece.span: piece.source.node
            for piece in plan.pieces
            if self.is_sharing and piece.stays and piece.span is not None and isinstance(piece.source, DeviceCopy)
        }

    @staticmethod
    def _is_under_way(node: TreeNode | None) -> bool:
        """Whether a node on this one's path waits to be filled, be it a chunk or the head."""
        while node is not None:
            if not getattr(node, "is_filled", True):
                return True
            node = node.parent
        return False

    def _decline(self, outcome: Outcome, reason: str, node: TreeNode) -> tuple[torch.Tensor, TreeNode]:
        outcome.declined.append(reason)
        return torch.empty((0,), dtype=torch.int64, device=self.cache.device), node

    def _allocate(self, num_tokens: int, num_behind: int) -> torch.Tensor | None:
        """Slots, evicting if need be; None where the batch's extends might then find no room, which kills SGLang.

        `num_behind` of the request's own are left to prefill: without chunked prefill that may be more than the reserve.
        """
        allocator = self.cache.token_to_kv_pool_allocator
        room = allocator.available_size() + self.cache.evictable_size()
        if room < num_tokens + max(self.extend_reserve, num_behind):
            return None
        if (missing := num_tokens - allocator.available_size()) > 0:
            self.cache.evict(EvictParams(num_tokens=missing))
        slots: torch.Tensor | None = allocator.alloc(num_tokens)
        return slots

    def _hang(
        self, key: ChunkKey, row: torch.Tensor, plan: ReusePlan, shared: Mapping[int, TreeNode], priority: int
    ) -> tuple[TreeNode, list[TreeNode]]:
        """Nodes for the region, yet to be filled: (the last one, those that share their source's slots)."""
        # As chunked: the request has not used these nodes yet, so nothing is a hit.
        _, path = self.cache.insert_segments(key, row, priority, True, are_filled=False)
        chunks = [node for node in path if node.chunk is not None]
        for piece in plan.pieces:
            if piece.span is not None:
                chunks[piece.span].is_moved = piece.source is not None
        for span, source in shared.items():
            self.cache.share(source, chunks[span])
        return path[-1], [chunks[span] for span in shared]


def _rows(plan: ReusePlan, slots: torch.Tensor, shared: Mapping[int, TreeNode]) -> list[torch.Tensor]:
    """The slots of each piece: its source's where they are shared, the next of `slots` elsewhere."""
    rows, at = [], 0
    for piece in plan.pieces:
        if piece.span is not None and piece.span in shared:
            rows.append(shared[piece.span].value)
        else:
            rows.append(slots[at : at + piece.end - piece.start])
            at += piece.end - piece.start
    return rows


def _capture_of(node: TreeNode) -> Capture:
    """The chunk with all that stands before it."""
    path = []
    above: TreeNode | None = node
    while above is not None and above.parent is not None:
        path.append(above)
        above = above.parent
    path.reverse()
    ids = array("q")
    for each in path:
        ids.extend(each.key.token_ids)
    return Capture(
        token_ids=ids,
        slots=torch.cat([each.value for each in path]),
        start=node.start,
        prefix=tuple(
            (each.start, each.start + len(each.key)) for each in path[:-1] if getattr(each, "chunk", None) is not None
        ),
    )


def sources_of(plan: ReusePlan) -> list[list[Any]]:
    """[span index, where from, chunks before the source, of these before it now, CFO] per piece."""
    return [_source(piece) for piece in plan.pieces]


def _source(piece: Piece) -> list[Any]:
    if piece.source is None:
        return [piece.span, "gap", 0, 0, None]
    return [piece.span, piece.source.where, len(piece.source.prefix), piece.overlap, piece.cfo]
