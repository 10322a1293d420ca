"""Bootstrap intervals: against each other, against formulas, and what blocks are for."""

from __future__ import annotations

import random
from statistics import fmean

import pytest

from eval.intervals import block_bootstrap, bootstrap, moving_block_share, quantile


def make_samples(n: int, *, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(5, 2) for _ in range(n)]


@pytest.mark.parametrize("seed", range(5))
def test_blocks_of_one_are_the_plain_bootstrap(seed: int) -> None:
    """Same seed, same draws, same distribution."""
    samples = make_samples(60, seed=seed)
    plain = bootstrap(samples, fmean, draws=400, seed=seed)
    assert block_bootstrap([[x] for x in samples], fmean, draws=400, seed=seed) == plain
    shares = moving_block_share(samples, [1] * 60, block=1, draws=400, seed=seed)
    assert shares == pytest.approx(plain)


def test_bootstrap_of_a_mean_agrees_with_its_formula() -> None:
    """1.96 standard errors to both sides, within the noise of resampling."""
    samples = make_samples(400)
    value, low, high = bootstrap(samples, fmean)
    error = (fmean((x - value) ** 2 for x in samples) / 400) ** 0.5
    assert value == fmean(samples)
    assert (low, high) == pytest.approx((value - 1.96 * error, value + 1.96 * error), abs=0.2 * error)


@pytest.mark.parametrize("kind", ["drawn", "moving"])
def test_blocks_widen_the_interval_where_neighbours_are_alike(kind: str) -> None:
    """Twenty values, each fifty times in a row, are twenty samples and not a thousand."""
    values = [x for x in make_samples(20) for _ in range(50)]
    _, low, high = bootstrap(values, fmean, draws=300)
    if kind == "drawn":
        _, block_low, block_high = block_bootstrap([values[i : i + 50] for i in range(0, 1000, 50)], fmean, draws=300)
    else:
        _, block_low, block_high = moving_block_share(values, [1] * 1000, block=50, draws=300)
    assert block_high - block_low > 4 * (high - low)


def test_share_is_of_the_sums() -> None:
    """Requests with many chunks weigh more; differences may be negative."""
    assert moving_block_share([1, 0, 9], [1, 1, 18], block=2)[0] == 0.5
    value, low, high = moving_block_share([-1, -2, -3], [10, 10, 10], block=2)
    assert (value, low < value < high, high < 0) == (-0.2, True, True)


def test_share_of_nothing_is_zero() -> None:
    """No request, no chunk, no division by zero; nor where a draw holds none."""
    assert moving_block_share([], [], block=5) == (0.0, 0.0, 0.0)
    assert moving_block_share([0], [0], block=5) == (0.0, 0.0, 0.0)
    assert moving_block_share([0, 0, 0, 2], [0, 0, 0, 2], block=1)[1:] == (0.0, 1.0)


def test_block_longer_than_the_sequence_is_all_of_it() -> None:
    """Then there is nothing to vary."""
    assert moving_block_share([1, 2], [4, 4], block=50) == (0.375, 0.375, 0.375)


def test_every_element_is_as_likely_as_any_other() -> None:
    """Runs wrap around at the end; otherwise a warm-up at the front would count less than it should."""
    first_only = [1.0] + [0.0] * 19
    value, low, high = moving_block_share(first_only, [1] * 20, block=10, draws=4000)
    assert value == 0.05
    assert (low, high) == (0.0, 0.1)


def test_quantile_is_linear_between_neighbours() -> None:
    """As numpy's."""
    assert [quantile([3, 1, 2], q) for q in (0, 0.25, 0.5, 1)] == [1, 1.5, 2, 3]
