"""Bootstrap intervals: of single samples, of blocks of them, and of shares along a sequence."""

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
    """As `bootstrap`, drawing whole blocks: for samples that depend on their neighbours, as requests sent together do.

    Args:
        blocks: the samples, each in one block. `statistic` gets those of the drawn blocks in one list.
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

    Runs may begin anywhere and go on at the front behind the end, so each element is as likely as any other.

    Args:
        parts, wholes: one each for every element, in order; parts may be negative (differences), wholes not.
        block: 1 <= block; one longer than the sequence would always be all of it, so at most its length is used.
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
    """Linear between neighbours, as numpy's default."""
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
    """Sum of the `length` numbers from each place on, going on at the front behind the end."""
    sums = [0.0, *accumulate(chain(numbers, numbers[: length - 1]))]
    return [after - before for before, after in zip(sums, sums[length:], strict=False)]


@lru_cache(maxsize=2)
def _starts(n: int, num_runs: int, draws: int, seed: int) -> list[list[int]]:
    """Where the runs of each draw begin; the same for all shares of a trace, and drawing them is most of the work."""
    rng = random.Random(seed)
    return [rng.choices(range(n), k=num_runs) for _ in range(draws)]
