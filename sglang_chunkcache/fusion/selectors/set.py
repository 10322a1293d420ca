"""Cache-Craft's SET-CACHE (5.1.4): chunks that are cached together as one chain are reused together, in any order.

Nothing is recomputed; instead less is reused. The planner asks `admissible` how far, so the selector chooses no token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch

from radix_ext import ChunkId
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk, Selection, Selector
from sglang_chunkcache.wire.fusion_request import FusionRequest


class SetCache(Selector):
    """Full reuse of the chunks that `admissible` returns."""

    name = "set"

    def select(self, chunks: Sequence[MovedChunk], request: FusionRequest, evidence: Evidence) -> Selection:
        """Nothing, at ratio 1 too."""
        return Selection(tuple(torch.arange(0) for _ in chunks), (None,) * len(chunks))


SELECTOR = SetCache()


def admissible(
    chunks: Sequence[ChunkId], prefixes: Sequence[Collection[tuple[ChunkId, ...]]]
) -> tuple[tuple[ChunkId, ...], ...]:
    """The longest leading run of a request's chunks that is, as a set, one cached chain.

    A chain is cached if each of its chunks has KV computed after exactly the chain's chunks before it, back to the first,
    which has none before it. Of chains of equal length the one nearest to the request's order is taken: the first in the
    lexicographic order of its chunks' indices.

    Args:
        chunks: the request's chunks, in order. A run ends before a chunk that occurs a second time.
        prefixes: per chunk, the prefixes that it has KV after; order irrelevant.
    Returns:
        For each chunk of the run the prefix whose KV to use; as long as the run, () if there is none.
    """
    index_of = {chunk: index for index, chunk in reversed(list(enumerate(chunks)))}  # its first place
    # Only a chain that ends in one of its own links can be whole: try each link as the last one.
    chains = []
    for chunk, index in index_of.items():
        for prefix in prefixes[index]:
            order = [index_of.get(link, -1) for link in (*prefix, chunk)]
            if sorted(order) == list(range(len(order))):
                chains.append((-len(order), order))
    for _, order in sorted(chains):
        chain = tuple(chunks[index] for index in order)
        links = {index: chain[:depth] for depth, index in enumerate(order)}
        if all(prefix in prefixes[index] for index, prefix in links.items()):
            return tuple(links[index] for index in range(len(order)))
    return ()
