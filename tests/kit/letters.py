"""Chunks by letter, and short traces of them."""

from __future__ import annotations

import random
from collections.abc import Iterable

from radix_ext import Chunk, ChunkId


def make_chunks(names: Iterable[str], num_tokens: int = 4) -> list[Chunk]:
    """One a name, all of one length."""
    return [Chunk(ChunkId(name), num_tokens) for name in names]


def make_trace(num_requests: int, *, seed: int = 0) -> list[list[str]]:
    """Requests of 1 to 5 of 20 chunks, low numbers more often:
    enough of everything in a short trace."""
    rng = random.Random(seed)
    draws = (
        [int(20 * rng.random() ** 2) for _ in range(rng.randint(1, 5))] for _ in range(num_requests)
    )
    return [[str(number) for number in dict.fromkeys(draw)] for draw in draws]
