"""Which node leaves a full cache first: `reused`, the rule of the live scheduler, and the policies
a replay compares with it.

A rule is a function of counts; it knows no tree and no clock. Its value is a priority: the smallest
is evicted first.
"""

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from typing import Literal, get_args

from radix_ext.chain_node import ChainNode
from radix_ext.chunk import ChainId
from radix_ext.errors import check_choice
from radix_ext.prefix_tree import ChunkPrefixTree

EvictionPolicy = Literal["lru", "promoted", "reused"]
EVICTION_POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)

_Entry = tuple[int, int, ChainId]
"""The leaf's priority, two numbers, and its chain."""


_ALWAYS = 1 << 60
"""More requests than a server will see."""


def reused_priority(
    *, hits: int, last_access: int, window: int, serves_one: bool = False
) -> tuple[int, int]:
    """The rule `reused`: each doubling of its hits keeps a node one access window longer, ties go
    by last access.

    The first number is last access + window * ceil(log2(1 + hits)). A chain used once leaves soon,
    one that was popular ages out in the end.

    Args:
        last_access: number of the request that used the node last, not a time.
        window: requests, as of the access table.
        serves_one: no other request finds the node as a prefix, as KV that was fused for one
            question. It leaves before all others: what it was moved from serves many, and its own
            conversation moves it again.
    """
    return last_access + window * hits.bit_length() - _ALWAYS * serves_one, last_access


class EvictionQueue:
    """The leaves of a tree in the order of their eviction: a heap whose stale entries stay until
    `pop` meets them.

    An entry is stale once its node was used or marked, got children or left the tree; `pop` skips
    it. The caller that changes a leaf pushes it again, so `push` and `pop` are O(log n) amortised.

    `reused` is the rule above with `window`, `lru` goes by last access, `promoted` by (promoted,
    last access). The live scheduler has its own forms of `lru` (SGLang's) and `promoted` (over
    SGLang's policies).

    Args:
        serves_one: as for `reused_priority`.
        is_leaf: whether the queue's tier has the node and none of its children; a tree of one tier
            needs none.
    """

    def __init__(
        self,
        tree: ChunkPrefixTree,
        policy: EvictionPolicy,
        *,
        window: int,
        serves_one: Callable[[ChainNode], bool] = lambda node: False,
        is_leaf: Callable[[ChainNode], bool] = lambda node: node.children is None,
    ) -> None:
        self._serves_one, self._is_leaf = serves_one, is_leaf
        check_choice("eviction", policy, EVICTION_POLICIES)
        self._tree = tree
        self._policy = policy
        self._window = window
        self._heap: list[_Entry] = []
        self._max_len = 0

    def push(self, node: ChainNode) -> None:
        """A node was used or marked, or lost its last child.
        Inner nodes are ignored: only leaves are evicted."""
        if self._is_leaf(node):
            heappush(self._heap, self._entry(node))
        if len(self._heap) > self._max_len:
            self._max_len = 4 * len(self._tree) + 64
            if len(self._heap) > self._max_len:
                self._heap = [entry for entry in set(self._heap) if self._current(entry)]
                heapify(self._heap)

    def pop(self) -> ChainNode | None:
        """The leaf to evict next, None if there is none.
        The caller evicts it and pushes its parent."""
        while self._heap:
            node = self._current(heappop(self._heap))
            if node is not None:
                return node
        return None

    def _entry(self, node: ChainNode) -> _Entry:
        last_access, window = node.last_access, self._window
        if self._policy == "reused":
            serves_one = self._serves_one(node)
            priority = reused_priority(
                hits=node.hits, last_access=last_access, window=window, serves_one=serves_one
            )
            return *priority, node.chain
        return int(self._policy == "promoted" and node.promoted), last_access, node.chain

    def _current(self, entry: _Entry) -> ChainNode | None:
        """The leaf this entry was made for, None if the leaf has changed since."""
        node = self._tree.find(entry[2])
        return (
            node
            if node is not None and self._is_leaf(node) and self._entry(node) == entry
            else None
        )
