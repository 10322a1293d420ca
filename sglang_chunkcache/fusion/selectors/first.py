"""The first tokens of each chunk (EPIC's LegoLink):
computed without a prefix, they are unwanted attention sinks."""

from __future__ import annotations

from collections.abc import Sequence

from radix_ext import FusionRequest
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk, Selection, Selector
from sglang_chunkcache.fusion.selectors.top_k import num_critical


class FirstTokens(Selector):
    """ceil(ratio * n) leading tokens of each chunk, or `request.tokens`."""

    name = "first"

    def select(
        self, chunks: Sequence[MovedChunk], request: FusionRequest, evidence: Evidence
    ) -> Selection:
        """The other selectors fall back to this, chunk by chunk,
        where their scores or evidence are missing."""
        fixed = request.tokens
        counts = [
            num_critical(request.ratio, chunk.num_tokens)
            if fixed is None
            else min(fixed, chunk.num_tokens)
            for chunk in chunks
        ]
        return Selection.leading(chunks, counts)


SELECTOR = FirstTokens()
