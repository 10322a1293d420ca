"""The nodes of exact chains in host memory, and all slots of its pool.

    head tokens ── C1 ── C2         a node's parent is here, too: a chain leaves from its end
                    └─── C3

The nodes are variants of `index`, in which a moved chunk finds its KV whatever precedes it. Other
variants of the index are in no chain: they were captured (fusion/capture.py) into the same pool.

Invariants:
- Slots that are held, since KV is read from them or written into them, belong to nobody else, and
  their node stays.
- `chain_key` names all tokens up to the node's end, with extra_key and cache_salt, by hashes of the
  tokens themselves.
- The front knows a node with a chain as long as the node is here or on the device.
"""

from __future__ import annotations

import itertools
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from radix_ext import ChainId, ChunkId
from radix_ext.cfo import Prefix
from radix_ext.variant_index import VariantIndex
from radix_ext.variants import Identity, Variant
from sglang_chunkcache.scheduler.host_slots import HostSlots, SlotBook, Slots
from sglang_chunkcache.scheduler.node import ChunkIdentity, HostNode, facts

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode
    from torch import Tensor

    from sglang_chunkcache.scheduler.chunk_key import ChunkKey
    from sglang_chunkcache.scheduler.chunk_tree import ChunkTree

KEY_BYTES = 16
"""Two chains never share a key by chance."""


@dataclass
class HostCounts:
    """Since the start."""

    saved_tokens: int = 0
    loaded_tokens: int = 0
    evicted_tokens: int = 0
    loads: int = 0
    skipped: int = 0
    """Loads that were estimated to take longer than computing. All were left out but for one in
    `EXPLORATION_PERIOD`."""
    no_room: int = 0
    """Loads that were cut short, or not made, because the device had no room."""
    missed: int = 0
    """Nodes that left the device before they were saved, or did not fit, or whose copy failed."""
    failed: int = 0
    """Copies that raised, in either direction, and loads that could not be prepared."""
    layers_ahead: int = 0
    """Layers of the last load that were copied before its forward began; the rest was beside it."""


