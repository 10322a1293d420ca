"""Which leaf of a replay's tree leaves first: `reused`, the rule of the live scheduler, and the
policies that a replay compares with it."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf
from typing import Literal, get_args

from eval.errors import check_choice
from radix_ext import Aging, ChainId, ChainNode, ChunkPrefixTree, Tier
from radix_ext.eviction import NEW

EvictionPolicy = Literal["lru", "promoted", "reused"]
EVICTION_POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)

_Entry = tuple[float, int, int, ChainId, int, bool]
"""The leaf's priority, and what it followed from: last access, recency, chain, hits and
promotion."""


class EvictionQueue:
    """The leaves of a tree in the order of their eviction: a heap whose stale entries stay until
    `pop` meets them.

    An entry is stale once its node was used or marked, got children or left the tree; `pop` skips
    it. The caller that changes a leaf pushes it again, so `push` and `pop` are O(log n) amortised.

    `reused` is `Aging`, `lru` goes by last access, `promoted` by (promoted, last access). The live
    scheduler has its own forms of `lru` (SGLang's) and `promoted` (over SGLang's policies).

    Args:
        new: as of `Aging`.
        serves_one: no other request finds the node as a prefix, as KV that was fused for one
            question. `reused` evicts it before all others: what it was moved from serves many, and
            its own conversation moves it again.
        is_leaf: whether the queue's tier has the node and none of its children; a tree of one tier
            needs none.
        recency: of leaves that one request used, the least goes first.
    """

    def __init__(
        self,
        tree: ChunkPrefixTree,
        policy: EvictionPolicy,
        *,
        new: float = NEW,
        serves_one: Callable[[ChainNode], bool] = lambda node: False,
        is_leaf: Callable[[ChainNode], bool] = lambda node: node.children is None,
        recency: Callable[[ChainNode], int] = lambda node: 0,
    ) -> None:
        self._serves_one, self._is_leaf, self._recency = serves_one, is_leaf, recency
        check_choice("eviction", policy, EVICTION_POLICIES)
        self._tree = tree
        self._policy = policy
        self._aging = Aging(new)
        self._heap: list[_Entry] = []
        self._max_len = 0

    def push(self, node: ChainNode) -> None:
        """A node was used or marked, or lost its last child.
        Inner nodes are ignored: only leaves are evicted."""
        if self._is_leaf(node):
            heappush(self._heap, self._entry(node))
        if len(self._heap) > self._max_len:
            # Entries must have quadrupled before a rebuild, which makes it O(1) a push, amortised.
            self._max_len = 4 * len(self._tree.nodes) + 64
            if len(self._heap) > self._max_len:
                # A set, since a leaf that is pushed twice unchanged has two current entries.
                found = ((entry, self._tree.nodes.find(entry[3])) for entry in set(self._heap))
                self._heap = [
                    entry for entry, node in found if node and self._is_current(entry, node)
                ]
                heapify(self._heap)

    def pop(self) -> ChainNode | None:
        """The leaf to evict next, None if there is none.
        The caller evicts it, with `evicted` before, and pushes its parent."""
        while self._heap:
            entry = heappop(self._heap)
            node = self._tree.nodes.find(entry[3])
            if node is not None and self._is_current(entry, node):
                return node
        return None

    def evicted(self, node: ChainNode, now: int) -> None:
        """The node that `pop` gave leaves during request `now`, as the tree counts them."""
        self._aging.evicted(self._entry(node)[0], now)

    # Private, in order of use

    def _entry(self, node: ChainNode) -> _Entry:
        if self._policy != "reused":
            priority = float(self._policy == "promoted" and node.promoted)
        elif self._serves_one(node):
            priority = -inf  # the age is a maximum, which this does not lower
        else:
            priority = self._aging.priority(hits=node.hits, last_access=node.last_access)
        # The chain breaks ties: it is the same in each run, and nodes do not compare.
        return priority, *self._known(node)

    def _is_current(self, entry: _Entry, node: ChainNode) -> bool:
        """Whether the leaf this entry was made for has not changed since."""
        return self._is_leaf(node) and self._known(node) == entry[1:]

    def _known(self, node: ChainNode) -> tuple[int, int, ChainId, int, bool]:
        return node.last_access, self._recency(node), node.chain, node.hits, node.promoted


def is_device_leaf(node: ChainNode, rank: int) -> bool:
    """Whether this rank has the node on the device, and no child of it there."""
    return node.tier(rank) is Tier.DEVICE and all(
        child.tier(rank) is not Tier.DEVICE for child in node.child_nodes()
    )
