"""Contrasts of two arms."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy import stats

from eval.contrast import contrast_arms, direction, sentences, verdict
from eval.stats import RATIOS, Statistic, contrast

TIMES = [(float(2 * i), float(i)) for i in range(1, 21)]
EQUAL = [(1.0, 1.0)] * 20
MEANS: Statistic = "difference of means"


def make_sample(request: str, value: float, **more: Any) -> dict[str, Any]:
    return {"arm": "x", "cell": {}, "request": request, "metrics": {"ttft_s": value}, **more}


def make_arm(values: list[float], **more: Any) -> list[dict[str, Any]]:
    return [make_sample(f"q{i}", value, **more) for i, value in enumerate(values)]


def label(found: dict[str, Any], metric: str = "ttft_s") -> dict[str, Any]:
    return {"cell": {}, "metric": metric, "a": "stock", "b": "ours", **found}


def drawn(seed: int, num: int) -> list[tuple[float, float]]:
    return [(a, b) for a, b in np.random.default_rng(seed).lognormal(size=(num, 2))]


def test_ratio_of_equally_scaled_times_is_known_without_doubt() -> None:
    for statistic in RATIOS:
        found = contrast(TIMES, statistic=statistic)
        assert (found["n"], found["p"]) == (20, None)
        assert [found["value"], found["low"], found["high"]] == pytest.approx([2.0] * 3, rel=1e-12)


def test_difference_and_p_value_known_answers() -> None:
    """Differences 1 and 3, ten each."""
    found = contrast([(0.0, 1.0), (5.0, 8.0)] * 10, statistic=MEANS)
    assert (found["statistic"], found["value"]) == (MEANS, pytest.approx(2.0))
    assert 1.4 < found["low"] < 2.0 < found["high"] < 2.6
    t = 2 / (math.sqrt(20 / 19) / math.sqrt(20))
    assert found["p"] == pytest.approx(2 * stats.t.sf(t, df=19))
    for pairs in ([(float(i), i + 1.0) for i in range(10)], [(0.0, 0.0)]):
        assert contrast(pairs, statistic=MEANS)["p"] is None


def test_quantiles_of_the_plain_data_are_numpys() -> None:
    """The weighted quantile must be np.quantile where every pair is drawn once."""
    pairs = drawn(0, 37)
    expected: dict[Statistic, float] = {"ratio of medians": 0.5, "ratio of p90": 0.9}
    for statistic, q in expected.items():
        a, b = np.quantile(np.array(pairs), q, axis=0)
        assert contrast(pairs, statistic=statistic)["value"] == pytest.approx(a / b)


def test_interval_equals_a_plain_bootstrap() -> None:
    rng = np.random.default_rng(3)
    values = rng.lognormal(size=(60, 2))
    draws = [values[rng.integers(0, 60, 60)] for _ in range(4000)]
    slow: dict[Statistic, Any] = {
        "ratio of medians": [np.median(d[:, 0]) / np.median(d[:, 1]) for d in draws],
        "mean ratio": [stats.gmean(d[:, 0] / d[:, 1]) for d in draws],
    }
    for statistic, ratios in slow.items():
        found = contrast([(a, b) for a, b in values], statistic=statistic, draws=4000)
        expected = np.quantile(ratios, [0.025, 0.975])
        assert [found["low"], found["high"]] == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("statistic", "truth"), [("ratio of medians", 2.0), (MEANS, 0.0)])
def test_interval_holds_the_truth_about_95_times_in_100(statistic: Statistic, truth: float) -> None:
    """An interval that is too short would find differences that are not there."""
    rng = np.random.default_rng(7)
    held = 0
    for _ in range(200):
        shared = rng.normal(size=40)  # A long prompt is long in both arms.
        a, b = (np.exp(shared + 0.3 * rng.normal(size=40)) for _ in range(2))
        pairs = list(zip(a * (truth or 1), b, strict=True))
        found = contrast(pairs, statistic=statistic, draws=500)
        held += found["low"] <= truth <= found["high"]
    assert 0.90 <= held / 200 <= 0.99


def test_blocks_that_move_together_give_a_longer_interval() -> None:
    """Ten pairs of one stretch of time are not ten witnesses."""
    rng = np.random.default_rng(1)
    drift = np.repeat(rng.normal(size=12), 10)
    pairs = [(0.0, d + e) for d, e in zip(drift, 0.1 * rng.normal(size=120), strict=True)]
    alone = contrast(pairs, statistic=MEANS)
    whole = contrast(pairs, statistic=MEANS, blocks=[i // 10 for i in range(120)])
    assert whole["high"] - whole["low"] > 2 * (alone["high"] - alone["low"])
    assert whole["p"] > alone["p"]


def test_few_blocks_fall_back_to_single_pairs_and_give_no_verdict() -> None:
    pairs = [(float(i % 5), float(i % 7) + 9) for i in range(70)]
    blocked = contrast(pairs, statistic=MEANS, blocks=[i // 10 for i in range(70)])
    single = contrast(pairs, statistic=MEANS)
    assert blocked == {**single, "num_blocks": 7}
    assert verdict(label(single, "em")) is not None
    (said,) = sentences([label(blocked, "em")])
    assert "1 of 1 comparisons: too few blocks of requests: 7; give --requests >= 80" in said


@pytest.mark.parametrize("metric", ["ttft_s", "em"])
def test_swapping_the_arms_inverts_the_answer(metric: str) -> None:
    pairs = drawn(2, 50)
    is_time = metric == "ttft_s"
    statistic: Statistic = "ratio of medians" if is_time else MEANS
    one, other = (contrast(p, statistic=statistic) for p in (pairs, [(b, a) for a, b in pairs]))
    ends = [other["value"], other["high"], other["low"]]
    # The ends are interpolated between draws, and 1/x is not linear between them.
    assert [one["value"], one["low"], one["high"]] == pytest.approx(
        [1 / end if is_time else -end for end in ends], rel=1e-3
    )
    assert one == contrast(pairs, statistic=statistic)


def test_ratio_over_zero_is_none_not_infinite() -> None:
    found = contrast([(1.0, 0.0)] * 10)
    assert (found["value"], found["low"], found["high"]) == (None, None, None)
    assert verdict(label(found)) is None
    assert contrast([(1.0, 0.0), (1.0, 2.0)], statistic="mean ratio")["value"] is None


def test_what_cannot_be_compared_raises() -> None:
    for pairs in ([], [(1.0, math.nan)], [(math.inf, 1.0)]):
        with pytest.raises(ValueError, match="pair"):
            contrast(pairs)
    with pytest.raises(ValueError, match="20 pairs but 1 blocks"):
        contrast(TIMES, blocks=[1])


def test_verdict_says_which_way() -> None:
    for pairs, way in ((TIMES, "faster"), ([(b, a) for a, b in TIMES], "slower")):
        said = (
            f"ours reaches the first token 2.00 times {way} than stock at the median [2.00, 2.00]"
        )
        assert verdict(label(contrast(pairs))) == said
    rose = contrast([(0.0, 0.5)] * 10, statistic=MEANS)
    for metric, said in (
        ("em", "exact match: ours is 0.5 higher than stock on average [0.5, 0.5], which is better"),
        ("kl", "0.5 nats higher than stock on average [0.5, 0.5], which is worse"),
    ):
        assert str(verdict(label(rose, metric))).endswith(said)
    assert direction(label(rose, "no_such_metric")) is None


def test_no_verdict_where_the_interval_holds_no_difference() -> None:
    same, few, enough = (label(contrast(pairs)) for pairs in (EQUAL, TIMES[:7], TIMES[:8]))
    assert verdict(same) is None
    either = contrast([(0.0, 1.0), (1.0, 0.0)] * 10, statistic=MEANS)
    assert verdict(label(either, "em")) is None
    assert sentences([same]) == ["No difference beyond chance in 1 of 1 comparisons."]
    assert len(sentences([same, label(contrast(TIMES))])) == 1
    assert sentences([]) == []
    said, reason = sentences([few, enough])
    assert said == verdict(enough)
    assert "1 of 2 comparisons: too few requests: 7; give --requests >= 8" in reason
    assert "No difference" not in " ".join(sentences([few]))


def test_difference_needs_the_t_test_too() -> None:
    """A bootstrap interval of eight values is a little short."""
    differences = (1.3, 1.1, 0.2, -0.5, 0.9, -0.4, 1.6, 0.3)
    found = label(contrast([(0.0, d) for d in differences], statistic=MEANS), "em")
    assert found["low"] > 0
    assert found["p"] > 0.05
    assert direction(found) is None
    assert direction({**found, "p": 0.04}) == "better"


def test_arm_that_fails_more_gets_no_verdict() -> None:
    """What it did answer may be what was easy: without its slow half any arm looks fast."""
    stock = make_arm([2.0 + i for i in range(90)])
    ours = make_arm([1.0] * 90)
    for sample in ours[43:]:
        sample |= {"metrics": {}, "error": "timeout"}
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
    counts = {"failed_a": failed_a, "failed_b": failed_b, "asked_a": 100, "asked_b": 100}
    assert direction({**label(contrast(TIMES)), **counts}) == way


def test_arms_are_paired_by_request_within_a_cell() -> None:
    right = [
        make_sample("q2", 3.0),
        make_sample("q0", 1.0),
        make_sample("q1", math.nan),
        make_sample("only here", 9.0),
        make_sample("q1", 100.0, warm_up=True),
        {"arm": "x", "cell": {}, "request": "q1", "metrics": {}, "error": "refused"},
        make_sample("q1", 100.0, cell={"rate": 2}),
    ]
    left = make_arm([2.0, 4.0, 6.0])
    mean, medians, p90 = contrast_arms(left * 3, right, a="stock", b="ours")
    assert (mean["statistic"], mean["value"]) == ("mean ratio", pytest.approx(2.0))
    assert (medians["n"], medians["value"], medians["cell"]) == (2, 2.0, {})
    assert (p90["statistic"], p90["a"], p90["b"]) == ("ratio of p90", "stock", "ours")
    assert contrast_arms(left, right, a="a", b="b", metrics=["em"]) == []
