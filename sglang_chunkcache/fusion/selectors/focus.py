"""Which chunks the question settles on, layer by layer (Cache-Craft 3.2.2, algorithm 1 and eq. 15).

The paper runs it while recomputing: once the focused chunks are settled, in layer L*, the tokens of
the others are dropped from the layers after it. Here it runs on evidence measured beforehand, and
the others are left out in every layer. What that frees is saved, as in the paper
(`spare_unfocused`). Dropping layer by layer would add the recomputation of unfocused chunks in
layers 1 to L*, and with it fresher KV for them there; it needs a pass whose rows shrink on the way.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch
from torch import Tensor

from sglang_chunkcache.attention.upload import upload
from sglang_chunkcache.fusion.selectors.base import Selection

WINDOW = 3
"""Layers that must agree: the paper's w, for which it gives no figure."""


def focused_chunks(by_layer: Tensor, *, window: int = WINDOW) -> frozenset[int]:
    """Cumulate each chunk's mass over the layers, split high from low in each layer, stop when the
    split is stable.

    Read with indices from 1, as the paper's i in [k]: the split after layer l is the top i* chunks,
    i* in 1 to k - 2, where the entropy of the first i + 1 gaps between neighbours grows most over
    that of the first i. Taken to the letter, so the gap concerned is the one *after* chunk i* + 1,
    and a single dominating gap adds less (-p log p peaks at p = 1/e) than two of middling size.
    Cases that the paper leaves open are decided for recomputing:
      - no gap at all (equal sums), or a NaN: all chunks are in the high set of that layer;
      - fewer than 3 chunks have no i*: all are focused, from layer `window` on;
      - equal growths: the lowest i; equal sums: the earlier chunk; 0 log 0 = 0;
      - never `window` equal sets in a row: all are focused.

    Args:
        by_layer: [num_layers, num_chunks] float, attention mass from the question;
            `Evidence.question_by_layer`.
        window: w, consecutive layers that must agree, at least 1.
    Returns:
        Indices of the focused chunks.
    """
    previous, agreeing = None, 0
    for sums in by_layer.cpu().double().cumsum(0):
        high = _high_chunks(sums)
        agreeing = agreeing + 1 if high == previous else 1
        if agreeing == window:
            return high
        previous = high
    return frozenset(range(by_layer.shape[1]))


def spare_unfocused(selection: Selection, focused: Collection[int]) -> Selection:
    """The selection without the tokens of chunks that are not in `focused` (indices into the
    selection)."""
    is_focused = torch.tensor([index in focused for index in range(len(selection.lens))])
    is_kept = upload(is_focused, selection.tokens.device)[selection.owners()]
    return replace(selection, tokens=selection.tokens[is_kept])


def _high_chunks(sums: Tensor) -> frozenset[int]:
    values, order = sums.sort(descending=True, stable=True)
    gaps = values[:-1] - values[1:]
    total = gaps.sum()
    if len(sums) < 3 or not total > 0:
        return frozenset(range(len(sums)))
    # h_{i+1} - h_i = -p_{i+1} log p_{i+1}, for i from 1
    growth = torch.special.entr(gaps / total)[1:]
    split = int((growth == growth.max()).nonzero()[0]) + 1  # argmax promises no order among equals
    return frozenset(order[:split].tolist())
