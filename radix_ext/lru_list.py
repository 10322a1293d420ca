"""The nodes of a tree in the order of their last use."""

from collections.abc import Iterator, Sequence

from radix_ext.chain_node import ChainNode
from radix_ext.chunk import ChainId, ChunkId


class LruList:
    """A circular list through all nodes by `ChainNode.newer` and `older`. Every step is O(1).

    Chains are touched as a whole, so a parent is newer than its children and the oldest node is a
    leaf.
    """

    def __init__(self) -> None:
        # _ends.newer is the oldest node, _ends.older the newest.
        self._ends = ChainNode(ChainId(0), ChunkId(""), 0, None)
        self._ends.newer = self._ends.older = self._ends
        self.last: ChainNode | None = None
        """The end of the chain that was touched last: `touch` may go on below it."""

    def touch(self, path: Sequence[ChainNode], now: int, *, below: ChainNode | None = None) -> None:
        """Make these nodes, parents first, the most recently used ones, as of request `now`. New
        nodes join the list.

        Args:
            below: what new nodes go on from: it stays newer, with all above it. None: the path
                is a whole one.
        """
        newer = self._ends if below is None else below
        for node in path:
            node.last_access = now
            node.older.newer, node.newer.older = node.newer, node.older
            node.older, node.newer = newer.older, newer
            newer.older.newer = newer.older = node  # from left to right: the old neighbour first
            newer = node
        if below in (None, self.last):
            self.last = path[-1] if path else None

    def remove(self, node: ChainNode) -> None:
        node.older.newer, node.newer.older = node.newer, node.older
        # pointing at itself it would wait for the garbage collector
        node.older = node.newer = self._ends

    def oldest_first(self) -> Iterator[ChainNode]:
        """All nodes; the caller may remove the one that it got last."""
        node = self._ends.newer
        while node is not self._ends:
            newer = node.newer  # before the caller unlinks the node
            yield node
            node = newer
