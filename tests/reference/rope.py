"""RoPE from its definition: one pair, one complex number, one multiplication at a time, in double
precision.

The reference of `sglang_chunkcache/fusion/relocate.py`. Shares nothing with SGLang's tables.
"""

from __future__ import annotations

import cmath
import math
from collections.abc import Sequence

import torch
from torch import Tensor


def plain(rotary_dim: int, base: float) -> list[float]:
    """Radians per position of each pair: base^(-2i / rotary_dim) (RoFormer, arXiv 2104.09864,
    section 3.2.2)."""
    return [base ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]


def linear(rotary_dim: int, base: float, *, factor: float) -> list[float]:
    """Positions squeezed by `factor` (arXiv 2306.15595)."""
    return [frequency / factor for frequency in plain(rotary_dim, base)]


def dynamic_ntk(rotary_dim: int, base: float, *, factor: float) -> list[float]:
    """A larger base, as for a sequence of `factor` times the trained length (Hugging Face's
    `dynamic`)."""
    return plain(
        rotary_dim, base * (factor * factor - (factor - 1)) ** (rotary_dim / (rotary_dim - 2))
    )


def llama3(
    rotary_dim: int, base: float, *, factor: float, low: float, high: float, trained_len: int
) -> list[float]:
    """Long waves squeezed, short ones kept, those between blended (Llama 3.1's reference code)."""
    frequencies = []
    for frequency in plain(rotary_dim, base):
        turns = trained_len * frequency / (2 * math.pi)
        keep = min(max((turns - low) / (high - low), 0.0), 1.0)
        frequencies.append(keep * frequency + (1 - keep) * frequency / factor)
    return frequencies


def yarn(
    rotary_dim: int,
    base: float,
    *,
    factor: float,
    trained_len: int,
    fast: float = 32,
    slow: float = 1,
) -> list[float]:
    """NTK by parts (YaRN, arXiv 2309.00071, section 3.2), ramp ends rounded outward as in its
    code."""

    def pair_that_turns(turns: float) -> float:
        return rotary_dim * math.log(trained_len / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = (
        max(math.floor(pair_that_turns(fast)), 0),
        min(math.ceil(pair_that_turns(slow)), rotary_dim - 1),
    )
    frequencies = []
    for i, frequency in enumerate(plain(rotary_dim, base)):
        squeeze = min(max((i - low) / (high - low), 0.0), 1.0)
        frequencies.append((1 - squeeze) * frequency + squeeze * frequency / factor)
    return frequencies


def yarn_mscale(factor: float) -> float:
    """What YaRN multiplies keys and queries by:
    the square root of 1/t (arXiv 2309.00071, section 3.4)."""
    return 0.1 * math.log(factor) + 1


def rotate(
    keys: Tensor,
    positions: Sequence[int],
    frequencies: Sequence[float],
    *,
    neox: bool,
    scale: float = 1.0,
) -> Tensor:
    """`keys` [num_tokens, num_heads, head_dim], each token turned by its position,
    which may be negative; float64."""
    result = keys.double().clone()
    half = len(frequencies)
    for token, position in enumerate(positions):
        for head in range(keys.shape[1]):
            for i, frequency in enumerate(frequencies):
                a, b = (i, i + half) if neox else (2 * i, 2 * i + 1)
                pair = complex(float(keys[token, head, a]), float(keys[token, head, b]))
                turned = scale * cmath.exp(1j * position * frequency) * pair
                result[token, head, a], result[token, head, b] = turned.real, turned.imag
    return result


def pair_norms(keys: Tensor, rotary_dim: int, *, neox: bool) -> Tensor:
    """Like `keys` in float64: at each number the length of the pair it belongs to,
    or its own where it is not rotated."""
    norms = keys.double().abs()
    for i in range(rotary_dim // 2):
        a, b = (i, i + rotary_dim // 2) if neox else (2 * i, 2 * i + 1)
        norms[..., a] = norms[..., b] = torch.hypot(keys[..., a].double(), keys[..., b].double())
    return norms
