"""What a request that opted into moved KV asks for."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from sglang_chunkcache.wire.message import Record


class FusionRequest(Record, frozen=True):
    """One request's options for fused reuse, defaults filled in."""

    selector: str
    ratio: Annotated[float, Meta(ge=0, le=1)]
    """Share of the moved tokens to recompute."""
    recipe: str = ""
    """Names how the fused KV is made. Requests share fused nodes where it agrees."""
    alpha: float | None = None
    """Cache-Craft's scale of eq. 12. None: solved for so that the mean CFO is `ratio`."""
    focus: bool = False
    """Whether chunks that the question does not attend to are spared recomputation (Cache-Craft, algorithm 1)."""
    without: frozenset[str] = frozenset()
    """Parts of `context` to leave out, for ablations: "beta", "cci"."""
    fresh: frozenset[int] = frozenset()
    """Indices of spans that are computed even where a source exists."""

    @property
    def recomputes(self) -> bool:
        """Whether its selector takes tokens at all."""
        return self.selector not in ("none", "set")

    @property
    def is_choice(self) -> bool:
        """Whether there is something to choose: neither nothing nor everything is asked for."""
        return self.alpha is not None or 0 < self.ratio < 1
