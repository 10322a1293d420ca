"""Full reuse: nothing is recomputed, whatever the ratio (Cache-Craft's FULL-CACHE, FusionRAG's Full Reuse)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from sglang_chunkcache.request_spans import ReuseRequest
from sglang_chunkcache.selectors.base import Evidence, MovedChunk, Selection, Selector


class NoTokens(Selector):
    """The baseline, and the lower end of every ratio curve."""

    name = "none"

    def select(self, chunks: Sequence[MovedChunk], request: ReuseRequest, evidence: Evidence) -> Selection:
        """Nothing, at ratio 1 too."""
        return Selection(tuple(torch.arange(0) for _ in chunks), (None,) * len(chunks))


SELECTOR = NoTokens()
