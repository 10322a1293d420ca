"""`python -m eval compare` on runs that are made up."""

from __future__ import annotations

import json
from collections.abc import Callable
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

Compare = Callable[..., tuple[int, str, dict[str, Any]]]
GRID = ("--order", "retriever", "tree")


@pytest.fixture
def compare(capsys: pytest.CaptureFixture[str]) -> Compare:
    """Exit code, what a person reads, and the last line's JSON."""

    def run(*args: object) -> tuple[int, str, dict[str, Any]]:
        code = main(["compare", *map(str, args)])
        text = capsys.readouterr().out
        return code, text, json.loads(text.splitlines()[-1])

    return run


@pytest.fixture
def stock_and_ours(tmp_path: Path) -> Callable[[int], Path]:
    def write(requests: int) -> Path:
        samples = make_served({"stock-lpm": 9.0, "ours": 1.0}, requests=requests)
        return write_served(tmp_path / str(requests), samples, against="stock-lpm")

    return write


def test_two_runs_pair_the_same_arm_cell_and_request(tmp_path: Path, compare: Compare) -> None:
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
    code, text, found = compare(tmp_path / "a", tmp_path / "b" / "record.json")
    assert code == 0
    assert [(c["a"], c["b"], c["metric"], c["n"], c["value"]) for c in found["contrasts"]] == [
        ("ours in A", "ours in B", "ttft_s", 37, 2.0)
    ] * 3
    assert {(c["asked_a"], c["asked_b"]) for c in found["contrasts"]} == {(38, 38)}
    assert "ours in B reaches the first token 2.00 times faster than ours in A" in text
    assert "not interleaved" in text


def test_what_differs_between_two_runs_is_told(tmp_path: Path, compare: Compare) -> None:
    samples = make_served({"ours": 1.0}, requests=12)
    write_served(tmp_path / "a", samples, against="ours")
    servers = {"servers": {"ours": {"model": "random", "device": "cuda"}}}
    more: dict[str, Any] = {
        "machine": {"cores": 16, "processor": "x86_64", "gpu": "H100"},
        "versions": {"sglang": "0.5.22", "torch": None},
        "spec": {"seed": 4, "warm_up": 2},
    }
    results = summarize(samples, against="ours") | servers
    write_run(tmp_path / "b", "serve", samples, results, **more)
    _, text, found = compare(tmp_path / "a", tmp_path / "b")
    assert {
        "machine cores: 2 in A, 16 in B",
        "versions sglang: 0.5.21 in A, 0.5.22 in B",
        "spec seed: 3 in A, 4 in B",
        "server ours device: cpu in A, cuda in B",
    } <= set(found["differs"])
    assert "The runs differ in:" in text
    assert found["verdict"] == ["No verdict: the runs are of different requests: seed differ."]


def test_arms_of_one_run_beside_the_usual_baseline(tmp_path: Path, compare: Compare) -> None:
    samples = make_served({"ours": 1.0, "stock-lpm": 2.0, "craft": 1.5})
    run = write_served(tmp_path / "a", samples, against="stock-lpm")
    contrasts = compare(run, "--metric", "ttft_s")[2]["contrasts"]
    assert {(c["a"], c["b"], c["metric"]) for c in contrasts} == {
        ("stock-lpm", "ours", "ttft_s"),
        ("stock-lpm", "craft", "ttft_s"),
    }
    assert {c["a"] for c in compare(run, "--against", "craft")[2]["contrasts"]} == {"craft"}


def test_default_arm_has_cells_in_common_with_another(
    tmp_path: Path, compare: Compare, capsys: pytest.CaptureFixture[str]
) -> None:
    """`quality` computes full prefill once, in a cell of its own; --metric counts, too."""
    samples = make_served({"full-prefill": 1.0})
    for sample in samples:
        sample["metrics"]["kl"] = 1.0
    samples += make_served({"full-reuse": 1.0}, cells=[{"ratio": 0.0}])
    samples += make_served({"first": 2.0, "context": 1.0}, cells=[{"ratio": 0.1}, {"ratio": 0.2}])
    run = write_served(tmp_path / "a", samples, against="first")
    found = compare(run, "--metric", "ttft_s")[2]
    assert {(c["a"], c["b"], c["cell"]["ratio"]) for c in found["contrasts"]} == {
        ("first", "context", 0.1),
        ("first", "context", 0.2),
    }
    for args in (["--against", "full-prefill"], ["--metric", "kl"]):
        assert main(["compare", str(run), *args]) == 2
        error = capsys.readouterr().err
        assert "with --against: 'full-prefill', 'full-reuse', 'first', 'context'" in error


def test_fail_if_worse_is_for_ci(tmp_path: Path, compare: Compare) -> None:
    slow, fast = (
        write_served(tmp_path / str(pace), make_served({"ours": pace}), against="ours")
        for pace in (2.0, 1.0)
    )
    assert compare(fast, slow, "--metric", "ttft_s", "--fail-if-worse")[0] == 1
    assert compare(slow, fast, "--metric", "ttft_s", "--fail-if-worse")[0] == 0
    assert compare(fast, slow, "--metric", "ttft_s")[0] == 0


