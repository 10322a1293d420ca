"""The tree over virtual slots (attention/slot_map.py), of which several may mean one row.

SGLang counts slots; what fits is decided by rows, too. A row comes free with the last slot that
means it, so what is evicted may free fewer than it has: eviction goes on until enough are free.

    root ── head ── A ── B            B at its own position, evictable: its row is not,
         └─ other head ── C ──<B>     as long as a running request reads it in <B>
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, EvictResult, InitLoadBackParams
from sglang.srt.mem_cache.radix_cache import TreeNode

from sglang_chunkcache.attention.slot_map import SlotMap
from sglang_chunkcache.scheduler.chunk_cache import ChunkRadixCache
from sglang_chunkcache.scheduler.node import joined, paths, up_from

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from torch import Tensor


class OneCopyRadixCache(ChunkRadixCache):
    """Its allocator is a `VirtualAllocator`."""

    _num_saved = 0  # rows that a request will not take, while SGLang decides on it

    @property
    def _slot_map(self) -> SlotMap:
        return self.token_to_kv_pool_allocator.slot_map  # type: ignore[no-any-return]

    def evictable_size(self) -> int:
        """Tokens more that fit once all that is not in use is evicted; of the request on which
        SGLang decides, counted with those that have rows already."""
        num_slots, num_rows = self._idle()
        num_free = int(self.token_to_kv_pool_allocator.available_size())
        return min(num_slots, num_rows + self._num_saved) - num_free

    def num_idle(self) -> int:
        return min(self._idle())

    @contextmanager
    def admitting(self, req: Req) -> Iterator[None]:
        """SGLang asks for room for all that is promised, of which some has rows already. If the
        pass fails in a full pool, such a request cannot be computed either, and ends with an
        error."""
        fuser = self.tiers.fuser
        self._num_saved = 0 if fuser is None else fuser.num_saved(req)
        try:
            yield
        finally:
            self._num_saved = 0

    def init_load_back(self, params: InitLoadBackParams) -> tuple[Any, TreeNode] | None:
        self._num_saved = 0  # from here on what it takes is taken
        return super().init_load_back(params)

    def in_slots(self, stats: Any) -> Any:
        """SGLang's figures of the pool, as if each slot in use had a row."""
        num_slots = self._slot_map.num_slots - self.token_to_kv_pool_allocator.num_free_slots
        counted = {"full_available_size": self._slot_map.num_rows - num_slots}
        return dataclasses.replace(stats, **counted, full_evictable_size=self.evictable_size_)

    def num_missing(self, num_slots: int, num_rows: int) -> int:
        idle_slots, idle_rows = self._idle()
        return max(num_slots - idle_slots, num_rows - idle_rows)

    def fits_alone(self, held: Iterable[TreeNode], num_slots: int, num_rows: int) -> bool:
        nodes, slot_map = paths(held), self._slot_map
        slots = _slots(nodes) if nodes else torch.empty(0, dtype=torch.int64)
        num_held = len(torch.unique(slot_map.rows(slots)))
        return (
            num_slots + len(slots) <= slot_map.num_slots
            and num_rows + num_held <= slot_map.num_rows
        )

    def make_room(self, num_slots: int, num_rows: int | None = None) -> None:
        self._evict_for(num_slots, num_slots if num_rows is None else num_rows)

    def evict(self, params: EvictParams) -> EvictResult:
        target = int(self.token_to_kv_pool_allocator.available_size()) + params.num_tokens
        return EvictResult(num_tokens_evicted=self._evict_for(target, target))

    def inc_lock_ref(self, node: TreeNode) -> Any:
        if idle := [each for each in up_from(node) if each.lock_ref == 0]:
            self._slot_map.hold(_slots(idle))
        return super().inc_lock_ref(node)

    def dec_lock_ref(self, node: TreeNode, *params: Any) -> Any:
        idle = [each for each in up_from(node) if each.lock_ref == 1]
        result = super().dec_lock_ref(node, *params)
        if idle:
            self._slot_map.let_go(_slots(idle))
        return result

    def _insert_helper(
        self, node: TreeNode, key: Any, value: Tensor, *how: Any
    ) -> tuple[int, TreeNode]:
        matched, last = super()._insert_helper(node, key, value, *how)
        if matched < len(key):  # a request's own until now
            self._slot_map.let_go(value[matched:])
        return matched, last

    def _idle(self) -> tuple[int, int]:
        """Slots, and rows, that are free or evictable."""
        slot_map = self._slot_map
        num_slots = self.token_to_kv_pool_allocator.num_free_slots + self.evictable_size_
        return num_slots, slot_map.num_free + slot_map.num_evictable

    def _evict_for(self, num_slots: int, num_rows: int) -> int:
        """Evict until so many are free, or nothing is left to evict. Returns slots evicted."""
        allocator, num_evicted = self.token_to_kv_pool_allocator, 0
        while True:
            free_slots, free_rows = allocator.num_free_slots, self._slot_map.num_free
            missing = max(num_slots - free_slots, num_rows - free_rows)
            # what is evicted while all of its rows are held frees none
            frees = free_slots < num_slots or self._slot_map.num_evictable > 0
            if missing <= 0 or not frees:
                return num_evicted
            evicted = super().evict(EvictParams(num_tokens=missing)).num_tokens_evicted
            if not evicted:
                return num_evicted
            num_evicted += evicted


def _slots(nodes: Sequence[TreeNode]) -> Tensor:
    return joined([each.value for each in nodes])
