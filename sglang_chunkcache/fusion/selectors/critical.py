"""The tokens whose KV deviates most, of those that a calibrated layer and calibrated heads point at
(ours).

    proposed   BY_CONTEXT of the tokens: those that in the calibrated heads attended most to what
               was before their chunk when it was computed (outward.py), since what they say depends
               on other chunks
               BY_QUESTION of the tokens: those that the question attends to most in the calibrated
               layer
    decided    by KV deviation at the calibrated depth (CacheBlend, FusionRAG eq. 7), measured on
               the proposed tokens alone

So two fifths of the tokens are compared. Where nothing says what a chunk's tokens attended to, all
of them are.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from radix_ext import FusionRequest, Need
from radix_ext.fusion_request import proposed_share
from sglang_chunkcache.attention.upload import upload
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk, positions_in
from sglang_chunkcache.fusion.selectors.deviation import LargestDeviation
from sglang_chunkcache.fusion.selectors.top_k import highest, jointly_highest, num_critical


class Critical(LargestDeviation):
    """ceil(ratio * all moved tokens) of the proposed ones with the highest `Evidence.deviation`."""

    name = "critical"
    needs = frozenset({Need.QUESTION, Need.DEVIATION})

    def candidates(
        self, chunks: Sequence[MovedChunk], request: FusionRequest, evidence: Evidence
    ) -> Tensor:
        """Without evidence from the question, by the context alone."""
        by_context, by_question = proposed_share(request)
        question = evidence.question
        proposed = _outward(chunks, by_context, "cpu" if question is None else question.device)
        if question is not None:
            proposed.index_fill_(0, jointly_highest(question, chunks, by_question), True)
        return proposed


def _outward(chunks: Sequence[MovedChunk], share: float, device: torch.device | str) -> Tensor:
    """[sum of the chunks' tokens] bool: those that attended most to what was before their chunk,
    over all scored chunks together."""
    ends = accumulate(chunk.num_tokens for chunk in chunks)
    known = [(c.outward, end) for c, end in zip(chunks, ends, strict=True) if c.outward is not None]
    # Computed before the calibration, or by a captured graph: all its tokens are compared.
    chosen = torch.ones(sum(c.num_tokens for c in chunks), dtype=torch.bool, device=device)
    if known:
        places = positions_in([(end - len(each), end) for each, end in known], device)
        chosen.index_fill_(0, places, False)
        # One share of all: a chunk that looked back more is compared more.
        looks = upload(torch.cat([each for each, _ in known]), device)
        best = highest(looks, num_critical(share, len(places)))
        chosen.index_fill_(0, places[best], True)
    return chosen


SELECTOR = Critical()
