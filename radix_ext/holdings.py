"""Which nodes of a tree each rank holds, and where: counts, and a digest that it can compare."""

from collections import defaultdict

from radix_ext.chain_node import ChainNode


class Holdings:
    """Alone writes `ChainNode.tiers`, so the counts are always those of the nodes."""

    def __init__(self) -> None:
        # (rank, tier) -> [nodes, tokens]
        self._held = defaultdict[tuple[int, int], list[int]](lambda: [0, 0])
        self._digests: dict[int, int] = {}

    def set_tier(self, node: ChainNode, rank: int, tier: int) -> None:
        """`rank` has the node in `tier` from now on, 0 for in none. O(1)."""
        old = node.tiers >> 2 * rank & 3
        if tier == old:
            return
        node.tiers += (tier - old) << 2 * rank
        if not old or not tier:
            # Exclusive or undoes itself and knows no order, so a digest costs O(1) a change.
            self._digests[rank] = self._digests.get(rank, 0) ^ node.chain
        if old:
            held = self._held[rank, old]
            held[0] -= 1
            held[1] -= node.num_tokens
        if tier:
            held = self._held[rank, tier]
            held[0] += 1
            held[1] += node.num_tokens

    def held(self, rank: int, tier: int) -> tuple[int, int]:
        """(nodes, tokens) that this rank holds in this tier. O(1)."""
        num_nodes, num_tokens = self._held.get((rank, tier), (0, 0))
        return num_nodes, num_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of the nodes that a rank holds, summed over ranks and tiers. O(ranks)."""
        return sum(num_tokens for _, num_tokens in self._held.values())

    def digest(self, rank: int) -> tuple[int, int]:
        """(number of nodes this rank holds, exclusive or of their chain ids):
        equal digests, equal trees. O(ranks)."""
        num_nodes = sum(nodes for (held_by, _), (nodes, _) in self._held.items() if held_by == rank)
        return num_nodes, self._digests.get(rank, 0)
