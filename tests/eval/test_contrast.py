"""Contrasts of two arms. Run: pytest tests/eval/test_contrast.py"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from eval.contrast import contrast_arms, direction, sentences, verdict
from eval.stats import RATIOS, Statistic, contrast

TIMES = [(float(2 * i), float(i)) for i in range(1, 21)]


def make_sample(request: str, value: float, **more: Any) -> dict[str, Any]:
    return {"arm": "x", "cell": {}, "request": request, "metrics": {"ttft_s": value}, **more}


def make_arm(values: list[float], **more: Any) -> list[dict[str, Any]]:
    return [make_sample(f"q{i}", value, **more) for i, value in enumerate(values)]


def label(found: dict[str, Any], metric: str = "ttft_s") -> dict[str, Any]:
    return {"cell": {}, "metric": metric, "a": "stock", "b": "ours", **found}


def test_ratio_of_equally_scaled_times_is_known_without_doubt() -> None:
    """Where b takes half of a's time on every request, no draw can say anything else."""
    for statistic in RATIOS:
        found = contrast(TIMES, statistic=statistic)
        assert (found["n"], found["p"]) == (20, None)
        assert [found["value"], found["low"], found["high"]] == pytest.approx([2.0] * 3, rel=1e-12)


def test_difference_and_p_value_known_answers() -> None:
    """Differences 1 and 3, ten each: mean 2, t = 2 / (sd / sqrt 20) with 19 degrees of freedom."""
    found = contrast([(0.0, 1.0), (5.0, 8.0)] * 10, statistic="difference of means")
    assert found["statistic"] == "difference of means"
    assert found["value"] == pytest.approx(2.0)
    assert 1.4 < found["low"] < 2.0 < found["high"] < 2.6
    t = 2 / (math.sqrt(20 / 19) / math.sqrt(20))
    assert found["p"] == pytest.approx(2 * stats.t.sf(t, df=19))


def test_equal_differences_have_no_p_value() -> None:
    """The t-test would divide by zero."""
    assert (
        contrast([(float(i), i + 1.0) for i in range(10)], statistic="difference of means")["p"]
        is None
    )
    assert contrast([(0.0, 0.0)], statistic="difference of means")["p"] is None


def test_quantiles_of_the_plain_data_are_numpys() -> None:
    """The weighted quantile must be np.quantile where every pair is drawn once."""
    values = np.random.default_rng(0).lognormal(size=(37, 2))
    expected: dict[Statistic, float] = {"ratio of medians": 0.5, "ratio of p90": 0.9}
    for statistic, q in expected.items():
        found = contrast([(a, b) for a, b in values], statistic=statistic)
        assert found["value"] == pytest.approx(
            np.quantile(values[:, 0], q) / np.quantile(values[:, 1], q)
        )


def test_interval_equals_a_plain_bootstrap() -> None:
    """Fast equals slow: drawing pairs one by one gives the same interval,
    up to the draws' chance."""
    rng = np.random.default_rng(3)
    values = rng.lognormal(size=(60, 2))
    draws = [values[rng.integers(0, 60, 60)] for _ in range(4000)]
    slow: dict[Statistic, Any] = {
        "ratio of medians": [np.median(d[:, 0]) / np.median(d[:, 1]) for d in draws],
        "mean ratio": [stats.gmean(d[:, 0] / d[:, 1]) for d in draws],
    }
    for statistic, drawn in slow.items():
        found = contrast([(a, b) for a, b in values], statistic=statistic, draws=4000)
        assert [found["low"], found["high"]] == pytest.approx(
            np.quantile(drawn, [0.025, 0.975]), rel=0.05
        )


def test_mean_ratio_over_zero_has_no_value() -> None:
    """As other ratios."""
    assert contrast([(1.0, 0.0), (1.0, 2.0)], statistic="mean ratio")["value"] is None


@pytest.mark.parametrize("statistic", ["ratio of medians", "difference of means"])
def test_interval_holds_the_truth_about_95_times_in_100(statistic: Statistic) -> None:
    """An interval that is too short would find differences that are not there."""
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(200):
        shared = rng.normal(size=40)  # A long prompt is long in both arms.
        a, b = (np.exp(shared + 0.3 * rng.normal(size=40)) for _ in range(2))
        pairs = (
            list(zip(2 * a, b, strict=True))
            if statistic != "difference of means"
            else list(zip(a, b, strict=True))
        )
        found = contrast(pairs, statistic=statistic, draws=500)
        held += (
            found["low"] <= (0.0 if statistic == "difference of means" else 2.0) <= found["high"]
        )
    assert 0.90 <= held / 200 <= 0.99


