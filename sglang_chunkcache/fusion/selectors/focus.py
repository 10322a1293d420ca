"""Which chunks the question settles on, layer by layer (Cache-Craft 3.2.2, algorithm 1 and eq. 15).

The paper runs it while recomputing: once the focused chunks are settled, in layer L*, the tokens of
the others are dropped from the layers after it. Here it runs on evidence measured beforehand, and
the others are left out in every layer. What that frees is saved, as in the paper
(`spare_unfocused`). Dropping layer by layer would add the recomputation of unfocused chunks in
layers 1 to L*, and with it fresher KV for them there; it needs a pass whose rows shrink on the way.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn.functional import pad

from sglang_chunkcache.attention.upload import upload
from sglang_chunkcache.fusion.selectors.base import Selection

WINDOW = 3
"""Layers that must agree: the paper's w, for which it gives no figure."""


def focused_chunks(by_layer: Tensor, *, window: int = WINDOW) -> Tensor:
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
        [num_chunks] bool, on the device of the masses: whether it is focused. No synchronisation.
    """
    high = _high_chunks(by_layer.double().cumsum(0))
    num_agreeing = len(high) - window + 1
    if num_agreeing < 1:
        return torch.ones_like(high.new_empty(high.shape[1]))
    # Of each layer whether it and the `window` - 1 after it have one set; the last row is for none.
    agree = (high.unfold(0, window, 1) == high[:num_agreeing, :, None]).all(2).all(1)
    first = _num_leading(~agree)
    return torch.cat([high[:num_agreeing], torch.ones_like(high[:1])]).index_select(0, first)[0]


def spare_unfocused(selection: Selection, focused: Tensor) -> Selection:
    """The selection, on the device of `focused` ([its chunks] bool), without the tokens of chunks
    that are not."""
    here = replace(selection, tokens=upload(selection.tokens, focused.device))
    is_kept = pad(focused, (0, 1))[here.owners()]
    return replace(here, tokens=torch.where(is_kept, here.tokens, sum(here.lens)))


def _high_chunks(sums: Tensor) -> Tensor:
    """[num_layers, num_chunks] bool."""
    num_chunks = sums.shape[1]
    values, order = sums.sort(dim=1, descending=True, stable=True)
    if num_chunks < 3:
        return torch.ones_like(values, dtype=torch.bool)
    gaps = values[:, :-1] - values[:, 1:]
    total = gaps.sum(1, keepdim=True)
    # h_{i+1} - h_i = -p_{i+1} log p_{i+1}, for i from 1
    growth = torch.special.entr(gaps / total)[:, 1:]
    is_lower = growth != growth.max(1, keepdim=True).values
    split = _num_leading(is_lower, dim=1) + 1  # argmax promises no order among equals
    is_high = torch.arange(num_chunks, device=sums.device) < split
    return torch.zeros_like(is_high).scatter(1, order, is_high | ~(total > 0))


def _num_leading(flags: Tensor, dim: int = 0) -> Tensor:
    """How many of them are set before the first that is not; the dimension is kept, as of 1."""
    return flags.long().cumprod(dim).sum(dim, keepdim=True)
