"""Cache-Craft's SET-CACHE (5.1.4): chunks that are cached together as one chain are reused together, in any order.

Nothing is recomputed; instead less is reused. The planner asks `admissible` how far, so the selector chooses no token.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from radix_ext import FusionRequest
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk, Selection, Selector


class SetCache(Selector):
    """Full reuse of the chunks that `admissible` returns."""

    name = "set"

    def select(self, chunks: Sequence[MovedChunk], request: FusionRequest, evidence: Evidence) -> Selection:
        """Nothing, at ratio 1 too."""
        return Selection(tuple(torch.arange(0) for _ in chunks), (None,) * len(chunks))


SELECTOR = SetCache()
