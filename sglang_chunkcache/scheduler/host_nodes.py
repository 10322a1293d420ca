"""The nodes of exact chains in host memory, by what their tokens are.

What is here, and what leaves, radix_ext/exact_chains.py decides. Other variants of its index were
captured (fusion/capture.py).

Invariants:
- `chain_key` names all tokens up to the node's end, with extra_key and cache_salt, by hashes of the
  tokens themselves.
- The front knows a node with a chain as long as the node is here or on the device.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING

from radix_ext import ChainId, ChunkId
from radix_ext.cfo import Prefix
from radix_ext.exact_chains import ChainCounts, ExactChains
from radix_ext.variant_index import VariantIndex
from sglang_chunkcache.scheduler.host_slots import HostSlots, Slots
from sglang_chunkcache.scheduler.node import ChunkIdentity, HostNode, facts

if TYPE_CHECKING:
    from sglang.srt.mem_cache.radix_cache import TreeNode
    from torch import Tensor

    from sglang_chunkcache.scheduler.chunk_key import ChunkKey
    from sglang_chunkcache.scheduler.chunk_tree import ChunkTree

KEY_BYTES = 16
"""Two chains never share a key by chance."""


@dataclass
class HostCounts(ChainCounts):
    """Since the start."""

    skipped: int = 0
    """Loads that were estimated to take longer than computing. All were left out but for one in
    `EXPLORATION_PERIOD`."""
    failed: int = 0
    """Copies that raised, in either direction, and loads that could not be prepared."""
    layers_ahead: int = 0
    """Layers of the last load that were copied before its forward began; the rest was beside it."""


class HostNodes(ExactChains[HostNode, HostSlots]):
    """Of one rank.

    Args:
        tree: on the device. Its log has the nodes that are here alone.
        index: as of `ExactChains`.
    """

    pool: Slots

    def __init__(
        self, tree: ChunkTree, pool: Slots, index: VariantIndex, counts: HostCounts
    ) -> None:
        super().__init__(
            pool, index, counts, create_node=HostNode, create_slots=HostSlots, unlink=self._left
        )
        self._tree = tree

    # Lookup

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
        yield from super().violations()
        for key, host in self._nodes.items():
            if host.node is not None and facts(host.node).host is not host:
                yield f"host node {key!r} and its node on the device do not know each other"

    # Private

    def _left(self, host: HostNode) -> None:
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
