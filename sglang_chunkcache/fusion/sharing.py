"""Which rows of the KV pool a promise has, where a chunk has one copy (attention/slot_map.py).

    prompt   head  C  |<A A A A>  gap  <B B>|   A's source is on the device, B's in host memory
    rows               s o s s    o    s l      s: others', o: its own, l: loaded for it and others

Moved tokens share rows from the promise on; the keys turn when they are read. What is in host
memory is loaded as it was computed there, and only what no row has: by whichever request comes
first, and while a row lives the next ones share it, whatever has become of that request. A chunk
whose rows all live is a source, even where tree and store have lost it. Tokens that are recomputed
get rows of their own before the pass writes them, from as many as the plan expects: these are
reserved with the promise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from radix_ext.cfo import KvFacts
from radix_ext.moved_plan import Piece, ReusePlan
from radix_ext.sources import DeviceCopy, HostCopy, RowCopy, origin
from radix_ext.variants import Identity
from sglang_chunkcache.attention.slot_map import MappedPool, SlotMap
from sglang_chunkcache.fusion.move import Move
from sglang_chunkcache.fusion.relocate import RotaryTable
from sglang_chunkcache.scheduler.node import ChunkIdentity
from sglang_chunkcache.wire.report import Fallback

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

SWEPT_FROM = 256
"""Chunks of which rows are remembered before those without any are looked for."""


class _Rows(NamedTuple):
    """A chunk's, of which some may have gone to others."""

    facts: KvFacts
    rows: Tensor  # [n] int64
    since: int  # as of `SlotMap.are_same`


class Found(NamedTuple):
    """A plan, and the rows that its moved tokens will share."""

    plan: ReusePlan
    pieces: Sequence[tuple[Piece, Identity, Tensor]]
    """Those that are moved, with [n] int64 each: the token's row. 0: it is to be loaded."""

    @property
    def is_whole(self) -> bool:
        """Whether all of it is here that can come from nowhere else."""
        alone = (rows for piece, _, rows in self.pieces if isinstance(piece.source, RowCopy))
        return all(bool(rows.all()) for rows in alone)

    @property
    def num_rows(self) -> int:
        """That a promise takes, with those that it reserves."""
        num_shared = sum(int((rows > 0).sum()) for *_, rows in self.pieces)
        return self.plan.end - self.plan.start - num_shared + self.num_expected

    @property
    def num_expected(self) -> int:
        """Shared tokens that are recomputed: what is loaded may be others' by then, too."""
        return min(self.plan.recomputed_len, self.plan.moved_len)

    @property
    def unlocked(self) -> Tensor:
        """[n] int64: rows that are here, of chunks that are not in the tree."""
        return self._rows_of(HostCopy, RowCopy)

    @property
    def rows(self) -> Tensor:
        """[n] int64: all rows that are here."""
        return self._rows_of(DeviceCopy, HostCopy, RowCopy)

    def _rows_of(self, *kinds: type) -> Tensor:
        none = torch.empty(0, dtype=torch.int64)
        found = torch.cat([none, *(r for p, _, r in self.pieces if isinstance(p.source, kinds))])
        return found[found > 0]


class Load(NamedTuple):
    """What comes from host memory: [n] int64 each."""

    slots: Tensor  # there
    rows: Tensor  # of the pool


