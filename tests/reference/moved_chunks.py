"""Small moved chunks and requests for the selectors' tests, by hand and drawn."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import strategies as st
from torch import Tensor

from radix_ext import ChunkId
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk, Selection
from sglang_chunkcache.fusion.store import ChunkScores
from tests.reference.sources import ids


def make_scores(
    inter: Sequence[float] = (),
    prefix_lens: Sequence[int] = (),
    *,
    intra: float = 1.0,
    context: Sequence[float] = (),
    received: Sequence[float] | None = None,
) -> ChunkScores:
    """`received` is zero unless given."""
    told = torch.tensor(list([0.0] * len(context) if received is None else received))
    return ChunkScores(tuple(inter), tuple(prefix_lens), intra, torch.tensor(list(context)), told)


def make_chunk(
    name: str,
    start: int,
    num_tokens: int,
    *,
    old: str = "",
    new: str = "",
    scores: ChunkScores | None = None,
    outward: Sequence[float] | None = None,
) -> MovedChunk:
    """Prefixes as letters."""
    known = None if outward is None else torch.tensor(list(outward))
    return MovedChunk(ChunkId(name), start, num_tokens, ids(old), ids(new), scores, outward=known)


def as_lists(selection: Selection) -> list[list[int]]:
    """The offsets, to compare."""
    return [offsets.tolist() for offsets in selection.offsets]


def by_chunk(chunks: Sequence[MovedChunk], tokens: Tensor | None) -> list[list[int]]:
    """Tokens as of `Selection`, or marked as of `Selector.candidates`, as offsets."""
    assert tokens is not None
    if tokens.dtype is torch.bool:
        assert len(tokens) == sum(chunk.num_tokens for chunk in chunks)
        tokens = tokens.nonzero()[:, 0]
    lens = tuple(chunk.num_tokens for chunk in chunks)
    return as_lists(Selection(tokens, lens, (None,) * len(lens)))


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[MovedChunk], Evidence]:
    """1 to 4 chunks with gaps between them, some scored, and evidence with many equal values over
    the whole prompt."""
    values = st.integers(0, 3).map(lambda tenths: tenths / 4)
    chunks: list[MovedChunk] = []
    position = draw(st.integers(0, 3))
    for name in "abcd"[: draw(st.integers(1, 4))]:
        num_tokens = draw(st.integers(1, 12))
        old = "".join(draw(st.lists(st.sampled_from("abcdxy"), unique=True, max_size=3)))
        new = "".join(chunk.chunk for chunk in chunks)
        scores = None
        if draw(st.booleans()):
            scores = make_scores(
                [draw(values) for _ in old],
                [3 for _ in old],
                intra=draw(values),
                context=[draw(values) for _ in range(num_tokens)],
                received=[draw(values) for _ in range(num_tokens)],
            )
        chunks.append(make_chunk(name, position, num_tokens, old=old, new=new, scores=scores))
        position += num_tokens + draw(st.integers(0, 2))
    question, deviation = (torch.tensor([draw(values) for _ in range(position)]) for _ in range(2))
    return chunks, Evidence(question=question, deviation=deviation)
