"""Bootstrap intervals of figures over independent units: single samples, or whole blocks of samples
that depend on each other.

    summary    mean, quantiles, and the interval of the mean or the median
    contrast   ratio or difference of paired values, with interval and paired t-test
    rates      two arms' amounts a second, over blocks
    share      mean of paired values as a share of the other ones' mean

A draw is a vector of counts: how often each unit was drawn. All figures of the same number of units
share their draws. scipy.stats.bootstrap has no blocks of unequal sizes, so only the t-test is
scipy's. Pure functions, seeded.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterator, Sequence
from functools import lru_cache
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from eval.metrics import MIN_BLOCKS, MIN_FOR_P99

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Statistic = Literal["mean ratio", "ratio of medians", "ratio of p90", "difference of means"]
QUANTILES = {"ratio of medians": 0.5, "ratio of p90": 0.9}
RATIOS: tuple[Statistic, ...] = ("mean ratio", "ratio of medians", "ratio of p90")
"""The mean ratio is the geometric mean of the pairs' ratios:
what one request gains, whether it is short or long."""
RATE_RATIO = "ratio of rates"
BATCH = 2_000_000
"""Counts drawn at once: 16 MB."""


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile, with linear interpolation."""
    return float(np.quantile(values, q))


def summary(
    values: Sequence[float],
    blocks: Sequence[Hashable] | None = None,
    *,
    of_median: bool = False,
    draws: int = 2000,
) -> dict[str, float]:
    """Mean, p50, p90, from `MIN_FOR_P99` values on p99, and the 95% interval of the mean or the
    median (`low`, `high`).

    Args:
        blocks: the block of each value; whole blocks are resampled if there are at least 8.
    Raises:
        ValueError: no values.
    """
    if not values:
        raise ValueError("no values")
    taken, q = np.asarray(values, dtype=float)[:, None], 0.5 if of_median else None
    units = _units(len(values), blocks)
    low, high = _ends([_figures(taken, units, counts, q)[0] for counts in _draw(units, draws)])
    p50, p90, p99 = map(float, np.quantile(taken, [0.5, 0.9, 0.99]))
    return {
        "mean": math.fsum(values) / len(values),
        "p50": p50,
        "p90": p90,
        **({"p99": p99} if len(values) >= MIN_FOR_P99 else {}),
        "low": low,
        "high": high,
    }


def contrast(
    pairs: Sequence[tuple[float, float]],
    *,
    statistic: Statistic = "ratio of medians",
    blocks: Sequence[Hashable] | None = None,
    draws: int = 2000,
) -> dict[str, Any]:
    """The contrast of b against a: a / b, of each pair, of medians or of p90, or b - a of means.

    Args:
        pairs: (a, b) of the same request, finite.
        blocks: the block of each pair; whole blocks are resampled if there are at least 8.
    Returns:
        A dict with
        - statistic;
        - a_value and b_value: the median, p90 or mean of each arm, geometric for the mean ratio;
        - value, low, high: None for a ratio over zero;
        - n, and num_blocks if blocks are given;
        - p of the paired t-test for differences (over the blocks' means if blocks are resampled).
          None for ratios, for fewer than two units, and if all differences are equal.
    Raises:
        ValueError: no pairs, a value that is not finite, or the numbers of blocks and pairs differ.
    """
    values = np.asarray(pairs, dtype=float).reshape(-1, 2)
    if not len(values) or not np.isfinite(values).all():
        raise ValueError("a contrast needs at least one pair, and finite values")
    if blocks is not None and len(blocks) != len(pairs):
        raise ValueError(f"{len(pairs)} pairs but {len(blocks)} blocks")
    units, q, is_mean_ratio = (
        _units(len(values), blocks),
        QUANTILES.get(statistic),
        statistic == "mean ratio",
    )
    if is_mean_ratio:
        # The logarithm of 0 is infinite: the contrast then has no value.
        with np.errstate(divide="ignore", invalid="ignore"):
            values = np.log(values)
    whole = _figures(values, units, np.ones((1, units.max() + 1)), q)
    spread = [_distance(_figures(values, units, counts, q), q) for counts in _draw(units, draws)]
    found = [float(_distance(whole, q)[0]), *_ends(spread)]
    if is_mean_ratio:  # of logarithms, b - a; rounded, since equal arms must have a ratio of 1
        # The sign turns b - a into a / b, so the ends change places.
        whole, found = np.exp(whole), [round(math.exp(-found[at]), 12) for at in (0, 2, 1)]
    value, low, high = found if all(map(math.isfinite, found)) else (None, None, None)
    return {
        "statistic": statistic,
        "a_value": float(whole[0, 0]),
        "b_value": float(whole[1, 0]),
        "value": value,
        "low": low,
        "high": high,
        "n": len(values),
        "num_blocks": None if blocks is None else len(set(blocks)),
        "p": None if statistic in RATIOS else _p_value(values, units),
    }


