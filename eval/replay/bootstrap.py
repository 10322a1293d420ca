"""Intervals of shares along a trace: a moving-block bootstrap with the standard library alone."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, chain


def moving_block_share(
    parts: Sequence[float],
    wholes: Sequence[float],
    *,
    block: int,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float, float]:
    """(value, low, high) of sum(parts) / sum(wholes) along a sequence, drawing runs of `block`
    neighbours.

    Runs may begin anywhere and wrap around at the end, so all elements are equally likely.

    Args:
        parts, wholes: one each for every element, in order; parts may be negative (differences),
            wholes not.
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
    values.sort()
    edge = int((1 - level) / 2 * draws)
    return sum(parts) / total, values[edge], values[draws - 1 - edge]


def _run_sums(numbers: Sequence[float], length: int) -> list[float]:
    """For each position, the sum of the `length` numbers from there on,
    wrapping around at the end."""
    # Sums of all beginnings: a draw then adds a number for each run, not for each element.
    sums = [0.0, *accumulate(chain(numbers, numbers[: length - 1]))]
    return [after - before for before, after in zip(sums, sums[length:], strict=False)]


@lru_cache(maxsize=1)
def _starts(n: int, num_runs: int, draws: int, seed: int) -> list[array[int]]:
    """Start positions of the runs of each draw.
    Cached: all shares of a trace use the same, and drawing takes most time."""
    rng = random.Random(seed)
    positions = range(n)
    # Four bytes a position; a list would take eight and an object besides.
    return [array("I", rng.choices(positions, k=num_runs)) for _ in range(draws)]
