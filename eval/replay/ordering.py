"""Orders that replays compare with the server's: behind the deepest cached chain other tails.

seen       chunks that the window has seen first: the server's
rank       as the retriever ranked them
frequency  descending count, ties by rank
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, get_args

import radix_ext
from radix_ext import AccessTable, Chunk, ChunkPrefixTree, Ordering, OrderPolicy

TailPolicy = Literal["seen", "rank", "frequency"]
TAIL_POLICIES: tuple[TailPolicy, ...] = get_args(TailPolicy)


def order_chunks(
    policy: OrderPolicy,
    tail: TailPolicy,
    tree: ChunkPrefixTree,
    table: AccessTable,
    namespace: str,
    chunks: Sequence[Chunk],
    **how: Any,
) -> Ordering:
    """As `radix_ext.order_chunks`. `tail` matters for the order `tree`."""
    ordering = radix_ext.order_chunks(policy, tree, table, namespace, chunks, **how)
    if policy != "tree" or tail == "seen":
        return ordering
    path = ordering.chunks[: ordering.held_len + ordering.planned_len]
    rest = [chunk for chunk in chunks if chunk not in path]
    if tail == "frequency":
        rest.sort(key=lambda chunk: -table.count(chunk.id))
    return ordering._replace(chunks=(*path, *rest))
