"""What each chunk token attends to before its chunk, one sum after the other,
for each token and each chunk before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def masses(weights: Tensor, spans: Sequence[tuple[int, int]], start: int) -> Tensor:
    """weights: [n, m] of the tokens from position `start` on, over all keys; spans: of the chunks,
    `[start, end)` in positions.

    Returns [n]: attention to each chunk before the token's own, together; to the text before the
    first chunk of its tokens; 0 for tokens of no chunk.
    """
    found = torch.zeros(len(weights), dtype=weights.dtype)
    for number, (first, last) in enumerate(spans):
        for position in range(max(first, start), min(last, start + len(weights))):
            for a, b in spans[:number] or [(0, first)]:
                found[position - start] += weights[position - start, a:b].sum()
    return found