class Sharing:
    """Of one rank. `make_room` evicts until so many rows are free, or nothing is left to evict."""

    def __init__(
        self, slot_map: SlotMap, table: RotaryTable, make_room: Callable[[int], None]
    ) -> None:
        self._slot_map, self._make_room = slot_map, make_room
        slot_map.turn_by(table)
        # by chunk, then `origin`
        self._known = dict[Identity, dict[tuple[Any, ...], _Rows]]()
        self._sweep_at = SWEPT_FROM

    @classmethod
    def of(cls, pool: Any, table: RotaryTable, make_room: Callable[[int], None]) -> Sharing | None:
        """None: the pool has no virtual slots."""
        return cls(pool.slot_map, table, make_room) if isinstance(pool, MappedPool) else None

    def find(self, req: Req, plan: ReusePlan) -> Found:
        """Where the plan's chunks are in the pool, now."""
        moved = [(each, _identity(each, req)) for each in plan.pieces if each.source is not None]
        return Found(plan, [(piece, chunk, self._here(piece, chunk)) for piece, chunk in moved])

    def copies(self, identity: Identity) -> Iterator[KvFacts]:
        """Of a chunk, those that rows have all of."""
        for facts, rows, since in self._known.get(identity, {}).values():
            is_here = self._slot_map.are_same(rows, since) & ~self._slot_map.are_awaited(rows)
            if is_here.all():
                yield facts

    def num_saved(self, found: Found) -> int:
        """How many rows fewer than tokens it takes from what is free or evictable: those that
        others hold, less what gets rows of its own."""
        num_held = int(self._slot_map.are_held(found.rows).sum())
        return max(0, num_held - found.num_expected)

    def pin(self, found: Found, until: ExitStack) -> None:
        """What it shares stays, whatever is evicted."""
        self._slot_map.pin(found.rows)
        until.callback(self._slot_map.unpin, found.rows)

    def share(self, move: Move, found: Found) -> None:
        """Rows for its slots, which have none; `num_rows` are free."""
        plan, own = move.plan, torch.ones(len(move.slots), dtype=torch.bool)
        own[: plan.start] = False
        move.shared = torch.zeros_like(own)
        for piece, identity, rows in found.pieces:
            assert piece.source is not None
            slots, start = move.slots[piece.start : piece.end], piece.source.facts.start
            old, is_here = start + torch.arange(len(slots)), rows > 0
            new = old + piece.start - start
            here, there = slots[is_here], slots[~is_here]
            self._slot_map.share(here, rows[is_here], old=old[is_here], new=new[is_here])
            self._slot_map.expect(there, old=old[~is_here], new=new[~is_here])
            own[piece.start : piece.end] = False
            move.shared[piece.start : piece.end] = is_here
            self._remember(identity, piece.source.facts, self._slot_map.rows(slots))
        self._slot_map.assign(move.slots[own])
        move.num_reserved = found.num_expected
        self._slot_map.reserve(move.num_reserved)

    def loads(self, moves: Sequence[Move]) -> Iterator[Load]:
        """What these moves' slots await, each row once."""
        taken = torch.empty(0, dtype=torch.int64)
        for move in moves:
            for piece in move.moved:
                slots = move.slots[piece.start : piece.end]
                rows = self._slot_map.rows(slots)
                is_new = self._slot_map.are_awaited(rows) & ~torch.isin(rows, taken)
                if is_new.any():
                    assert isinstance(piece.source, HostCopy), "what is on the device is there"
                    taken = torch.cat([taken, rows[is_new]])
                    yield Load(piece.source.facts.blob.slots[is_new], rows[is_new])

    def came(self, moves: Sequence[Move]) -> None:
        """All `loads` of these moves are there. Until then who shares the rows loads them, too."""
        for move in moves:
            self._slot_map.came(move.slots[move.plan.start :])

    def own(self, move: Move, positions: Tensor, *, all_of_them: bool = False) -> Tensor:
        """Rows of their own for these positions of its prompt, [n] int64, which are to be computed.
        Returns those that have one: all, unless more were chosen than the plan expected, and there
        is no room.

        Raises:
            IndexError: `all_of_them` are needed, and there is no room.
        """
        slots, slot_map = move.slots[positions], self._slot_map
        unexpected = int(slot_map.has_others(slots).sum()) - move.num_reserved
        if unexpected > slot_map.num_free:
            self._make_room(unexpected)
        has_others = slot_map.has_others(slots)  # of which some may have been evicted
        missing = int(has_others.sum()) - move.num_reserved - slot_map.num_free  # below 1: none
        if missing > 0 and not all_of_them:
            kept = torch.ones_like(has_others)
            kept[has_others.nonzero().flatten()[-missing:]] = False
            positions, slots = positions[kept], slots[kept]
            move.recomputed_len, move.whole = move.recomputed_len - missing, frozenset()
            move.fallbacks.append(Fallback.NO_ROOM)
        move.num_reserved = slot_map.own(slots, reserved=move.num_reserved)
        move.shared[positions] = False
        return positions

    def end(self, move: Move) -> None:
        """It is filled, or cannot be."""
        self._slot_map.release(move.num_reserved)
        move.num_reserved = 0

    def clear(self) -> None:
        """No row has anything."""
        self._known.clear()

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

    def _here(self, piece: Piece, identity: Identity) -> Tensor:
        """[n] int64: the rows that have the piece's source. 0: none has the token."""
        assert piece.source is not None
        if isinstance(piece.source, DeviceCopy):
            return self._slot_map.rows(piece.source.node.value)
        known = self._known.get(identity, {}).get(origin(piece.source.facts))
        if known is None:
            return torch.zeros(piece.end - piece.start, dtype=torch.int64)
        return known.rows * self._slot_map.are_same(known.rows, known.since)

    def _remember(self, identity: Identity, facts: KvFacts, rows: Tensor) -> None:
        # else a chunk that is always asked for would have all places that it ever came from
        known = self._known[identity] = self._live(self._known.get(identity, {}))
        known[origin(facts)] = _Rows(facts, rows, self._slot_map.num_given)
        if len(self._known) > self._sweep_at:
            live = {chunk: self._live(known) for chunk, known in self._known.items()}
            self._known = {chunk: known for chunk, known in live.items() if known}
            self._sweep_at = max(SWEPT_FROM, 2 * len(self._known))

    def _live(self, known: Mapping[tuple[Any, ...], _Rows]) -> dict[tuple[Any, ...], _Rows]:
        return {
            at: each
            for at, each in known.items()
            if self._slot_map.are_same(each.rows, each.since).any()
        }


def _identity(piece: Piece, req: Req) -> ChunkIdentity:
    assert piece.chunk is not None
    return ChunkIdentity(piece.chunk, req.extra_key, req.cache_salt)
