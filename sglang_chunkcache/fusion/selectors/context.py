"""Cache-Craft (3.1 and 3.2): of each chunk the ceil(CFO * n) tokens that attended to the old prefix
most (eq. 14).

CFO is radix_ext/cfo.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from radix_ext import FusionRequest, Need
from radix_ext.cfo import cfo, fix_overhead, solve_alpha
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk, Selection, Selector
from sglang_chunkcache.fusion.selectors.top_k import highest, leading, num_critical
from sglang_chunkcache.wire.report import Fallback


class ContextGuided(Selector):
    """ceil(CFO * n) tokens of each chunk with the highest `ChunkScores.context`.

    Where `request.alpha` is None, alpha is solved so that the token-weighted mean CFO is the ratio;
    else alpha decides, and the ratio only for chunks without scores. A chunk computed after nothing
    has a context of 0 throughout, and ties go to the earlier token: for it the choice is that of
    `first`.
    """

    name = "context"
    needs = frozenset({Need.MASSES})

    def makes_variants(self, request: FusionRequest) -> bool:
        """By alpha: what depends too much on what is not here is computed."""
        return request.alpha is not None and request.focus == "off"

    def select(
        self, chunks: Sequence[MovedChunk], request: FusionRequest, evidence: Evidence
    ) -> Selection:
        """Chunks without scores: as `first` with the ratio, fallback "unscored"."""
        scored = [chunk for chunk in chunks if chunk.scores is not None]
        overheads = [
            fix_overhead(
                chunk.prefix_old,
                chunk.scores,
                chunk.prefix_new,
                other_head=chunk.other_head,
            )
            for chunk in scored
        ]
        alpha = request.alpha
        if alpha is None:
            alpha = solve_alpha(overheads, [chunk.num_tokens for chunk in scored], request.ratio)
        # the clamp of CFO would choose one token of each chunk
        nothing = request.alpha is None and request.ratio == 0
        shares = iter(overheads)  # of the scored chunks, in their order
        offsets: list[Tensor] = []
        cfos: list[float | None] = []
        for chunk in chunks:
            if chunk.scores is None or nothing:
                cfos.append(None)
                offsets.append(leading(request.ratio, chunk.num_tokens))
            else:
                share = cfo(alpha, next(shares), chunk.num_tokens)
                cfos.append(share)
                offsets.append(highest(chunk.scores.context, num_critical(share, chunk.num_tokens)))
        unscored = (Fallback.UNSCORED,) if len(scored) < len(chunks) else ()
        return Selection.of(chunks, offsets, cfos, unscored)


SELECTOR = ContextGuided()
