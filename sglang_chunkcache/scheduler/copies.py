"""Where a chunk's KV stands in the tree, whatever stands before it: the device side of the alternative path (FusionRAG 4.1)."""

from __future__ import annotations

import itertools

from sglang.srt.mem_cache.radix_cache import TreeNode

from sglang_chunkcache.fusion.store import ChunkIdentity


class ChunkCopies:
    """Where a chunk's computed KV stands in the tree: every filled chunk node that was not moved there itself."""

    def __init__(self) -> None:
        self._nodes: dict[ChunkIdentity, dict[TreeNode, None]] = {}

    def find(self, identity: ChunkIdentity, num: int) -> list[TreeNode]:
        """The latest `num`."""
        return list(itertools.islice(reversed(self._nodes.get(identity, {})), num))

    def holds(self, node: TreeNode) -> bool:
        """Whether the node is one of them, and so still in the tree."""
        return getattr(node, "chunk", None) is not None and node in self._nodes.get(identity_of(node), {})

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


def identity_of(node: TreeNode) -> ChunkIdentity:
    """Whose chunk a chunk node holds."""
    return ChunkIdentity(node.chunk, node.key.extra_key, node.key.cache_salt)
