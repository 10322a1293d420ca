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

import torch
from torch import Tensor

from radix_ext import FusionRequest, Need
from radix_ext.fusion_request import proposed_share
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk
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
        proposed = _outward(chunks, by_context)
        if evidence.question is not None:
            asked = jointly_highest(evidence.question, chunks, by_question)
            proposed = proposed.to(asked.device)
            proposed[asked] = True
        return proposed.nonzero()[:, 0]


def _outward(chunks: Sequence[MovedChunk], share: float) -> Tensor:
    """[sum of the chunks' tokens] bool, CPU: those that attended most to what was before their
    chunk, over all scored chunks together."""
    known = [chunk.outward for chunk in chunks if chunk.outward is not None]
    # Computed before the calibration, or by a captured graph: all its tokens are compared.
    is_unknown = torch.tensor([chunk.outward is None for chunk in chunks], dtype=torch.bool)
    lens = torch.tensor([chunk.num_tokens for chunk in chunks], dtype=torch.int64)
    chosen = is_unknown.repeat_interleave(lens)
    if known:
        places = (~chosen).nonzero()[:, 0]
        # One share of all: a chunk that looked back more is compared more.
        chosen[places[highest(torch.cat(known), num_critical(share, len(places)))]] = True
    return chosen


SELECTOR = Critical()
