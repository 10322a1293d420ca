"""Bootstrap intervals of figures over independent units: single samples, or whole blocks of samples that depend on each other.

    summary    mean, quantiles, and the interval of the mean or the median
    contrast   ratio or difference of paired values, with interval and paired t-test

A draw is a vector of counts: how often each unit was drawn. All figures of the same number of units share their draws.
scipy.stats.bootstrap has no blocks of unequal sizes, so only the t-test is scipy's. Pure functions, seeded.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]
Statistic = Literal["ratio of medians", "ratio of p90", "difference of means"]
QUANTILES = {"ratio of medians": 0.5, "ratio of p90": 0.9}
MIN_BLOCKS = 8
"""With fewer blocks single values are resampled."""
BATCH = 2_000_000
"""Counts drawn at once: 16 MB."""


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, with linear interpolation."""
    return float(np.quantile(values, q))


def summary(
    values: Sequence[float], blocks: Sequence[Hashable] | None = None, *, of_median: bool = False, draws: int = 2000
) -> dict[str, float]:
    """Mean, p50, p90, p99, and the 95% interval of the mean or the median (`low`, `high`).

    Args:
        blocks: the block of each value; whole blocks are resampled if there are at least 8.
    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values")
    taken, units = np.asarray(values, dtype=float), _units(len(values), blocks)
    sums, sizes = np.bincount(units, weights=taken), np.bincount(units)
    low, high = _ends(
        [
            _quantiles(taken, counts[:, units], 0.5) if of_median else (counts @ sums) / (counts @ sizes)
            for counts in _draw(len(sums), draws, len(values) if of_median else len(sums))
        ]
    )
    p50, p90, p99 = map(float, np.quantile(taken, [0.5, 0.9, 0.99]))
    return {"mean": math.fsum(values) / len(values), "p50": p50, "p90": p90, "p99": p99, "low": low, "high": high}


def contrast(
    pairs: Sequence[tuple[float, float]],
    *,
    statistic: Statistic = "ratio of medians",
    blocks: Sequence[Hashable] | None = None,
    draws: int = 2000,
) -> dict[str, Any]:
    """The contrast of b against a: a / b of medians or p90, or b - a of means.

    Args:
        pairs: (a, b) of the same request, finite.
        blocks: the block of each pair; whole blocks are resampled if there are at least 8.
    Returns:
        A dict with
        - statistic;
        - a_value and b_value: the median, p90 or mean of each arm;
        - value, low, high: None for a ratio over zero;
        - n, and num_blocks if blocks are given;
        - p of the paired t-test for differences (over the blocks' means if blocks are resampled). None for ratios, for fewer
          than two units, and if all differences are equal.
    Raises:
        ValueError: no pairs, a value that is not finite, or the numbers of blocks and pairs differ.
    """
    values = np.asarray(pairs, dtype=float).reshape(-1, 2)
    if not len(values) or not np.isfinite(values).all():
        raise ValueError("a contrast needs at least one pair, and finite values")
    if blocks is not None and len(blocks) != len(pairs):
        raise ValueError(f"{len(pairs)} pairs but {len(blocks)} blocks")
    units = _units(len(values), blocks)
    num_units = int(units.max()) + 1
    arms = _arms(values, units, np.ones((1, num_units)), statistic)
    batches = _draw(num_units, draws, len(values))
    spread = [_distance(_arms(values, units, counts, statistic), statistic) for counts in batches]
    found = [float(_distance(arms, statistic)[0]), *_ends(spread)]
    value, low, high = found if all(map(math.isfinite, found)) else (None, None, None)
    return {
        "statistic": statistic,
        "a_value": float(arms[0, 0]),
        "b_value": float(arms[1, 0]),
        "value": value,
        "low": low,
        "high": high,
        "n": len(values),
        "num_blocks": None if blocks is None else len(set(blocks)),
        "p": _p_value(values, units) if statistic == "difference of means" else None,
    }


# Private, in order of use


def _draw(num_units: int, draws: int, width: int) -> Iterator[Floats]:
    """[batch of draws, num_units] how often each unit was drawn, in batches that fit in memory with `width` numbers a draw."""
    rng, batch = np.random.default_rng(0), max(1, BATCH // max(num_units, width))
    if draws <= batch:
        yield _all_at_once(num_units, draws)
        return
    for start in range(0, draws, batch):
        yield _counts(rng, num_units, min(batch, draws - start))


@lru_cache(maxsize=8)
def _all_at_once(num_units: int, draws: int) -> Floats:
    return _counts(np.random.default_rng(0), num_units, draws)


def _counts(rng: np.random.Generator, num_units: int, draws: int) -> Floats:
    return rng.multinomial(num_units, np.full(num_units, 1 / num_units), size=draws).astype(np.float64)


def _ends(batches: Sequence[Floats]) -> tuple[float, float]:
    low, high = np.quantile(np.concatenate(batches), [0.025, 0.975])
    return float(low), float(high)


def _units(num_values: int, blocks: Sequence[Hashable] | None) -> NDArray[np.int64]:
    """[num_values] the unit of resampling of each value: its block, or the value itself."""
    number = {block: place for place, block in enumerate(dict.fromkeys(blocks or ()))}
    if blocks is None or len(number) < MIN_BLOCKS:
        return np.arange(num_values)
    return np.array([number[block] for block in blocks])


def _arms(values: Floats, units: NDArray[np.int64], counts: Floats, statistic: Statistic) -> Floats:
    """[2, draws] each arm's own figure. values: [num_pairs, 2]; units: [num_pairs]; counts: [draws, num_units]."""
    if statistic == "difference of means":
        sums = np.stack([np.bincount(units, weights=values[:, arm]) for arm in (0, 1)])
        return np.asarray(sums @ counts.T / (counts @ np.bincount(units)))
    return np.stack([_quantiles(values[:, arm], counts[:, units], QUANTILES[statistic]) for arm in (0, 1)])


def _distance(arms: Floats, statistic: Statistic) -> Floats:
    """[draws] a / b, NaN where b is zero; or b - a. arms: [2, draws]."""
    a, b = arms
    if statistic == "difference of means":
        return np.asarray(b - a)
    return np.asarray(np.divide(a, b, out=np.full(len(a), math.nan), where=b > 0))


def _quantiles(values: Floats, weights: Floats, q: float) -> Floats:
    """[draws] quantiles of values repeated weights[draw] times, as np.quantile interpolates, without expanding them."""
    order = np.argsort(values)
    ordered, upto = values[order], np.cumsum(weights[:, order], axis=1)
    position = q * (upto[:, -1] - 1)
    below = np.floor(position)
    at = [ordered[(upto <= np.minimum(rank, upto[:, -1] - 1)[:, None]).sum(axis=1)] for rank in (below, below + 1)]
    return np.asarray(at[0] + (at[1] - at[0]) * (position - below))


def _p_value(values: Floats, units: NDArray[np.int64]) -> float | None:
    sizes = np.bincount(units)
    a, b = (np.bincount(units, weights=values[:, arm]) / sizes for arm in (0, 1))
    return None if np.ptp(b - a) <= 1e-12 else float(stats.ttest_rel(b, a).pvalue)
