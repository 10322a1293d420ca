"""What leaves the KV pool first, as strategies for SGLang's eviction.
Plain traffic sees recency alone, as under SGLang's default policy."""

from __future__ import annotations

from math import inf
from typing import Any

from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.radix_cache import TreeNode

from radix_ext import Aging
from radix_ext.eviction import NEW
from sglang_chunkcache.scheduler.chunk_key import ChunkKey
from sglang_chunkcache.scheduler.node import facts, up_from


class ReusedLonger(EvictionStrategy):  # type: ignore[misc]
    """`Aging`: the more often a chunk node was found, the longer it stays; `base` breaks ties. What
    was fused for one question leaves first.

    Token nodes have no hits of their own, so plain traffic sees recency alone, as in SGLang. Clock
    and hits count requests, never seconds: all ranks of a group must evict the same nodes.
    """

    def __init__(self, base: EvictionStrategy) -> None:
        self.base, self._aging = base, Aging(NEW)

    def get_priority(self, node: TreeNode) -> tuple[float, Any]:
        # `base` second: ties are common, since all nodes of one request are as old.
        return self._priority(node), self.base.get_priority(node)

    def evicted(self, node: TreeNode, now: int) -> None:
        """The node leaves for want of room, during request `now`."""
        self._aging.evicted(self._priority(node), now)

    def _priority(self, node: TreeNode) -> float:
        known, fused = facts(node), node.key.fused if isinstance(node.key, ChunkKey) else None
        # Evicted while it waits, it would never get into the store.
        if fused is not None and fused.serves_one and not known.is_waiting:
            return -inf
        return self._aging.priority(hits=known.hits, last_access=known.used)


class PromotedFirst(EvictionStrategy):  # type: ignore[misc]
    """Nodes that are not promoted leave first; within each kind `base` decides.

    A token node inherits the mark of its nearest chunk above; without one (plain traffic, prompt
    heads) it counts as promoted, so that traffic without spans sees `base` alone.
    """

    def __init__(self, base: EvictionStrategy) -> None:
        self.base = base

    def get_priority(self, node: TreeNode) -> tuple[bool, Any]:
        return is_promoted(node), self.base.get_priority(node)


def is_promoted(node: TreeNode | None) -> bool:
    """The mark of the nearest chunk node of the first chunk area; fused nodes have none."""
    # Asked first: else it would inherit the mark of the exact chunk above it.
    if node is not None and isinstance(node.key, ChunkKey) and node.key.fused is not None:
        return False
    known = map(facts, up_from(node)) if node is not None else ()
    return next((each.promoted for each in known if each.chain is not None), True)