def test_failed_requests_are_counted_not_compared(tmp_path: Path, compare: Compare) -> None:
    samples = make_served({"stock-lpm": 1.0}, requests=20)
    samples += make_served({"ours": 1.0}, requests=20)[10:] + make_failed("ours", 10)
    _, text, found = compare(write_served(tmp_path / "a", samples, against="stock-lpm"))
    counts = ("n", "asked_a", "failed_a", "asked_b", "failed_b")
    assert {tuple(c[name] for name in counts) for c in found["contrasts"]} == {(10, 18, 0, 20, 10)}
    assert "No verdict: ours failed 10 of 20, stock-lpm failed 0 of 18" in text


@pytest.mark.parametrize(("requests", "said"), [(7, "requests: 5"), (20, "blocks of requests: 5")])
def test_too_few_have_no_verdict(
    requests: int, said: str, compare: Compare, stock_and_ours: Callable[[int], Path]
) -> None:
    _, text, found = compare(stock_and_ours(requests), "--metric", "ttft_s")
    (verdict,) = found["verdict"]
    assert f"3 of 3 comparisons: too few {said}; give --requests >=" in verdict
    assert "No difference" not in text


def test_replay_policies_are_arms(tmp_path: Path, compare: Compare) -> None:
    run = write_replay(tmp_path / "a")
    _, text, found = compare(run)
    assert [(c["cell"], c["a"], c["b"], c["n"]) for c in found["contrasts"]] == [
        ({"capacity": size}, "retriever", "tree", 120) for size in (0, 1000, 50)
    ]
    assert "no limit" in text
    said = read_record(run)["results"]["contrasts"]
    for one, other in zip(found["contrasts"], said, strict=True):
        assert (one["metric"], one["value"]) == (other["metric"], pytest.approx(other["value"]))
        assert one["high"] - one["low"] == pytest.approx(other["high"] - other["low"], rel=0.4)
    rows = list(map(json.loads, (run / "samples.jsonl").read_text().splitlines()))
    assert any(sum(row["lost"]) for row in rows if "cell" in row), "they could not differ"


def test_replay_with_another_block_has_another_interval(tmp_path: Path, compare: Compare) -> None:
    """--block is the user's word on how far neighbours are alike; compare holds itself to it."""
    runs = [write_replay(tmp_path / block, *GRID, "--block", block) for block in ("1", "10")]
    assert [compare(run)[2]["contrasts"][0]["num_blocks"] for run in runs] == [120, 12]


@pytest.mark.parametrize(
    ("spec", "code", "differs"),
    [
        ({"requests_sha256": "2", "seed": 1}, 0, "requests_sha256"),
        ({"requests_sha256": "1", "seed": 2}, 1, None),
        ({"seed": 2}, 0, "seed"),
    ],
)
def test_runs_of_other_requests_have_no_verdict(
    spec: dict[str, Any], code: int, differs: str | None, tmp_path: Path, compare: Compare
) -> None:
    """`hotpotqa:7` of another seed or file is another question; the digest settles it."""
    known = {"requests_sha256": "1", "seed": 1}
    a, b = (
        write_served(tmp_path / name, make_served({"ours": pace}), against="ours", spec=told)
        for name, pace, told in (("a", 1.0, known), ("b", 3.0, spec))
    )
    found = compare(a, b, "--fail-if-worse")
    assert found[0] == code
    assert len(found[2]["contrasts"]) > 0
    assert (f"No verdict: the runs are of different requests: {differs}" in found[1]) != code


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nothing"], "holds no record.json"),
        (["one"], "give a second record, or another of the arms of one with --against: 'ours'"),
        (["9", "--against", "vllm"], "--against: 'stock-lpm', 'ours'"),
        (["9", "--metric", "speed"], "measured: e2e_s, hit_share, itl_s, ttft_s"),
        (["9", "replay"], "no request was answered on both sides"),
        (["bench"], "no request was answered on both sides"),
        (["old"], "has no kind"),
        (["broken"], "were not written by `python -m eval`"),
    ],
)
def test_nonsense_gets_one_clear_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    stock_and_ours: Callable[[int], Path],
    args: list[str],
    message: str,
) -> None:
    stock_and_ours(9)
    write_served(tmp_path / "one", make_served({"ours": 1.0}, requests=9), against="ours")
    write_replay(tmp_path / "replay")
    write_run(tmp_path / "bench", "bench", [], {"verdict": []}, spec={"bench": "tree"})
    broken = {"kind": "serve", "versions": {}, "machine": {}, "spec": {}}
    for name, record in (("nothing", None), ("old", {"name": "ttft"}), ("broken", broken)):
        (tmp_path / name).mkdir()
        if record:
            (tmp_path / name / "record.json").write_text(json.dumps(record))
    paths = [str(tmp_path / arg) if (tmp_path / arg).exists() else arg for arg in args]
    assert main(["compare", *paths]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
