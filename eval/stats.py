"""Bootstrap intervals of figures over independent units: single samples, or whole blocks of samples that depend on each other.

    bootstrap, block_bootstrap   (value, low, high) of any statistic of a list
    summary                      mean, quantiles and the interval of the mean
    contrast                     ratio or difference of paired values, with interval and paired t-test

A draw is a vector of counts: how often each unit was drawn. All figures of the same number of units and seed share their draws.
scipy.stats.bootstrap has no blocks of unequal sizes, so only the t-test is scipy's. Pure functions, seeded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from scipy import stats

T = TypeVar("T")
Floats = NDArray[np.float64]
Statistic = Literal["ratio of medians", "ratio of p90", "difference of means"]
QUANTILES = {"ratio of medians": 0.5, "ratio of p90": 0.9}
MIN_BLOCKS = 8
"""With fewer blocks single values are resampled."""
BATCH = 2_000_000
"""Counts drawn at once: 16 MB."""


def bootstrap(
    samples: Sequence[T],
    statistic: Callable[[Sequence[T]], float],
    *,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> tuple[float, float, float]:
    """(value, low, high): percentile interval of `statistic` over resampled `samples`; keep pairs together as one sample."""
    return block_bootstrap([[sample] for sample in samples], statistic, draws=draws, level=level, seed=seed)


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
    numbers = np.arange(len(blocks))
    values = [
        statistic([*chain.from_iterable(blocks[int(i)] for i in np.repeat(numbers, count.astype(int)))])
        for counts in _draw(len(blocks), draws, seed, len(blocks))
        for count in counts
    ]
    return statistic([*chain.from_iterable(blocks)]), *_ends(np.asarray(values), level)


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, with linear interpolation."""
    return float(np.quantile(values, q))


def summary(
    values: Sequence[float], blocks: Sequence[Hashable] | None = None, *, draws: int = 2000
) -> dict[str, float]:
    """Mean, p50, p90, p99, and the 95% interval of the mean (`low`, `high`): over whole blocks if there are at least 8.

    Args:
        blocks: the block of each value.
    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values")
    taken, units = np.asarray(values, dtype=float), _units(len(values), blocks)
    sums, sizes = np.bincount(units, weights=taken), np.bincount(units)
    means = np.concatenate([(c @ sums) / (c @ sizes) for c in _draw(len(sums), draws, 0, len(sums))])
    low, high = _ends(means, 0.95)
    p50, p90, p99 = map(float, np.quantile(taken, [0.5, 0.9, 0.99]))
    return {"mean": math.fsum(values) / len(values), "p50": p50, "p90": p90, "p99": p99, "low": low, "high": high}


def contrast(
    pairs: Sequence[tuple[float, float]],
    *,
    better: Literal["lower", "higher"],
    blocks: Sequence[Hashable] | None = None,
    statistic: Statistic | None = None,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> dict[str, Any]:
    """The contrast of b against a: a / b of medians or p90, or b - a of means.

    Args:
        pairs: (a, b) of the same request, finite.
        better: selects the statistic if none is given: the ratio of medians for "lower", else the difference of means.
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
    chosen = statistic or ("ratio of medians" if better == "lower" else "difference of means")
    units = _units(len(values), blocks)
    num_units = int(units.max()) + 1
    arms = _arms(values, units, np.ones((1, num_units)), chosen)
    batches = _draw(num_units, draws, seed, len(values))
    spread = np.concatenate([_distance(_arms(values, units, counts, chosen), chosen) for counts in batches])
    found = [float(_distance(arms, chosen)[0]), *_ends(spread, level)]
    value, low, high = found if all(map(math.isfinite, found)) else (None, None, None)
    return {
        "statistic": chosen,
        "a_value": float(arms[0, 0]),
        "b_value": float(arms[1, 0]),
        "value": value,
        "low": low,
        "high": high,
        "n": len(values),
        "num_blocks": None if blocks is None else len(set(blocks)),
        "p": _p_value(values, units) if chosen == "difference of means" else None,
    }


# Private, in order of use


def _draw(num_units: int, draws: int, seed: int, width: int) -> Iterator[Floats]:
    """[batch of draws, num_units] how often each unit was drawn, in batches that fit in memory with `width` numbers a draw."""
    if draws * max(num_units, width) <= BATCH:
        yield _counts(num_units, draws, seed)
        return
    rng, batch = np.random.default_rng(seed), max(1, BATCH // max(num_units, width))
    for start in range(0, draws, batch):
        yield _multinomial(rng, num_units, min(batch, draws - start))


@lru_cache(maxsize=8)
def _counts(num_units: int, draws: int, seed: int) -> Floats:
    return _multinomial(np.random.default_rng(seed), num_units, draws)


def _multinomial(rng: np.random.Generator, num_units: int, size: int) -> Floats:
    return rng.multinomial(num_units, np.full(num_units, 1 / num_units), size=size).astype(np.float64)


def _ends(values: Floats, level: float) -> tuple[float, float]:
    low, high = np.quantile(values, [(1 - level) / 2, (1 + level) / 2])
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