def rates(
    blocks: Sequence[tuple[float, float, float, float]], *, draws: int = 2000
) -> dict[str, Any]:
    """The contrast of two arms' rates, b / a: of an amount a second over all blocks.

    Args:
        blocks: (amount of a, its seconds, amount of b, its seconds) of each, at least one; whole
            blocks are resampled, however few they are. Seconds are over 0.
    Returns:
        As `contrast`, but for `n`. No value where an arm has nothing, or an end of
        the interval is 0 or infinite.
    """
    values, units = np.asarray(blocks, dtype=float), np.arange(len(blocks))

    def of(counts: Floats) -> Floats:
        amount_a, seconds_a, amount_b, seconds_b = _figures(values, units, counts, None)
        return np.stack([amount_a / seconds_a, amount_b / seconds_b])

    whole = of(np.ones((1, len(blocks))))
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = [b / a for a, b in map(of, _draw(units, draws))]
        found = [float(whole[1, 0] / whole[0, 0]), *_ends(spread)]
    is_known = all(0 < each < math.inf for each in found)
    value, low, high = found if is_known else (None, None, None)
    return {
        "statistic": RATE_RATIO,
        "a_value": float(whole[0, 0]),
        "b_value": float(whole[1, 0]),
        "value": value,
        "low": low,
        "high": high,
        "num_blocks": len(blocks),
        "p": None,
    }


def share(
    pairs: Sequence[tuple[float, float]],
    *,
    blocks: Sequence[Hashable] | None = None,
    draws: int = 2000,
) -> dict[str, float] | None:
    """The mean of b as a share of the mean of a, with its 95% interval. None if the mean of a is 0,
    be it in one draw.

    Args:
        pairs: (a, b) of the same request, finite, a not negative.
        blocks: as for `contrast`.
    """
    values, units = np.asarray(pairs, dtype=float).reshape(-1, 2), _units(len(pairs), blocks)
    if not values[:, 0].any():
        return None
    with np.errstate(divide="ignore", invalid="ignore"):
        spread = [
            b / a
            for a, b in (_figures(values, units, counts, None) for counts in _draw(units, draws))
        ]
    mean_a, mean_b = values.mean(axis=0)
    low, high = _ends(spread)
    return (
        {"mean": float(mean_b / mean_a), "low": low, "high": high}
        if math.isfinite(low + high)
        else None
    )


# Private, in order of use


def _units(num_values: int, blocks: Sequence[Hashable] | None) -> Ints:
    """[num_values] the unit of resampling of each value: its block, or the value itself."""
    number = {block: place for place, block in enumerate(dict.fromkeys(blocks or ()))}
    if blocks is None or len(number) < MIN_BLOCKS:
        return np.arange(num_values)
    return np.array([number[block] for block in blocks])


def _draw(units: Ints, draws: int) -> Iterator[Floats]:
    """[batch of draws, num_units] how often each unit was drawn,
    in batches that fit in memory with a number for each value."""
    batch = max(1, BATCH // len(units))
    for start in range(0, draws, batch):
        # Seeded by its start: with one seed every batch would have the same draws.
        yield _counts(int(units.max()) + 1, min(batch, draws - start), start)


# Shared by all figures of as many units: nobody may write to the array.
@lru_cache(maxsize=8)
def _counts(num_units: int, draws: int, seed: int) -> Floats:
    rng = np.random.default_rng(seed)
    return rng.multinomial(num_units, np.full(num_units, 1 / num_units), size=draws).astype(
        np.float64
    )


def _figures(values: Floats, units: Ints, counts: Floats, q: float | None) -> Floats:
    """[num_arms, draws] each arm's q-quantile, or mean.
    values: [num_values, num_arms]; counts: [draws, num_units]."""
    if q is not None:
        return np.stack([_quantiles(arm, counts[:, units], q) for arm in values.T])
    # A block is drawn whole, so its sum is enough: no array of [draws, num_values].
    sums = np.stack([np.bincount(units, weights=arm) for arm in values.T])
    return np.asarray(sums @ counts.T / (counts @ np.bincount(units)))


def _quantiles(values: Floats, weights: Floats, q: float) -> Floats:
    """[draws] quantiles of values repeated weights[draw] times, as np.quantile interpolates,
    without expanding them."""
    order = np.argsort(values)
    ordered, upto = values[order], np.cumsum(weights[:, order], axis=1)
    position = q * (upto[:, -1] - 1)
    below = np.floor(position)
    # Where one value was drawn in all, rank `below + 1` is beyond the last one.
    at = [
        ordered[(upto <= np.minimum(rank, upto[:, -1] - 1)[:, None]).sum(axis=1)]
        for rank in (below, below + 1)
    ]
    return np.asarray(at[0] + (at[1] - at[0]) * (position - below))


def _distance(arms: Floats, q: float | None) -> Floats:
    """[draws] a / b of quantiles, NaN where b is zero; or b - a of means. arms: [2, draws]."""
    a, b = arms
    return np.asarray(
        b - a if q is None else np.divide(a, b, out=np.full(len(a), math.nan), where=b > 0)
    )


def _ends(batches: Sequence[Floats]) -> tuple[float, float]:
    low, high = np.quantile(np.concatenate(batches), [0.025, 0.975])
    return float(low), float(high)


def _p_value(values: Floats, units: Ints) -> float | None:
    sizes = np.bincount(units)
    a, b = (np.bincount(units, weights=values[:, arm]) / sizes for arm in (0, 1))
    # Equal differences have no variance: `ttest_rel` warns, and gives 0 or NaN.
    return None if np.ptp(b - a) <= 1e-12 else float(stats.ttest_rel(b, a).pvalue)
