"""The tree bench runs, at a small size, and reports what it promises."""

from pathlib import Path

import pytest

from eval.bench import tree
from eval.recorded import read_recorded

SMALL = ["--nodes", "2000", "--decisions", "50"]


@pytest.mark.nightly
def test_bench_reports_times_and_sizes(tmp_path: Path) -> None:
    assert tree.main([*SMALL, "--out", str(tmp_path)]) == 0
    run = read_recorded(tmp_path)
    times, sizes = (table["rows"] for table in run.results["tables"])
    assert [(row["requests"], row["k"]) for row in times] == [
        ("topics", 10),
        ("permutations", 10),
        ("permutations", 100),
    ]
    assert all(0 < row["p50_us"] <= row["p99_us"] for row in times)
    assert times[1]["held_len"] > 5
    assert [row["of"] for row in sizes] == ["node"] * 3 + ["access table"] * 2
    assert all(100 < row["bytes"] < 500 for row in sizes[:3])
    assert sizes[3]["bytes"] < 1_000_000


def test_interrupted_bench_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    argv = ["--nodes", "60", "--decisions", "5", "--out", str(tmp_path)]
    with monkeypatch.context() as patch:
        patch.setattr(tree, "traced_bytes", lambda build: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            tree.main(argv)
    before = read_recorded(tmp_path)
    assert (len(before.samples), before.record["complete"]) == (3, False)
    assert tree.main(argv) == 0
    after = read_recorded(tmp_path)
    assert (len(after.samples), after.record["complete"]) == (8, True)
    assert after.samples[:3] == before.samples
