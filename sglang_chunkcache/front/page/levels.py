"""The global tree, a page of one node's children at a time, the largest first.

How much is behind a node is added up over the whole tree, in slices, so that no request waits for
it, and kept for a while. What changes meanwhile is shown with the next sum.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import numpy as np

from radix_ext import ChainId, ChainNode, ChunkPrefixTree

MAX_NODES = 1_000
"""Children in one answer."""
SLICE = 2_000
"""Nodes between two looks at the event loop: about a millisecond."""
KEPT_S = 10.0
NOTHING = (0, 0)


class Levels:
    def __init__(self, tree: ChunkPrefixTree, clock: Callable[[], float] = time.monotonic) -> None:
        self._tree, self._clock = tree, clock
        self._behind: dict[ChainId, tuple[int, int]] = {}
        self._roots: dict[ChainId, ChainNode] = {}
        self._summed_at: float | None = None
        self._summing = asyncio.Lock()

    async def children(
        self, chain: ChainId | None, offset: int, labels: Mapping[str, str]
    ) -> dict[str, Any] | None:
        """Children of a node from the `offset`th largest on; of None the namespaces.
        `labels`: names of chunks. Returns None for a node that is gone."""
        await self._sum()
        if chain is None:
            nodes = self._tree.nodes.roots
        else:
            node = self._tree.nodes.find(chain) or self._roots.get(chain)
            if node is None:
                return None
            nodes = node.child_nodes()
        sizes = []
        async for node in _sliced(nodes):
            sizes.append(node.num_tokens + self._behind.get(node.chain, NOTHING)[1])
        largest = await asyncio.to_thread(_largest_first, sizes)
        page = largest[offset : offset + MAX_NODES].tolist()
        shown = [self._shown(nodes[i], labels) for i in page]
        return {"num_children": len(nodes), "offset": offset, "children": shown}

    async def _sum(self) -> None:
        """Nodes and tokens behind every node."""
        async with self._summing:  # several pages cost as one
            if self._summed_at is not None and self._clock() - self._summed_at < KEPT_S:
                return
            behind: dict[ChainId, tuple[int, int]] = {}
            # a parent was made before its children
            async for node in _sliced([*self._tree.nodes.by_chain.values()][::-1]):
                if node.parent is not None:
                    nodes, tokens = behind.get(node.chain, NOTHING)
                    others = behind.get(node.parent.chain, NOTHING)
                    behind[node.parent.chain] = (
                        others[0] + nodes + 1,
                        others[1] + tokens + node.num_tokens,
                    )
            roots: dict[ChainId, ChainNode] = {}
            async for node in _sliced(self._tree.nodes.roots):
                roots[node.chain] = node
            self._behind, self._roots, self._summed_at = behind, roots, self._clock()

    def _shown(self, node: ChainNode, labels: Mapping[str, str]) -> dict[str, Any]:
        num_nodes, num_tokens = self._behind.get(node.chain, NOTHING)
        return {
            "node": str(node.chain),  # a script's numbers have 53 bits
            "is_root": node.parent is None,
            "chunk": node.chunk_id[:12],
            "label": labels.get(node.chunk_id),
            "tokens": node.num_tokens,
            "hits": node.hits,
            "promoted": node.promoted,
            "planned": node.plans != 0,
            "num_children": len(node.child_nodes()),
            "nodes_behind": num_nodes,
            "tokens_behind": num_tokens,
            "held": {str(rank): tier.name.lower() for rank, tier in node.held_by()},
        }


async def _sliced(nodes: Sequence[ChainNode]) -> AsyncIterator[ChainNode]:
    for index, node in enumerate(nodes):
        if index % SLICE == SLICE - 1:
            await asyncio.sleep(0)
        yield node


def _largest_first(sizes: list[int]) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Their places."""
    return np.argsort(-np.array(sizes, dtype=np.int64), kind="stable")
