"""Host memory of a fused replay: exact chains and captured variants in one pool, by the server's
own decisions (radix_ext/exact_chains.py, write_back.py). No KV: slots are counted.

In the tree a chain that is here alone is in the tier HOST, as the front of a server knows it. A
replay does not count the tokens before a first chunk, and they are not kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from eval.replay.offloading import HostAdmission, worth_offloading
from radix_ext import ChainId, ChainNode, Chunk, ChunkId, ChunkPrefixTree, Tier
from radix_ext.exact_chains import ChainCounts, ChainPlace, ChainVariant, ExactChains
from radix_ext.pool_slots import PoolSlots
from radix_ext.sources import CopyFacts
from radix_ext.variant_index import VariantIndex
from radix_ext.write_back import MUCH_LARGER, WriteBackQueue
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
        *,
        num_on_device: int | None,
    ) -> None:
        self.counts, self._tree, self._rank, self._known = ChainCounts(), tree, rank, facts_of
        self._admission: HostAdmission = admission
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
            save_tokens=lambda: MAX_SAVED_TOKENS,
            max_waiting=MAX_WAITING_SAVES,
            only_lost=num_on_device is not None and pool.num_slots < MUCH_LARGER * num_on_device,
        )

    def come_back(self, node: ChainNode, known: Known) -> None:
        """The node is on the device, loaded or computed: it may be here, too."""
        host = self.nodes.get(node.chain)
        if host is not None:
            if host.chain is None:  # the tree has forgotten it meanwhile
                node.hits = host.hits
            known.host, host.node, host.chain = host, node, node.chain
            known.scores, known.outward = host.scores, host.outward
        self._show_below(node.chain)

    def lost(self, chain: ChainId) -> int:
        """Neither device nor host memory has it any more. How many nodes exact requests lose."""
        num_hidden = sum(1 for _ in self.nodes.hide(chain))
        assert self._tree.evict(chain, rank=self._rank) == 1 + num_hidden
        return 1

    # From a disk

    def came(self, host: ChainVariant) -> None:
        """As `HostNodes.came`, of what is released."""
        if not (self.nodes.released(host) and self.nodes.came(host)):
            return
        node = self._tree.nodes.by_chain.get(host.chain_key)
        if node is not None and node.tier(self._rank) is Tier.DEVICE:
            self.come_back(node, self._known(node))
        self._show(host)

    def num_on_device(self, head: str, chunks: Sequence[ChunkId]) -> int:
        """Leading chunks that the device has."""
        nodes = self._tree.match(head, chunks)
        return sum(1 for _ in takewhile(lambda node: node.tier(self._rank) is Tier.DEVICE, nodes))

    # Of `WriteBackQueue`

    def _is_worth_it(self, *, hits: int, promoted: bool) -> bool:
        return worth_offloading(self._admission, hits=hits, promoted=promoted)

    def _place(self, node: ChainNode) -> ChainPlace | None:
        assert node.parent is not None
        if node.tier(self._rank) is not Tier.DEVICE:
            return None
        above, known = node.parent.chain, self._known(node)
        where = known.start, node.chunk_id, known.head, known.prefix
        return ChainPlace(node.chain, above, above, *where)

    def _source(self, node: ChainNode) -> Sequence[Any]:
        return range(node.num_tokens)

    def _copy(self, source: Sequence[Any], host: ChainVariant) -> bool:
        return True

    # Private

    def _show(self, host: ChainVariant) -> None:
        """In the tree, if all before it is there and it is not on the device, too. No request."""
        node = self._tree.nodes.by_chain.get(host.chain_key)
        if node is not None and node.is_held(self._rank):
            return
        chunk = Chunk(ChunkId(str(host.identity)), host.blob.num_tokens)
        how: Any = {"rank": self._rank, "tier": Tier.HOST, "promoted_len": 0}
        clock = self._tree.clock
        if not host.prefix:
            node = self._tree.insert(host.head, [chunk], **how)
        elif (above := self._tree.nodes.by_chain.get(host.above)) and above.is_held(self._rank):
            node = self._tree.extend(host.above, [chunk], is_used=False, **how)
        else:
            return
        self._tree.clock = clock
        if node is not None:
            host.chain, node.hits = host.chain_key, host.hits
            self._show_below(host.chain_key)

    def _show_below(self, chain: ChainId) -> None:
        for host in self.nodes.hidden(chain):
            self._show(host)

    def _left(self, host: ChainVariant) -> None:
        if host.node is not None:
            self._facts_of(host.node).host = None
        elif host.chain is not None:
            self.lost(host.chain)
