"""The micro-benchmark runs, at a small size, and reports what it promises. Its times depend on the machine; its sizes do not."""

import json

import pytest

from eval.bench.tree import main

pytestmark = pytest.mark.nightly


def test_bench_reports_times_and_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    """The last line is JSON; sizes are plausible even of a small tree."""
    assert main(["--nodes", "2000", "--decisions", "50", "--table-requests", "200"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    for name in ("topics_k10", "permutations_k10", "wide_k100"):
        assert 0 < report[name]["p50_us"] <= report[name]["p99_us"]
    assert report["permutations_k10"]["mean_held_len"] > 5
    for shape in ("topics", "permutations", "chains"):
        assert 100 < report[f"{shape}_bytes_per_node"] < 500
    assert report["topics_table_bytes"] < 1_000_000
