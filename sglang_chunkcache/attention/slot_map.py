"""Virtual slots: what requests and trees hold, and the row of the KV pool that each one means.

    virtual slots   1 2 3 4 5 6 7 8     of a request's tokens, many more than rows
    rows            5 5 2 7 7 7 . .     4 and 5 share 4's row: the same chunk at other positions

A row lives as long as a slot means it. A key is kept as it was turned where it was computed; the
slot knows both positions, and whoever reads it turns the key from one to the other. What is loaded
is loaded as it was computed, for all who share its row. What is about to be computed anew gets a
row of its own (`own`), from a reserve, since it cannot wait for one.

Slots are held, by requests or locked nodes, or evictable. A row is evictable where all slots that
mean it are. Knows neither trees nor requests. One map serves all layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

MAX_KNOWN = 1024
"""Resolved sequences that are remembered until slots change: those of a large batch."""


class Turns(Protocol):
    """As `fusion.relocate.RotaryTable`."""

    def turning(self, old: Tensor, new: Tensor) -> Callable[[Tensor], Tensor]:
        """Turns keys, [num_tokens, num_kv_heads, head_dim], from positions to positions."""


class Places(NamedTuple):
    """Slots, resolved."""

    rows: Tensor
    turned: Tensor | None  # the indices, among `rows`, whose keys turn; None: none
    turn: Callable[[Tensor], Tensor] | None

    def keys(self, buffer: Tensor) -> Tensor:
        """[num_tokens, num_kv_heads, head_dim], copied, as if computed at the slots' positions."""
        found = _taken(buffer, self.rows)
        if self.turned is not None and self.turn is not None:
            found[self.turned] = self.turn(found[self.turned])
        return found

    def values(self, buffer: Tensor) -> Tensor:
        """Likewise; no value turns."""
        return _taken(buffer, self.rows)


