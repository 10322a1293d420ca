"""Which chains are saved into a pool of host memory that is full."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import Mock, patch

import pytest

from eval.replay.fused_host import CountedPool
from radix_ext import ChainId, ChunkId
from radix_ext.exact_chains import ChainCounts, ChainPlace, ChainVariant, ExactChains
from radix_ext.pool_slots import PoolSlots
from radix_ext.variant_index import VariantIndex
from radix_ext.write_back import WriteBackQueue

NUM_SLOTS, SIZE = 20, 10


@dataclass(eq=False)
class Known:
    """A node on the device."""

    name: ChunkId
    hits: int
    promoted: bool = True
    chain: ChainId | None = None
    host: Any = None
    scores: Any = None
    outward: Any = None
    is_turned_away: bool = False


class Chains(WriteBackQueue[ChainVariant]):
    """First chunks of ten tokens, by name; two fill the pool."""

    def __init__(self, *, only_lost: bool) -> None:
        index = VariantIndex(max_bytes=NUM_SLOTS, max_chunks=100, max_variants=1, window=100)
        counts = ChainCounts()
        nodes: ExactChains[ChainVariant, PoolSlots] = ExactChains(
            CountedPool(NUM_SLOTS, 1),
            index,
            counts,
            create_node=ChainVariant,
            create_slots=PoolSlots,
            unlink=lambda host: None,
        )
        how: Any = {"save_tokens": lambda: 1000, "max_waiting": 100, "only_lost": only_lost}
        super().__init__(nodes, lambda node: node, counts, **how)

    def _place(self, node: Any) -> ChainPlace:
        return ChainPlace(node.name, None, ChainId(0), 0, node.name, "", ())

    def _source(self, node: Any) -> range:
        return range(SIZE)

    def _copy(self, source: Any, host: ChainVariant) -> bool:
        return True

    def serve(self, node: Known) -> None:
        """A request that uses the node."""
        self.offer([node])
        list(self.save_some())
        node.hits += 1

    @property
    def saved(self) -> set[Any]:
        return {variant.identity for variant in self._nodes._nodes.values()}


@pytest.mark.parametrize("only_lost", [False, True])
def test_a_chain_displaces_others_once_the_device_has_lost_it(only_lost: bool) -> None:
    """However often it is found on the device: it is there. A request that computed it anew says
    that it was not."""
    chains = Chains(only_lost=only_lost)
    for name in ("a", "b"):  # while there is room
        chains.serve(Known(ChunkId(name), 0))
    assert chains.saved == {"a", "b"}
    age, node = chains._nodes.index.held.aging.now(0), Known(ChunkId("c"), 0)
    for _ in range(5):
        chains.serve(node)
    assert ("c" in chains.saved) is not only_lost
    if only_lost:
        assert chains._nodes.index.held.aging.now(0) > age
        chains.serve(Known(ChunkId("c"), 0))
        assert "c" in chains.saved


def test_nothing_leaves_for_the_head_of_a_chain_that_is_turned_away() -> None:
    chains, precede = Chains(only_lost=True), Mock()
    for name in ("a", "b"):
        chains.serve(Known(ChunkId(name), 0))
    with patch.object(chains, "_precede", precede):
        chains.serve(node := Known(ChunkId("c"), 0))
        assert not precede.called
        chains.serve(replace(node, is_turned_away=False))
        assert precede.called
