"""Bootstrap intervals: against a plain bootstrap and formulas, and what blocks are for.
Contrasts: test_contrast.py."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.stats import quantile, share, summary


def make_samples(n: int, *, seed: int = 0) -> list[float]:
    rng = random.Random(seed)
    return [rng.gauss(5, 2) for _ in range(n)]


def make_blocks() -> tuple[list[float], list[int]]:
    """Twenty values, each fifty times in a row: twenty samples and not a thousand."""
    return [x for x in make_samples(20) for _ in range(50)], [i // 50 for i in range(1000)]


def test_intervals_agree_with_a_plain_bootstrap() -> None:
    """Of means and medians, of values and whole blocks, within other draws' noise."""
    rng, values, repeated = np.random.default_rng(1), np.array(make_samples(60)), make_blocks()
    for of_median, statistic in ((False, np.mean), (True, np.median)):
        for found, units in (
            (summary([*values], of_median=of_median), values[:, None]),
            (summary(*repeated, of_median=of_median), np.reshape(repeated[0], (20, 50))),
        ):
            slow = [statistic(units[rng.integers(0, len(units), len(units))]) for _ in range(2000)]
            low, high = np.quantile(slow, [0.025, 0.975])
            near = pytest.approx((low, high), abs=0.15 * (high - low))
            assert (found["low"], found["high"]) == near


def test_fewer_than_eight_blocks_are_not_resampled() -> None:
    """Of seven blocks an interval says too little."""
    values = [float(n % 2) for n in range(7) for _ in range(10)]
    single = summary(values)
    assert summary(values, [n // 10 for n in range(70)]) == single == summary(values, range(70))


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


def test_draws_in_batches_say_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace of many bins does not fit in one batch; another batch holds other draws."""
    whole = summary(make_samples(50))
    monkeypatch.setattr("eval.stats.BATCH", 1700)
    batched = summary(make_samples(50))
    for end in ("low", "high"):
        assert whole[end] != batched[end] == pytest.approx(whole[end], rel=0.02)


def test_p99_is_of_a_thousand_values() -> None:
    assert "p99" not in summary([1.0] * 999)
    assert summary([1.0] * 980 + [2.0] * 20)["p99"] == 2


def test_no_values_have_no_interval() -> None:
    """A mean of nothing is no figure."""
    with pytest.raises(ValueError, match="no values"):
        summary([])


def test_quantile_is_linear_between_neighbours() -> None:
    """As numpy's."""
    assert [quantile([3, 1, 2], q) for q in (0, 0.25, 0.5, 1)] == [1, 1.5, 2, 3]


def test_share_is_the_ratio_of_paired_means() -> None:
    """Equal answers have no spread, whatever their mean."""
    same = share([(1.0, 1.0), (0.0, 0.0)] * 20)
    assert same == {"mean": 1, "low": 1, "high": 1}
    found = share([(1.0, 1.0)] * 30 + [(1.0, 0.0)] * 10)
    assert found is not None
    assert found["mean"] == 0.75
    assert 0.55 < found["low"] < 0.75 < found["high"] < 0.95
    assert share([(0.0, 0.0), (0.0, 1.0)]) is None
