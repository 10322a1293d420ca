"""Chunks by letter, for tests of chains."""

from __future__ import annotations

from collections.abc import Iterable

from radix_ext import Chunk, ChunkId


def make_chunks(names: Iterable[str], num_tokens: int = 4) -> list[Chunk]:
    """One a name, all of one length."""
    return [Chunk(ChunkId(name), num_tokens) for name in names]
