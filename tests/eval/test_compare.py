"""`python -m eval compare` on runs that are made up. Run: pytest tests/eval/test_compare.py"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main
from eval.run import read_record
from tests.eval.made_runs import (
    make_failed,
    make_served,
    summarize,
    write_replay,
    write_run,
    write_served,
)


def compare(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, dict[str, Any]]:
    """Exit code, what a person reads, and the last line's JSON."""
    code = main(["compare", *map(str, args)])
    text = capsys.readouterr().out
    return code, text, json.loads(text.splitlines()[-1])


def test_two_runs_pair_the_same_arm_cell_and_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """B is exactly twice as fast on what both have; what only one has must not move the figure."""
    a = make_served({"ours": 1.0, "stock-lpm": 2.0}, requests=40)
    b = [
        {**s, "metrics": {"ttft_s": s["metrics"]["ttft_s"] / 2}}
        for s in a
        if s["arm"] == "ours" and s["request"] != "made:7"
    ]
    b += [{**b[0], "request": "only in b", "warm_up": False, "metrics": {"ttft_s": 999.0}}]
    write_served(tmp_path / "a", a, against="stock-lpm")
    write_served(tmp_path / "b", b, against="ours")
    code, text, found = compare(capsys, tmp_path / "a", tmp_path / "b" / "record.json")
    assert code == 0
    assert [(c["a"], c["b"], c["metric"], c["n"], c["value"]) for c in found["contrasts"]] == [
        ("ours in A", "ours in B", "ttft_s", 37, 2.0),
    ] * 3
    assert {(c["asked_a"], c["asked_b"]) for c in found["contrasts"]} == {(38, 38)}
    assert (
        "ours in B reaches the first token 2.00 times faster than ours in A at the median" in text
    )
    assert "not interleaved" in text


def test_what_differs_between_two_runs_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another machine or version explains a difference before reuse does."""
    samples = make_served({"ours": 1.0}, requests=12)
    write_served(tmp_path / "a", samples, against="ours")
    results = summarize(samples, against="ours") | {
        "servers": {"ours": {"model": "random", "device": "cuda"}}
    }
    machine, versions = (
        {"cores": 16, "processor": "x86_64", "gpu": "H100"},
        {"sglang": "0.5.22", "torch": None},
    )
    spec = {"seed": 4, "warm_up": 2}
    write_run(
        tmp_path / "b", "serve", samples, results, machine=machine, versions=versions, spec=spec
    )
    _, text, found = compare(capsys, tmp_path / "a", tmp_path / "b")
    assert "machine cores: 2 in A, 16 in B" in found["differs"]
    assert "versions sglang: 0.5.21 in A, 0.5.22 in B" in found["differs"]
    assert "spec seed: 3 in A, 4 in B" in found["differs"]
    assert "server ours device: cpu in A, cuda in B" in found["differs"]
    assert "The runs differ in:" in text
    assert found["verdict"] == ["No verdict: the runs are of different requests: seed differ."]
    assert "No verdict: the runs are of different requests: seed differ." in text


def test_arms_of_one_run_beside_the_usual_baseline(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --against the others are compared with stock SGLang,
    whatever its place in the run."""
    run = write_served(
        tmp_path / "a",
        make_served({"ours": 1.0, "stock-lpm": 2.0, "craft": 1.5}),
        against="stock-lpm",
    )
    _, _, found = compare(capsys, run, "--metric", "ttft_s")
    assert {(c["a"], c["b"]) for c in found["contrasts"]} == {
        ("stock-lpm", "ours"),
        ("stock-lpm", "craft"),
    }
    assert {c["metric"] for c in found["contrasts"]} == {"ttft_s"}
    _, _, found = compare(capsys, run, "--against", "craft")
    assert {c["a"] for c in found["contrasts"]} == {"craft"}


