"""Selectors that the papers compare with, for servers: `--chunkcache-selectors eval.selectors`.

random    Cache-Craft's RANDOM-RECOMP: ceil(r n) tokens of each chunk, the control that a good
          selector must beat
h2o       Cache-Craft's PREFILL-H2O: ceil(r n) of each chunk that the rest of their own chunk
          attends to most
prophet   ProphetKV: ceil(r sum of n) that the question attends to most in all layers together;
          the baseline of `query`
set       Cache-Craft's SET-CACHE: nothing of a chunk whose KV was computed behind the same set
          of chunks, ceil(r n) of any other. With a ratio just below 1, at which alone selectors
          are asked, that is all of it
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from radix_ext import FusionRequest, Need
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk, Selection, Selector
from sglang_chunkcache.fusion.selectors.query import QueryGuided
from sglang_chunkcache.fusion.selectors.top_k import highest, leading, num_critical
from sglang_chunkcache.wire.report import Fallback


class RandomTokens(Selector):
    """Drawn by recipe and chunk: the same on every rank and for a repeated request."""

    name = "random"

    def select(
        self, chunks: Sequence[MovedChunk], request: FusionRequest, evidence: Evidence
    ) -> Selection:
        """No token is drawn twice."""
        return Selection.of(chunks, [_draw(chunk, request) for chunk in chunks])


class MostAttended(Selector):
    """By `ChunkScores.received`, which is known before the request.
    A sum over later tokens favours early ones, as in H2O."""

    name = "h2o"
    needs = frozenset({Need.RECEIVED})

    def select(
        self, chunks: Sequence[MovedChunk], request: FusionRequest, evidence: Evidence
    ) -> Selection:
        """Chunks of which this was not measured: as `first`, fallback "unscored"."""
        received = [chunk.scores.received if chunk.scores else None for chunk in chunks]
        offsets = tuple(
            leading(request.ratio, chunk.num_tokens)
            if scores is None
            else highest(scores, num_critical(request.ratio, chunk.num_tokens))
            for chunk, scores in zip(chunks, received, strict=True)
        )
        unscored = any(scores is None for scores in received)
        return Selection.of(chunks, offsets, fallbacks=(Fallback.UNSCORED,) if unscored else ())


class AllLayers(QueryGuided):
    """As `query`, by evidence that is summed over the layers."""

    name = "prophet"
    needs = frozenset({Need.QUESTION, Need.ALL_LAYERS})


class SameSet(Selector):
    """By the chunks before it alone, in whatever order: a chunk is reused or computed."""

    name = "set"

    def makes_variants(self, request: FusionRequest) -> bool:
        """Else a chunk would be known behind one set alone."""
        return True

    def select(
        self, chunks: Sequence[MovedChunk], request: FusionRequest, evidence: Evidence
    ) -> Selection:
        """Another head is another prefix."""
        counts = [
            num_critical(0 if is_same else request.ratio, chunk.num_tokens)
            for chunk in chunks
            for is_same in [{*chunk.prefix_old} == {*chunk.prefix_new} and not chunk.other_head]
        ]
        return Selection.leading(chunks, counts)


def _draw(chunk: MovedChunk, request: FusionRequest) -> Tensor:
    # hash() differs between processes
    seed = blake2b(f"{request.recipe}\0{chunk.chunk}".encode(), digest_size=8).digest()
    drawn = random.Random(seed).sample(
        range(chunk.num_tokens), num_critical(request.ratio, chunk.num_tokens)
    )
    # `Selection.offsets` are ascending; `sample` returns them as drawn.
    return torch.tensor(sorted(drawn), dtype=torch.int64)


SELECTORS = (RandomTokens(), MostAttended(), AllLayers(), SameSet())
