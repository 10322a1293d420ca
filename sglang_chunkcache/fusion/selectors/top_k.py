"""How many tokens a ratio means, and which have the highest scores.
Ties go to the earlier token, on every rank alike."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

import torch
from torch import Tensor

from radix_ext import FusionRequest
from radix_ext.fusion_request import MIN_AUTO
from sglang_chunkcache.fusion.selectors.base import MovedChunk, Selection, positions_of
from sglang_chunkcache.wire.report import Fallback

ROUNDING = 1e-9
"""0.07 * 100 is 7.000000000000001 in floating point and still means 7 tokens."""


def num_critical(ratio: float, num_tokens: int) -> int:
    """ceil(ratio * num_tokens), at most `num_tokens`; 0 for ratio 0."""
    return min(num_tokens, ceil(ratio * num_tokens - ROUNDING))


def leading(ratio: float, num_tokens: int) -> Tensor:
    """Offsets of the first `num_critical` tokens, int64."""
    return torch.arange(num_critical(ratio, num_tokens))


def highest(scores: Tensor, k: int) -> Tensor:
    """Indices of the `k` highest scores, ascending.

    Args:
        scores: [n] float, any device. NaN counts as the highest: a token without a valid score is
            recomputed.
        k: 0 to n.
    Returns:
        [k] int64, on the device of the scores; no synchronisation.
    """
    return _descending(scores)[:k].sort().values


def jointly_highest(
    scores: Tensor, chunks: Sequence[MovedChunk], ratio: float, *, above: float | None = None
) -> Tensor:
    """The highest tokens of all chunks together, so that a chunk that matters more gets more
    (FusionRAG 3.2).

    Args:
        scores: [end] float by prompt position, any device.
        chunks: disjoint, in any order; ties go to the chunk named first.
        ratio: share of the tokens of all chunks together.
        above: only those with higher scores, `MIN_AUTO` of the tokens at least.
    Returns:
        [ceil(ratio * all)] as `Selection.tokens`, on the device of the scores; no synchronisation.
        What `above` leaves out is no token.
    Raises:
        ValueError: the scores end before a chunk does.
    """
    end = max((chunk.start + chunk.num_tokens for chunk in chunks), default=0)
    if scores.dim() != 1 or len(scores) < end:
        raise ValueError(f"evidence must be [{end}] or longer but is {tuple(scores.shape)}")
    # Chunk after chunk, so that ties go to the chunk named first.
    moved = scores[positions_of(chunks, scores.device)]
    k = num_critical(ratio, len(moved))
    if above is None:
        return highest(moved, k)
    # Not `moved > above`: NaN counts as above it.
    num_above = (~(moved <= above)).sum().clamp(min=num_critical(MIN_AUTO, len(moved)))
    best = _descending(moved)[:k]
    is_above = torch.arange(k, device=best.device) < num_above
    return torch.where(is_above, best, len(moved)).sort().values


def jointly_chosen(
    scores: Tensor | None, chunks: Sequence[MovedChunk], request: FusionRequest, missing: Fallback
) -> Selection:
    """`jointly_highest` as the request has it. Without scores as the selector `first`, and why."""
    if scores is None:
        counts = [num_critical(request.ratio, chunk.num_tokens) for chunk in chunks]
        return Selection.leading(chunks, counts, (missing,))
    tokens = jointly_highest(scores, chunks, request.ratio, above=request.above)
    return Selection(tokens, tuple(chunk.num_tokens for chunk in chunks), (None,) * len(chunks))


def _descending(scores: Tensor) -> Tensor:
    # A stable sort, not topk: topk breaks ties differently from device to device.
    return scores.sort(descending=True, stable=True).indices
