"""Where moved KV comes from, and what its use counts for: copies in a tree, variants in a store.

A tier is one class here: what a plan needs to choose it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from types import MappingProxyType
from typing import Any, TypeAlias

from radix_ext.cfo import KvFacts, Prefix
from radix_ext.chunk import ChunkId
from radix_ext.moved_plan import Candidate, ReusePlan
from radix_ext.variant_index import VariantIndex
from radix_ext.variants import Identity, Variant

Coming: TypeAlias = Mapping[ChunkId, Sequence[Variant]]
"""What is on its way into a store."""
NOTHING: Coming = MappingProxyType({})


@dataclass(slots=True)
class CopyFacts(KvFacts):
    """A chunk node."""

    prefix: Prefix = ()
    is_waiting: bool = False  # to be copied into the store
    is_turned_away: bool = False  # by a host pool that was full, since it came to the device


@dataclass(frozen=True, slots=True)
class DeviceCopy(Candidate):
    """A chunk node of the tree. The server locks it until its KV is copied."""

    facts: CopyFacts
    node: Any
    where = "device"


@dataclass(frozen=True, slots=True)
class HostCopy(Candidate):
    """A variant of the store. A plain reference: it may leave the store meanwhile."""

    facts: Variant
    has_rows: bool = False
    """Rows of the device's pool have all of it, so that nothing is loaded."""
    where = "host"


@dataclass(frozen=True, slots=True)
class RowCopy(Candidate):
    """What requests share of a copy that has left tree and store. It may end with any of them."""

    where = "device"


class ChunkCopies:
    """Where a chunk's KV is in a tree, whatever precedes it (FusionRAG 4.1): filled chunk nodes
    with computed, not moved, KV.

    Args:
        identity_of: which chunk a node holds, always the same. None: no chunk.
        credit: a node was used as a source: its tree keeps it as it keeps what was used last.
    """

    def __init__(
        self,
        identity_of: Callable[[Any], Identity | None],
        facts_of: Callable[[Any], CopyFacts],
        credit: Callable[[Any], None],
    ) -> None:
        self.identity_of, self.facts_of, self._credit = identity_of, facts_of, credit
        # by chunk, then head, latest last
        self._nodes: dict[Identity | None, dict[str, dict[Any, None]]] = {}

    def find(
        self, identity: Identity | None, head: str, num: int, *, alone: bool = False
    ) -> list[Any]:
        """The latest `num` behind this head (`alone`: and no chunk).
        Where nothing is behind it, those behind others."""
        by_head = self._nodes.get(identity, {})
        groups = [by_head[head]] if head in by_head else by_head.values()
        found = chain.from_iterable(map(reversed, groups))
        return list(
            islice((node for node in found if not (alone and self.facts_of(node).prefix)), num)
        )

    def holds(self, node: Any) -> bool:
        """Whether the node is one of them, and so still in the tree."""
        return node in self._nodes.get(self.identity_of(node), {}).get(self.facts_of(node).head, {})

    def add(self, node: Any) -> None:
        identity = self.identity_of(node)
        nodes = self._nodes.setdefault(identity, {}).setdefault(self.facts_of(node).head, {})
        nodes[node] = None

    def use(self, node: Any) -> None:
        """The node was a source: it is the latest from now on."""
        nodes = self._nodes[self.identity_of(node)][self.facts_of(node).head]
        nodes[node] = nodes.pop(node)
        self._credit(node)

    def drop(self, node: Any) -> None:
        """No effect on a node that is none."""
        if self.holds(node):
            identity, head = self.identity_of(node), self.facts_of(node).head
            del self._nodes[identity][head][node]
            if not self._nodes[identity][head]:
                del self._nodes[identity][head]
            if not self._nodes[identity]:
                del self._nodes[identity]

    def forget_scores(self) -> None:
        """As `HeldVariants.forget_scores`."""
        for nodes in self._nodes.values():
            for node in chain.from_iterable(nodes.values()):
                self.facts_of(node).scores = self.facts_of(node).outward = None

    def clear(self) -> None:
        self._nodes.clear()

    def __len__(self) -> int:
        return sum(len(nodes) for by_head in self._nodes.values() for nodes in by_head.values())


class ChunkSources:
    """The sources of one rank.

    Args:
        max_copies: device copies of one chunk that a plan looks at, latest first.
        shared: facts of a chunk's copies that rows have all of. None: there are none.
    """

    def __init__(
        self,
        copies: ChunkCopies,
        store: VariantIndex,
        *,
        max_copies: int,
        shared: Callable[[Identity], Iterable[KvFacts]] | None = None,
    ) -> None:
        self._copies, self._store, self._max_copies = copies, store, max_copies
        self._shared = shared

    def candidates(
        self,
        identity: Identity,
        head: str = "",
        *,
        alone: bool = False,
        coming: Iterable[Variant] = (),
    ) -> list[Candidate]:
        """Everywhere the chunk's KV is, the device first: there as `ChunkCopies.find` says. With
        what is `coming` into the store: to estimate a plan, not to carry it out."""
        copies = self._copies.find(identity, head, self._max_copies, alone=alone)
        found: list[Candidate] = [
            *(DeviceCopy(self._copies.facts_of(node), node) for node in copies),
            *(HostCopy(variant) for variant in (*self._store.find(identity), *coming)),
        ]
        rows = {origin(f): f for f in self._shared(identity)} if self._shared is not None else {}
        for index, each in enumerate(found if rows else ()):
            if rows.pop(origin(each.facts), None) is not None and isinstance(each, HostCopy):
                found[index] = HostCopy(each.facts, has_rows=True)
        return [*found, *map(RowCopy, rows.values())]

    def are_there(self, plan: ReusePlan) -> bool:
        """Whether the tree still holds the plan's device copies, and the store its variants."""
        sources = [piece.source for piece in plan.pieces]
        return all(
            self._copies.holds(source.node) for source in sources if isinstance(source, DeviceCopy)
        ) and all(
            source.facts in self._store.held for source in sources if isinstance(source, HostCopy)
        )

    def count_uses(self, plan: ReusePlan) -> None:
        """The plan's sources have been used, and a device copy's twin in the store with it."""
        for piece in plan.pieces:
            source, used = piece.source, None
            if isinstance(source, HostCopy):
                used = source.facts
            elif isinstance(source, DeviceCopy):
                self._copies.use(source.node)
                identity, facts = self._copies.identity_of(source.node), source.facts
                used = self._store.get(identity, facts.head, facts.prefix)
            if used is not None:
                self._store.held.use(used)


def origin(facts: KvFacts) -> tuple[Any, ...]:
    """Where a chunk's KV was computed: what has the same has the same KV."""
    return facts.head, facts.prefix, facts.start, facts.preprocessed
