"""What leaves the KV pool first, as strategies for SGLang's eviction.
Plain traffic sees SGLang's own policy alone."""

from __future__ import annotations

from typing import Any

from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.radix_cache import TreeNode

from radix_ext import reused_priority
from sglang_chunkcache.scheduler.chunk_key import ChunkKey
from sglang_chunkcache.scheduler.node import facts


class ReusedLonger(EvictionStrategy):  # type: ignore[misc]
    """Each doubling of a chunk node's hits keeps it one access window longer; `base` breaks ties.
    What was fused for one question leaves first.

    Token nodes have no hits of their own, so plain traffic sees recency alone, as in SGLang. Clock
    and hits count requests, never seconds: all ranks of a tensor-parallel group must evict the same
    nodes.
    """

    def __init__(self, base: EvictionStrategy, window: int) -> None:
        self.base, self.window = base, window

    def get_priority(self, node: TreeNode) -> tuple[tuple[int, int], Any]:
        known, fused = facts(node), node.key.fused if isinstance(node.key, ChunkKey) else None
        serves_one = fused is not None and fused.serves_one and not known.is_waiting
        priority = reused_priority(
            hits=known.hits, last_access=known.used, window=self.window, serves_one=serves_one
        )
        return priority, self.base.get_priority(node)


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
    """The mark of a node, inherited from the nearest chunk node of the first chunk area;
    fused nodes have none."""
    if node is not None and isinstance(node.key, ChunkKey) and node.key.fused is not None:
        return False
    while node is not None:
        if facts(node).chain is not None:
            return facts(node).promoted
        node = node.parent
    return True
