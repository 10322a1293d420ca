"""Prices of what plans do."""

from __future__ import annotations

from radix_ext.costs import Costs, Line, Phase

GROWING: Costs = {
    **dict.fromkeys(Phase, Line()),
    Phase.EXTEND: Line(each=1.0),
    Phase.RECOMPUTE: Line(fixed=1.0, each=1e-6),
}
"""What a pass computes costs nearly nothing, so exact chains may grow."""
EACH: Costs = {**GROWING, Phase.RECOMPUTE: Line(each=1.0)}
"""Each token is dear, so they may not."""
