"""The pure parts of the reuse bench: arms, their order, what an answer must say, figures."""

import math
from typing import Any

import pytest

from eval.bench.reuse import Arm, arms_of, choice_of, main, wrong_fates
from eval.bench.reuse_figures import crossover, summarize
from eval.bench.rounds import turned
from eval.errors import CommandError

RATIOS = (0.0, 0.5, 1.0)
FUSED = Arm("fused", "host", "query", 0.15)
OTHER = {"fused_hit": 0, "gap": 0, "fallbacks": []}


def make_arms(*, stock: bool = False) -> list[Arm]:
    return arms_of(["query", "none"], RATIOS, stock=stock)


def fates(exact: int, relocated: int, recomputed: int, computed: int) -> dict[str, int]:
    names = {"exact": exact, "relocated": relocated, "recomputed": recomputed}
    return {**names, "computed": computed}


def make_sample(arm: Arm, seconds: float = 1.0, **changed: Any) -> dict[str, Any]:
    """What a server says of a prompt of 8 head tokens, 4 chunks of 100 and 12 for the question,
    moved as the arm asks."""
    is_fused = arm.kind == "fused"
    recomputed = {"none": 0, "context": 37}.get(arm.selector, math.ceil(400 * arm.ratio))
    told = {"full": fates(8, 0, 0, 412), "exact": fates(419, 0, 0, 1)}
    metrics = {"ttft_s": seconds}
    if is_fused:
        metrics |= {"lookup_s": 0.001, "relocate_s": 0.01, "select_s": 0.02, "recompute_s": 0.1}
        metrics |= {"recomputed_share": recomputed / 400}
    return {
        "arm": arm.name,
        "cell": {"tokens": 400},
        "metrics": metrics,
        "prompt_tokens": 420,
        "cached_tokens": 8,
        "head_tokens": 8,
        "fates": told.get(arm.kind, fates(8, 400 - recomputed, recomputed, 12)),
        "sources": [arm.source] * 4 if is_fused else [],
        "other": OTHER,
        "wrong": [],
        "warm_up": False,
        **changed,
    }


def make_samples(share: float, slope: float, num_rounds: int = 5) -> list[dict[str, Any]]:
    """Rounds on a machine whose speed drifts; a fused arm takes share + slope * ratio of `full`."""
    samples = []
    for number in range(num_rounds):
        for arm in make_arms():
            of_full = {"full": 1.0, "exact": 0.2}.get(arm.kind, share + slope * arm.ratio)
            samples.append(make_sample(arm, (2.0 + number) * of_full, request=str(number)))
    return samples


def rows_of(results: dict[str, Any], number: int, key: str) -> dict[str, dict[str, Any]]:
    return {row[key]: row for row in results["tables"][number]["rows"]}


def test_arms_are_listed_once() -> None:
    sweep = [f"query/{source}/{ratio:g}" for source in ("host", "device") for ratio in RATIOS]
    rest = ["planned/host", "planned/device", "none/host/0"]
    assert [arm.name for arm in make_arms()] == ["full", "exact", *sweep, *rest]
    assert [arm.name for arm in make_arms(stock=True)[:3]] == ["full", "exact", "stock"]


def test_selector_may_name_a_ratio_and_a_layer() -> None:
    arms = arms_of(["query", "critical@9=0.05", "first"], (), stock=False)
    assert [arm.name for arm in arms[-2:]] == ["critical@9/host/0.05", "first/host/0.15"]
    assert choice_of("critical@9") == {"selector": "critical", "depth": 9, "layers": 9}
    assert choice_of("deviation@3") == {"selector": "deviation", "depth": 3}
    assert choice_of("query@12") == {"selector": "query", "layers": 12}
    assert choice_of("critical") == {"selector": "critical"}
    with pytest.raises(CommandError, match="prophet reads no layer"):
        choice_of("prophet@3")


def test_every_arm_comes_first_once_in_a_cycle() -> None:
    """No arm keeps its place, and none always follows the same other one."""
    arms = [arm.name for arm in make_arms()]
    orders = [turned(arms, number) for number in range(2 * len(arms))]
    assert all(sorted(order, key=arms.index) == arms for order in orders)
    assert {order[0] for order in orders[::2]} | {order[-1] for order in orders[1::2]} == set(arms)
    assert len({order[order.index("exact") - 1] for order in orders if order[0] != "exact"}) == 2


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(0.0, 0.4), (0.5, 0.8), (1.0, 1.2)], 0.75),
        ([(0.0, 0.4), (0.5, 1.0), (1.0, 1.4)], 0.5),
        ([(0.0, 0.4), (0.2, 1.1), (0.5, 0.9), (1.0, 1.2)], 0.2 * 0.6 / 0.7),
        ([(0.05, 1.3), (1.0, 1.2)], 0.05),
        ([(0.0, 0.4), (1.0, 0.99)], math.inf),
    ],
    ids=["between", "on a point", "first of several", "never pays", "always pays"],
)
def test_crossover(points: list[tuple[float, float]], expected: float) -> None:
    assert crossover(points) == pytest.approx(expected)


