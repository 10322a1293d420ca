"""A chunk-prefix tree as plainly as it can be written: a dict from (namespace, path of ids) to what
is known of it.

Slow and obviously right; tests/radix_ext/test_prefix_tree_model.py holds the real one against it.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from radix_ext import Chunk, Tier

Path = tuple[str, ...]


@dataclass
class NaiveNode:
    """What is known of one path."""

    num_tokens: int
    tiers: dict[int, Tier] = field(default_factory=dict)
    plans: list[int] = field(default_factory=list)
    promoted: bool = False
    hits: int = 0


class NaiveTree:
    """Same operations and meaning as ChunkPrefixTree without a bound;
    paths instead of chain ids."""

    def __init__(self) -> None:
        self.nodes: dict[tuple[str, Path], NaiveNode] = {}

    def match(self, namespace: str, ids: Sequence[str], rank: int | None) -> int:
        length = 0
        for end in range(1, len(ids) + 1):
            node = self.nodes.get((namespace, tuple(ids[:end])))
            if node is None or not (node.tiers if rank is None else rank in node.tiers):
                break
            length = end
        return length

    def insert(
        self, namespace: str, chunks: Sequence[Chunk], rank: int, tier: Tier, promoted_len: int
    ) -> None:
        for index, node in enumerate(self._reach(namespace, chunks)):
            node.hits += rank in node.tiers
            node.tiers[rank] = tier
            node.promoted = index < promoted_len

    def mark_promoted(self, namespace: str, ids: Sequence[str], promoted_len: int) -> None:
        for end in range(1, len(ids) + 1):
            node = self.nodes.get((namespace, tuple(ids[:end])))
            if node is None:
                break
            node.promoted = end <= promoted_len

    def plan(self, namespace: str, chunks: Sequence[Chunk], rank: int) -> None:
        for node in self._reach(namespace, chunks):
            node.plans.append(rank)

    def release(self, namespace: str, chunks: Sequence[Chunk], rank: int) -> None:
        for node in self._reach(namespace, chunks):
            node.plans.remove(rank)
        self._clean()

    def count_hits(self, namespace: str, chunks: Sequence[Chunk]) -> None:
        for node in self._reach(namespace, chunks):
            node.hits += 1

    def evict(self, namespace: str, ids: Sequence[str], rank: int) -> int:
        path = tuple(ids)
        lost = 0
        for (other, below), node in self.nodes.items():
            if (
                other == namespace
                and below[: len(path)] == path
                and node.tiers.pop(rank, None) is not None
            ):
                lost += 1
        self._clean()
        return lost

    def move(self, namespace: str, ids: Sequence[str], rank: int, tier: Tier) -> bool:
        node = self.nodes.get((namespace, tuple(ids)))
        if node is None or rank not in node.tiers:
            return False
        node.tiers[rank] = tier
        return True

    def drop_rank(self, rank: int) -> int:
        lost = sum(node.tiers.pop(rank, None) is not None for node in self.nodes.values())
        self._clean()
        return lost

    def held(self) -> dict[tuple[int, str], tuple[int, int]]:
        """(rank, tier name) -> nodes, tokens."""
        held: dict[tuple[int, str], tuple[int, int]] = {}
        for node in self.nodes.values():
            for rank, tier in node.tiers.items():
                nodes, tokens = held.get((rank, tier.name.lower()), (0, 0))
                held[rank, tier.name.lower()] = nodes + 1, tokens + node.num_tokens
        return held

    def _reach(self, namespace: str, chunks: Iterable[Chunk]) -> list[NaiveNode]:
        path: Path = ()
        reached = []
        for chunk in chunks:
            path = (*path, chunk.id)
            reached.append(self.nodes.setdefault((namespace, path), NaiveNode(chunk.num_tokens)))
        return reached

    def _clean(self) -> None:
        self.nodes = {path: node for path, node in self.nodes.items() if node.tiers or node.plans}
