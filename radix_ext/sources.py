"""Where moved KV comes from, and what its use counts for: copies in a tree, variants in a store.

A tier is one class here: what a plan needs to choose it. A disk tier is another class: its blob reads from a file, and `where`
says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from typing import Any

from radix_ext.cfo import Prefix
from radix_ext.moved_plan import Candidate, ReusePlan
from radix_ext.variants import Identity, Variant, VariantIndex


@dataclass(slots=True)
class CopyFacts:
    """A chunk node."""

    start: int = 0
    """Position of the first token."""
    prefix: Prefix = ()
    """The chunks before it, in order."""
    scores: Any = None
    """What was measured of the chunk: an `Attention`, or None."""


class ChunkCopies:
    """Where a chunk's KV is in a tree, whatever precedes it (FusionRAG 4.1): filled chunk nodes with computed, not moved, KV.

    Args:
        identity_of: which chunk a node holds, always the same. None: no chunk.
    """

    def __init__(self, identity_of: Callable[[Any], Identity | None], facts_of: Callable[[Any], CopyFacts]) -> None:
        self.identity_of, self.facts_of = identity_of, facts_of
        self._nodes: dict[Identity | None, dict[Any, None]] = {}

    def find(self, identity: Identity, num: int) -> list[Any]:
        """The latest `num`."""
        return list(islice(reversed(self._nodes.get(identity, {})), num))

    def holds(self, node: Any) -> bool:
        """Whether the node is one of them, and so still in the tree."""
        return node in self._nodes.get(self.identity_of(node), {})

    def add(self, node: Any) -> None:
        """A filled chunk node."""
        self._nodes.setdefault(self.identity_of(node), {})[node] = None

    def drop(self, node: Any) -> None:
        """No effect on a node that is none."""
        if self.holds(node):
            identity = self.identity_of(node)
            del self._nodes[identity][node]
            if not self._nodes[identity]:
                del self._nodes[identity]

    def clear(self) -> None:
        """Forget all, as the tree does."""
        self._nodes.clear()

    def __len__(self) -> int:
        return sum(map(len, self._nodes.values()))


@dataclass(frozen=True, slots=True)
class DeviceCopy:
    """A chunk node of the tree. The server locks it until its KV is copied."""

    node: Any
    facts: CopyFacts
    where: str = "device"
    preprocessed: bool = False

    @property
    def start(self) -> int:
        return self.facts.start

    @property
    def prefix(self) -> Prefix:
        return self.facts.prefix

    @property
    def scores(self) -> Any:
        return self.facts.scores


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A variant of the store. A plain reference: it may leave the store meanwhile."""

    variant: Variant
    where: str = "host"
    start: None = None

    @property
    def prefix(self) -> Prefix:
        return self.variant.prefix

    @property
    def scores(self) -> Any:
        return self.variant.scores

    @property
    def preprocessed(self) -> bool:
        return self.variant.preprocessed


class ChunkSources:
    """The sources of one rank.

    Args:
        max_copies: device copies of one chunk that a plan looks at, latest first.
    """

    def __init__(self, copies: ChunkCopies, store: VariantIndex, *, max_copies: int) -> None:
        self._copies, self._store, self._max_copies = copies, store, max_copies

    def candidates(self, identity: Identity) -> list[Candidate]:
        """Everywhere the chunk's KV is, the device first."""
        copies = self._copies.find(identity, self._max_copies)
        return [
            *(DeviceCopy(node, self._copies.facts_of(node)) for node in copies),
            *(HostCopy(variant) for variant in self._store.find(identity)),
        ]

    def are_there(self, plan: ReusePlan) -> bool:
        """Whether the tree still holds the plan's device copies."""
        sources = (piece.source for piece in plan.pieces)
        return all(self._copies.holds(source.node) for source in sources if isinstance(source, DeviceCopy))

    def count_uses(self, plan: ReusePlan) -> None:
        """The plan is carried out: its sources have been used once more."""
        for piece in plan.pieces:
            if isinstance(piece.source, HostCopy):
                self._store.use(piece.source.variant, piece.cfo)