class Groups(NamedTuple):
    """Slots by how far their keys turn. A query turned the other way meets the keys as they are, so
    no key turns."""

    rows: Tensor
    sizes: list[int]
    turn: Callable[[Tensor], Tensor]

    def attend(self, query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
        """[num_heads, head_dim] of one query over all of them, within rounding what turned keys
        give. `keys`, `values`: the layer's buffers."""
        # in float32: products before their scale are large where keys have a large common part
        seen, num_kv_heads = _taken(keys, self.rows).float().permute(1, 2, 0), keys.shape[1]
        turned = self.turn(query.float().repeat(len(self.sizes), 1, 1))
        by_head = turned.view(len(turned), num_kv_heads, -1, turned.shape[-1])
        parts = torch.split(seen, self.sizes, dim=-1)
        logits = torch.cat([part @ key for part, key in zip(by_head, parts, strict=True)], dim=-1)
        weights = (logits * scale).softmax(-1).to(query.dtype)
        seen = _taken(values, self.rows).to(query.dtype).transpose(0, 1)
        return (weights @ seen).flatten(0, 1)


class SlotMap:
    """`num_slots` virtual slots over `num_rows` rows, both from 1: 0 is SGLang's, for padding.

    All arguments named `slots` are [n] int64 on the CPU, each slot once.
    """

    def __init__(self, num_rows: int, num_slots: int) -> None:
        self.num_rows, self.num_slots = num_rows, num_slots
        self._turns: Turns | None = None
        self.num_given = 0
        """Times that rows were given out; never less, so that no row is taken for what it was."""
        self.clear()

    def turn_by(self, turns: Turns) -> None:
        """The model's rotary table: before anything is shared."""
        self._turns = turns

    def clear(self) -> None:
        """No slot means a row."""
        self._row = torch.zeros(self.num_slots + 1, dtype=torch.int64)
        # int32: read for each token and forward
        self._old = torch.zeros(self.num_slots + 1, dtype=torch.int32)
        self._new = torch.zeros(self.num_slots + 1, dtype=torch.int32)
        self._is_shared = torch.zeros(self.num_slots + 1, dtype=torch.bool)
        self._is_held = torch.zeros(self.num_slots + 1, dtype=torch.bool)
        self._owners = torch.zeros(self.num_rows + 1, dtype=torch.int32)
        self._holders = torch.zeros(self.num_rows + 1, dtype=torch.int32)
        self._given = torch.zeros(self.num_rows + 1, dtype=torch.int64)
        self._is_awaited = torch.zeros(self.num_rows + 1, dtype=torch.bool)
        self._free = torch.arange(self.num_rows, 0, -1)
        self._num_unused = self.num_rows
        self.num_reserved = self.num_evictable = self.num_mapped = 0
        self._known: dict[tuple[str, int, int, int], tuple[Tensor, Any]] = {}

    @property
    def num_free(self) -> int:
        """Rows that are neither used nor reserved."""
        return self._num_unused - self.num_reserved

    @property
    def num_used(self) -> int:
        return self.num_rows - self._num_unused

    @property
    def num_held(self) -> tuple[int, int]:
        """Rows and slots that may not be evicted. Reads a table."""
        return self.num_used - self.num_evictable, int(self._is_held.sum())

    @property
    def num_saved(self) -> int:
        """Rows more that the mapped slots would take if each had its own."""
        return self.num_mapped - self.num_used

    @property
    def nbytes(self) -> int:
        """Of the tables."""
        slots = (self._row, self._old, self._new, self._is_shared, self._is_held)
        rows = (self._owners, self._holders, self._given, self._is_awaited, self._free)
        return sum(each.nbytes for each in (*slots, *rows))

    def assign(self, slots: Tensor) -> None:
        """A row for each of these slots, which mean none; they are held.
        Raises IndexError, and changes nothing, where so many are not free."""
        if len(slots) > self.num_free:
            raise IndexError(f"{len(slots)} rows are wanted, {self.num_free} are free")
        self._give_rows(slots)
        self._is_held[slots] = True
        self.num_mapped += len(slots)
        self._known.clear()

    def share(self, slots: Tensor, rows: Tensor, *, old: Tensor, new: Tensor) -> None:
        """These slots, which mean no row, mean rows of others, and are held.

        Args:
            rows: Like `slots`; some slot means each.
            old, new: Like `slots`, positions: where `rows` were computed, where `slots` are read.
        """
        self._count(rows, owners=1, holders=1)
        self._row[slots] = rows
        self._is_held[slots] = True
        self.num_mapped += len(slots)
        self._place(slots, old, new)

    def expect(self, slots: Tensor, *, old: Tensor, new: Tensor) -> None:
        """As `assign`, with rows to be loaded, which others may share. `old`, `new`: as of `share`.
        They are awaited until they `came`."""
        self.assign(slots)
        self._is_awaited[self._row[slots]] = True
        self._place(slots, old, new)

    def came(self, slots: Tensor) -> None:
        """Their rows are loaded, or need not be."""
        self._is_awaited[self._row[slots]] = False

    def pin(self, rows: Tensor) -> None:
        """They stay, until `unpin`, whatever becomes of the slots that mean them."""
        self._count(rows, owners=1, holders=1)

    def unpin(self, rows: Tensor) -> None:
        """Likewise."""
        self._drop(rows, holders=1)

    def reserve(self, num_rows: int) -> None:
        """Keep so many free rows, at most `num_free`, for `own`."""
        self.num_reserved += num_rows

    def release(self, num_rows: int) -> None:
        """What of that is not needed."""
        self.num_reserved -= num_rows

    def own(self, slots: Tensor, *, reserved: int) -> int:
        """Each of these held slots that shares a row gets one that nothing is copied into: the same
        where no other slot means it. Takes from the `reserved` rows first; returns how many of
        these are left. Raises IndexError, and changes nothing, where rows are short."""
        shared, has_others = slots[self._is_shared[slots]], self.has_others(slots)
        leaving, staying = slots[has_others], slots[self._is_shared[slots] & ~has_others]
        from_reserve = min(reserved, len(leaving))
        if len(leaving) - from_reserve > self.num_free:
            raise IndexError(
                f"{len(leaving)} rows to be computed, {reserved} reserved, {self.num_free} free"
            )
        self.num_reserved -= from_reserve
        self._renew(self._row[staying])
        self._drop(self._row[leaving], holders=1)
        self._give_rows(leaving)
        self._old[shared] = self._new[shared] = 0
        self._is_shared[shared] = False
        self._known.clear()
        return reserved - from_reserve

    def unmap(self, slots: Tensor) -> None:
        """These slots mean no row any more; rows that none means are free. Some may mean none."""
        slots = slots[self._row[slots] > 0]
        held = self._is_held[slots]
        for part, holders in ((slots[held], 1), (slots[~held], 0)):
            if len(part):
                self._drop(self._row[part], holders=holders)
        self._row[slots] = 0
        self._old[slots] = self._new[slots] = 0
        self._is_shared[slots] = self._is_held[slots] = False
        self.num_mapped -= len(slots)
        self._known.clear()

    def hold(self, slots: Tensor) -> None:
        """They are in use."""
        self._count(self._row[slots], holders=1)
        self._is_held[slots] = True

    def let_go(self, slots: Tensor) -> None:
        """They may be evicted."""
        self._count(self._row[slots], holders=-1)
        self._is_held[slots] = False

    def rows(self, slots: Tensor) -> Tensor:
        """[n] int64: what is written and copied; keys are as they were computed."""
        return self._row[slots]

    def are_held(self, rows: Tensor) -> Tensor:
        """[n] bool: somebody uses the row. None uses 0."""
        return self._holders[rows] > 0

    def are_same(self, rows: Tensor, since: int) -> Tensor:
        """[n] bool: a slot means the row, and what is in it was there, or awaited, when `num_given`
        was `since`."""
        return (self._owners[rows] > 0) & (self._given[rows] <= since)

    def are_awaited(self, rows: Tensor) -> Tensor:
        """[n] bool: the row is still to be loaded."""
        return self._is_awaited[rows]

    def has_others(self, slots: Tensor) -> Tensor:
        """[n] bool: it shares its row with another slot."""
        return self._is_shared[slots] & (self._owners[self._row[slots]] > 1)

    def is_shared(self, slots: Tensor) -> Tensor:
        """[n] bool: its row may be another's, too, and was not computed for it."""
        return self._is_shared[slots]

    def places(self, slots: Tensor) -> Places:
        """What these slots, of any integer dtype, mean to attention."""
        return self._known_or(slots, self._places)  # type: ignore[no-any-return]

    def groups(self, slots: Tensor) -> Groups | None:
        """The same for one query that sees all of them. None: no key turns."""
        return self._known_or(slots, self._groups)  # type: ignore[no-any-return]

    def violations(self) -> list[str]:
        """What does not hold, in words. Reads all of the tables."""
        mapped = self._row.nonzero().flatten()
        rows = self._row[mapped]
        size = self.num_rows + 1
        free = self._free[: self._num_unused]
        owners, holders = (
            torch.bincount(each, minlength=size) for each in (rows, rows[self._is_held[mapped]])
        )
        evictable = int(((owners > 0) & (holders == 0)).sum())
        checks = {
            "owners of rows": bool((owners == self._owners).all()),
            "holders of rows": bool((holders == self._holders).all()),
            "free rows once each": _num_distinct(free) == len(free),
            "free rows without owner": not bool(self._owners[free].any()),
            "free + owned == all": len(free) + int((owners > 0).sum()) == self.num_rows,
            "mapped": len(mapped) == self.num_mapped,
            "evictable": evictable == self.num_evictable,
            "reserve within free": 0 <= self.num_reserved <= len(free),
            "held means mapped": bool((self._row[self._is_held] > 0).all()),
            "shared means mapped": bool((self._row[self._is_shared] > 0).all()),
            "a row is computed for one slot": self._num_computed_twice() == 0,
            "what is computed is not awaited": not bool(self._is_awaited[self._computed()].any()),
        }
        return [name for name, holds in checks.items() if not holds]

    # Private, in order of use

    def _known_or(self, slots: Tensor, resolve: Callable[[Tensor], Any]) -> Any:
        """The same tensor is resolved once, whatever the number of layers."""
        # An inference tensor counts no versions: the same memory may hold other slots.
        if slots.is_inference():
            return resolve(slots)
        key = resolve.__name__, slots.data_ptr(), len(slots), slots._version
        if key not in self._known:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            # with the tensor, or its memory would be another's
            self._known[key] = slots, resolve(slots)
        return self._known[key][1]

    def _places(self, slots: Tensor) -> Places:
        if not self._is_shared[slots].any():
            return Places(self._row[slots], None, None)
        old, new = self._old[slots], self._new[slots]
        turned = (old != new).nonzero().flatten()
        if not len(turned):
            return Places(self._row[slots], None, None)
        turn = self._turning(old[turned], new[turned])
        return Places(self._row[slots], turned, turn)

    def _groups(self, slots: Tensor) -> Groups | None:
        if not self._is_shared[slots].any():
            return None
        old, new = self._old[slots], self._new[slots]
        distance, order = (new - old).sort(stable=True)
        _, sizes = torch.unique_consecutive(distance, return_counts=True)
        if len(sizes) == 1 and not distance[:1].any():
            return None
        firsts = order[sizes.cumsum(0) - sizes]
        turn = self._turning(new[firsts], old[firsts])
        return Groups(self._row[slots[order]], sizes.tolist(), turn)

    def _turning(self, old: Tensor, new: Tensor) -> Callable[[Tensor], Tensor]:
        assert self._turns is not None, "told before anything is shared"
        return self._turns.turning(old.long(), new.long())

    def _give_rows(self, slots: Tensor) -> None:
        first = self._num_unused - len(slots)
        rows = self._free[first : self._num_unused].clone()
        self._num_unused = first
        self._row[slots] = rows
        self._owners[rows] = self._holders[rows] = 1
        self._renew(rows)

    def _renew(self, rows: Tensor) -> None:
        self.num_given += 1
        self._given[rows] = self.num_given
        self._is_awaited[rows] = False

    def _place(self, slots: Tensor, old: Tensor, new: Tensor) -> None:
        self._old[slots], self._new[slots] = old.to(torch.int32), new.to(torch.int32)
        self._is_shared[slots] = True
        self._known.clear()

    def _drop(self, rows: Tensor, *, holders: int) -> None:
        gone = self._count(rows, owners=-1, holders=-holders)
        end = self._num_unused + len(gone)
        self._free[self._num_unused : end] = gone
        self._num_unused = end

    def _count(self, rows: Tensor, *, owners: int = 0, holders: int = 0) -> Tensor:
        """Changes the counts of these rows, as often as each is there. Returns those that no slot
        means any more."""
        distinct: Tensor
        distinct, times = torch.unique(rows, return_counts=True)
        before = self._count_evictable(distinct)
        times = times.to(torch.int32)
        self._owners[distinct] += owners * times
        self._holders[distinct] += holders * times
        self.num_evictable += self._count_evictable(distinct) - before
        return distinct[self._owners[distinct] == 0]

    def _count_evictable(self, distinct: Tensor) -> int:
        return int(((self._owners[distinct] > 0) & (self._holders[distinct] == 0)).sum())

    def _num_computed_twice(self) -> int:
        own = self._computed()
        return len(own) - _num_distinct(own)

    def _computed(self) -> Tensor:
        """Rows of slots that share none."""
        return self._row[(self._row > 0) & ~self._is_shared]


class MappedSide:
    """Keys or values of one layer, indexed by virtual slots."""

    def __init__(self, slot_map: SlotMap, buffer: Tensor, *, are_keys: bool) -> None:
        self._slot_map, self.buffer, self._are_keys = slot_map, buffer, are_keys

    def groups(self, slots: Tensor) -> Groups | None:
        """As of `SlotMap`."""
        return self._slot_map.groups(slots)

    def __getitem__(self, at: Tensor | tuple[Any, ...]) -> Tensor:
        """A copy of what these slots, [n], mean; of a tuple, its further indices of that."""
        slots, *within = at if isinstance(at, tuple) else (at,)
        places = self._slot_map.places(slots)
        found = (places.keys if self._are_keys else places.values)(self.buffer)
        return found[:, *within] if within else found


class MappedPool:
    """What a KV pool with virtual slots adds. Its buffers have rows."""

    slot_map: SlotMap


def rows_of(pool: Any) -> Callable[[Tensor], Tensor]:
    """Slots of a KV pool -> rows of its buffers, to be written, or copied as they are. The slots
    themselves where the pool has no virtual ones."""
    return pool.slot_map.rows if isinstance(pool, MappedPool) else _same


def _taken(buffer: Tensor, rows: Tensor) -> Tensor:
    return buffer.index_select(0, rows)  # torch indexes by brackets four times as slowly


def _num_distinct(rows: Tensor) -> int:
    return len({*rows.tolist()})


def _same(slots: Tensor) -> Tensor:
    return slots
