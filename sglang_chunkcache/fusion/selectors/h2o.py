"""The tokens that the rest of their own chunk attends to most (Cache-Craft's PREFILL-H2O, after H2O's heavy hitters)."""

from __future__ import annotations

from collections.abc import Sequence

from radix_ext import FusionRequest
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk, Selection, Selector
from sglang_chunkcache.fusion.selectors.top_k import highest, leading, num_critical
from sglang_chunkcache.wire.report import Fallback


class MostAttended(Selector):
    """ceil(ratio * n) tokens of each chunk with the highest `ChunkScores.received`, which is known before the request.

    A sum over later tokens favours early ones, as in H2O.
    """

    name = "h2o"

    def select(self, chunks: Sequence[MovedChunk], request: FusionRequest, evidence: Evidence) -> Selection:
        """Chunks without scores: as `first`, fallback "unscored"."""
        offsets = tuple(
            highest(chunk.scores.received, num_critical(request.ratio, chunk.num_tokens))
            if chunk.scores
            else leading(request.ratio, chunk.num_tokens)
            for chunk in chunks
        )
        unscored = any(chunk.scores is None for chunk in chunks)
        return Selection(offsets, (None,) * len(chunks), (Fallback.UNSCORED,) if unscored else ())


SELECTOR = MostAttended()
