"""Upper bounds of reuse: what the requests of a trace share, before any order, cache size or eviction."""

import sys
from collections.abc import Iterable, Sequence

from radix_ext.chain_node import Tier
from radix_ext.chunk import Chunk, ChunkId
from radix_ext.prefix_tree import ChunkPrefixTree


def overlap(requests: Iterable[Sequence[ChunkId]]) -> tuple[float, float]:
    """CRAFT 3.1's two measures of a trace as retrieved: how much prefixes share, and how much sets share.

    Returns:
        Prefix, the mean over all requests but the first of max_{j<i} LCP(R_i, R_j) / len(R_i), and
        Total, that of max_{j<i} |R_i ∩ R_j| / len(R_i). Both 0 for fewer than two requests.
    """
    tree = ChunkPrefixTree(max_nodes=sys.maxsize)
    retrieved_by: dict[ChunkId, int] = {}  # bit j: request j has the chunk
    prefix = total = 0.0
    num_requests = 0
    for index, ids in enumerate(requests):
        if index and ids:
            prefix += len(tree.match("", ids)) / len(ids)
            total += _most_shared([retrieved_by.get(chunk, 0) for chunk in ids]) / len(ids)
        chunks = [Chunk(chunk, 1) for chunk in ids]
        tree.insert("", chunks, rank=0, tier=Tier.DEVICE, promoted_len=0)
        for chunk in ids:
            retrieved_by[chunk] = retrieved_by.get(chunk, 0) | 1 << index
        num_requests += 1
    return prefix / max(1, num_requests - 1), total / max(1, num_requests - 1)


def seen_before(requests: Iterable[Sequence[Chunk]]) -> list[tuple[int, int]]:
    """For each request (chunks, tokens) that an earlier request retrieved too: what reuse at any position could find."""
    seen: set[ChunkId] = set()
    counts = []
    for request in requests:
        lengths = [chunk.num_tokens for chunk in request if chunk.id in seen]
        counts.append((len(lengths), sum(lengths)))
        seen.update(chunk.id for chunk in request)
    return counts


def _most_shared(bit_sets: Sequence[int]) -> int:
    """The largest number of these bit sets that have one bit in common, by adding all bits up at once, column-wise."""
    columns: list[int] = []  # columns[n]: bit 2**n of every sum
    for carry in bit_sets:
        for n, column in enumerate(columns):
            columns[n], carry = column ^ carry, column & carry
        if carry:
            columns.append(carry)
    most, candidates = 0, -1
    for n in reversed(range(len(columns))):
        if candidates & columns[n]:
            candidates &= columns[n]
            most += 1 << n
    return most
