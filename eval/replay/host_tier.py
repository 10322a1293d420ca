"""A replay's host memory: the nodes that it has, no KV."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Literal

from eval.errors import check_choice
from eval.replay.eviction_queue import EvictionPolicy, EvictionQueue
from eval.replay.offloading import HOST_ADMISSIONS, HostAdmission, worth_offloading
from radix_ext import ChainNode, ChunkPrefixTree
from radix_ext.eviction import NEW_ON_HOST


class HostTier:
    """The nodes of a tree that host memory has, whether or not the device has them too.
    Single-threaded.

    A node's parent is there before it and stays as long as it does. Room is made before a copy, by
    the device's rule of eviction.

    Args:
        capacity, capacity_tokens: in nodes and in tokens, None for unlimited.
    Raises:
        PolicyError: unknown admission or policy.
    """

    def __init__(
        self,
        tree: ChunkPrefixTree,
        policy: EvictionPolicy,
        admission: HostAdmission,
        *,
        capacity: int | None,
        capacity_tokens: int | None,
    ) -> None:
        check_choice("host admission", admission, HOST_ADMISSIONS)
        self.num_tokens = self.num_offloaded = self.num_offloaded_tokens = self.num_evicted = 0
        self._admission, self._capacity, self._capacity_tokens = (
            admission,
            capacity,
            capacity_tokens,
        )
        self._tree = tree
        self._nodes: set[ChainNode] = set()
        self._num_children = Counter[ChainNode]()
        self._queue = EvictionQueue(tree, policy, new=NEW_ON_HOST, is_leaf=self._is_leaf)

    def __contains__(self, node: ChainNode) -> bool:
        return node in self._nodes

    def offload(
        self, path: Sequence[ChainNode], *, is_later_turn: bool = False
    ) -> list[ChainNode]:
        """A request has used this chain: copy those of its nodes that are worth it, as far as there
        is room; of a conversation that goes on all.

        Returns what left for that, children first. The caller drops what the device does not have.
        Nothing of the chain leaves.
        """
        last, gone = None, list[ChainNode]()
        for node in path:
            if node not in self._nodes:
                if not is_later_turn and not worth_offloading(
                    self._admission, hits=node.hits, promoted=node.promoted
                ):
                    break
                gone += self._make_room(node, path)
                if not self._has_room(node):
                    break
                self._count(node, 1)
                self.num_offloaded += 1
                self.num_offloaded_tokens += node.num_tokens
            last = node
        if last is not None:
            self._queue.push(last)
        return gone

    # Private, in order of use

    def _make_room(self, node: ChainNode, path: Sequence[ChainNode]) -> Iterator[ChainNode]:
        # The queue names nothing of the chain: the request has used it, so its entries are stale
        # until `offload` pushes its end.
        while not self._has_room(node) and (victim := self._queue.pop()) is not None:
            self._queue.evicted(victim, self._tree.clock)
            self._count(victim, -1)
            self.num_evicted += 1
            if victim.parent in self._nodes and victim.parent not in path:
                self._queue.push(victim.parent)
            yield victim

    def _has_room(self, node: ChainNode) -> bool:
        return self._fits(len(self._nodes) + 1, self.num_tokens + node.num_tokens)

    def _fits(self, num_nodes: int, num_tokens: int) -> bool:
        return (self._capacity is None or num_nodes <= self._capacity) and (
            self._capacity_tokens is None or num_tokens <= self._capacity_tokens
        )

    def _count(self, node: ChainNode, change: Literal[1, -1]) -> None:
        assert node.parent is not None
        self.num_tokens += change * node.num_tokens
        self._num_children[node.parent] += change
        if change == 1:
            self._nodes.add(node)
            return
        self._nodes.remove(node)
        if not self._num_children[node.parent]:
            del self._num_children[node.parent]

    def _is_leaf(self, node: ChainNode) -> bool:
        return node in self._nodes and node not in self._num_children
