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
    ) -> tuple[Tensor, ...]:
        """Without evidence from the question, by the context alone."""
        by_context, by_question = proposed_share(request)
        proposed = [torch.zeros(chunk.num_tokens, dtype=torch.bool) for chunk in chunks]
        for marks, chosen in zip(proposed, _outward(chunks, by_context), strict=True):
            marks[chosen] = True
        if evidence.question is not None:
            asked = jointly_highest(evidence.question, chunks, by_question)
            for marks, chosen in zip(proposed, asked, strict=True):
                marks[chosen] = True
        return tuple(marks.nonzero()[:, 0] for marks in proposed)


def _outward(chunks: Sequence[MovedChunk], share: float) -> tuple[Tensor, ...]:
    """Per chunk the offsets of the tokens that attended most to what was before it,
    over all scored chunks together."""
    outward = [chunk.outward for chunk in chunks]
    known = [each for each in outward if each is not None]
    # One share of all: a chunk that looked back more is compared more.
    chosen = torch.zeros(sum(map(len, known)), dtype=torch.bool)
    if known:
        chosen[highest(torch.cat(known), num_critical(share, len(chosen)))] = True
    parts = iter(torch.split(chosen, [len(each) for each in known]))
    return tuple(
        # Computed before the calibration, or by a captured graph: all its tokens are compared.
        torch.arange(chunk.num_tokens) if each is None else next(parts).nonzero()[:, 0]
        for chunk, each in zip(chunks, outward, strict=True)
    )


SELECTOR = Critical()
