"""SGLang's `RadixCache` whose nodes may share slots. A shared slot is counted once and freed with its last node.

Only chunk nodes share, since SGLang never splits them. What a node shares is its `holding` (shared_slots.py). As long as no node
shares, every call is SGLang's own. Reserved slots are allocated for moves that are not filled yet: they are in no node, and count
as protected.
"""

from __future__ import annotations

import heapq
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    DecLockRefParams,
    DecLockRefResult,
    EvictParams,
    EvictResult,
    IncLockRefResult,
)
from sglang.srt.mem_cache.radix_cache import RadixCache, TreeNode

from sglang_chunkcache.attention.upload import upload
from sglang_chunkcache.scheduler.node import facts
from sglang_chunkcache.scheduler.shared_slots import SharedSlots, violations

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams


class SharingRadixCache(RadixCache):  # type: ignore[misc]
    """A tree that owns KV slots, some of them through several nodes."""

    def __init__(self, params: CacheInitParams) -> None:
        self.shared = SharedSlots()
        self.num_reserved = 0
        super().__init__(params)

    # Sharing

    def share(self, source: TreeNode, node: TreeNode) -> None:
        """`node`, new in the tree and unlocked, has the source's slots for values."""
        held = facts(source).holding or self.shared.open(len(source.key), is_locked=source.lock_ref > 0)
        facts(source).holding, facts(node).holding = held, self.shared.join(held)

    def unshare(self, node: TreeNode, offsets: NDArray[np.int64], slots: torch.Tensor) -> None:
        """The node has `slots` of its own at `offsets`, which it has shared so far; they were reserved.

        The node's value is another tensor afterwards. The old one stays valid for its readers.
        """
        holding = facts(node).holding
        assert holding is not None
        self.shared.give_up(holding, offsets)
        value = node.value.clone()
        value[upload(torch.from_numpy(offsets), value.device)] = slots
        node.value = value
        self.num_reserved -= len(slots)
        if not holding.offsets.any():
            self.shared.leave(holding)
            facts(node).holding = None

    def sharing_violations(self, nodes: Iterable[TreeNode]) -> list[str]:
        """What is wrong with shared slots and the sizes, given all nodes; for tests and idle moments."""
        nodes = list(nodes)
        found = violations(
            [
                (held, node.lock_ref > 0, node.value.tolist())
                for node in nodes
                if (held := facts(node).holding) is not None
            ]
        )
        slots: dict[int, list[tuple[TreeNode, bool]]] = {}
        for node in nodes:
            held = facts(node).holding
            for offset, slot in enumerate(node.value.tolist()):
                slots.setdefault(slot, []).append((node, held is not None and bool(held.offsets[offset])))
        twice = [slot for slot, users in slots.items() if len(users) > 1 and not all(shares for _, shares in users)]
        if twice:
            found.append(f"slots with two owners: {twice[:8]}")
        protected = sum(any(node.lock_ref > 0 for node, _ in users) for users in slots.values())
        sizes = (self.evictable_size(), self.protected_size())
        if sizes != (len(slots) - protected, protected + self.num_reserved):
            found.append(
                f"evictable, protected are booked as {sizes}, the tree has {len(slots) - protected}, {protected} "
                f"and {self.num_reserved} reserved"
            )
        return found

    # SGLang's calls

    def inc_lock_ref(self, node: TreeNode) -> IncLockRefResult:
        if not self.shared.num_holdings:
            return super().inc_lock_ref(node)
        before = self.evictable_size()
        super().inc_lock_ref(node)
        self._book_locks(node)
        return IncLockRefResult(delta=self.evictable_size() - before)

    def dec_lock_ref(self, node: TreeNode, params: DecLockRefParams | None = None) -> DecLockRefResult:
        if not self.shared.num_holdings:
            return super().dec_lock_ref(node, params)
        before = self.evictable_size()
        super().dec_lock_ref(node, params)
        self._book_locks(node)
        return DecLockRefResult(delta=self.evictable_size() - before)

    def evict(self, params: EvictParams) -> EvictResult:
        """As SGLang's, until as many slots are free: a slot that another node still holds is none.

        A leaf whose slots are all locked through other nodes leaves last: it frees nothing.
        """
        if not self.shared.num_holdings:
            return super().evict(params)
        started = time.perf_counter()
        heap = [(False, self.eviction_strategy.get_priority(node), node) for node in self.evictable_leaves]
        heapq.heapify(heap)
        num_evicted = 0
        while num_evicted < params.num_tokens and heap:
            is_late, priority, node = heapq.heappop(heap)
            holding = facts(node).holding
            if not is_late and holding is not None and self.shared.is_locked_elsewhere(holding):
                heapq.heappush(heap, (True, priority, node))
                continue
            slots = self._freed_with(node)
            self.token_to_kv_pool_allocator.free_segment(slots, start_pos=0)
            num_evicted += len(slots)
            self._delete_leaf(node)
            if len(node.parent.children) == 0 and node.parent.lock_ref == 0:
                heapq.heappush(heap, (False, self.eviction_strategy.get_priority(node.parent), node.parent))
            self.kv_events.record_remove(node)
        self.update_eviction_metrics(num_evicted, started)
        return EvictResult(num_tokens_evicted=num_evicted)

    def evictable_size(self) -> int:
        """Slots in the tree that `evict` can free."""
        return self.evictable_size_ - self.shared.surplus_evictable  # type: ignore[no-any-return]

    def protected_size(self) -> int:
        """Slots in the tree that a lock holds, and reserved ones."""
        return self.protected_size_ - self.shared.surplus_protected + self.num_reserved  # type: ignore[no-any-return]

    def reset(self) -> None:
        """Empty tree."""
        super().reset()
        self.shared.clear()
        self.num_reserved = 0

    def _delete_leaf(self, node: TreeNode) -> None:
        super()._delete_leaf(node)
        if (holding := facts(node).holding) is not None:
            self.shared.leave(holding)

    # Private

    def _book_locks(self, node: TreeNode) -> None:
        while node is not self.root_node:
            if (holding := facts(node).holding) is not None:
                self.shared.set_locked(holding, node.lock_ref > 0)
            node = node.parent

    def _freed_with(self, node: TreeNode) -> torch.Tensor:
        slots: torch.Tensor = node.value
        holding = facts(node).holding
        if holding is None or (sole := self.shared.sole(holding)).all():
            return slots
        return slots[upload(torch.from_numpy(np.flatnonzero(sole)), slots.device)]
