"""What fusing does to attention, at most (Fast Fusion, proposition 5.3).

A block K and the shared K' have the same norm and similarity u, so |K' - K| = |K| sqrt(2 (1 - u)).
A query q of one head sees of each token a part of that difference, so no logit moves further than

    epsilon = |K| |q| / sqrt(head_dim) * sqrt(2 (1 - u))

and the attention distribution moves by at most exp(2 epsilon) - 1 in L1, as the paper shows. What
epsilon allows is exactly 2 tanh(epsilon / 2), never more than epsilon nor than 2: some logits gain
epsilon, all others lose it, and the worst mass to gain has odds of exp(-epsilon).

NOTE: norms are those of blocks. The paper's proof speaks of tokens, whose norms are not kept where
whole blocks are turned: one token may have all of the difference.
NOTE: u is the similarity of a block to what it is decoded from. That may be less than the
threshold: of several blocks that join one, the fewer are outvoted, and over the levels a direction
moves on (test_drift.py has both). `relative_errors` measures it.
"""

from __future__ import annotations

import math


def distance(similarity: float) -> float:
    """|K' - K| / |K| of two blocks of one norm: sqrt(2 (1 - u)).
    What `encoding.relative_errors` measures."""
    # A similarity of rounded unit vectors may exceed 1.
    return math.sqrt(2 * max(0.0, 1 - similarity))


def logit_scale(block_norm: float, query_norm: float, head_dim: int) -> float:
    """|K| |q| / sqrt(d), the largest of a layer:
    `block_norm` of all heads together, `query_norm` of one head."""
    return block_norm * query_norm / math.sqrt(head_dim)


def drift_bound(logit_drift: float) -> float:
    """Proposition 5.3: |s' - s|_1 at most, before its Taylor expansion 2 epsilon + O(epsilon^2)."""
    # expm1 keeps the digits of a small drift, which exp(x) - 1 would cancel.
    return math.expm1(2 * logit_drift)


def least_drift_bound(logit_drift: float) -> float:
    """|s' - s|_1 at most, and reached by some attention: 2 tanh(epsilon / 2)."""
    return 2 * math.tanh(logit_drift / 2)


def logit_drift_within(drift: float) -> float:
    """The epsilon whose `least_drift_bound` is `drift`, above 0 and below 2."""
    return 2 * math.atanh(drift / 2)


def similarity_within(logit_drift: float, scale: float) -> float:
    """The least similarity at which a layer with this `logit_scale` has no larger logit drift;
    0 if any has."""
    # A layer of zeros has no logit to move.
    return max(0.0, 1 - (logit_drift / scale) ** 2 / 2) if scale else 0.0
