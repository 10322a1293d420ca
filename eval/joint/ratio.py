"""Thresholds that give some blocks a compression ratio:
what `ThresholdController` predicts is corrected by what fuses."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from eval.joint.drift import logit_scale
from eval.joint.fast_fusion import NEVER, fast_fusion
from eval.joint.fusion_rate import unit_similarities
from eval.joint.thresholds import LayerStatistics, ThresholdController

MAX_ROUNDS = 8
"""Thresholds that are tried. Each takes the comparison of all blocks once."""
NEAR = 1.05
"""A ratio off by less is what was asked for."""
MAX_PAIRS = 1 << 16
"""Similarities of a layer that are kept of those of all pairs, at equal distances."""


def thresholds_for_ratio(
    layers: Sequence[Tensor], lens: Sequence[int], ratio: float, head_dim: int
) -> list[float]:
    """Of a few rounds' thresholds those that came nearest to the ratio.

    Args:
        layers: of each layer the keys, [num_blocks, size], the units one after the other.
        lens: blocks of each unit, of two units or more.
        ratio: blocks before over after fusing, in all layers together; above 1.
        head_dim: of a key.
    Returns:
        Of each layer; `NEVER` for one where nothing would fuse.
    Raises:
        ValueError: a ratio of 1 or below.
    """
    statistics = [_statistics(each, lens, head_dim) for each in layers]
    # 2 is no limit on the drift: the ratio alone is asked for.
    controller = ThresholdController(statistics, lens, ratio=ratio, drift=2)
    num_blocks, nearest, best = len(layers) * sum(lens), math.inf, list[float]()
    for _ in range(MAX_ROUNDS):
        thresholds = controller.thresholds
        num_shared = sum(_num_shared(*each, lens) for each in zip(layers, thresholds, strict=True))
        controller.observe(num_blocks, num_shared)
        # By the logarithm: half the ratio is as far off as twice the ratio.
        off = abs(math.log(num_blocks / num_shared / ratio))
        if off < nearest:
            nearest, best = off, thresholds
        if off < math.log(NEAR):
            break
    return best


# Private, in order of use


def _statistics(blocks: Tensor, lens: Sequence[int], head_dim: int) -> LayerStatistics:
    """NOTE: queries are not there, so all layers' count as equally long."""
    similarities = unit_similarities(blocks, lens)
    # At equal distances: the first ones are the pairs of the first unit alone.
    similarities = similarities[:: -(-len(similarities) // MAX_PAIRS)]
    norm = float(torch.linalg.vector_norm(blocks.float(), dim=1).max())
    return LayerStatistics(similarities, logit_scale(norm, 1.0, head_dim))


def _num_shared(blocks: Tensor, threshold: float, lens: Sequence[int]) -> int:
    return (
        sum(lens)
        if threshold >= NEVER
        # Keys as values: values decide nothing, and only the number of blocks is read.
        else len(fast_fusion(blocks, blocks, lens, threshold).leaders)
    )
