"""Random tokens of each chunk (Cache-Craft's RANDOM-RECOMP): the control that a good selector must beat."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b

import torch
from torch import Tensor

from radix_ext import FusionRequest
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk, Selection, Selector
from sglang_chunkcache.fusion.selectors.top_k import num_critical


class RandomTokens(Selector):
    """ceil(ratio * n) tokens of each chunk, drawn by recipe and chunk: the same on every rank and for a repeated request."""

    name = "random"

    def select(self, chunks: Sequence[MovedChunk], request: FusionRequest, evidence: Evidence) -> Selection:
        """No token is drawn twice."""
        return Selection(tuple(_draw(chunk, request) for chunk in chunks), (None,) * len(chunks))


def _draw(chunk: MovedChunk, request: FusionRequest) -> Tensor:
    seed = blake2b(
        f"{request.recipe}\0{chunk.chunk}".encode(), digest_size=8
    ).digest()  # hash() differs between processes
    drawn = random.Random(seed).sample(range(chunk.num_tokens), num_critical(request.ratio, chunk.num_tokens))
    return torch.tensor(sorted(drawn), dtype=torch.int64)


SELECTOR = RandomTokens()
