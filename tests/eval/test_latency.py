"""Figures of a load as pure functions of its samples."""

from __future__ import annotations

from typing import Any

import pytest

from eval.serve.latency import cells, loaded_s, summarize, table, throughput


def sample(arm: str = "ours", number: int = 0, ttft: float = 0.1, **other: Any) -> dict[str, Any]:
    """An answered request; the n-th begins n seconds into its arm's load and takes half a second."""
    base = {
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
    }
    return base | other


def test_cells_are_one_row_for_each_arm_and_setting() -> None:
    rows = cells([sample(cell={"k": k}, arm=arm, number=n) for k in (1, 2) for n in (0, 1) for arm in ("a", "b")])
    assert [(row["arm"], row["cell"], row["n"]) for row in rows] == [
        ("a", {"k": 1}, 2),
        ("b", {"k": 1}, 2),
        ("a", {"k": 2}, 2),
        ("b", {"k": 2}, 2),
    ]


def test_times_are_quantiles_with_an_interval_of_the_median() -> None:
    (row,) = cells([sample(number=n, ttft=0.1 * (n + 1)) for n in range(9)])
    figures = row["metrics"]["ttft_s"]
    assert figures["mean"] == pytest.approx(0.5)
    assert figures["p50"] == pytest.approx(0.5)
    assert figures["p90"] == pytest.approx(0.82)
    assert figures["low"] < 0.5 < figures["high"]


