"""Figures of a load as pure functions of its samples."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from eval.outcome import text
from eval.serve.latency import RATES, cell_rows, loaded_s, summarize, throughput

MOVED = {"exact": 10, "relocated": 60, "recomputed": 15, "computed": 15}


def sample(arm: str = "ours", number: int = 0, ttft: float = 0.1, **other: Any) -> dict[str, Any]:
    """An answered request; the n-th begins n seconds into its arm's load, and takes half of one."""
    return {
        "key": f"{arm}/t:{number}",
        "arm": arm,
        "cell": {},
        "request": f"t:{number}",
        "block": number // 2,
        "warm_up": False,
        "due_s": float(number),
        "sent_s": float(number),
        "done_s": number + 0.5,
        "prompt_tokens": 100,
        "cached_tokens": 25,
        "completion_tokens": 4,
        "fates": {"exact": 25, "relocated": 0, "recomputed": 0, "computed": 75},
        "metrics": {"ttft_s": ttft, "e2e_s": 0.5},
        **other,
    }


def row_of(*samples: dict[str, Any]) -> dict[str, Any]:
    (row,) = cell_rows(samples)
    return row


def test_interval_of_a_cell_draws_whole_blocks() -> None:
    widths = []
    for size in (10, 20):
        taken = [
            sample(number=n, block=n // size, ttft=0.1 + 0.1 * (n // 10 % 4)) for n in range(120)
        ]
        figures = cell_rows(taken)[0]["metrics"]["ttft_s"]
        widths.append(figures["high"] - figures["low"])
    blocked, single = widths
    assert blocked > 1.9 * single


def test_request_that_two_servers_answered_counts_once() -> None:
    """With the mean of its times, so that the faster of two equal servers decides nothing."""
    paces = {"stock-lpm": (0.4, 0.4), "ours": (0.1, 0.3)}
    taken = [
        sample(arm=arm, number=n, ttft=pace, cell={"k": 1, "server": server})
        for arm in paces
        for server, pace in enumerate(paces[arm], 1)
        for n in range(20)
    ]
    found = summarize(taken, facts={}, against="stock-lpm")
    cells = [(row["arm"], row["cell"], row["n"]) for row in found["cells"]]
    assert cells == [("stock-lpm", {"k": 1}, 40), ("ours", {"k": 1}, 40)]
    first = next(row for row in found["contrasts"] if row["metric"] == "ttft_s")
    assert (first["cell"], first["n"], first["num_blocks"]) == ({"k": 1}, 20, 10)
    assert first["value"] == pytest.approx(2)
    one = [row for row in taken if row["arm"] == "ours" and row["cell"]["server"] == 1]
    alone = summarize(one, facts={}, against="ours")["cells"][0]["throughput"]["requests_per_s"]
    assert found["cells"][1]["throughput"]["requests_per_s"] == pytest.approx(alone)


def test_warm_up_counts_nowhere() -> None:
    warm = sample(number=0, ttft=99.0, warm_up=True)
    row = row_of(warm, sample(number=2), sample(number=3))
    assert (row["n"], row["metrics"]["ttft_s"]["p90"], row["fates"]["computed"]) == (2, 0.1, 150)
    assert row["throughput"]["requests_per_s"] == pytest.approx(2 / 1.5)
    assert summarize([warm], facts={}, against="ours")["num_warm_up"] == 1


def test_failed_requests_are_errors_and_have_no_times() -> None:
    nothing: dict[str, Any] = {
        "metrics": {},
        "fates": None,
        "prompt_tokens": None,
        "cached_tokens": None,
    }
    row = row_of(sample(), sample(number=1, error="HTTP 500", **nothing))
    assert (row["n"], row["errors"]) == (1, 1)
    assert row["throughput"]["requests_per_s"] == pytest.approx(1 / 1.5)


def test_throughput_counts_the_time_the_arm_was_loaded() -> None:
    """Between an arm's blocks its clock stops; a pause inside a block is part of the load."""
    taken = [sample(number=n) for n in range(4)]
    assert loaded_s(taken) == 1.5 + 1.5
    assert throughput(taken) == {
        "requests_per_s": pytest.approx(4 / 3),
        "output_tokens_per_s": pytest.approx(16 / 3),
        "prompt_tokens_per_s": pytest.approx(400 / 3),
    }


def loaded_arm(arm: str, pace: float, seed: int) -> list[dict[str, Any]]:
    """Blocks of two, of unequal lengths, and answers of unequal lengths; one request fails."""
    rng = np.random.default_rng(seed)
    seconds, tokens = pace * rng.uniform(1, 3, 24), rng.integers(1, 9, 24)
    taken = [
        sample(arm, n, done_s=n + float(seconds[n]), completion_tokens=int(tokens[n]))
        for n in range(24)
    ]
    taken[5] |= {"error": "timeout", "completion_tokens": None}
    return taken


def test_ratios_of_throughput_are_a_plain_bootstraps() -> None:
    """Of the two arms' throughput over the same blocks, drawn whole."""
    slow, fast = arms = loaded_arm("ours", 2.0, 0), loaded_arm("fused", 1.0, 1)
    warm_up = sample("fused", 90, warm_up=True, done_s=1e6)
    results = summarize([*slow, *fast, warm_up], facts={}, against="ours")
    found = {one["metric"]: one for one in results["contrasts"] if one["metric"] in RATES}
    rng, draws = np.random.default_rng(3), []
    for _ in range(4000):
        blocks = rng.integers(0, 12, 12)
        told = [
            throughput(
                [
                    {**arm[2 * block + of], "block": number}
                    for number, block in enumerate(blocks)
                    for of in (0, 1)
                ]
            )
            for arm in arms
        ]
        draws.append([told[1][name] / told[0][name] for name in RATES])  # type: ignore[operator]
    for name, low, high in zip(RATES, *np.quantile(draws, [0.025, 0.975], axis=0), strict=True):
        one, both = found[name], [throughput(arm)[name] for arm in arms]
        assert [one["a_value"], one["b_value"]] == pytest.approx(both)
        assert one["value"] == pytest.approx(one["b_value"] / one["a_value"])
        assert [one["low"], one["high"]] == pytest.approx([low, high], rel=0.03)
        assert (one["a"], one["b"], one["n"], one["num_blocks"]) == ("ours", "fused", 24, 12)
        assert (one["failed_a"], one["asked_b"]) == (1, 24)
    assert any(line.startswith("fused answers requests 1.") for line in results["verdict"])
    rows = {row["metric"]: row for row in results["tables"][-1]["rows"]}
    assert rows["requests per second"]["ratio"] == "fused / ours"
    value, low = (found["requests_per_s"][each] for each in ("value", "low"))
    assert rows["requests per second"]["value and interval"].startswith(f"{value:.2f} [{low:.2f}")
    back = summarize([*slow, *fast], facts={}, against="fused")["verdict"]
    assert any(line.startswith("ours answers requests 1.") and "slower" in line for line in back)


def test_throughput_of_unequal_counts_has_no_ratio() -> None:
    """Blocks that one arm alone has do not count; nor do tokens that a server does not."""
    taken = [*loaded_arm("ours", 1.0, 0), *loaded_arm("fused", 1.0, 0)[:-2]]
    for one in taken[24:]:
        one["completion_tokens"] = None
    contrasts = summarize(taken, facts={}, against="ours")["contrasts"]
    (found,) = [one for one in contrasts if one["metric"] in RATES]
    assert (found["metric"], found["num_blocks"], found["value"]) == ("requests_per_s", 11, 1.0)
    assert (found["low"], found["high"]) == (1.0, 1.0)
    for one in taken:
        one["error"] = "timeout"
    contrasts = summarize(taken, facts={}, against="ours")["contrasts"]
    assert [one["value"] for one in contrasts if one["metric"] in RATES] == [None, None]


def test_server_that_counts_no_tokens_has_no_token_figures() -> None:
    untold: dict[str, Any] = dict.fromkeys(
        ("cached_tokens", "prompt_tokens", "completion_tokens", "fates")
    )
    row = row_of(sample(**untold))
    assert (row["fates"], row["cached_share"]) == (None, None)
    assert row["throughput"]["output_tokens_per_s"] is None
    assert row["throughput"]["requests_per_s"] == 2.0


def test_shares_are_of_all_tokens() -> None:
    """Recomputed ones, which SGLang counts as cached, are not."""
    told = {"chunks_hit": 1, "chunks_planned": None}
    plain = sample(number=1, prompt_tokens=300, cached_tokens=0, fates=None)
    assert row_of(sample(fates=None), plain)["cached_share"] == 25 / 400
    assert row_of(sample(cached_tokens=85, fates=MOVED))["cached_share"] == 70 / 100
    own = sample(fates=MOVED, chunkcache={**told, "fallbacks": ["no_room"]})
    row = row_of(own, sample(number=1, fates=MOVED, chunkcache={**told, "fused_hit": 50}))
    assert row["recomputed_share"] == 30 / (75 + 25)
    assert row["fallbacks"] == {"no_room": 1}


def test_planned_hits_that_did_not_come_true() -> None:
    """Of all planned ones; finding more than was planned makes up for none."""
    counts = [(4, 3), (4, 6), (None, 2), (2, 2)]
    told = [{"chunks_planned": planned, "chunks_hit": hit} for planned, hit in counts]
    row = row_of(*(sample(number=n, chunkcache=each) for n, each in enumerate(told)))
    assert row["planned_missed"] == 1 / 10


def test_every_arm_is_compared_with_one_in_each_cell() -> None:
    samples = [
        sample(arm=arm, number=n, cell={"rate": rate}, ttft=ttft * (1 + 0.01 * n))
        for rate in (1, 2)
        for n in range(24)
        for arm, ttft in (("stock-lpm", 0.3), ("ours", 0.1), ("craft", 0.3))
    ]
    results = summarize(samples, facts={"servers": {"ours": {}}}, against="stock-lpm")
    found = {
        (c["b"], c["cell"]["rate"], c["metric"], c["statistic"]): c for c in results["contrasts"]
    }
    assert len(found) == 2 * 2 * (2 * 3 + len(RATES))
    assert found["ours", 1, "ttft_s", "ratio of medians"]["value"] == pytest.approx(3.0)
    assert found["craft", 2, "ttft_s", "ratio of p90"]["value"] == pytest.approx(1.0)
    *said, chance = results["verdict"]
    assert len(said) == 6, "only where the interval leaves out 1: ours, both rates, all statistics"
    assert all(line.startswith("ours reaches the first token 3.00 times faster") for line in said)
    assert chance.startswith("Of 32 comparisons")
    assert results["servers"] == {"ours": {}}


def test_verdict_tells_of_the_cache_and_the_table_of_times() -> None:
    taken = []
    for number in range(16):
        for arm, cached in (("stock-lpm", 20 + number), ("ours", 70 + 2 * number)):
            metrics = {"ttft_s": 0.1, "cached_share": cached / 100, "prefill_tokens": 100 - cached}
            taken.append(sample(arm=arm, number=number, block=number // 2, metrics=metrics))
    results = summarize(taken, facts={}, against="stock-lpm")
    said = "\n".join(results["verdict"])
    assert "prompt tokens found cached: ours is 0.575 higher than stock-lpm" in said
    assert "prompt tokens computed: ours is 57.5 tokens lower than stock-lpm" in said
    arms, ratios, _ = (table["rows"] for table in results["tables"])
    assert [(row["arm"], row["cached"]) for row in arms] == [("stock-lpm", 0.25), ("ours", 0.25)]
    assert [row["of"] for row in ratios] == ["mean ratio", "medians", "p90"]
    assert {row["value and interval"] for row in ratios} == {"1.00 [1.00, 1.00]"}


def test_table_shows_arms_cells_and_ratios() -> None:
    assert summarize([], facts={}, against="ours")["cells"] == []
    samples = [
        sample(arm=arm, number=n, cell={"k": 5}) for arm in ("stock-lpm", "ours") for n in range(8)
    ]
    samples += [sample(number=9, error="x", metrics={}, cell={"k": 5}, completion_tokens=None)]
    facts = {"overhead": {"k=5/ours": {"share": 0.001}}}
    results = summarize(samples, facts=facts, against="stock-lpm")
    assert [row["overhead_share"] for row in results["cells"]] == [None, 0.001]
    arms, ratios, rates = (table["rows"] for table in results["tables"])
    shown = [(row["arm"], row["cell"], row["n"], row["errors"]) for row in arms]
    assert shown == [("stock-lpm", "k 5", 8, None), ("ours", "k 5", 8, 1)]
    assert {row["value and interval"] for row in ratios + rates} == {"1.00, too few"}
    assert "stock-lpm / ours" in text(results["tables"])


def bystanders(arm: str, block: int, *gaps: float) -> dict[str, Any]:
    """A block's sample of the streams that only decode."""
    figures = {"itl_bystander_p50_s": gaps[0], "itl_bystander_p99_s": max(gaps)}
    about = {"arm": arm, "cell": {}, "request": f"bystanders:{block}", "block": block}
    times = {"due_s": 0.0, "done_s": 1.0, "warm_up": False, "gaps_s": list(gaps)}
    return {**about, **times, "metrics": figures}


def test_bystanders_are_compared_with_arms_that_move_nothing() -> None:
    """With the usual one, and with ours without moved KV; they are no requests of the load."""
    unmoved = MOVED | {"relocated": 0, "recomputed": 0}
    arms = (("stock-lpm", 0.04, None), ("ours", 0.05, unmoved), ("fused", 0.2, MOVED))
    taken = []
    for block in range(10):
        for arm, longest, fates in arms:
            taken += [
                sample(arm, block, block=block, fates=fates),
                bystanders(arm, block, 0.02, longest),
            ]
    results = summarize(taken, facts={}, against="stock-lpm")
    contrasts = [c for c in results["contrasts"] if c["metric"] == "itl_bystander_p99_s"]
    assert {(c["a"], c["b"]): round(c["value"], 2) for c in contrasts} == {
        ("stock-lpm", "ours"): 0.8,
        ("stock-lpm", "fused"): 0.2,
        ("ours", "fused"): 0.25,
    }
    assert {c["num_blocks"] for c in contrasts} == {10}
    row = results["cells"][2]
    assert (row["n"], row["bystanders"]["n"], row["bystanders"]["max_s"]) == (10, 20, 0.2)
    slower = "only decode, p99) is 5.00 times slower than stock-lpm"
    assert sum(slower in line for line in results["verdict"]) == 1
