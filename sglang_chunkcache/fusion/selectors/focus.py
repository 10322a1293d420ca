"""Which chunks the question settles on, layer by layer (Cache-Craft 3.2.2, algorithm 1 and eq. 15).

The paper runs it while recomputing: once the focused chunks are settled, in layer L*, the tokens of the others are dropped
from the layers after it. Here it runs on evidence measured beforehand, and the others are left out in every layer. What that
frees is saved, as in the paper (`spare_unfocused`), or goes to the focused chunks (`refill`). Dropping layer by layer would add
the recomputation of unfocused chunks in layers 1 to L*, and with it fresher KV for them there; it needs a pass whose rows
shrink on the way.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from radix_ext import FusionRequest
from sglang_chunkcache.fusion.selectors.base import Evidence, MovedChunk, Selection, Selector


def focused_chunks(by_layer: Tensor, *, window: int) -> tuple[frozenset[int], int | None]:
    """Cumulate each chunk's mass over the layers, split high from low in each layer, stop when the split is stable.

    Read with indices from 1, as the paper's i in [k]: the split after layer l is the top i* chunks, i* in 1 to k - 2, where
    the entropy of the first i + 1 gaps between neighbours grows most over that of the first i. Taken to the letter, so the
    gap concerned is the one *after* chunk i* + 1, and a single dominating gap adds less (-p log p peaks at p = 1/e) than
    two of middling size. Cases that the paper leaves open are decided for recomputing:
      - no gap at all (equal sums), or a NaN: all chunks are in the high set of that layer;
      - fewer than 3 chunks have no i*: all are focused, from layer `window` on;
      - equal growths: the lowest i; equal sums: the earlier chunk; 0 log 0 = 0;
      - never `window` equal sets in a row: all are focused, None.

    Args:
        by_layer: [num_layers, num_chunks] float, attention mass from the question; `Evidence.question_by_layer`.
        window: w, consecutive layers that must agree, at least 1.
    Returns:
        (indices of the focused chunks, L* counted from 1 or None).
    Raises:
        ValueError: `by_layer` has not two dimensions, or `window` is below 1.
    """
    if by_layer.dim() != 2:
        raise ValueError(f"by_layer must be [num_layers, num_chunks] but is {tuple(by_layer.shape)}")
    if window < 1:
        raise ValueError(f"window must be at least 1 but got {window}")
    previous, agreeing = None, 0
    for layer, sums in enumerate(by_layer.cpu().double().cumsum(0), start=1):
        high = _high_chunks(sums)
        agreeing = agreeing + 1 if high == previous else 1
        if agreeing == window:
            return high, layer
        previous = high
    return frozenset(range(by_layer.shape[1])), None


def spare_unfocused(selection: Selection, focused: Collection[int]) -> Selection:
    """The selection without the tokens of chunks that are not in `focused` (indices into the selection)."""
    offsets = (chosen if index in focused else chosen[:0] for index, chosen in enumerate(selection.offsets))
    return replace(selection, offsets=tuple(offsets))


def refill(
    selector: Selector,
    chunks: Sequence[MovedChunk],
    request: FusionRequest,
    evidence: Evidence,
    selection: Selection,
    focused: Collection[int],
) -> Selection:
    """As many tokens as in `selection`, chosen by the selector among the focused chunks, up to all of their tokens.

    The budget is a ratio of the focused chunks: selectors that choose by chunk round it up for each, as they do without focus.

    Args:
        selection: of all `chunks`, without focus.
        focused: indices of chunks, not empty.
    """
    inside = [chunk for index, chunk in enumerate(chunks) if index in focused]
    num_tokens = sum(map(len, selection.offsets))
    ratio = min(1.0, num_tokens / sum(chunk.num_tokens for chunk in inside))
    chosen = selector.select(
        inside, replace(request, ratio=ratio, alpha=None, floor=min(request.floor, ratio)), evidence
    )
    pairs = iter(zip(chosen.offsets, chosen.cfo, strict=True))
    nothing = torch.arange(0), None
    offsets, cfo = zip(*(next(pairs) if i in focused else nothing for i in range(len(chunks))), strict=True)
    return Selection(offsets, cfo, chosen.fallbacks)


def _high_chunks(sums: Tensor) -> frozenset[int]:
    values, order = sums.sort(descending=True, stable=True)
    gaps = values[:-1] - values[1:]
    total = gaps.sum()
    if len(sums) < 3 or not total > 0:
        return frozenset(range(len(sums)))
    growth = torch.special.entr(gaps / total)[1:]  # h_{i+1} - h_i = -p_{i+1} log p_{i+1}, for i from 1
    split = int((growth == growth.max()).nonzero()[0]) + 1  # argmax promises no order among equals
    return frozenset(order[:split].tolist())
