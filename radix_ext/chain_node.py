"""One node of the global tree: one chunk after one particular chain, and which ranks hold its KV in
which tier.

Any code may read a node, only `ChunkPrefixTree` and its parts write it. Packed fields keep a node
at 128 bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum

from radix_ext.chunk import ChainId, ChunkId

PLAN_BITS = 32
PLAN_MASK = (1 << PLAN_BITS) - 1


class Tier(IntEnum):
    """Where a rank keeps the KV of a node; 0 in a packed field means that it does not."""

    DEVICE = 1
    HOST = 2
    DISK = 3


@dataclass(slots=True, eq=False, repr=False)
class ChainNode:
    """One chunk after one chain. A root's `chunk_id` is its namespace."""

    chain: ChainId
    chunk_id: ChunkId
    num_tokens: int
    parent: ChainNode | None
    children: ChainNode | dict[ChunkId, ChainNode] | None = None
    """None, the only child, or a dict: most nodes of a deep tree have one child, and a dict for
    each would be half of the tree's memory."""
    hits: int = 0
    last_access: int = 0
    promoted: bool = False
    tiers: int = 0  # 2 bits per rank
    plans: int = 0
    """A 32-bit count per rank: requests under way whose chain passes through the node."""
    newer: ChainNode = field(init=False)
    older: ChainNode = field(init=False)

    def child(self, chunk: ChunkId) -> ChainNode | None:
        """The child for this chunk, held or planned."""
        children = self.children
        if type(children) is dict:
            return children.get(chunk)
        if children is not None and children.chunk_id == chunk:  # type: ignore[union-attr]
            return children  # type: ignore[return-value]
        return None

    def child_nodes(self) -> tuple[ChainNode, ...]:
        """All children, in no promised order."""
        children = self.children
        if children is None:
            return ()
        return tuple(children.values()) if isinstance(children, dict) else (children,)

    def has_held_child(self, rank: int) -> bool:
        """Whether this rank holds a child; a head may have as many as there are chunks."""
        children = self.children
        each = children.values() if isinstance(children, dict) else self.child_nodes()
        return any(child.is_held(rank) for child in each)

    def tier(self, rank: int) -> Tier | None:
        """Where this rank holds the node, None if it does not."""
        packed = self.tiers >> 2 * rank & 3
        return Tier(packed) if packed else None

    def is_held(self, rank: int | None = None) -> bool:
        """Whether this rank (None: any) holds the node."""
        return bool(self.tiers & held_mask(rank))

    def held_by(self) -> Iterator[tuple[int, Tier]]:
        """(rank, tier) of every rank that holds the node."""
        rank, packed = 0, self.tiers  # read once: callers change tiers between ranks
        while packed:
            if packed & 3:
                yield rank, Tier(packed & 3)
            rank, packed = rank + 1, packed >> 2

    def path(self) -> tuple[ChainNode, ...]:
        """The chain: nodes from below the root down to this one."""
        # A loop: chains of thousands of chunks exceed Python's limit of recursion.
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return tuple(reversed(nodes))


def held_mask(rank: int | None) -> int:
    """Bits of `ChainNode.tiers` that say this rank (None: any) holds the node."""
    return -1 if rank is None else 3 << 2 * rank  # every bit, of integers of any length


def planned_mask(rank: int | None) -> int:
    """Bits of `ChainNode.plans` that say this rank (None: any) has the node planned."""
    return -1 if rank is None else PLAN_MASK << PLAN_BITS * rank
