"""Chunk ids by letter, requests and measured attention for tests of what is moved; no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from radix_ext import ChunkId, FusionRequest
from radix_ext.cfo import Attention, Scored


@dataclass(frozen=True, eq=False)
class Sums(Attention):
    """Attention of a chunk of `num_tokens`."""

    num_tokens: int = 1
    nbytes: int = 0
    scored: Scored = Scored.ALL


def ids(names: str) -> tuple[ChunkId, ...]:
    """One chunk a letter."""
    return tuple(ChunkId(name) for name in names)


def make_sums(
    inter: Sequence[float] = (),
    prefix_lens: Sequence[int] = (),
    *,
    intra: float = 1.0,
    num_tokens: int = 1,
    head: float = 0.0,
    head_len: int = 0,
) -> Sums:
    """Attention on chunks of these lengths, and on the head."""
    return Sums(tuple(inter), tuple(prefix_lens), intra, num_tokens, head=head, head_len=head_len)


def make_request(
    selector: str = "query",
    ratio: float = 0.15,
    *,
    alpha: float | None = None,
    recipe: str = "r",
) -> FusionRequest:
    """Without focus; a selector does not look at it."""
    return FusionRequest(selector, ratio, recipe, alpha=alpha)
