"""Promised slots: from a request's plan to the batch that fills them.

commit   per request: locks the sources, allocates slots, inserts empty fused nodes after the
         prefix
fill     per batch, before its forward: `FusionPass` fills all slots, then the sources are
         unlocked
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import TreeNode

from radix_ext import IntegrityError
from radix_ext.moved_plan import Limits, ReusePlan, has_room
from radix_ext.sources import ChunkSources, DeviceCopy, HostCopy
from sglang_chunkcache.fusion.fill import FusionPass
from sglang_chunkcache.fusion.move import Move, move_of
from sglang_chunkcache.fusion.outcome import Outcome, outcome_of
from sglang_chunkcache.scheduler.chunk_key import ChunkKey, Fused
from sglang_chunkcache.scheduler.host_slots import HostSlots
from sglang_chunkcache.scheduler.node import facts, state
from sglang_chunkcache.wire.report import Fallback
from sglang_chunkcache.wire.spans import RequestSpans

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_chunkcache.scheduler.chunk_tree import ChunkTree


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


class Promises:
    """Of one rank.

    Args:
        extend_reserve: tokens that SGLang may take for the extends of one batch. They stay free or
            evictable.
    """

    def __init__(
        self,
        tree: ChunkTree,
        sources: ChunkSources,
        fusion_pass: FusionPass,
        limits: Limits,
        *,
        extend_reserve: int,
    ) -> None:
        self._tree, self._sources, self._fusion_pass = tree, sources, fusion_pass
        self._limits, self._extend_reserve = limits, extend_reserve
        self._pending: list[_Pending] = []

    def commit(self, req: Req, node: TreeNode) -> tuple[int, TreeNode]:
        """Take the slots of the request's plan. 0: declined, to be computed."""
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
        if not self._sources.are_there(plan):
            return self._decline(outcome, Fallback.SOURCE_GONE, node)
        num_after = len(req.origin_input_ids) + len(req.output_ids) - plan.end
        with self._locked(node), ExitStack() as taken, ExitStack() as held:
            for blob in slots_of(plan):
                blob.hold()
                held.callback(blob.let_go)
            for source in sources:
                self._tree.inc_lock_ref(source)
                taken.callback(self._tree.dec_lock_ref, source)
            slots = self._allocate(plan.end - plan.start, num_after, taken)
            if slots is None:
                return self._decline(outcome, Fallback.NO_ROOM, node)
            taken.push(lambda error, *_: self._remove_below(node, key, plan) if error else None)
            row = torch.cat([self._tree.path_device_indices(node), slots])
            move = move_of(req, plan, spans, row)
            last = self._insert(key, row, plan, spans.namespace, req.priority or 0)
            outcome.move = move
            self._pending.append(_Pending(req, move, last, taken.pop_all(), held.pop_all()))
        state(req).fused = key.fused
        return len(slots), last

    def fill(self, batch: ScheduleBatch) -> None:
        """Fill what was promised to this batch's requests."""
        if not self._pending:
            return
        here = {id(outcome_of(req).move) for req in batch.reqs}
        if lost := [p for p in self._pending if id(p.move) not in here]:
            raise IntegrityError(
                [f"{len(lost)} promised prompts are not in the batch that should fill them"]
            )
        pending, self._pending = self._pending, []
        self._fusion_pass.run([each.move for each in pending])
        for each in pending:
            state(each.req).outward = each.move.outward
            each.taken.close()
            each.held.close()
            node = each.last
            # by the path: others may have split its token nodes since
            while node is not self._tree.root_node:
                if not facts(node).is_filled:
                    self._tree.fill(node)
                node = node.parent

    def reset(self) -> None:
        """The tree is empty: what is promised is not filled any more."""
        for each in self._pending:
            each.held.close()
        self._pending.clear()  # `taken` is not closed: the locks went with the tree

    # Private, in order of use

    @staticmethod
    def _is_filled(node: TreeNode) -> bool:
        """Whether every node from here up holds its KV. What this batch itself will fill does not:
        the pass would read it while it is written."""
        above: TreeNode | None = node
        while above is not None and facts(above).is_filled:
            above = above.parent
        return above is None

    def _is_full(self, plan: ReusePlan) -> bool:
        """Whether the batch's pass has no room for this plan; for the first it always has."""
        promised = sum(each.move.plan.num_pass_tokens for each in self._pending)
        num_tokens = promised + plan.num_pass_tokens
        return bool(self._pending) and num_tokens > self._limits.max_pass_tokens

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

    @staticmethod
    def _decline(outcome: Outcome, reason: Fallback, node: TreeNode) -> tuple[int, TreeNode]:
        outcome.declined.append(reason)
        return 0, node

    @contextmanager
    def _locked(self, node: TreeNode) -> Iterator[None]:
        self._tree.inc_lock_ref(node)
        try:
            yield
        finally:
            self._tree.dec_lock_ref(node)

    def _allocate(self, num_tokens: int, num_after: int, taken: ExitStack) -> torch.Tensor | None:
        """Slots, evicting if need be; an exception on the way out of `taken` frees them.

        None where the batch's extends might then find none, which kills SGLang. `num_after` tokens
        of the request's own are left to prefill: without chunked prefill that may be more than the
        reserve.
        """
        allocator = self._tree.token_to_kv_pool_allocator
        capacity = allocator.available_size() + self._tree.evictable_size()
        if not has_room(capacity, num_tokens, reserve=self._extend_reserve, num_after=num_after):
            return None
        if (missing := num_tokens - allocator.available_size()) > 0:
            self._tree.evict(EvictParams(num_tokens=missing))
        slots: torch.Tensor | None = allocator.alloc(num_tokens)
        if slots is not None:
            taken.push(lambda error, *_: allocator.free(slots) if error else None)
        return slots

    def _insert(
        self, key: ChunkKey, row: torch.Tensor, plan: ReusePlan, head: str, priority: int
    ) -> TreeNode:
        """The last of the region's nodes, which are yet to be filled."""
        # The request has not used these nodes yet, so nothing is a hit.
        _, path = self._tree.insert_segments(key, row, head, priority, len(row), are_filled=False)
        chunks = [node for node in path if facts(node).chunk is not None]
        for piece in plan.pieces:
            if piece.span is not None:
                facts(chunks[piece.span]).is_moved = piece.source is not None
        return path[-1]

    def _remove_below(self, node: TreeNode, key: ChunkKey, plan: ReusePlan) -> None:
        """Take out what a commit that failed has inserted behind `node`, if anything: one chain,
        which holds slots that the commit frees."""
        last = node.children.get(key[plan.start :].child_key(), node)
        while last.children and last is not node:
            (last,) = last.children.values()
        while last is not node:
            self._tree._delete_leaf(last)
            self._tree.kv_events.record_remove(last)
            last = last.parent


def slots_of(plan: ReusePlan) -> Iterator[HostSlots]:
    """What the plan reads in the host pool."""
    for piece in plan.pieces:
        if isinstance(piece.source, HostCopy) and isinstance(piece.source.variant.blob, HostSlots):
            yield piece.source.variant.blob