def test_default_arm_has_cells_in_common_with_another(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`quality` computes full prefill once, in a cell of its own; --metric counts, too."""
    samples = make_served({"full-prefill": 1.0})
    samples += make_served({"full-reuse": 1.0}, cells=[{"ratio": 0.0}])
    samples += make_served({"first": 2.0, "context": 1.0}, cells=[{"ratio": 0.1}, {"ratio": 0.2}])
    for sample in samples:
        sample["metrics"] |= {"kl": 1.0} if sample["arm"] == "full-prefill" else {}
    run = write_served(tmp_path / "a", samples, against="first")
    found = compare(capsys, run, "--metric", "ttft_s")[2]
    assert {(c["a"], c["b"], c["cell"]["ratio"]) for c in found["contrasts"]} == {
        ("first", "context", 0.1),
        ("first", "context", 0.2),
    }
    for args in (["--against", "full-prefill"], ["--metric", "kl"]):
        assert main(["compare", str(run), *args]) == 2
        error = capsys.readouterr().err
        assert "with --against: 'full-prefill', 'full-reuse', 'first', 'context'" in error
        assert error.count("\n") == 1


def test_fail_if_worse_is_for_ci(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 1 needs a verdict that B is worse, not any difference."""
    slow = write_served(tmp_path / "slow", make_served({"ours": 2.0}), against="ours")
    fast = write_served(tmp_path / "fast", make_served({"ours": 1.0}), against="ours")
    assert compare(capsys, fast, slow, "--metric", "ttft_s", "--fail-if-worse")[0] == 1
    assert compare(capsys, slow, fast, "--metric", "ttft_s", "--fail-if-worse")[0] == 0
    assert compare(capsys, fast, slow, "--metric", "ttft_s")[0] == 0


def test_failed_requests_are_counted_not_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An arm that fails half of its requests must not look fast on the other half without a
    word."""
    samples = make_served({"stock-lpm": 1.0, "ours": 1.0}, requests=20)
    samples = [
        s for s in samples if s["arm"] == "stock-lpm" or int(s["request"][5:]) >= 10
    ] + make_failed("ours", 10)
    _, text, found = compare(capsys, write_served(tmp_path / "a", samples, against="stock-lpm"))
    assert {c["n"] for c in found["contrasts"]} == {10}
    assert {
        (c["asked_a"], c["failed_a"], c["asked_b"], c["failed_b"]) for c in found["contrasts"]
    } == {(18, 0, 20, 10)}
    assert "No verdict: ours failed 10 of 20, stock-lpm failed 0 of 18" in text


def test_too_few_requests_have_no_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Five pairs are shown, not judged."""
    run = write_served(
        tmp_path / "a",
        make_served({"stock-lpm": 9.0, "ours": 1.0}, requests=7),
        against="stock-lpm",
    )
    _, text, found = compare(capsys, run, "--metric", "ttft_s")
    assert found["verdict"] == [
        "No verdict in 3 of 3 comparisons: too few requests: 5; give --requests >= 24 and the"
        " warm-up's."
    ]
    assert len(re.findall(r"too few +\d", text)) == 3
    assert "No difference" not in text


def test_few_blocks_have_no_interval(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Twenty requests in five stretches of time are five witnesses:
    neither a difference nor none."""
    run = write_served(
        tmp_path / "a",
        make_served({"stock-lpm": 9.0, "ours": 1.0}, requests=20),
        against="stock-lpm",
    )
    _, text, found = compare(capsys, run, "--metric", "ttft_s")
    assert len(found["verdict"]) == 1
    assert "too few blocks of requests: 5" in found["verdict"][0]
    assert len(re.findall(r"too few +\d", text)) == 3


def test_replay_policies_are_arms(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A replay has one row a cell; its requests pair up all the same, in each size,
    and compare says what replay said."""
    run = write_replay(tmp_path / "a")
    _, text, found = compare(capsys, run)
    assert [(c["cell"], c["a"], c["b"], c["n"]) for c in found["contrasts"]] == [
        ({"capacity": size}, "retriever", "tree", 120) for size in (0, 1000, 50)
    ]
    assert "no limit" in text
    said = read_record(run)["results"]["contrasts"]
    for one, other in zip(found["contrasts"], said, strict=True):
        assert (one["metric"], one["value"]) == (other["metric"], pytest.approx(other["value"]))
        assert one["high"] - one["low"] == pytest.approx(other["high"] - other["low"], rel=0.4)
    rows = list(map(json.loads, (run / "samples.jsonl").read_text().splitlines()))
    assert any(sum(row["lost"]) for row in rows if "cell" in row), (
        "or the case in which they could differ is not here"
    )


def test_replay_with_another_block_has_another_interval(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """--block is the user's word on how far neighbours are alike; compare holds itself to it."""
    grid = ("--order", "retriever", "tree")
    runs = [write_replay(tmp_path / block, *grid, "--block", block) for block in ("1", "10")]
    assert [compare(capsys, run)[2]["contrasts"][0]["num_blocks"] for run in runs] == [120, 12]


def test_bins_of_a_long_replay_have_the_same_shares_and_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trace of a million requests has an entry for many of them;
    a block is as many requests as in a short one."""
    run = write_replay(tmp_path / "a", "--order", "retriever", "tree", "--block", "10")
    single = compare(capsys, run)[2]["contrasts"][0]
    rows = list(map(json.loads, (run / "samples.jsonl").read_text().splitlines()))
    for row in rows:
        joined = {
            key: [*map(sum, zip(v[::2], v[1::2], strict=True))]
            for key, v in row.items()
            if isinstance(v, list)
        }
        row |= joined | {"bin": 2}
    (run / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    record = json.loads((run / "record.json").read_text()) | {"values": None}
    (run / "record.json").write_text(json.dumps(record))
    paired = compare(capsys, run)[2]["contrasts"][0]
    assert (single["n"], paired["n"], single["num_blocks"], paired["num_blocks"]) == (
        120,
        60,
        12,
        12,
    )
    assert [paired[key] for key in ("value", "low", "high")] == pytest.approx(
        [single[key] for key in ("value", "low", "high")]
    )


def test_runs_of_other_requests_have_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`hotpotqa:7` of another seed or file is another question:
    what the two have in common is a number."""
    samples = {name: make_served({"ours": slow}) for name, slow in (("a", 1.0), ("b", 3.0))}
    for name, spec in (
        ("a", {"requests_sha256": "1", "seed": 1}),
        ("b", {"requests_sha256": "2", "seed": 1}),
    ):
        write_served(tmp_path / name, samples[name], against="ours", spec=spec)
    write_served(
        tmp_path / "c", samples["b"], against="ours", spec={"requests_sha256": "1", "seed": 2}
    )
    write_served(tmp_path / "d", samples["b"], against="ours", spec={"seed": 2})
    code, text, found = compare(capsys, tmp_path / "a", tmp_path / "b", "--fail-if-worse")
    assert code == 0
    assert len(found["contrasts"]) > 0
    assert "No verdict: the runs are of different requests: requests_sha256 differ." in text
    assert compare(capsys, tmp_path / "a", tmp_path / "c", "--fail-if-worse")[0] == 1, (
        "the digest settles it"
    )
    code, text, _ = compare(capsys, tmp_path / "a", tmp_path / "d", "--fail-if-worse")
    assert (code, "different requests: seed differ" in text) == (0, True)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nothing"], "holds no record.json"),
        (["one"], "give a second record, or another of the arms of one with --against: 'ours'"),
        (["two", "--against", "vllm"], "--against: 'stock-lpm', 'ours'"),
        (["two", "--metric", "speed"], "measured: e2e_s, hit_share, itl_s, ttft_s"),
        (["two", "replay"], "no request was answered on both sides"),
        (["bench"], "no request was answered on both sides"),
        (["old"], "has no kind"),
        (["broken"], "were not written by `python -m eval`"),
        (["two", "other"], "no request was answered on both sides"),
    ],
)
def test_nonsense_gets_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], args: list[str], message: str
) -> None:
    """Exit code 2 and a line that says what was wrong, no traceback."""
    (tmp_path / "nothing").mkdir()
    write_served(tmp_path / "one", make_served({"ours": 1.0}, requests=9), against="ours")
    write_served(
        tmp_path / "two", make_served({"stock-lpm": 2.0, "ours": 1.0}, requests=9), against="ours"
    )
    write_served(tmp_path / "other", make_served({"a": 2.0, "b": 1.0}, requests=9), against="a")
    write_replay(tmp_path / "replay")
    write_run(tmp_path / "bench", "bench", [], {"verdict": []}, spec={"bench": "tree"})
    for name, record in (
        ("old", {"name": "ttft"}),
        ("broken", {"kind": "serve", "versions": {}, "machine": {}, "spec": {}}),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / "record.json").write_text(json.dumps(record))
    code = main(
        [
            "compare",
            *(
                arg if arg[0] == "-" or not (tmp_path / arg).exists() else str(tmp_path / arg)
                for arg in args
            ),
        ]
    )
    error = capsys.readouterr().err
    assert code == 2
    assert message in error
    assert error.count("\n") == 1