class HostNodes:
    """Of one rank.

    Args:
        tree: on the device. Its log has the nodes that are here alone.
        index: empty, as large as the pool.
    """

    def __init__(
        self, tree: ChunkTree, pool: Slots, index: VariantIndex, counts: HostCounts
    ) -> None:
        self.pool, self.index = pool, index
        self._tree, self._counts = tree, counts
        self._nodes: dict[bytes, HostNode] = {}
        self._num_below = Counter[bytes]()
        """Children of each chain key."""
        self._slots = SlotBook()
        index.held.stay_if(self._stays)
        index.watchers.append(self._changed)

    def __len__(self) -> int:
        return len(self._nodes)

    # Lookup

    def get(self, chain_key: bytes) -> HostNode | None:
        """The node of that key, or what is to become it."""
        return self._nodes.get(chain_key)

    def of(self, chunks: Sequence[TreeNode]) -> list[HostNode]:
        """The copies of device nodes, from a prompt's first chunk on, as far as they are here."""
        found: list[HostNode] = []
        host = self._nodes.get(head_of(chunks[0])[0]) if self._nodes and chunks else None
        for node in chunks:
            host = (
                self._nodes.get(below(host.chain_key, facts(node).chunk))
                if host and node.key.fused is None
                else None
            )
            if host is None or not host.is_here:
                break
            found.append(host)
        return found

    def after(self, key: ChunkKey, area_len: int, start: int) -> Iterator[tuple[HostNode, Tensor]]:
        """(node, its slots from `start` on) of what is here of the key's first `area_len` chunks
        and the tokens before them, up to the first gap."""
        area = key.spans[:area_len]
        if not self._nodes or not area or start >= area[-1].end:
            return
        head_len = area[0].start
        if start > head_len and all(span.start != start for span in area):
            return
        host = self._nodes.get(root(key.token_ids[:head_len], key.extra_key, key.cache_salt))
        if host is None or not host.is_here:
            return
        if start < head_len:
            yield host, host.blob.slots[start:]
        for span in area:
            host = self._nodes.get(below(host.chain_key, span.chunk))
            if host is None or not host.is_here:
                return
            if span.start >= start:
                yield host, host.blob.slots

    @property
    def chains_not_on_device(self) -> list[ChainId]:
        return [
            host.chain
            for host in self._nodes.values()
            if host.chain is not None and host.node is None
        ]

    # Coming and going

    def room(self, num_tokens: int) -> HostSlots | None:
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
        return None if slots is None else HostSlots(self.pool, slots, self._slots)

    def add(
        self,
        chain_key: bytes,
        parent: HostNode | None,
        num_tokens: int,
        identity: ChunkIdentity,
        head: str,
        prefix: Prefix,
    ) -> HostNode | None:
        """A node whose slots hold nothing yet, in no index until `keep`. None: it does not fit, or
        another chain of the same name is here."""
        old = self.index.get(identity, head, prefix)
        if old is not None and old.is_exact:
            return None
        if parent is not None:
            self._num_below[parent.chain_key] += 1  # it does not leave for its child
        blob = self.room(num_tokens)
        if blob is None:
            self._lost_child(parent)
            return None
        start = 0 if parent is None else parent.start + parent.blob.num_tokens
        host = self._nodes[chain_key] = HostNode(
            prefix=prefix,
            blob=blob,
            head=head,
            start=start,
            identity=identity,
            chain_key=chain_key,
            parent=parent,
        )
        return host

    def keep(self, host: HostNode) -> bool:
        """The node's slots hold its KV. False: the index has no room for it, and it is dropped."""
        is_kept = self.index.insert(host.identity, host)
        if not is_kept:
            self.drop(host)
        return is_kept

    def drop(self, host: HostNode) -> None:
        """Take the node out, with all that is below it."""
        if self._num_below[host.chain_key]:
            for child in [each for each in self._nodes.values() if each.parent is host]:
                self.drop(child)
        self._remove(host)

    def count_hits(self, host: HostNode, hits: int) -> None:
        """So many requests have found the node's copy on the device."""
        host.num_uses += max(0, hits - host.hits)
        host.hits = hits
        self.index.held.touch(host)
        # No request hits the tokens before a first chunk, which have been used as often.
        if host.parent is not None and not host.parent.identity.chunk:
            host.parent.num_uses = max(host.parent.num_uses, host.num_uses)
            self.index.held.touch(host.parent)

    def reset(self) -> None:
        """The tree on the device is empty: no chain is kept. Captured variants stay."""
        nodes, self._nodes = list(self._nodes.values()), {}
        self._num_below.clear()
        for host in nodes:
            host.node = host.chain = None  # the front drops all by itself
            self._remove(host)

    # From the storage

    def claim(
        self,
        chain_key: bytes,
        above: bytes | None,
        num_tokens: int,
        identity: ChunkIdentity,
        head: str,
        prefix: Prefix,
    ) -> HostNode | None:
        """A node with held slots, for KV that is on its way: `released`, then `came` or `drop`
        follow. Without tokens it is here at once. None: as `add`, or there is no node `above`."""
        parent = None if above is None else self._nodes.get(above)
        if above is not None and parent is None:
            return None
        host = self.add(chain_key, parent, num_tokens, identity, head, prefix)
        if host is None:
            return None
        if num_tokens:
            host.is_here = False
            host.blob.hold()
        elif not self.keep(host):
            return None
        return host

    def released(self, host: HostNode) -> bool:
        """No other thread reads or writes its slots any more. Whether the node is still here."""
        host.blob.let_go()
        return self._nodes.get(host.chain_key) is host

    def came(self, host: HostNode, namespace: str, node: TreeNode | None) -> bool:
        """The node holds its KV. `node` is the same on the device. False: as `keep`."""
        host.is_here, host.hits, host.num_uses = True, 1, 1
        if not self.keep(host):
            return False
        if not host.identity.chunk:
            return True
        if node is not None and facts(node).chain is not None:
            facts(node).host, host.chain, host.node = host, facts(node).chain, node
            self.index.held.learn(host, facts(node).scores, facts(node).outward)
        else:
            above = host.parent.chain if host.parent is not None else None
            host.chain = self._tree.on_host(
                host.identity.chunk, host.blob.num_tokens, above, namespace
            )
        return True

    # For tests and idle moments

    def violations(self) -> Iterator[str]:
        """Of the invariants. Walks all nodes."""
        children = Counter(
            host.parent.chain_key for host in self._nodes.values() if host.parent is not None
        )
        if self._num_below != children:
            yield "host nodes have other children than were booked"
        for key, host in self._nodes.items():
            if host.chain_key != key or (
                host.parent is not None
                and self._nodes.get(host.parent.chain_key) is not host.parent
            ):
                yield f"host node {key.hex()} has another chain key, or no parent"
            if host.chain is not None and not host.is_here:
                yield f"host node {key.hex()} is known before it is here"
            if host.node is not None and facts(host.node).host is not host:
                yield f"host node {key.hex()} and its node on the device do not know each other"
            if (self.index.get(host.identity, host.head, host.prefix) is host) != host.is_here:
                yield f"host node {key.hex()} is in the index although it is not here, or not"
        blobs = {each.blob for each in self.index.held}
        blobs |= {host.blob for host in self._nodes.values()}
        if not blobs <= self._slots.out or any(blob.is_given_back for blob in blobs):
            yield "slots on the host are read that were given back"
        if not all(blob.is_held for blob in self._slots.out if blob.is_given_back):
            yield "slots on the host are kept for nobody"
        num_held = sum(blob.num_tokens for blob in self._slots.out if blob.is_held)
        if num_held != self._slots.num_held:
            yield f"{num_held} slots on the host are held, {self._slots.num_held} were counted"
        num_booked = sum(blob.num_tokens for blob in self._slots.out)
        if num_booked != (num_out := self.pool.num_slots - self.pool.num_free):
            yield f"{num_booked} slots on the host are booked, {num_out} are given out"

    # Private, in order of use

    def _lost_child(self, parent: HostNode | None) -> None:
        if parent is None or not self._num_below[parent.chain_key]:
            return
        self._num_below[parent.chain_key] -= 1
        if not self._num_below[parent.chain_key]:
            del self._num_below[parent.chain_key]

    def _remove(self, host: HostNode) -> None:
        """A node without children."""
        if self.index.get(host.identity, host.head, host.prefix) is host:
            self.index.drop(host)
        else:
            self._unlink(host)
            host.blob.give_back()

    def _stays(self, variant: Variant) -> bool:
        is_inner = isinstance(variant, HostNode) and self._num_below[variant.chain_key] > 0
        is_held: bool = variant.blob.is_held
        return is_held or is_inner

    def _changed(self, identity: Identity, variant: Variant, is_here: bool) -> None:
        """As `VariantIndex.watchers`."""
        if not is_here:
            if isinstance(variant, HostNode):
                self._unlink(variant)
            variant.blob.give_back()

    def _unlink(self, host: HostNode) -> None:
        self._nodes.pop(host.chain_key, None)
        self._lost_child(host.parent)
        if host.node is not None:
            facts(host.node).host = None
        elif host.chain is not None:
            self._tree.off_host(host.chain)


def head_of(node: TreeNode) -> tuple[bytes, list[TreeNode]]:
    """(chain key, nodes on the device) of the tokens before a first chunk, which is `node`."""
    above: list[TreeNode] = []
    key, node = node.key, node.parent
    while node.parent is not None:
        above.insert(0, node)
        node = node.parent
    token_ids = array("q", itertools.chain.from_iterable(each.key.token_ids for each in above))
    return root(token_ids, key.extra_key, key.cache_salt), above


def root(token_ids: array[int], extra_key: str | None, cache_salt: str | None) -> bytes:
    """The chain key of the tokens before a first chunk. They may be none."""
    tenant = "".join(
        "-" if each is None else f"{len(each)}:{each}" for each in (extra_key, cache_salt)
    )
    data = tenant.encode("utf-8", "surrogatepass") + b"\0" + token_ids.tobytes()
    return blake2b(data, digest_size=KEY_BYTES, person=b"head").digest()


def below(chain_key: bytes, chunk: ChunkId | None) -> bytes:
    """The chain key of a chunk that follows `chain_key`."""
    assert chunk is not None
    return blake2b(chain_key + chunk.encode(), digest_size=KEY_BYTES, person=b"chunk").digest()
