"""Where a chunk's KV is in the tree, whatever precedes it: the device side of the alternative path (FusionRAG 4.1)."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

from sglang_chunkcache.scheduler.node import ChunkIdentity, identity_of

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode


class ChunkCopies:
    """The filled chunk nodes of a tree whose KV was computed, not moved, by chunk."""

    def __init__(self) -> None:
        self._nodes: dict[ChunkIdentity | None, dict[TreeNode, None]] = {}

    def find(self, identity: ChunkIdentity, num: int) -> list[TreeNode]:
        """The latest `num`."""
        return list(itertools.islice(reversed(self._nodes.get(identity, {})), num))

    def holds(self, node: TreeNode) -> bool:
        """Whether the node is one of them, and so still in the tree."""
        return node in self._nodes.get(identity_of(node), {})

    def add(self, node: TreeNode) -> None:
        """A filled chunk node."""
        self._nodes.setdefault(identity_of(node), {})[node] = None

    def drop(self, node: TreeNode) -> None:
        """No effect on a node that is none."""
        if self.holds(node):
            nodes = self._nodes[identity_of(node)]
            del nodes[node]
            if not nodes:
                del self._nodes[identity_of(node)]

    def clear(self) -> None:
        """Forget all, as the tree does."""
        self._nodes.clear()

    def __len__(self) -> int:
        return sum(map(len, self._nodes.values()))
