"""Which node leaves a full cache first: `reused`, the rule of the live scheduler, and the policies
a replay compares with it.

A rule is a function of counts; it knows no tree and no clock. Its value is a priority: the smallest
is evicted first.
"""

from array import array
from collections.abc import Callable
from heapq import heapify, heappop, heappush
from math import inf, log2
from typing import Literal, get_args

from radix_ext.chain_node import ChainNode
from radix_ext.chunk import ChainId
from radix_ext.errors import check_choice
from radix_ext.prefix_tree import ChunkPrefixTree

EvictionPolicy = Literal["lru", "promoted", "reused"]
EVICTION_POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)

_Entry = tuple[float, int, int, ChainId, int, bool]
"""The leaf's priority, and what it followed from: last access, recency, chain, hits and
promotion."""

_MAX_AGES = 1 << 16
"""Requests whose age is known; what was used before them is as old as the first of them."""

NEW = 0.1
"""What a node of the KV pool has before its first hit, in doublings of its hits. The smaller, the
longer what was popular stays: until what changes in the pool has turned over by ten times a
doubling."""
NEW_ON_HOST = 0.25
"""Likewise in host memory, which has more room, and so turns over later, and takes what was found
once already (eval/LOG.md)."""


class Aging:
    """The rule `reused`: least frequently used with dynamic aging (LFU-DA, Arlitt et al. 2000), by
    the logarithm of the hits. One for each tier, since the tier's own evictions are its time.

        priority = age at the last access + new + log2(1 + hits)
        age      = the highest priority that has left

    So a popular node outlives its popularity by some turnovers of what changes in the pool. Where
    dead nodes fill most of it the rest turns over soon, and so they leave soon, however long a
    window of requests is. It follows from requests and evictions, never from a clock: ranks, and a
    replay, decide alike. Without hits it is LRU.

    Args:
        new: of a node without hits, over 0.
    """

    def __init__(self, new: float) -> None:
        self._new, self._age = new, 0.0
        self._ages = array("d")
        self._first = 0

    def priority(self, *, hits: int, last_access: int) -> float:
        """The smallest leaves first.

        Args:
            hits: requests that found the node.
            last_access: number of the request that used it last.
        """
        index = last_access - self._first
        # Ages are written by evictions: without one since that request the age is the same.
        age = self._ages[max(0, index)] if index < len(self._ages) else self._age
        return age + self._new + log2(1 + hits)

    def now(self, hits: int) -> float:
        """The priority of what is used now, for a tier that keeps it until the next use."""
        return self._age + self._new + log2(1 + hits)

    def resume(self, priority: float, hits: int) -> None:
        """An earlier tier has kept this: this one is at least as old as it was at its last use."""
        self._age = max(self._age, priority - self._new - log2(1 + hits))

    def left(self, priority: float) -> None:
        """What has kept this priority since its last use has left."""
        self._age = max(self._age, priority)

    def evicted(self, priority: float, now: int) -> None:
        """A node of that priority has left during request `now`. All that the request uses counts
        from before that. O(1), amortised."""
        # Written before the age rises, so that what `now` uses is no younger by its own evictions.
        if (missing := now + 1 - self._first - len(self._ages)) > 0:
            if missing >= _MAX_AGES:
                del self._ages[:]
            # Cut at twice the length: a cut for each eviction would move all ages each time.
            elif missing + len(self._ages) > 2 * _MAX_AGES:
                del self._ages[:-_MAX_AGES]
            self._ages.extend([self._age] * min(missing, _MAX_AGES))
            self._first = now + 1 - len(self._ages)
        self.left(priority)


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
