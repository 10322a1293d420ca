"""Bootstrap intervals: against each other, against formulas, and what blocks are for. Contrasts: test_contrast.py."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.stats import block_bootstrap, bootstrap, quantile, summary


def make_samples(n: int, *, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(5, 2) for _ in range(n)]


@pytest.mark.parametrize("seed", range(5))
def test_blocks_of_one_are_the_plain_bootstrap(seed: int) -> None:
    """Same seed, same draws, same distribution."""
    samples = make_samples(60, seed=seed)
    plain = bootstrap(samples, fmean, draws=400, seed=seed)
    assert block_bootstrap([[x] for x in samples], fmean, draws=400, seed=seed) == plain
    one = summary(samples, draws=400)
    if seed == 0:
        assert (one["mean"], one["low"], one["high"]) == pytest.approx(plain)


def test_bootstrap_of_a_mean_agrees_with_its_formula() -> None:
    """1.96 standard errors to both sides, within the noise of resampling."""
    samples = make_samples(400)
    value, low, high = bootstrap(samples, fmean)
    error = (fmean((x - value) ** 2 for x in samples) / 400) ** 0.5
    assert value == fmean(samples)
    assert (low, high) == pytest.approx((value - 1.96 * error, value + 1.96 * error), abs=0.2 * error)


def test_blocks_widen_the_interval_where_neighbours_are_alike() -> None:
    """Twenty values, each fifty times in a row, are twenty samples and not a thousand."""
    values = [x for x in make_samples(20) for _ in range(50)]
    _, low, high = bootstrap(values, fmean, draws=300)
    _, block_low, block_high = block_bootstrap([values[i : i + 50] for i in range(0, 1000, 50)], fmean, draws=300)
    assert block_high - block_low > 4 * (high - low)
    single, whole = summary(values), summary(values, [i // 50 for i in range(1000)])
    assert whole["high"] - whole["low"] > 4 * (single["high"] - single["low"])
    assert whole["high"] - whole["low"] == pytest.approx(block_high - block_low, rel=0.2)


def test_fewer_than_eight_blocks_are_not_resampled() -> None:
    """Of seven blocks an interval says too little."""
    values = [float(n % 2) for n in range(7) for _ in range(10)]
    assert summary(values, [n // 10 for n in range(70)]) == summary(values) == summary(values, range(70))


def test_the_mean_of_unequal_blocks_is_over_values() -> None:
    """A conversation of many turns counts with all of them."""
    found = summary([0.0] * 8 + [1.0] * 24, [*range(8), *([8] * 24)])
    assert (found["mean"], found["low"]) == (0.75, 0.0)
    assert found["high"] == pytest.approx(1.0, abs=0.1)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
def test_interval_holds_its_mean(values: list[float]) -> None:
    """For any values."""
    found = summary(values, draws=200)
    assert min(values) - 1e-9 <= found["low"] <= found["high"] <= max(values) + 1e-9
    assert found["mean"] == pytest.approx(sum(values) / len(values))


def test_draws_in_batches_are_the_same_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace of many bins does not fit in one batch."""
    whole = summary(make_samples(50))
    monkeypatch.setattr("eval.stats.BATCH", 1700)
    assert summary(make_samples(50)) == whole


def test_no_values_have_no_interval() -> None:
    """A mean of nothing is no figure."""
    with pytest.raises(ValueError, match="no values"):
        summary([])


def test_quantile_is_linear_between_neighbours() -> None:
    """As numpy's."""
    assert [quantile([3, 1, 2], q) for q in (0, 0.25, 0.5, 1)] == [1, 1.5, 2, 3]