def test_blocks_that_move_together_give_a_longer_interval() -> None:
    """Ten pairs of one stretch of time are not ten witnesses."""
    rng = np.random.default_rng(1)
    drift = np.repeat(rng.normal(size=12), 10)
    pairs = [(0.0, d + e) for d, e in zip(drift, 0.1 * rng.normal(size=120), strict=True)]
    alone = contrast(pairs, statistic="difference of means")
    whole = contrast(pairs, statistic="difference of means", blocks=[i // 10 for i in range(120)])
    assert whole["high"] - whole["low"] > 2 * (alone["high"] - alone["low"])
    assert whole["p"] > alone["p"]


def test_few_blocks_fall_back_to_single_pairs_and_give_no_verdict() -> None:
    """Seven blocks are seven witnesses at most:
    pairs give an interval to look at, which is too short to be believed."""
    pairs = [(float(i % 5), float(i % 7) + 9) for i in range(70)]
    blocked = contrast(pairs, statistic="difference of means", blocks=[i // 10 for i in range(70)])
    single = contrast(pairs, statistic="difference of means")
    assert blocked == {**single, "num_blocks": 7}
    names = {"cell": {}, "metric": "em", "a": "x", "b": "y"}
    assert verdict({**names, **single}) is not None
    assert sentences([{**names, **blocked}]) == [
        "No verdict in 1 of 1 comparisons: too few blocks of requests: 7; give --requests >= 80 and"
        " the warm-up's."
    ]


@pytest.mark.parametrize("metric", ["ttft_s", "em"])
def test_swapping_the_arms_inverts_the_answer(metric: str) -> None:
    """The verdict must not depend on which folder is named first."""
    rng = np.random.default_rng(2)
    pairs = [(a, b) for a, b in rng.lognormal(size=(50, 2))]
    statistic: Statistic = "ratio of medians" if metric == "ttft_s" else "difference of means"
    one, other = (contrast(p, statistic=statistic) for p in (pairs, [(b, a) for a, b in pairs]))
    turned = (
        [1 / other["value"], 1 / other["high"], 1 / other["low"]]
        if metric == "ttft_s"
        else [-other["value"], -other["high"], -other["low"]]
    )
    # The ends are interpolated between draws, and 1/x is not linear between them.
    assert [one["value"], one["low"], one["high"]] == pytest.approx(turned, rel=1e-3)


def test_same_seed_same_interval() -> None:
    """A record that is computed again must hold the same figures."""
    pairs = [(a, b) for a, b in np.random.default_rng(5).lognormal(size=(30, 2))]
    assert contrast(pairs) == contrast(pairs)


def test_ratio_over_zero_is_none_not_infinite() -> None:
    """Infinity is no JSON."""
    found = contrast([(1.0, 0.0)] * 10)
    assert (found["value"], found["low"], found["high"]) == (None, None, None)
    assert verdict(label(found)) is None


@pytest.mark.parametrize("pairs", [[], [(1.0, math.nan)], [(math.inf, 1.0)]])
def test_no_pairs_or_not_finite_raises(pairs: list[tuple[float, float]]) -> None:
    """A figure of nothing is no figure."""
    with pytest.raises(ValueError, match="pair"):
        contrast(pairs)


def test_blocks_of_another_length_raise() -> None:
    """A shifted list of blocks would resample the wrong pairs."""
    with pytest.raises(ValueError, match="20 pairs but 1 blocks"):
        contrast(TIMES, blocks=[1])


def test_verdict_says_which_way() -> None:
    """Faster and better are the same thing only for times."""
    faster = contrast(TIMES)
    slower = contrast([(b, a) for a, b in TIMES])
    assert (
        verdict(label(faster))
        == "ours reaches the first token 2.00 times faster than stock at the median [2.00, 2.00]"
    )
    assert (
        verdict(label(slower))
        == "ours reaches the first token 2.00 times slower than stock at the median [2.00, 2.00]"
    )
    rose = contrast([(0.0, 0.5)] * 10, statistic="difference of means")
    assert (
        verdict(label(rose, "em"))
        == "exact match: ours is 0.5 higher than stock on average [0.5, 0.5], which is better"
    )
    assert (
        verdict(label(rose, "kl"))
        == "KL to full prefill, mean of the answer: ours is 0.5 nats higher than stock on average"
        " [0.5, 0.5], which is worse"
    )
    assert direction(label(rose, "no_such_metric")) is None


def test_no_verdict_where_the_interval_holds_no_difference() -> None:
    """An interval that touches 1 or 0 excludes nothing."""
    assert verdict(label(contrast([(1.0, 1.0)] * 20))) is None
    assert (
        verdict(
            label(contrast([(0.0, 1.0), (1.0, 0.0)] * 10, statistic="difference of means"), "em")
        )
        is None
    )


def test_no_verdict_of_fewer_than_eight_pairs() -> None:
    """Seven equal ratios would have an interval of length zero; nor are they no difference."""
    few, enough = (label(contrast(TIMES[:n])) for n in (7, 8))
    assert sentences([few, enough]) == [
        verdict(enough),
        (
            "No verdict in 1 of 2 comparisons: too few requests: 7; give --requests >= 8 and the"
            " warm-up's."
        ),
    ]
    assert "No difference" not in " ".join(sentences([few]))


def test_no_difference_is_said_of_what_could_have_shown_one() -> None:
    """Of many small comparisons one that is large enough may be quoted, and it alone."""
    same = label(contrast([(1.0, 1.0)] * 20))
    assert sentences([same]) == ["No difference beyond chance in 1 of 1 comparisons."]
    assert len(sentences([same, label(contrast(TIMES))])) == 1
    assert sentences([]) == []


def test_difference_needs_the_t_test_too() -> None:
    """A bootstrap interval of eight values is a little short:
    where the test finds nothing, nothing is found."""
    found = label(
        contrast(
            [(0.0, d) for d in (1.3, 1.1, 0.2, -0.5, 0.9, -0.4, 1.6, 0.3)],
            statistic="difference of means",
        ),
        "em",
    )
    assert found["low"] > 0
    assert found["p"] > 0.05
    assert direction(found) is None
    assert direction({**found, "p": 0.04}) == "better"


def test_arm_that_fails_more_gets_no_verdict() -> None:
    """What it did answer may be what was easy: without its slow half any arm looks fast."""
    stock = make_arm([2.0 + i for i in range(90)])
    ours = [
        {**s, "metrics": {}, "error": "timeout"} if i >= 43 else s
        for i, s in enumerate(make_arm([1.0] * 90))
    ]
    warm_up = make_sample("w", 1.0, warm_up=True, error="timeout")
    found = contrast_arms(stock, [*ours, warm_up], a="stock", b="ours")
    assert (found[0]["n"], found[0]["failed_a"], found[0]["failed_b"]) == (43, 0, 47)
    assert [direction(one) for one in found] == [None, None, None]
    assert sentences(found) == ["No verdict: ours failed 47 of 90, stock failed 0 of 90"]


@pytest.mark.parametrize(
    ("failed_a", "failed_b", "way"),
    [(9, 9, "better"), (0, 1, "better"), (0, 2, None), (9, 2, None)],
)
def test_few_failures_or_as_many_on_both_sides_leave_the_verdict(
    failed_a: int, failed_b: int, way: str | None
) -> None:
    """One timeout in a hundred chooses no sample."""
    counts = {"failed_a": failed_a, "failed_b": failed_b, "asked_a": 100, "asked_b": 100}
    assert direction({**label(contrast(TIMES)), **counts}) == way


def test_arms_are_paired_by_request_within_a_cell() -> None:
    """Order, extra requests, warm-up, failures, missing and infinite values must not shift a
    pair."""
    left = make_arm([2.0, 4.0, 6.0])
    right = [
        make_sample("q2", 3.0),
        make_sample("q0", 1.0),
        make_sample("q1", math.nan),
        make_sample("only here", 9.0),
        make_sample("q1", 100.0, warm_up=True),
        {"arm": "x", "cell": {}, "request": "q1", "metrics": {}, "error": "refused"},
        make_sample("q1", 100.0, cell={"rate": 2}),
    ]
    mean, medians, p90 = contrast_arms(left, right, a="stock", b="ours")
    assert (mean["statistic"], mean["value"]) == ("mean ratio", pytest.approx(2.0))
    assert (medians["n"], medians["value"], medians["cell"]) == (2, 2.0, {})
    assert (p90["statistic"], p90["a"], p90["b"]) == ("ratio of p90", "stock", "ours")


def test_request_taken_twice_counts_once() -> None:
    """Repeats are not new questions: they would make the interval too short."""
    found = contrast_arms(
        make_arm([2.0, 2.0]) * 3, make_arm([1.0, 1.0]), a="a", b="b", metrics=["ttft_s"]
    )
    assert found[0]["n"] == 2
    assert contrast_arms(make_arm([2.0]), make_arm([1.0]), a="a", b="b", metrics=["em"]) == []


def test_blocks_of_the_samples_are_used() -> None:
    """Serve cuts requests into blocks; chance moves a block as a whole."""
    values = [float(1 + i % 13) for i in range(80)]
    blocked = [{**s, "block": i // 10} for i, s in enumerate(make_arm(values))]
    other = make_arm([1.0] * 80)
    one = contrast_arms(blocked, other, a="a", b="b")[0]
    assert (one["low"], one["high"]) != (
        contrast_arms(make_arm(values), other, a="a", b="b")[0]["low"],
        one["high"],
    )
