"""Which rows of the KV pool a promise has, where a chunk has one copy (attention/slot_map.py).

    prompt   head  C  |<A A A A>  gap  <B B>|   A's source is on the device, B's in host memory
    rows               s o s s    o    o o      s: the source's, o: its own

Moved tokens share their source's rows from the promise on; the keys turn when they are read. Those
that are recomputed get rows of their own before the pass writes them, from as many as the plan
expects: these are reserved with the promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from radix_ext.moved_plan import Piece, ReusePlan
from radix_ext.sources import DeviceCopy
from sglang_chunkcache.attention.slot_map import MappedPool, SlotMap
from sglang_chunkcache.fusion.move import Move
from sglang_chunkcache.fusion.relocate import RotaryTable
from sglang_chunkcache.wire.report import Fallback


class Sharing:
    """Of one rank. `make_room` evicts until so many rows are free, or nothing is left to evict."""

    def __init__(
        self, slot_map: SlotMap, table: RotaryTable, make_room: Callable[[int], None]
    ) -> None:
        self._slot_map, slot_map.turns, self._make_room = slot_map, table, make_room

    @classmethod
    def of(cls, pool: Any, table: RotaryTable, make_room: Callable[[int], None]) -> Sharing | None:
        """None: the pool has no virtual slots."""
        return cls(pool.slot_map, table, make_room) if isinstance(pool, MappedPool) else None

    def num_rows(self, plan: ReusePlan) -> int:
        """That a promise takes, with those that it reserves."""
        return plan.end - plan.start - _num_shared(plan) + _num_expected(plan)

    def num_saved(self, plan: ReusePlan) -> int:
        """How many rows fewer than tokens it takes from what is free or evictable: those that
        others hold, less what gets rows of its own."""
        sources = [source.node.value for _, source in _on_device(plan)]
        num_held = sum(int(self._slot_map.is_in_use(slots).sum()) for slots in sources)
        return max(0, num_held - _num_expected(plan))

    def share(self, move: Move) -> None:
        """Rows for its slots, which have none; `num_rows` are free."""
        plan, own = move.plan, torch.ones(len(move.slots), dtype=torch.bool)
        own[: plan.start] = False
        for piece, source in _on_device(plan):
            own[piece.start : piece.end] = False
            tokens, start = torch.arange(piece.end - piece.start), source.facts.start
            self._slot_map.share(
                move.slots[piece.start : piece.end],
                source.node.value,
                old=start + tokens,
                new=piece.start + tokens,
            )
        self._slot_map.assign(move.slots[own])
        move.num_reserved, move.num_shared = _num_expected(plan), _num_shared(plan)
        self._slot_map.reserve(move.num_reserved)

    def own(self, move: Move, positions: Tensor, *, all_of_them: bool = False) -> Tensor:
        """Rows of their own for these positions of its prompt, [n] int64, which are to be computed.
        Returns those that have one: all, unless more were chosen than the plan expected, and there
        is no room.

        Raises:
            IndexError: `all_of_them` are needed, and there is no room.
        """
        slots = move.slots[positions]
        is_shared = self._slot_map.is_shared(slots)
        unexpected = int(is_shared.sum()) - move.num_reserved
        if unexpected > self._slot_map.num_free:
            self._make_room(unexpected)
        missing = unexpected - self._slot_map.num_free  # below 1: none
        if missing > 0 and not all_of_them:
            kept = torch.ones_like(is_shared)
            kept[is_shared.nonzero().flatten()[-missing:]] = False
            positions, slots = positions[kept], slots[kept]
            move.recomputed_len, move.whole = move.recomputed_len - missing, frozenset()
            move.fallbacks.append(Fallback.NO_ROOM)
        move.num_reserved = self._slot_map.own(slots, reserved=move.num_reserved)
        move.num_shared -= int(is_shared.sum()) - max(0, missing)
        return positions

    def end(self, move: Move) -> None:
        """It is filled, or cannot be."""
        self._slot_map.release(move.num_reserved)
        move.num_reserved = 0

    def stats(self) -> dict[str, int]:
        """Rows of the pool, and virtual slots: now."""
        slot_map = self._slot_map
        held_rows, held_slots = slot_map.num_held
        return {
            "rows": slot_map.num_used,
            "held_rows": held_rows,
            "held_slots": held_slots,
            "saved": slot_map.num_saved,
            "reserved": slot_map.num_reserved,
            "slots": slot_map.num_mapped,
        }


def _on_device(plan: ReusePlan) -> Iterator[tuple[Piece, DeviceCopy]]:
    for piece in plan.pieces:
        if isinstance(piece.source, DeviceCopy):
            yield piece, piece.source


def _num_shared(plan: ReusePlan) -> int:
    return sum(piece.end - piece.start for piece, _ in _on_device(plan))


def _num_expected(plan: ReusePlan) -> int:
    """Shared tokens that are recomputed."""
    return min(plan.recomputed_len, _num_shared(plan))
