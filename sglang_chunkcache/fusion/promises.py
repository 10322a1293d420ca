"""Promised slots: from a request's plan to the batch that fills them. They are the request's own
until it inserts them, as what it computes itself.

commit   per request: locks the sources, allocates slots
fill     per batch, before its forward: `FusionPass` fills all slots; sources are unlocked

What cannot be filled, not even by computing it, is read by its own request alone: that one gets an
error, and nothing of it is inserted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.radix_cache import TreeNode

from radix_ext.costs import explores
from radix_ext.moved_plan import Limits, ReusePlan
from radix_ext.sources import ChunkSources, DeviceCopy, HostCopy
from sglang_chunkcache import compat
from sglang_chunkcache.fusion.fill import FusionPass
from sglang_chunkcache.fusion.move import Move, move_of
from sglang_chunkcache.fusion.outcome import outcome_of
from sglang_chunkcache.fusion.tail import tails_of
from sglang_chunkcache.scheduler.chunk_key import Fused
from sglang_chunkcache.scheduler.host_slots import HostSlots
from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.scheduler.stages import MOVE, is_traced, traced
from sglang_chunkcache.scheduler.waiting import Reason
from sglang_chunkcache.wire.report import Fallback

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch

    from sglang_chunkcache.scheduler.chunk_tree import ChunkTree


logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Pending:
    req: Req
    move: Move
    taken: ExitStack
    """Locks of sources in the tree, until the move is filled."""
    held: ExitStack
    """Those in the host pool."""


class Promises:
    def __init__(
        self, tree: ChunkTree, sources: ChunkSources, fusion_pass: FusionPass, limits: Limits
    ) -> None:
        self._tree, self._sources, self._fusion_pass = tree, sources, fusion_pass
        self._limits = limits
        self._pending: list[_Pending] = []
        self._num_pass_tokens = 0  # of these
        self._num_with_tails = 0

    def commit(self, req: Req, node: TreeNode) -> torch.Tensor | None:
        """Take the slots of the request's plan. None: declined, to be computed, or put off."""
        outcome, known = outcome_of(req), state(req)
        plan, spans = outcome.plan, known.spans
        assert spans is not None
        assert plan.fusion is not None
        if not self._fits(plan.num_pass_tokens):
            if known.must_go:
                outcome.declined.append(Fallback.PASS_FULL)
            else:
                is_over = partial(self._fits, plan.num_pass_tokens)
                self._tree.line.put_off(req, Reason.PASS_FULL, is_over)
            return None
        sharing = self._fusion_pass.sharing
        found = None if sharing is None else sharing.find(req, plan)
        if not self._sources.are_there(plan) or (found is not None and not found.is_whole):
            outcome.declined.append(Fallback.SOURCE_GONE)
            return None
        moved = [(each.start, each.source) for each in plan.pieces if each.source is not None]
        sources = [source.node for _, source in moved if isinstance(source, DeviceCopy)]
        num_after = len(req.origin_input_ids) + len(req.output_ids) - plan.end
        num_computed = self._tree.line.num_computed(num_after)
        num_tokens = plan.end - plan.start
        num_rows = num_tokens if found is None else found.num_rows
        with ExitStack() as locked, ExitStack() as taken, ExitStack() as held:
            self._lock(node, locked)
            for blob in slots_of(plan):
                blob.hold()
                held.callback(blob.let_go)
            for source in sources:
                self._lock(source, taken)
            if sharing is not None and found is not None:
                sharing.pin(found, locked)
            missing = self._tree.num_missing(num_tokens + num_computed, num_rows + num_computed)
            slots = None if missing > 0 else self._allocate(plan, num_rows, taken)
            if slots is None:
                num_slots, num_rows = num_tokens + num_computed, num_rows + num_computed
                num_rows += 0 if found is None else len(found.unlocked)
                fits = self._tree.fits_alone([node, *sources], num_slots, num_rows)
                if not (fits and self._tree.line.for_room(req, missing)):
                    outcome.declined.append(Fallback.NO_ROOM)
                return None
            row = torch.cat([self._tree.path_device_indices(node), slots])
            outcome.move = move_of(req, plan, spans, row)
            if sharing is not None and found is not None:
                sharing.share(outcome.move, found)
            self._pending.append(_Pending(req, outcome.move, taken.pop_all(), held.pop_all()))
            self._num_pass_tokens += plan.num_pass_tokens
        known.fused = known.fused or Fused(plan.fused_from, plan.fusion.recipe)
        known.moved = frozenset(start for start, _ in moved)
        return slots

    def fill(self, batch: ScheduleBatch) -> torch.Tensor | None:
        """Returns [n, hidden_size], what the batch's forward would compute, if the pass has."""
        if not self._pending:
            return None
        known = {id(each.req): each for each in self._pending}
        pending = [known.pop(id(req)) for req in batch.reqs if id(req) in known]
        if not pending:
            return None
        self._pending = list(known.values())
        self._num_pass_tokens = sum(each.move.plan.num_pass_tokens for each in self._pending)
        moves, hidden, begun = [each.move for each in pending], None, time.perf_counter()
        for each in pending:
            compat.keep_own(each.req, each.move.plan.start)
        try:
            tails = tails_of(batch, [move.plan for move in moves], self._limits.max_pass_tokens)
            self._num_with_tails += bool(tails)
            # now and then SGLang's extend runs alone: what never runs is never observed
            if not explores(self._num_with_tails):
                for move, tail in zip(moves, tails, strict=False):
                    move.tail = tail
            hidden = self._fusion_pass.run(moves)
        except Exception:
            logger.exception("chunk cache: %d prompt(s) cannot be filled", len(pending))
            for move in moves:
                move.is_lost = True
        for each in pending:
            if each.move.is_lost:
                state(each.req).is_failed = True
                compat.drop_output(each.req, "its chunks could not be moved, nor computed")
            its, move = state(each.req), each.move
            if self._fusion_pass.sharing is not None:
                self._fusion_pass.sharing.end(move)
            if is_traced(each.req):
                times = {f"{phase}_ms": round(took, 3) for phase, took in move.ms.items()}
                lens = {"tokens": move.plan.end - move.plan.start, "gap": move.plan.gap_len}
                lens |= {"recomputed": move.recomputed_len, "requests": len(moves)}
                traced(each.req, MOVE, begun, **lens, **times)
            its.outward = move.outward
            # a source like a gap: a variant behind these chunks, as Cache-Craft has several of one
            its.moved -= move.whole
            each.taken.close()
            each.held.close()
        return hidden

    def reset(self) -> None:
        """The tree is empty: what is promised is not filled any more."""
        for each in self._pending:
            each.held.close()
        self._num_pass_tokens = 0
        self._pending.clear()  # `taken` is not closed: the locks went with the tree
        if self._fusion_pass.sharing is not None:
            self._fusion_pass.sharing.clear()

    def _fits(self, num_tokens: int) -> bool:
        """Whether the batch's pass has room for so many more; for the first it always has."""
        num_all = self._num_pass_tokens + num_tokens
        return not self._pending or num_all <= self._limits.max_pass_tokens

    def _lock(self, node: TreeNode, until: ExitStack) -> None:
        self._tree.inc_lock_ref(node)
        until.callback(self._tree.dec_lock_ref, node)

    def _allocate(self, plan: ReusePlan, num_rows: int, taken: ExitStack) -> torch.Tensor | None:
        """Slots, evicting if need be; an exception on the way out of `taken` frees them. With
        `sharing` they have no rows yet, but so many are free."""
        allocator, num_tokens = self._tree.token_to_kv_pool_allocator, plan.end - plan.start
        self._tree.make_room(num_tokens, num_rows)
        shares = self._fusion_pass.sharing is not None
        slots: torch.Tensor | None = (allocator.take if shares else allocator.alloc)(num_tokens)
        if slots is not None:
            taken.push(lambda error, *_: allocator.free(slots) if error else None)
        return slots


def slots_of(plan: ReusePlan) -> Iterator[HostSlots]:
    """What the plan reads in the host pool."""
    for piece in plan.pieces:
        if isinstance(piece.source, HostCopy):
            yield piece.source.facts.blob
