"""Full reuse: nothing is recomputed, whatever the ratio (Cache-Craft's FULL-CACHE,
FusionRAG's Full Reuse)."""

from __future__ import annotations

from collections.abc import Sequence

from radix_ext import FusionRequest
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk, Selection, Selector


class NoTokens(Selector):
    """The baseline, and the lower end of every ratio curve."""

    name = "none"

    def select(
        self, chunks: Sequence[MovedChunk], request: FusionRequest, evidence: Evidence
    ) -> Selection:
        """Nothing, at ratio 1 too."""
        return Selection.leading(chunks, [0] * len(chunks))


SELECTOR = NoTokens()
