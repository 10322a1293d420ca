"""Bootstrap intervals."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def bootstrap(
    samples: Sequence[T],
    statistic: Callable[[Sequence[T]], float],
    *,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float, float]:
    """(value, low, high): percentile interval of `statistic` over resampled `samples`; keep pairs together as one sample."""
    rng = random.Random(seed)
    values = sorted(statistic(rng.choices(samples, k=len(samples))) for _ in range(draws))
    edge = int((1 - level) / 2 * draws)
    return statistic(samples), values[edge], values[draws - 1 - edge]


def quantile(values: Sequence[float], q: float) -> float:
    """Linear between neighbours, as numpy's default."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
