"""Bootstrap intervals: over single samples, over blocks of them, and of shares along a sequence."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, chain
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
    values = [statistic(rng.choices(samples, k=len(samples))) for _ in range(draws)]
    return statistic(samples), *_percentiles(values, level)


def block_bootstrap(
    blocks: Sequence[Sequence[T]],
    statistic: Callable[[Sequence[T]], float],
    *,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float, float]:
    """As `bootstrap`, drawing whole blocks: for samples that depend on their neighbours, such as requests sent together.

    Args:
        blocks: the samples, each in one block. `statistic` gets the samples of the drawn blocks in one list.
    """
    rng = random.Random(seed)
    values = [statistic([*chain.from_iterable(rng.choices(blocks, k=len(blocks)))]) for _ in range(draws)]
    return statistic([*chain.from_iterable(blocks)]), *_percentiles(values, level)


def moving_block_share(
    parts: Sequence[float],
    wholes: Sequence[float],
    *,
    block: int,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float, float]:
    """(value, low, high) of sum(parts) / sum(wholes) along a sequence, drawing runs of `block` neighbours.

    Runs may begin anywhere and wrap around at the end, so all elements are equally likely.

    Args:
        parts, wholes: one each for every element, in order; parts may be negative (differences), wholes not.
        block: at least 1; limited to the length of the sequence.
    """
    total = sum(wholes)
    if not total:
        return 0.0, 0.0, 0.0
    n, length = len(wholes), min(block, len(wholes))
    part_sums, whole_sums = _run_sums(parts, length), _run_sums(wholes, length)
    values = []
    for starts in _starts(n, -(-n // length), draws, seed):
        whole = sum(map(whole_sums.__getitem__, starts))
        values.append(sum(map(part_sums.__getitem__, starts)) / whole if whole else 0.0)
    return sum(parts) / total, *_percentiles(values, level)


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, with linear interpolation, as numpy's default."""
    ordered = sorted(values)
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _percentiles(values: list[float], level: float) -> tuple[float, float]:
    values.sort()
    edge = int((1 - level) / 2 * len(values))
    return values[edge], values[len(values) - 1 - edge]


def _run_sums(numbers: Sequence[float], length: int) -> list[float]:
    """For each position, the sum of the `length` numbers from there on, wrapping around at the end."""
    sums = [0.0, *accumulate(chain(numbers, numbers[: length - 1]))]
    return [after - before for before, after in zip(sums, sums[length:], strict=False)]


@lru_cache(maxsize=2)
def _starts(n: int, num_runs: int, draws: int, seed: int) -> list[list[int]]:
    """Start positions of the runs of each draw. Cached: all shares of a trace use the same, and drawing takes most time."""
    rng = random.Random(seed)
    return [rng.choices(range(n), k=num_runs) for _ in range(draws)]
