"""The chain id of a whole path at once, where the packages go step by step."""

from collections.abc import Iterable
from functools import reduce

from radix_ext import ChainId, ChunkId, extend_chain, root_chain


def chain_of(namespace: str, ids: Iterable[ChunkId]) -> ChainId:
    return reduce(extend_chain, ids, root_chain(namespace))