def test_summary_finds_what_the_rounds_were_made_of() -> None:
    results = summarize(make_samples(0.5, 1.0))
    arms = rows_of(results, 0, "arm")
    assert results["wrong"] == 0
    assert list(arms) == [arm.name for arm in make_arms()]
    assert arms["full"]["share of full"] == "1.000 [1.000, 1.000]"
    assert arms["exact"]["share of full"].startswith("0.200")
    fused = arms["query/host/1"]
    assert fused["share of full"].startswith("1.500")
    assert fused["recomputed"] == 1.0
    assert fused["recompute"] == pytest.approx(0.1 / 4.0)
    assert fused["rest"] == pytest.approx(1.5 - 0.131 / 4.0, abs=1e-4)
    crossed = rows_of(results, 1, "selector/source")
    assert list(crossed) == ["query/host", "query/device"]
    assert crossed["query/host"]["ratio"] == "0.50 [0.50, 0.50]"
    assert arms["query/host/0.5"]["full / arm"] == 1.0
    said = "400 tokens, query/host/0.5: full prefill takes 1.0 times"
    assert any(line.startswith(said) for line in results["verdict"])
    always = rows_of(summarize(make_samples(0.1, 0.5)), 1, "selector/source")
    assert always["query/host"]["ratio"] == "none [none, none]"


def test_wrong_samples_are_counted_and_kept_and_warm_up_is_not() -> None:
    samples, warm = make_samples(0.5, 1.0), make_samples(1, 1, 1)
    samples[0]["wrong"] = ["gap 3"]
    for one in warm:
        one["warm_up"], one["metrics"]["ttft_s"] = True, 99.0
    results = summarize([*warm, *samples])
    assert results["wrong"] == 1
    assert results["tables"][0]["rows"] == summarize(samples)["tables"][0]["rows"]
    assert summarize(warm)["tables"] == []


@pytest.mark.parametrize(
    "arm",
    [*make_arms(stock=True), FUSED, Arm("fused", "host", "context", 0.15)],
    ids=lambda a: a.name,
)
def test_fates_as_intended_are_not_wrong(arm: Arm) -> None:
    assert wrong_fates(arm, make_sample(arm), 400, 4) == []
    if arm.kind == "full":
        told = {**OTHER, "fallbacks": ["other_head"]}
        assert wrong_fates(arm, make_sample(arm, other=told), 400, 4) == []


@pytest.mark.parametrize(
    ("arm", "changed"),
    [
        (Arm("full"), {"fates": fates(108, 0, 0, 312)}),
        (Arm("full"), {"fates": fates(8, 100, 0, 312)}),
        (Arm("exact"), {"fates": fates(308, 0, 0, 112)}),
        (Arm("stock"), {"cached_tokens": 100}),
        (FUSED, {"fates": fates(108, 240, 60, 12)}),
        (FUSED, {"fates": fates(8, 240, 60, 112)}),
        (FUSED, {"fates": fates(8, 390, 10, 12)}),
        (FUSED, {"sources": ["host", "host", "device", "host"]}),
        (FUSED, {"sources": ["host"] * 3}),
        (FUSED, {"other": {**OTHER, "fused_hit": 100}}),
        (FUSED, {"other": {**OTHER, "gap": 8}}),
        (FUSED, {"other": {**OTHER, "fallbacks": ["pass_failed"]}}),
        (Arm("fused", "host", "none", 0.0), {"fates": fates(8, 340, 60, 12)}),
    ],
)
def test_other_fates_are_wrong(arm: Arm, changed: dict[str, Any]) -> None:
    assert wrong_fates(arm, make_sample(arm, **changed), 400, 4)


@pytest.mark.parametrize("flags", [["--ratios", "0.5", "0"], ["--ratios", "0", "1.5"]])
def test_impossible_options_are_refused(flags: list[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(flags)
    assert stopped.value.code == 2
