"""The pure parts of the reuse benchmark: arms, their order, what an answer must say, shares and crossovers. No server."""

import math
from typing import Any

import pytest

from eval.bench.reuse import (
    Arm,
    Load,
    arms_of,
    crossover,
    main,
    summarize,
    summarize_preprocessing,
    table,
    turned,
    wrong_fates,
)

RATIOS = (0.0, 0.5, 1.0)
FUSED = Arm("fused", "host", "query", 0.15)


def make_arms() -> list[Arm]:
    return arms_of(["query"], RATIOS, ["none", "query"], 0.5, stock=False)


def make_sample(arm: Arm, seconds: float = 1.0, **changed: Any) -> dict[str, Any]:
    """What a server says of a prompt of 8 head tokens, 4 chunks of 100 and 12 for the question, moved as the arm asks."""
    recomputed = {"none": 0, "context": 37}.get(arm.selector, math.ceil(400 * arm.ratio))
    fates = {
        "full": {"exact": 8, "relocated": 0, "recomputed": 0, "computed": 412},
        "exact": {"exact": 419, "relocated": 0, "recomputed": 0, "computed": 1},
    }.get(arm.kind, {"exact": 8, "relocated": 400 - recomputed, "recomputed": recomputed, "computed": 12})
    return {
        "ttft_s": seconds,
        "prompt": 420,
        "head": 8,
        "fates": fates,
        "fused_hit": 0,
        "gap": 0,
        "sources": [arm.source] * 4 if arm.kind == "fused" else [],
        "fallbacks": [],
        "ms": {"lookup": 1.0, "relocate": 10.0, "select": 20.0, "recompute": 100.0} if arm.kind == "fused" else {},
        "cached": 8,
        "wrong": [],
        **changed,
    }


def make_rows(share: float, slope: float, num_rounds: int = 5) -> list[dict[str, Any]]:
    """Rounds on a machine whose speed drifts; a fused arm takes share + slope * ratio of `full`."""
    rows = []
    for number in range(num_rounds):
        full_s = 2.0 + number
        seconds = {
            arm.name: full_s * {"full": 1.0, "exact": 0.2}.get(arm.kind, share + slope * arm.ratio)
            for arm in make_arms()
        }
        rows.append({arm.name: make_sample(arm, seconds[arm.name]) for arm in make_arms()})
    return rows


def test_arms_are_listed_once() -> None:
    """An arm that is part of a sweep and of the phase comparison is measured once; `none` has no ratio."""
    names = [arm.name for arm in make_arms()]
    sweep = [f"query/{source}/{ratio:g}" for source in ("host", "device") for ratio in RATIOS]
    assert names == ["full", "exact", *sweep, "none/host/0"]
    assert [arm.name for arm in arms_of([], [], [], 0.5, stock="url")] == ["full", "exact", "stock"]


def test_every_arm_comes_first_once_in_a_cycle() -> None:
    """A round has every arm once; no arm keeps its place, and none always follows the same other one."""
    arms = make_arms()
    orders = [turned(arms, number) for number in range(2 * len(arms))]
    assert all(sorted(order, key=arms.index) == arms for order in orders)
    assert {order[0] for order in orders[::2]} | {order[-1] for order in orders[1::2]} == set(arms)
    before_exact = {order[order.index(Arm("exact")) - 1] for order in orders if order[0] != Arm("exact")}
    assert len(before_exact) == 2


def test_load_has_whole_chunks_and_no_text_twice() -> None:
    """Two sets that share no chunk, or a device source could replace a host one."""
    load = Load.make(600, 256, 0.5)
    assert len(load.stored) == len(load.plain) == len(set(load.stored)) == 2
    assert not set(load.stored) & set(load.plain)
    assert len(load.stored[0].split()) == 128


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
    """Linear between neighbours; the first ratio where nothing pays, infinity where everything does."""
    assert crossover(points) == pytest.approx(expected)


def test_summary_finds_what_the_rounds_were_made_of() -> None:
    """Shares are those built in whatever the machine's drift, and so is the crossover; phases are over the median of `full`."""
    summary = summarize(make_rows(0.5, 1.0), make_arms())
    assert summary["rounds"] == 5
    assert summary["wrong"] == 0
    assert summary["arms"]["full"]["share_of_full"] == (1.0, 1.0, 1.0)
    assert summary["arms"]["exact"]["share_of_full"][0] == pytest.approx(0.2)
    fused = summary["arms"]["query/host/1"]
    assert fused["share_of_full"][0] == pytest.approx(1.5)
    assert fused["recomputed_share"] == 1.0
    assert fused["phases_of_full"]["recompute"] == pytest.approx(0.1 / 4.0)
    assert fused["phases_of_full"]["rest"] == pytest.approx(1.5 - 0.131 / 4.0)
    assert summary["crossover"]["query/host"][0] == pytest.approx(0.5)
    assert set(summary["crossover"]) == {"query/host", "query/device"}


