"""KV of moved chunks into promised slots: gathered, its keys turned to their new positions,
scattered. What comes from host memory does so layer by layer, beside the passes that follow
(Cache-Craft 3.4.2, scheduler/layer_loads.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from radix_ext.costs import Phase, Work, seconds
from radix_ext.sources import DeviceCopy, HostCopy
from sglang_chunkcache.attention.slot_map import rows_of
from sglang_chunkcache.fusion.move import Move
from sglang_chunkcache.fusion.relocate import KeyTurn, RotaryTable, copy_moved
from sglang_chunkcache.fusion.sharing import Sharing
from sglang_chunkcache.scheduler.host_nodes import HostNodes
from sglang_chunkcache.scheduler.layer_loads import LayerLoads, copied_ahead
from sglang_chunkcache.scheduler.node import joined
from sglang_chunkcache.scheduler.pricing import Pricing


class Mover:
    """Of one rank. `host` has the store's KV. `num_tokens`, by source, is counted here. `sharing`:
    nothing is copied but what it lets load, whose keys stay as they are. None: there is none."""

    def __init__(
        self,
        pool: Any,
        table: RotaryTable,
        pricing: Pricing,
        host: HostNodes,
        num_tokens: Counter[str],
        sharing: Sharing | None = None,
    ) -> None:
        self._pool, self._table, self._pricing, self._host = pool, table, pricing, host
        self._loads, self.num_tokens, self._sharing = LayerLoads.of(pool), num_tokens, sharing
        self._is_overlapped = False
        self.layers_ahead = 0
        """Layers of the last load that were copied before the passes."""
        self.num_copied_again = 0
        """Loads whose copies failed beside the passes, and were made again."""

    def move(self, moves: Sequence[Move]) -> None:
        """Copy the KV of every moved piece into its slots; what comes from host memory may go on
        beside what is queued next, until `settle`."""
        for move in moves:
            self.num_tokens["moved_other_head"] += sum(
                each.end - each.start for each in move.moved if each.other_head
            )
            for piece in move.moved:
                assert piece.source is not None
                self.num_tokens[f"moved_{piece.source.where}"] += piece.end - piece.start
        if self._sharing is not None:
            if loads := [*self._sharing.loads(moves)]:
                held, rows = zip(*loads, strict=True)
                self._load(moves, held, joined(rows), _as_it_is)
            return
        copies: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        blobs: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []
        for move in moves:
            for piece in move.moved:
                source = piece.source
                assert isinstance(source, DeviceCopy | HostCopy)
                target = move.slots[piece.start : piece.end]
                positions, origin = (
                    torch.arange(start, start + len(target), device=target.device)
                    for start in (piece.start, source.facts.start)
                )
                if isinstance(source, DeviceCopy):
                    copies.append((source.node.value, origin, target, positions))
                else:
                    blobs.append((source.facts.blob.slots, origin, target, positions))
        if copies:
            # All layers at once: what is loaded beside this pass has to be there.
            self._pool.get_kv_buffer(self._pool.layer_num - 1)
            num_tokens = sum(len(target) for _, _, target, _ in copies)
            with self._pricing.timed(Phase.DEVICE, Work(1, num_tokens)):
                # All requests' pieces in one launch, and the turn once for all of them.
                slots, origins, targets, positions = map(joined, zip(*copies, strict=True))
                copy_moved(
                    self._pool,
                    self._table,
                    source_slots=slots,
                    source_positions=origins,
                    target_slots=targets,
                    target_positions=positions,
                )
        if blobs:
            held, *places = zip(*blobs, strict=True)
            origins, targets, positions = map(joined, places)
            turn = KeyTurn(self._pool, self._table, origins, targets, positions)
            self._load(moves, held, rows_of(self._pool)(targets), turn)

    def settle(self) -> None:
        """All that was loaded for these moves is there."""
        if self._is_overlapped:
            self._is_overlapped = False
            self.num_copied_again += self._loads.settle()

    def _load(
        self,
        moves: Sequence[Move],
        slots: Sequence[Tensor],
        rows: Tensor,
        turn: Callable[[range], None],
    ) -> None:
        """From these chunks' slots in host memory, in layers, of which some come beside the passes
        (Cache-Craft 3.4.2): one launch for all chunks of a layer, and another one that turns their
        keys in place."""
        work = Work(len(slots), len(rows))
        pool = self._host.pool
        pool.follow()
        held = pool.prepare(torch.cat([*slots]))

        # `LayerLoads` calls it again after a failure: it only overwrites slots of these moves.
        def copy(layers: range) -> None:
            pool.copy(held, rows, layers)
            turn(layers)

        num_ahead = self._num_ahead(moves, work)
        self.layers_ahead = self._loads.start(
            copy, Phase.HOST, work, num_ahead=num_ahead, clock=self._pricing
        )
        # Loads that others have begun, as of exact chains, end after their own forward.
        self._is_overlapped = self.layers_ahead < self._loads.num_layers

    def _num_ahead(self, moves: Sequence[Move], work: Work) -> int:
        """By equation 16, as if the passes were one; all where none follows, or a thread beside it
        would take a second team of torch's threads."""
        costs, num_layers = self._pricing.agreed, self._loads.num_layers
        passes = (Phase.QUESTION, Phase.DEVIATION, Phase.RECOMPUTE)
        compute: float = sum(
            seconds(costs, {phase: move.plan.works.get(phase, Work()) for phase in passes})
            for move in moves
        )
        if not compute or (not self._loads.is_cuda and torch.get_num_threads() > 1):
            return num_layers
        return copied_ahead(num_layers, load=costs[Phase.HOST].seconds(work), compute=compute)


def _as_it_is(layers: range) -> None:
    """Its keys turn where they are read."""
