"""Host memory of a fused replay: exact chains and captured variants in one pool, by the server's
own decisions (radix_ext/exact_chains.py, write_back.py). No KV: slots are counted.

In the tree a chain that is here alone is in the tier HOST, as the front of a server knows it. The
tokens before a first chunk, which a replay does not count, are a node without tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from radix_ext import ChainId, ChainNode, Chunk, ChunkId, ChunkPrefixTree, Tier
from radix_ext.cfo import Prefix
from radix_ext.exact_chains import ChainCounts, ChainVariant, ExactChains
from radix_ext.offloading import HostAdmission
from radix_ext.pool_slots import PoolSlots
from radix_ext.sources import CopyFacts
from radix_ext.variant_index import VariantIndex
from radix_ext.variants import Identity
from radix_ext.write_back import WriteBackQueue
from sglang_chunkcache.config import MAX_SAVED_TOKENS, MAX_WAITING_SAVES


@dataclass(slots=True)
class Known(CopyFacts):
    """What a replay knows of a node on the device."""

    chunk: ChunkId | None = None
    node: Any = None
    host: ChainVariant | None = None
    """Its copy in host memory."""
    used: int = 0
    """The higher, the more recently."""

    @property
    def chain(self) -> ChainId | None:
        return None if self.node is None else self.node.chain

    @property
    def hits(self) -> int:
        return int(self.node.hits)

    @property
    def promoted(self) -> bool:
        return bool(self.node.promoted)


GONE = Known()


class CountedPool:
    """Slots that hold nothing."""

    def __init__(self, num_slots: int, token_bytes: int) -> None:
        self.num_slots = self.num_free = num_slots
        self.token_bytes = token_bytes

    def alloc(self, num_tokens: int) -> range | None:
        if num_tokens > self.num_free:
            return None
        self.num_free -= num_tokens
        return range(num_tokens)

    def free(self, slots: range) -> None:
        self.num_free += len(slots)


class FusedHost(WriteBackQueue[ChainVariant]):
    """Of one rank.

    Args:
        index: as large as the pool.
        facts_of: of a node on the device.
    """

    def __init__(
        self,
        tree: ChunkPrefixTree,
        rank: int,
        pool: CountedPool,
        index: VariantIndex,
        facts_of: Callable[[ChainNode], Known],
        admission: HostAdmission,
    ) -> None:
        self.counts, self._tree, self._rank, self._known = ChainCounts(), tree, rank, facts_of
        self.nodes: ExactChains[ChainVariant, PoolSlots] = ExactChains(
            pool,
            index,
            self.counts,
            create_node=ChainVariant,
            create_slots=PoolSlots,
            unlink=self._left,
        )
        super().__init__(
            self.nodes,
            facts_of,
            self.counts,
            admission=admission,
            save_tokens=lambda: MAX_SAVED_TOKENS,
            max_waiting=MAX_WAITING_SAVES,
        )

    def come_back(self, node: ChainNode, known: Known) -> None:
        """The node is on the device, loaded or computed: it may be here, too."""
        host = self.nodes.get(node.chain)
        if host is not None:
            known.host, host.node = host, node
            known.scores, known.outward = host.scores, host.outward

    # From a disk

    def claim(
        self,
        key: ChainId,
        above: ChainId,
        chunk: ChunkId,
        head: str,
        prefix: Prefix,
        num_tokens: int,
    ) -> ChainVariant | None:
        """As `HostNodes.claim`."""
        parent = self._head(above, head) if not prefix else self.nodes.get(above)
        host = parent and self.nodes.add(key, parent, num_tokens, chunk, head, prefix)
        if host is not None:
            host.is_here = False
            host.blob.hold()
        return host

    def came(self, host: ChainVariant) -> None:
        """As `HostNodes.released` and `came`."""
        host.blob.let_go()
        if self.nodes.get(host.chain_key) is not host:
            return
        host.is_here, host.hits, host.num_uses = True, 1, 1
        if not self.nodes.keep(host):
            return
        host.chain, chunk = host.chain_key, Chunk(ChunkId(str(host.identity)), host.blob.num_tokens)
        node = self._tree.nodes.by_chain.get(host.chain)
        if node is not None and node.tier(self._rank) is Tier.DEVICE:
            self.come_back(node, self._known(node))
            return
        how: Any = {"rank": self._rank, "tier": Tier.HOST, "promoted_len": 0}
        if host.prefix:
            node = self._tree.extend(host.parent.chain, [chunk], **how)
        else:
            node = self._tree.insert(host.head, [chunk], **how)
        if node is None:
            self.nodes.drop(host)

    def num_on_device(self, head: str, chunks: Sequence[ChunkId]) -> int:
        """Leading chunks that the device has."""
        nodes = self._tree.match(head, chunks)
        return sum(1 for _ in takewhile(lambda node: node.tier(self._rank) is Tier.DEVICE, nodes))

    # Of `WriteBackQueue`

    def _parent(self, node: ChainNode) -> ChainVariant | None:
        assert node.parent is not None
        if node.tier(self._rank) is not Tier.DEVICE:
            return None
        if node.parent.parent is not None:
            above: ChainVariant | None = self._facts_of(node.parent).host
            return above
        return self._head(node.parent.chain, self._facts_of(node).head)

    def _place(self, node: ChainNode, parent: ChainVariant) -> tuple[Hashable, Identity]:
        return node.chain, node.chunk_id

    def _source(self, node: ChainNode) -> Sequence[Any]:
        return range(node.num_tokens)

    def _copy(self, source: Sequence[Any], host: ChainVariant) -> bool:
        return True

    # Private

    def _head(self, key: ChainId, head: str) -> ChainVariant | None:
        return self.nodes.get(key) or self._copied(key, None, (), ChunkId(""), head, ())

    def _left(self, host: ChainVariant) -> None:
        if host.node is not None:
            self._facts_of(host.node).host = None
        elif host.chain is not None:
            self._tree.evict(host.chain, rank=self._rank)