def test_summary_has_no_crossover_where_all_ratios_pay() -> None:
    """JSON has no infinity: null says that moving paid at every ratio measured."""
    assert summarize(make_rows(0.1, 0.5), make_arms())["crossover"]["query/host"] == [None, None, None]


def test_wrong_samples_are_counted_and_kept() -> None:
    """A sample with other fates is no reason to drop it: its time stays in the medians, and the count tells."""
    rows = make_rows(0.5, 1.0)
    rows[0]["query/host/1"]["wrong"] = ["gap 3"]
    summary = summarize(rows, make_arms())
    assert summary["wrong"] == 1
    assert summary["arms"]["query/host/1"]["share_of_full"][0] == pytest.approx(1.5)


@pytest.mark.parametrize(
    "arm", [*make_arms(), FUSED, Arm("fused", "host", "context", 0.15), Arm("stock")], ids=lambda a: a.name
)
def test_fates_as_intended_are_not_wrong(arm: Arm) -> None:
    """Every arm has an answer that suits it."""
    assert wrong_fates(arm, make_sample(arm), 400, 4) == []


@pytest.mark.parametrize(
    ("arm", "changed"),
    [
        (Arm("full"), {"fates": {"exact": 108, "relocated": 0, "recomputed": 0, "computed": 312}}),
        (Arm("full"), {"fates": {"exact": 8, "relocated": 100, "recomputed": 0, "computed": 312}}),
        (Arm("exact"), {"fates": {"exact": 308, "relocated": 0, "recomputed": 0, "computed": 112}}),
        (Arm("stock"), {"cached": 100}),
        (FUSED, {"fates": {"exact": 108, "relocated": 240, "recomputed": 60, "computed": 12}}),
        (FUSED, {"fates": {"exact": 8, "relocated": 240, "recomputed": 60, "computed": 112}}),
        (FUSED, {"fates": {"exact": 8, "relocated": 390, "recomputed": 10, "computed": 12}}),
        (FUSED, {"sources": ["host", "host", "device", "host"]}),
        (FUSED, {"sources": ["host"] * 3}),
        (FUSED, {"fused_hit": 100}),
        (FUSED, {"gap": 8}),
        (FUSED, {"fallbacks": ["pass_failed"]}),
        (
            Arm("fused", "host", "none", 0.0),
            {"fates": {"exact": 8, "relocated": 340, "recomputed": 60, "computed": 12}},
        ),
    ],
)
def test_other_fates_are_wrong(arm: Arm, changed: dict[str, Any]) -> None:
    """A hit where none should be, a chunk not moved, another ratio or tier: each makes the sample another measurement."""
    assert wrong_fates(arm, make_sample(arm, **changed), 400, 4)


def test_preprocessing_is_shown_over_full_prefill() -> None:
    """Full prefill takes 1 s for 420 tokens here; 100 tokens preprocessed in as much time cost 4.2 times that."""
    times = {"chunk": 100, "relocate": 0.0, "score": 0.5, "capture": 0.1}
    rows = [{"alone": {**times, "seconds": 1.0}, "behind": {**times, "seconds": 2.0}}] * 3
    summary = summarize_preprocessing(rows, [{"full": make_sample(Arm("full"))}] * 3)
    assert summary is not None
    assert summary["alone"]["of_full"]["seconds"] == pytest.approx(4.2)
    assert summary["behind"]["of_full"]["score"] == pytest.approx(2.1)
    assert summary["behind_over_alone"][0] == pytest.approx(2.0)
    assert summarize_preprocessing([], []) is None


def test_table_has_a_line_per_arm() -> None:
    """What is printed names every arm, the crossovers and the wrong samples."""
    shown = table(400, {**summarize(make_rows(0.5, 1.0), make_arms()), "preprocess": None})
    assert all(any(line.startswith(arm.name + " ") for line in shown.splitlines()) for arm in make_arms())
    assert "crossover query/host: ratio 0.50" in shown
    assert "0 wrong" in shown


@pytest.mark.parametrize("flags", [["--ratios", "0.5", "0"], ["--ratios", "0", "1.5"], ["--pairs", "0"]])
def test_impossible_options_are_refused(flags: list[str]) -> None:
    """Before a server is started."""
    with pytest.raises(SystemExit) as stopped:
        main(flags)
    assert stopped.value.code == 2
