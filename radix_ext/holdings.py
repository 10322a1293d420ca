"""Which nodes of a tree each rank holds, and where: counts, and a digest that it can compare."""

from collections import Counter

from radix_ext.chain_node import ChainNode


class Holdings:
    """Alone writes `ChainNode.tiers`, so the counts are always those of the nodes."""

    def __init__(self) -> None:
        # by rank and tier
        self._num_nodes, self._num_tokens = Counter[tuple[int, int]](), Counter[tuple[int, int]]()
        self._digests = Counter[int]()

    def set_tier(self, node: ChainNode, rank: int, tier: int) -> None:
        """`rank` has the node in `tier` from now on, 0 for in none. O(1)."""
        old = node.tiers >> 2 * rank & 3
        if tier == old:
            return
        node.tiers += (tier - old) << 2 * rank
        if not old or not tier:
            # Exclusive or undoes itself and knows no order, so a digest costs O(1) a change.
            self._digests[rank] ^= node.chain
        if old:
            self._num_nodes[rank, old] -= 1
            self._num_tokens[rank, old] -= node.num_tokens
        if tier:
            self._num_nodes[rank, tier] += 1
            self._num_tokens[rank, tier] += node.num_tokens

    def held(self, rank: int, tier: int) -> tuple[int, int]:
        """(nodes, tokens) that this rank holds in this tier. O(1)."""
        return self._num_nodes[rank, tier], self._num_tokens[rank, tier]

    @property
    def num_tokens(self) -> int:
        """Tokens of the nodes that a rank holds, summed over ranks and tiers. O(ranks)."""
        return self._num_tokens.total()

    def digest(self, rank: int) -> tuple[int, int]:
        """(number of nodes this rank holds, exclusive or of their chain ids):
        equal digests, equal trees. O(ranks)."""
        num_nodes = sum(num for (held_by, _), num in self._num_nodes.items() if held_by == rank)
        return num_nodes, self._digests[rank]
