"""The nodes of exact chains in host memory, and all slots of its pool.

    text ── C1 ── (gone) ── C3               each chunk leaves for itself. An exact request reads up
             └─── C2                         to the first gap, a moved chunk what is behind it, too

The nodes are variants of an index, in which a moved chunk finds its KV whatever precedes it. Other
variants of the index are in no chain: they were captured into the same pool. What a node of the
tree on the device is, the caller knows: on a server SGLang's, in a replay ours.

Invariants:
- Slots that are held, since KV is read from them or written into them, belong to nobody else, and
  their node stays.
- A chain key names all before the node's end, for one tenant.
- The text before chunks stays as long as one of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from radix_ext.cfo import Prefix
from radix_ext.chunk import ChainId
from radix_ext.pool_slots import Pool, PoolSlots, SlotBook
from radix_ext.variant_index import VariantIndex
from radix_ext.variants import Identity, Variant


class ChainPlace(NamedTuple):
    """What a node of a chain is."""

    chain_key: Any
    before: Any  # the chain key of what is before it. None: nothing is
    above: ChainId
    """What is before it, as `chain` names it. Of text: what is before the chunk that follows it."""
    start: int
    identity: Identity
    head: str
    prefix: Prefix
    is_text: bool = False  # no chunk, but the tokens before one that no chunk has


@dataclass(eq=False, kw_only=True)
class ChainVariant(Variant):
    """One chunk after one particular chain, or the text before chunks."""

    # As in `ChainPlace`, which has the others, too.
    identity: Identity
    chain_key: Any
    before: Any
    above: ChainId
    is_text: bool = False
    chain: ChainId | None = None
    """Its own, if an exact request may come to it: what is before it is here, or on the device."""
    node: Any = None  # the chunk's on the device, where it is
    hits: int = 0  # requests that found it cached exactly; `num_uses` has its moves, too
    is_here: bool = True  # False: its KV is on its way from a slower tier
    is_exact: bool = True


@dataclass
class ChainCounts:
    """Since the start."""

    saved_tokens: int = 0
    loaded_tokens: int = 0
    evicted_tokens: int = 0
    loads: int = 0
    no_room: int = 0  # loads that were cut short, or not made, because the device had no room
    missed: int = 0
    """Nodes that left the device before they were saved, or were turned away, did not fit, or whose
    copy failed."""


Node = TypeVar("Node", bound=ChainVariant)
Blob = TypeVar("Blob", bound=PoolSlots)


class ExactChains(Generic[Node, Blob]):
    """Of one rank.

    Args:
        index: empty, as large as the pool.
        create_node, create_slots: make them.
        unlink: told of a node that has left, for whatever reason: its twin on the device, or who
            knew of it, has to forget it.
    """

    def __init__(
        self,
        pool: Pool,
        index: VariantIndex,
        counts: ChainCounts,
        *,
        create_node: Callable[..., Node],
        create_slots: Callable[[Any, Any, SlotBook], Blob],
        unlink: Callable[[Node], None],
    ) -> None:
        self.pool, self.index, self._counts = pool, index, counts
        self._create_node, self._create_slots, self._tell = create_node, create_slots, unlink
        self._nodes: dict[Hashable, Node] = {}
        self._below = defaultdict[ChainId, dict[Hashable, None]](dict)
        """What follows each chain, wherever that is."""
        self._slots = SlotBook()
        index.held.stay_if(self._stays)
        index.watchers.append(self._changed)

    def __len__(self) -> int:
        return len(self._nodes)

    def get(self, chain_key: Hashable) -> Node | None:
        """The node of that key, or what is to become it."""
        return self._nodes.get(chain_key)

    def room(self, num_tokens: int) -> Blob | None:
        """Slots that hold nothing yet, for which the variants that the index evicts first leave.
        None, and nothing leaves: there are not so many beside those that are held or reserved."""
        num_kept = self._slots.num_held + self.index.held.reserved_bytes // self.pool.token_bytes
        # else all others would leave in vain
        if self.pool.num_free < num_tokens > self.pool.num_slots - num_kept:
            return None
        while self.pool.num_free < num_tokens:
            before = self.pool.num_free
            if not self.index.evict():
                return None
            self._counts.evicted_tokens += self.pool.num_free - before
        slots = self.pool.alloc(num_tokens)
        return None if slots is None else self._create_slots(self.pool, slots, self._slots)

    def add(self, place: ChainPlace, num_tokens: int) -> Node | None:
        """A node whose slots hold nothing yet, in no index until `keep`. None: it does not fit
        beside what precedes it, it is behind a gap and nothing is free, or another chain of the
        same name is here."""
        old = self.index.get(place.identity, place.head, place.prefix)
        if old is not None and old.is_exact:
            return None
        preceding, node = list[Node](), self._nodes.get(place.before)
        while node is not None:  # without it nobody would come to the new one
            node.blob.hold()
            preceding.append(node)
            node = self._nodes.get(node.before)
        # behind a gap nothing leaves for it
        is_wanted = not place.prefix or preceding or num_tokens <= self.pool.num_free
        blob = self.room(num_tokens) if is_wanted else None
        for node in preceding:
            node.blob.let_go()
        if blob is None:
            return None
        if not place.is_text:
            self._below[place.above][place.chain_key] = None
        host = self._nodes[place.chain_key] = self._create_node(blob=blob, **place._asdict())
        return host

    def keep(self, host: Node) -> bool:
        """The node's slots hold its KV. False: the index has no room for it, and it is dropped."""
        is_kept = self.index.insert(host.identity, host)
        if not is_kept:
            self.drop(host)
        return is_kept

    def claim(self, place: ChainPlace, num_tokens: int) -> Node | None:
        """A node with held slots, for KV that is on its way from a slower tier: `released`, then
        `came` or `drop` follow. None: as `add`."""
        host = self.add(place, num_tokens)
        if host is not None:
            host.is_here = False
            host.blob.hold()
        return host

    def released(self, host: Node) -> bool:
        """Nobody else reads or writes its slots any more. Whether the node is still here."""
        host.blob.let_go()
        return self._nodes.get(host.chain_key) is host

    def came(self, host: Node) -> bool:
        """The node holds its KV. False: as `keep`."""
        host.is_here, host.hits, host.num_uses = True, 1, 1
        return self.keep(host)

    def drop(self, host: Node) -> None:
        if self.index.get(host.identity, host.head, host.prefix) is host:
            self.index.drop(host)
        else:
            self._unlink(host)
            host.blob.give_back()

    def hide(self, chain: ChainId) -> Iterator[Node]:
        """Neither device nor host memory has the chain any more: no exact request comes to what
        follows it, moved chunks do. Those nodes, the ends first, whose `chain` is None then."""
        for host in self._after(chain):
            if host.chain is not None and host.node is None:
                yield from self.hide(host.chain)
                yield host
                host.chain = None

    def hidden(self, chain: ChainId) -> list[Node]:
        """What follows the chain and is not known to, now that it is here or on the device."""
        return [host for host in self._after(chain) if host.chain is None and host.node is None]

    def touch(self, host: Node, hits: int) -> None:
        """So many requests have found the node's copy on the device. Its age counts that, its uses
        do not: what the device has does not need host memory (eval/LOG.md)."""
        host.hits = hits
        self.index.held.touch(host)
        if not host.prefix and (head := self._nodes.get(host.before)) is not None:
            self.index.held.touch(head)  # no request hits that

    def loaded(self, nodes: Sequence[Node]) -> None:
        """A request has these chunks of one chain copied to the device, which counts as a use."""
        for host in reversed(nodes):
            if not host.is_text:
                self.index.held.use(host)

    def reset(self) -> None:
        """The tree on the device is empty: no chain is kept. Captured variants stay."""
        nodes, self._nodes = list(self._nodes.values()), {}
        self._below.clear()
        for host in nodes:
            host.node = host.chain = None  # who knew of it forgets all by itself
            self.drop(host)

    # Private, in order of use

    def _after(self, chain: ChainId) -> Iterator[Node]:
        for key in [*self._below.get(chain, ())]:
            if self._nodes[key].is_here:
                yield self._nodes[key]

    def _stays(self, variant: Variant) -> bool:
        # without the text before them no request reads any chain
        if isinstance(variant, ChainVariant) and variant.is_text:
            return variant.blob.is_held or variant.above in self._below
        return bool(variant.blob.is_held)

    def _changed(self, identity: Identity, variant: Variant, is_here: bool) -> None:
        """As `VariantIndex.watchers`."""
        if not is_here:
            if isinstance(variant, ChainVariant):
                self._unlink(variant)  # type: ignore[arg-type]
            variant.blob.give_back()

    def _unlink(self, host: Node) -> None:
        self._nodes.pop(host.chain_key, None)
        siblings = self._below.get(host.above, {})
        siblings.pop(host.chain_key, None)
        if not siblings:
            self._below.pop(host.above, None)
        self._tell(host)
