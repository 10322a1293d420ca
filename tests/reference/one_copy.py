"""Virtual slots whose rows remember what they hold (fused_scheduler.py)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, MutableMapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from sglang_chunkcache.attention.slot_map import SlotMap
from sglang_chunkcache.cpu.one_copy import VirtualAllocator


class MappedContents(MutableMapping[int, Any]):
    """Slot -> what its row holds, as it is read: at the slot's position, and approximate where the
    row is another's."""

    def __init__(self, slot_map: SlotMap) -> None:
        self._map, self._rows = slot_map, dict[int, Any]()
        self._loaded = dict[int, int]()  # row -> when it had been given
        self.num_loaded = 0

    def __getitem__(self, slot: int) -> Any:
        at = torch.tensor([slot])
        row = int(self._map.rows(at))
        is_there = not self._map._is_awaited[row] or self._loaded.get(row) == self._map._given[row]
        assert is_there, f"slot {slot} is read before it is loaded"
        kv = self._rows[row]
        if not self._map.is_shared(at):
            return kv
        distance = int(self._map._new[slot] - self._map._old[slot])
        return kv._replace(position=kv.position + distance, context=None)

    def __setitem__(self, slot: int, kv: Any) -> None:
        at = torch.tensor([slot])
        row = int(self._map.rows(at))
        assert row, f"slot {slot} has no row"
        assert not self._map.is_shared(at), f"slot {slot} shares its row and is written"
        others, known = int(self._map._owners[row]) - 1, self._rows.get(row, kv)
        # a load may write what it has written: its late layers
        assert not others or known == kv, f"{others} others read slot {slot}'s row"
        self._rows[row] = kv

    def load(self, rows: torch.Tensor, held: Sequence[Any]) -> None:
        """What was in host memory, as it was computed."""
        for row, kv in zip(rows.tolist(), held, strict=True):
            assert self._map._is_awaited[row], f"row {row} is loaded over what it has"
            self._rows[row], self._loaded[row] = kv, int(self._map._given[row])
        self.num_loaded += len(held)

    def __delitem__(self, slot: int) -> None:
        raise AssertionError("rows are forgotten, not slots")

    def __iter__(self) -> Iterator[int]:
        mapped = self._map._row.nonzero().flatten()
        rows = zip(mapped.tolist(), self._map.rows(mapped).tolist(), strict=True)
        return (slot for slot, row in rows if row in self._rows)

    def __len__(self) -> int:
        return len(list(iter(self)))

    def forget(self) -> None:
        """What no slot means any more."""
        self._rows = {row: kv for row, kv in self._rows.items() if self._map._owners[row]}


class CountingVirtual(VirtualAllocator):
    """Refuses to free a slot twice. Rows forget what they hold with their last slot."""

    contents: MappedContents

    @classmethod
    def of(cls, num_rows: int, num_slots: int) -> CountingVirtual:
        pool = SimpleNamespace(slot_map=SlotMap(num_rows, num_slots))
        return cls(num_rows, torch.float32, "cpu", pool, False)

    def clear(self) -> None:
        super().clear()
        self.contents = MappedContents(self.slot_map)

    def free(self, free_index: torch.Tensor) -> None:
        slots = Counter(free_index.tolist())
        twice = {slot for slot, num in slots.items() if num > 1}
        twice |= slots.keys() & set(self.free_pages.tolist())
        assert not twice, f"slots freed twice: {sorted(twice)}"
        super().free(free_index.to(torch.int64))
        self.contents.forget()

    def extend(self, start: int, end: int, last_slot: int) -> torch.Tensor | None:
        """Slots for a request's tokens `[start, end)`."""
        return self.alloc(end - start)


def check_rows(allocator: VirtualAllocator, nodes: Sequence[Any], own: Sequence[int]) -> None:
    """The map is sound, and slots are held by requests and locked nodes alone."""
    slot_map = allocator.slot_map
    assert slot_map.violations() == []
    held = {*own}.union(*(node.value.tolist() for node in nodes if node.lock_ref))
    assert held == {*slot_map._is_held.nonzero().flatten().tolist()}
    assert int(slot_map.num_mapped) == len({*own}.union(*(node.value.tolist() for node in nodes)))
