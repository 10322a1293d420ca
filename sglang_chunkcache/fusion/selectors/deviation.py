"""The tokens whose moved KV is furthest from computed KV at one layer,
by default the second (CacheBlend; FusionRAG eq. 7, 8)."""

from __future__ import annotations

from collections.abc import Sequence

from radix_ext import FusionRequest, Need
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk, Selection, Selector
from sglang_chunkcache.fusion.selectors.top_k import jointly_chosen
from sglang_chunkcache.wire.report import Fallback


class LargestDeviation(Selector):
    """ceil(ratio * all moved tokens) with the highest `Evidence.deviation`:
    early deviation persists in later layers."""

    name = "deviation"
    needs = frozenset({Need.DEVIATION})

    def select(
        self, chunks: Sequence[MovedChunk], request: FusionRequest, evidence: Evidence
    ) -> Selection:
        """Without evidence: as `first`, fallback "no_deviation"."""
        return jointly_chosen(evidence.deviation, chunks, request, Fallback.NO_DEVIATION)


SELECTOR = LargestDeviation()
