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
        """Chunks of which this was not measured: as `first`, fallback "unscored"."""
        received = [chunk.scores.received if chunk.scores else None for chunk in chunks]
        offsets = tuple(
            leading(request.ratio, chunk.num_tokens)
            if scores is None
            else highest(scores, num_critical(request.ratio, chunk.num_tokens))
            for chunk, scores in zip(chunks, received, strict=True)
        )
        unscored = any(scores is None for scores in received)
        return Selection(offsets, (None,) * len(chunks), (Fallback.UNSCORED,) if unscored else ())


SELECTOR = MostAttended()
