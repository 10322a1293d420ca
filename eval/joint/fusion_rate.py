"""How many blocks will fuse at a threshold, from a sample of their similarities (Fast Fusion,
section 5).

    similarities of a layer --> kernel density (eq. 1) or a Gaussian
        --> rate: pairs over the threshold --> blocks that join

The rate L is that of a Poisson variable, so nothing fuses with probability exp(-L). The paper's
compression ratio takes L itself for the number of blocks that join, but several of the L pairs may
have the same right block, which joins once. So there are two predictions. `most_joins`, the
paper's, takes each right block to be in one pair at most, as in variants of one chunk.
`expected_joins` spreads the pairs over the right blocks at random.

NOTE: a kernel knows no limit, cosines end at 1. Where similarities lie in several heaps or near 1,
the bandwidth that suits a Gaussian puts mass over thresholds that nothing exceeds: eq. 1 can
predict fusing at .999 where no pair is over .99.

Everything is computed in float64, on the sample's device.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from eval.joint.fast_fusion import cosine, normalize

Joins = Callable[[float, float], float]
"""Rate and number of right blocks -> how many of them join."""


def unit_similarities(blocks: Tensor, lens: Sequence[int]) -> Tensor:
    """Similarities of all pairs of blocks of different units, those that the tree compares as long
    as nothing fuses.

    Args:
        blocks: [num_blocks, size] float, the units one after the other.
        lens: blocks of each unit.
    Returns:
        [num_pairs(lens)] float32.
    """
    units = torch.arange(len(lens)).repeat_interleave(torch.tensor(lens)).to(blocks.device)
    directions = normalize(blocks)
    # Each pair once, and none within a unit, which the tree never compares.
    return cosine(directions, directions)[units.unsqueeze(1) < units]


def num_pairs(lens: Sequence[int]) -> int:
    """Pairs of blocks of different units; m1 m2 for two units."""
    return (sum(lens) ** 2 - sum(length**2 for length in lens)) // 2


def normal_bandwidth(similarities: Tensor) -> float:
    """The kernel's standard deviation that is best if the sample is Gaussian: (4 / 3n)^(1/5) of the
    sample's own (the paper names none). Of one similarity it is 0, which is no bandwidth."""
    num = len(similarities)
    # correction=0: else a single similarity gives NaN.
    return float((4 / (3 * num)) ** 0.2 * similarities.double().std(correction=0))


def density(at: Tensor, similarities: Tensor, bandwidth: float) -> Tensor:
    """f_h: the kernel density estimate at the points `at` [k], [k] float64."""
    # Point by point: all at once would be [k, n] numbers.
    terms = (((x - similarities.double()) / bandwidth).square() / -2 for x in at.double())
    return torch.stack([each.exp().mean() for each in terms]) / (bandwidth * math.sqrt(2 * math.pi))


def distribution(at: Tensor, similarities: Tensor, bandwidth: float) -> Tensor:
    """F_h (eq. 1): the estimated share of similarities up to the points `at` [k], [k] float64."""
    return torch.stack(
        [torch.special.ndtr((x - similarities.double()) / bandwidth).mean() for x in at.double()]
    )


def kernel_rate(threshold: float, similarities: Tensor, bandwidth: float) -> float:
    """n (1 - F_h): similarities over the threshold that are expected of n like the sample's.
    Bandwidth above 0."""
    # 1 - Phi(x) as Phi(-x), which does not cancel in the tail.
    return float(torch.special.ndtr((similarities.double() - threshold) / bandwidth).sum())


def extreme_rate(threshold: float, similarities: Tensor, bandwidth: float) -> float:
    """Eq. 2: `kernel_rate` with the Gaussian's tail in its extreme-value form, of two similarities
    at least.

    NOTE: a term is right where a kernel has about one of n samples over the threshold. For
    similarities within three bandwidths below the threshold, or above it, a term is far too large,
    without limit; see README.md. Infinite where it overflows.
    """
    num = len(similarities)
    a = (2 * math.log(num)) ** -0.5
    b = 1 / a - a / 2 * (math.log(math.log(num)) + math.log(4 * math.pi))
    # torch's exp: math.exp raises OverflowError, and the term may be infinite.
    return float(
        torch.exp(-(threshold - (bandwidth * b + similarities.double())) / (bandwidth * a)).mean()
    )


def gaussian_rate(threshold: float, mean: float, std: float, num: int) -> float:
    """n (1 - Phi((u - mean) / std)): the same if the layer's similarities are Gaussian."""
    return num * _upper_tail((threshold - mean) / std)


def no_fusion(rate: float) -> float:
    """Corollary 5.2: the probability that a layer with this rate is not compressed at all."""
    return math.exp(-rate)


def compression_ratio(num_left: int, num_right: int, rates: Sequence[float]) -> float:
    """Corollary 5.2: blocks of a pair of units in all layers, before over after.

    Args:
        num_left: m1, blocks of the one unit; at least 1.
        num_right: m2, of the other one.
        rates: of each layer. More than `num_right` cannot join; the paper's formula would then have
            no meaning.
    """
    before = len(rates) * (num_left + num_right)
    return before / (before - sum(most_joins(rate, num_right) for rate in rates))


def most_joins(rate: float, num_right: float) -> float:
    """Right blocks with a pair over the threshold, if no two pairs have the same one as long as
    there are others."""
    return min(rate, num_right)


def expected_joins(rate: float, num_right: float) -> float:
    """Right blocks with a pair over the threshold, if the pairs fall on them at random;
    at most `num_right`."""
    # expm1: 1 - exp(-x) cancels where few pairs are over the threshold.
    return num_right * -math.expm1(-rate / num_right) if num_right else 0.0


def expected_blocks(lens: Sequence[int], exceedance: float, joins: Joins = expected_joins) -> float:
    """Shared blocks that the whole tree is expected to leave of units with these numbers of blocks.

    Args:
        lens: blocks of each unit.
        exceedance: probability that a pair of blocks is over the threshold, at every level the
            same.
        joins: `expected_joins` or `most_joins`.
    """
    if len(lens) < 2:
        return float(sum(lens))
    halves = lens[: len(lens) // 2], lens[len(lens) // 2 :]
    left, right = (expected_blocks(half, exceedance, joins) for half in halves)
    return left + right - joins(left * right * exceedance, right)


def _upper_tail(z: float) -> float:
    # erfc, since 1 - erf has no digits left where few pairs are over the threshold.
    return math.erfc(z / math.sqrt(2)) / 2
