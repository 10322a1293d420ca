"""The tokens the question attends to most in one layer, by default the last,
over all chunks together (FusionRAG 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

from radix_ext import FusionRequest, Need
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk, Selection, Selector
from sglang_chunkcache.fusion.selectors.top_k import jointly_chosen
from sglang_chunkcache.wire.report import Fallback


class QueryGuided(Selector):
    """ceil(ratio * all moved tokens) with the highest `Evidence.question`,
    so chunks that answer the question get more."""

    name = "query"
    needs = frozenset({Need.QUESTION})

    def select(
        self, chunks: Sequence[MovedChunk], request: FusionRequest, evidence: Evidence
    ) -> Selection:
        """Without evidence: as `first`, fallback "no_question"."""
        return jointly_chosen(evidence.question, chunks, request, Fallback.NO_QUESTION)


SELECTOR = QueryGuided()
