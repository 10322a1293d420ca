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
    """Wraps `base`. Plain requests are not looked at.

    The queue is SGLang's own, the same on all ranks of a tensor-parallel group, so they evict the same.

    Args:
        path_of: the nodes that a request finds on the device; notes in its record the places of its chain in host memory.
    """

    base: EvictionStrategy

    def __init__(self, path_of: Callable[[Req], Sequence[TreeNode]]) -> None:
        self._path_of = path_of
        self.queue: Callable[[], Sequence[Req]] = tuple
        self.is_stale = True
        """Requests have come or gone, or chunks: looked at once between two prefills, since decoding evicts at each step."""
        self.nodes: set[TreeNode] = set()
        self.places: set[bytes] = set()
        """Of what is in host memory."""

    def refresh(self) -> None:
        """Look at the queue, unless nothing has changed: something is to be evicted."""
        if not self.is_stale:
            return
        self.clear()
        self.is_stale = False
        for req in islice(self.queue(), AHEAD):
            self.nodes.update(self._path_of(req))
            self.places.update(state(req).places)

    def clear(self) -> None:
        """Nothing is known of the queue."""
        self.nodes.clear()
        self.places.clear()
        self.is_stale = True

    def needed_places(self) -> set[bytes]:
        """As the queue is now."""
        self.refresh()
        return self.places

    def get_priority(self, node: TreeNode) -> tuple[bool, Any]:
        return node in self.nodes, self.base.get_priority(node)