def test_interval_of_a_cell_draws_whole_blocks() -> None:
    """A block that was slow was slow for all of its requests: they are one witness, unless there are too few blocks."""
    widths = []
    for size in (10, 20):
        taken = [sample(number=n, block=n // size, ttft=0.1 + 0.1 * (n // 10 % 4)) for n in range(120)]
        figures = cells(taken)[0]["metrics"]["ttft_s"]
        widths.append(figures["high"] - figures["low"])
    blocked, single = widths
    assert blocked > 1.9 * single


def test_few_blocks_are_named_not_called_no_difference() -> None:
    """Four blocks cannot show anything, so they have not shown that arms are alike."""
    taken = [sample(arm=arm, number=n, block=n // 20) for n in range(80) for arm in ("stock-lpm", "ours")]
    (said,) = summarize(taken, facts={}, against="stock-lpm")["verdict"]
    assert "too few blocks of requests: 4; give --requests >= 160" in said


def test_warm_up_counts_nowhere() -> None:
    """The first requests pay for what the server builds once."""
    warm = sample(number=0, ttft=99.0, warm_up=True)
    (row,) = cells([warm, sample(number=2), sample(number=3)])
    assert row["n"] == 2
    assert row["metrics"]["ttft_s"]["p99"] == 0.1
    assert row["fates"]["computed"] == 150
    assert row["throughput"]["requests_per_s"] == pytest.approx(2 / 1.5)
    assert summarize([warm], facts={}, against="ours")["num_warm_up"] == 1


def test_failed_requests_are_errors_and_have_no_times() -> None:
    failed = sample(number=1, error="HTTP 500", metrics={}, fates=None, prompt_tokens=None, cached_tokens=None)
    (row,) = cells([sample(), failed])
    assert (row["n"], row["errors"]) == (1, 1)
    assert row["throughput"]["requests_per_s"] == pytest.approx(1 / 1.5), "the time it took is load all the same"


def test_throughput_counts_the_time_the_arm_was_loaded() -> None:
    """Between an arm's blocks another arm is measured, and the arm's clock stops; a pause inside a block is part of the load."""
    taken = [sample(number=n) for n in range(4)]
    assert loaded_s(taken) == 1.5 + 1.5
    assert throughput(taken) == {
        "requests_per_s": pytest.approx(4 / 3),
        "output_tokens_per_s": pytest.approx(16 / 3),
        "prompt_tokens_per_s": pytest.approx(400 / 3),
    }


def test_server_that_counts_no_tokens_has_no_token_figures() -> None:
    """Zero would read as a measurement."""
    (row,) = cells([sample(cached_tokens=None, prompt_tokens=None, completion_tokens=None, fates=None)])
    assert row["fates"] is None
    assert row["cached_share"] is None
    assert row["throughput"]["output_tokens_per_s"] is None
    assert row["throughput"]["requests_per_s"] == 2.0


def test_cached_share_is_over_all_tokens() -> None:
    """A mean over requests would give short prompts too much weight."""
    (row,) = cells([sample(fates=None), sample(number=1, prompt_tokens=300, cached_tokens=0, fates=None)])
    assert row["cached_share"] == 25 / 400


def test_recomputed_tokens_are_not_cached() -> None:
    """SGLang counts recomputed tokens as cached, since they are in the cache's slots: more recomputing would look cheaper."""
    fates = {"exact": 10, "relocated": 15, "recomputed": 60, "computed": 15}
    (row,) = cells([sample(cached_tokens=85, fates=fates)])
    assert row["cached_share"] == 0.25


def test_every_arm_is_compared_with_one_in_each_cell() -> None:
    samples = [
        sample(arm=arm, number=n, cell={"rate": rate}, ttft=ttft * (1 + 0.01 * n))
        for rate in (1, 2)
        for n in range(24)
        for arm, ttft in (("stock-lpm", 0.3), ("ours", 0.1), ("craft", 0.3))
    ]
    results = summarize(samples, facts={"servers": {"ours": {}}}, against="stock-lpm")
    found = {(c["b"], c["cell"]["rate"], c["metric"], c["statistic"]): c for c in results["contrasts"]}
    assert len(found) == 2 * 2 * 2 * 2
    assert found["ours", 1, "ttft_s", "ratio of medians"]["value"] == pytest.approx(3.0)
    assert found["craft", 2, "ttft_s", "ratio of p90"]["value"] == pytest.approx(1.0)
    assert len(results["verdict"]) == 4, "only where the interval leaves out 1: ours, both rates, both statistics"
    assert all(line.startswith("ours reaches the first token 3.00 times faster") for line in results["verdict"])
    assert results["servers"] == {"ours": {}}


def test_verdict_tells_of_the_cache_and_the_table_of_times() -> None:
    """Faster for which reason: an arm that computes less."""
    taken = []
    for number in range(16):
        for arm, cached in (("stock-lpm", 20 + number), ("ours", 70 + 2 * number)):
            metrics = {"ttft_s": 0.1, "cached_share": cached / 100, "prefill_tokens": 100 - cached}
            taken.append(sample(arm=arm, number=number, block=number // 2, metrics=metrics))
    results = summarize(taken, facts={}, against="stock-lpm")
    said = "\n".join(results["verdict"])
    assert "prompt tokens found cached: ours is 0.575 higher than stock-lpm" in said
    assert "prompt tokens computed: ours is 57.5 tokens lower than stock-lpm" in said
    assert len(table(results).splitlines()) == 3 + 2, "two ratios of ttft_s below header and arms"


def test_nothing_taken_yet_has_results() -> None:
    """An interruption before the first sample still leaves a record."""
    assert summarize([], facts={}, against="ours")["cells"] == []


def test_table_shows_arms_cells_and_ratios() -> None:
    samples = [sample(arm=arm, number=n, cell={"k": 5}) for arm in ("stock-lpm", "ours") for n in range(8)]
    samples += [sample(number=9, error="x", metrics={}, cell={"k": 5}, completion_tokens=None)]
    lines = table(summarize(samples, facts={}, against="stock-lpm")).splitlines()
    assert lines[0].split()[:4] == ["arm", "cell", "n", "errors"]
    assert lines[2].split()[:4] == ["ours", "k=5", "8", "1"]
    assert any(line.startswith("ttft_s stock-lpm / ours, ratio of medians: 1.00 too few n=8") for line in lines)
