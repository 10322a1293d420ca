"""Chains that waiting requests will find leave device and host memory last: evicted, they would be loaded or computed again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.radix_cache import TreeNode

from sglang_chunkcache.scheduler.node import state

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

AHEAD = 16
"""Requests from the queue's head on: some batches. Of more than fit together all would be kept, and none in the end."""


class LookAhead(EvictionStrategy):  # type: ignore[misc]
    """Wraps a strategy. Plain requests are not looked at.

    The queue is SGLang's own, the same on all ranks of a tensor-parallel group, so they evict the same.

    Args:
        find: notes in the request's record what it will find.
    """

    def __init__(self, base: EvictionStrategy, find: Callable[[Req], None]) -> None:
        self.base, self._find = base, find
        self.queue: Callable[[], Sequence[Req]] = tuple
        self.nodes: set[TreeNode] = set()
        self.places: set[bytes] = set()
        """Of what is in host memory."""

    def refresh(self) -> None:
        """Look at the queue: something is to be evicted."""
        self.nodes.clear()
        self.places.clear()
        for req in islice(self.queue(), AHEAD):
            known = state(req)
            if known.places is None:
                self._find(req)
            self.places.update(known.places or ())
            node = known.last_node
            while node is not None and node not in self.nodes:
                self.nodes.add(node)
                node = node.parent

    def needed_places(self) -> set[bytes]:
        """As the queue is now."""
        self.refresh()
        return self.places

    def get_priority(self, node: TreeNode) -> tuple[bool, Any]:
        return node in self.nodes, self.base.get_priority(node)
