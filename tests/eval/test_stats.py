"""Bootstrap intervals: against a plain bootstrap and formulas, and what blocks are for.
Contrasts: test_contrast.py."""

from __future__ import annotations

import random
from statistics import fmean

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
    """Of the mean and of the median, of single values and of whole blocks,
    within the noise of other draws."""
    rng, values, repeated = np.random.default_rng(1), np.array(make_samples(60)), make_blocks()
    for of_median, statistic in ((False, np.mean), (True, np.median)):
        for found, units in (
            (summary([*values], of_median=of_median), values[:, None]),
            (summary(*repeated, of_median=of_median), np.reshape(repeated[0], (20, 50))),
        ):
            slow = [statistic(units[rng.integers(0, len(units), len(units))]) for _ in range(2000)]
            low, high = np.quantile(slow, [0.025, 0.975])
            assert (found["low"], found["high"]) == pytest.approx(
                (low, high), abs=0.15 * (high - low)
            )


def test_interval_of_a_mean_agrees_with_its_formula() -> None:
    """1.96 standard errors to both sides, within the noise of resampling."""
    samples = make_samples(400)
    found = summary(samples)
    error = (fmean((x - found["mean"]) ** 2 for x in samples) / 400) ** 0.5
    ends = found["mean"] - 1.96 * error, found["mean"] + 1.96 * error
    assert (found["low"], found["high"]) == pytest.approx(ends, abs=0.2 * error)


def test_blocks_widen_the_interval_where_neighbours_are_alike() -> None:
    """Else a long conversation would count as independent evidence."""
    values, blocks = make_blocks()
    single, whole = summary(values), summary(values, blocks)
    assert whole["high"] - whole["low"] > 4 * (single["high"] - single["low"])


def test_fewer_than_eight_blocks_are_not_resampled() -> None:
    """Of seven blocks an interval says too little."""
    values = [float(n % 2) for n in range(7) for _ in range(10)]
    assert (
        summary(values, [n // 10 for n in range(70)])
        == summary(values)
        == summary(values, range(70))
    )


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
    assert [batched[end] for end in ("low", "high")] == pytest.approx(
        [whole[end] for end in ("low", "high")], rel=0.02
    )
    assert batched["low"] != whole["low"]


def test_no_values_have_no_interval() -> None:
    """A mean of nothing is no figure."""
    with pytest.raises(ValueError, match="no values"):
        summary([])


def test_quantile_is_linear_between_neighbours() -> None:
    """As numpy's."""
    assert [quantile([3, 1, 2], q) for q in (0, 0.25, 0.5, 1)] == [1, 1.5, 2, 3]


def test_share_is_the_ratio_of_paired_means() -> None:
    """What moved KV keeps of full prefill's exact match:
    equal answers have no spread, whatever their mean."""
    same = share([(1.0, 1.0), (0.0, 0.0)] * 20)
    assert same == {"mean": 1, "low": 1, "high": 1}
    found = share([(1.0, 1.0)] * 30 + [(1.0, 0.0)] * 10)
    assert found is not None
    assert found["mean"] == 0.75
    assert 0.55 < found["low"] < 0.75 < found["high"] < 0.95
    assert share([(0.0, 0.0), (0.0, 1.0)]) is None
