"""`python -m eval serve` against endpoints that are already there:
its record, its last line, and what it refuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pytest

from eval.errors import CommandError
from eval.packed import pack_results, unpack_results
from eval.run import Run, read_record, read_samples
from eval.serve.command import cells, main, make_plan, parse
from eval.serve.options import split_flags
from eval.serve.plan import Cell
from eval.serve.workload import days
from eval.task import Request, TextChunk
from tests.eval.fake_endpoint import FakeEndpoint, serving

Endpoints = tuple[FakeEndpoint, FakeEndpoint]


@pytest.fixture
def endpoints() -> Iterator[Endpoints]:
    """Slow enough to be interrupted."""
    with ExitStack() as stack:
        slow = stack.enter_context(serving(FakeEndpoint(delay_s=0.03)))
        yield slow, stack.enter_context(serving(FakeEndpoint(delay_s=0.01, chunk_cache=True)))


def options(endpoints: Endpoints, folder: Path, *more: str) -> list[str]:
    """A small run over both."""
    arms = [f"theirs={endpoints[0].url}", f"ours={endpoints[1].url}/v1/"]
    return ["--arms", *arms, "--requests", "24", "--warm-up", "4", "--out", str(folder), *more]


def results_of(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The last line of stdout."""
    return dict(json.loads(capsys.readouterr().out.splitlines()[-1]))


def test_run_leaves_a_record_a_table_and_results(
    endpoints: Endpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    endpoints[0].delay_s = 0.1
    assert main(options(endpoints, tmp_path / "r")) == 0
    out = capsys.readouterr().out
    results, record = json.loads(out.splitlines()[-1]), read_record(tmp_path / "r")
    assert record["complete"] is True
    assert record["results"] == unpack_results(pack_results(results))
    assert [(cell["arm"], cell["n"]) for cell in results["cells"]] == [("theirs", 20), ("ours", 20)]
    assert {(row["a"], row["b"]) for row in results["contrasts"]} == {("theirs", "ours")}
    told = [line for line in results["verdict"] if "ours reaches the first token" in line]
    assert "faster" in told[0]
    assert "ttft p50" in out
    samples = read_samples(tmp_path / "r")
    assert len(samples) == 48
    assert len({sample["block"] for sample in samples if not sample["warm_up"]}) >= 8


def test_sweep_has_a_cell_for_every_combination(
    endpoints: Endpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = "--load poisson --rates 200 400 --ks 2 3"
    assert main(options(endpoints, tmp_path / "r", *sweep.split())) == 0
    results = results_of(capsys)
    assert [(each["chunks"], len(each["first"])) for each in results["density"]] == [(2, 2), (3, 3)]
    found = {(cell["cell"]["rate"], cell["cell"]["k"]) for cell in results["cells"]}
    assert found == {(200.0, 2), (200.0, 3), (400.0, 2), (400.0, 3)}
    samples = read_samples(tmp_path / "r")
    assert all(sample["num_chunks"] == sample["cell"]["k"] for sample in samples)


SLOW = [pytest.param(sign, marks=pytest.mark.nightly) for sign in (signal.SIGTERM, signal.SIGHUP)]


@pytest.mark.parametrize("sign", [signal.SIGINT, *SLOW])
def test_interrupted_run_leaves_a_valid_record_and_is_continued(
    endpoints: Endpoints,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    sign: signal.Signals,
) -> None:
    """Ctrl-C at any time costs at most a block."""
    argv = options(endpoints, tmp_path / "r")
    endpoints[0].delay_s = 0.3
    process = subprocess.Popen(
        [sys.executable, "-m", "eval", "serve", *argv],
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background job ignores SIGINT, and would hand that down.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 300
    while len(endpoints[0].received) < 7 and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(sign)
    _, told = process.communicate(timeout=300)
    assert process.returncode == 130, told
    assert told.splitlines()[-1] == "eval serve: interrupted"
    assert "Traceback" not in told
    record, kept = read_record(tmp_path / "r"), read_samples(tmp_path / "r")
    assert record["complete"] is False
    assert 4 <= len(kept) < 48
    endpoints[0].delay_s = 0.0
    assert main(argv) == 0
    results = results_of(capsys)
    samples = read_samples(tmp_path / "r")
    assert samples[: len(kept)] == kept
    assert len({sample["key"] for sample in samples}) == len(samples) == 48
    assert [part["samples"] for part in results["resumed_at"]] == [len(kept)]
    with pytest.raises(CommandError, match="complete"):
        main(argv)


def test_run_goes_on_with_the_same_requests_only(
    endpoints: Endpoints, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A data set that has changed since would be half of the record, and nothing would say so."""
    data = tmp_path / "trace.jsonl"
    data.write_text('{"passages": ["a", "b"], "lengths": [4, 4]}\n' * 24)
    argv = options(endpoints, tmp_path / "r", "--task", "trace", "--data", str(data))

    def interrupted(taken: Run, *_: Any) -> None:
        sample = {"arm": "theirs", "cell": {}, "request": "a", "warm_up": True, "metrics": {}}
        taken.add("a", sample)
        raise KeyboardInterrupt

    monkeypatch.setattr("eval.serve.command.measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        main(argv)
    spec = read_record(tmp_path / "r")["spec"]
    assert (len(spec["requests_sha256"]), spec["model_sha256"]) == (64, None)
    data.write_text('{"passages": ["a", "c"], "lengths": [4, 4]}\n' * 24)
    with pytest.raises(CommandError, match="other settings: requests_sha256"):
        main(argv)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ("--rate 1", "--rate needs --load poisson"),
        ("--load poisson --clients 2", "--clients needs --load closed"),
        ("--load poisson --rates 1 0", "--rate: 0.0 is not between 1e-06 and"),
        ("--load trace --speed nan", "--speed: nan is not between 1e-06 and"),
        ("--arms fused --ratios nan", "--ratios: nan is not between 0.0 and 1.0"),
        ("--load poisson --rates 2 2", "given twice"),
        ("--load trace", "arrival"),
        ("--ratios 0.1", "--ratios needs an arm that moves KV"),
        ("--windows 10", "--windows and --thresholds need"),
        ("--requests 10", "--warm-up 10 leaves none of 10"),
        ("--block -1", "--block: -1 is not between 0 and inf"),
        ("--against nobody", "not one of the arms"),
        ("--servers 2", "--servers 2 starts servers, but a runs already"),
        ("--servers 0", "--servers: 0 is not between 1 and"),
        ("--host-mib 5", "--host-mib is for the arm ours-host"),
        ("--restart", "--restart measures one arm that starts a server with our cache"),
        ("--restart --arms ours fused", "--restart measures one arm"),
        ("--days prompt --load trace", "the days have no times"),
        ("--restart --arms ours --warm-up 0", "--restart needs --warm-up N"),
        ("--restart --arms ours --clients 1 2", "--restart measures one cell"),
        ("--restart --arms ours --against stock-lpm", "not one of the arms: ours-cold"),
    ],
)
def test_nonsense_is_one_clear_line(tmp_path: Path, wrong: str, told: str) -> None:
    """And it is refused before a folder is made or a server started."""
    command = ["--arms", "a=http://127.0.0.1:9", "--requests", "30", "--out", str(tmp_path / "r")]
    with pytest.raises(CommandError, match=told) as error:
        main([*command, *wrong.split()])
    assert "\n" not in str(error.value)
    assert not (tmp_path / "r").exists()


@pytest.mark.parametrize(
    ("load", "requests", "block"),
    [
        ("--load closed", 210, 10),
        ("--load closed", 50, 5),
        ("--load closed", 12, 1),
        ("--clients 1 8", 50, 32),
        ("--load poisson", 50, 20),
        ("--load poisson", 810, 100),
        ("--block 0", 50, 0),
    ],
)
def test_block_leaves_enough_blocks_and_an_open_loop_its_queue(
    load: str, requests: int, block: int
) -> None:
    """A block of one request at a time would be a closed loop, whatever the rate."""
    assert make_plan(parse(load.split())[0], (), requests).block == block


def test_too_few_blocks_for_a_verdict_are_said_before_the_load(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An hour that can say nothing is not begun by mistake; the number is enough."""
    args, arms = parse(["--load", "poisson", "--warm-up", "10"])
    make_plan(args, arms, 100)
    assert (
        "too few blocks for a verdict: 5, less than 8; give --requests >= 170"
        in capsys.readouterr().err
    )
    make_plan(args, arms, 170)
    make_plan(args, arms[:1], 100)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("change", ["documents", "prompt"])
def test_every_day_has_the_same_requests_with_something_new(
    change: Literal["documents", "prompt"],
) -> None:
    chunks = TextChunk("a", "text"), TextChunk("b", "more")
    requests = [Request(f"r{n}", "why?", chunks, conversation="c", system="be brief") for n in "12"]
    found = days(requests, change)
    assert len({each.id for each in found}) == len(found) == 6
    of_days = [found[start : start + 2] for start in (0, 2, 4)]
    assert {each.question for each in found} == {"why?"}
    for name, is_new in ("chunks", change == "documents"), ("system", change == "prompt"):
        values = [{getattr(each, name) for each in day} for day in of_days]
        assert [len(each) for each in values] == [1, 1, 1]  # of a day they are the same
        assert len(set.union(*values)) == (3 if is_new else 1)
    assert len({each.conversation for each in found}) == 3


def test_only_what_is_swept_is_a_label() -> None:
    """Records of runs without a sweep can then be compared whatever their load."""

    def labels(options: str) -> list[Any]:
        return [cell.label for cell in cells_of(options)]

    def cells_of(options: str) -> list[Cell]:
        return cells(parse(options.split())[0], {None: ()})

    assert labels("--load poisson --rates 2") == [{}]
    assert labels("--servers 2") == [{"server": 1}, {"server": 2}]
    swept = cells_of("--clients 1 4 --ratios .5 --arms fused")
    assert [(cell.label, cell.load.clients, cell.reuse) for cell in swept] == [
        ({"clients": clients, "ratio": 0.5}, clients, {"ratio": 0.5}) for clients in (1, 4)
    ]
    (window,) = cells_of("--windows 10")
    assert (window.label, window.flags) == ({"window": 10}, ("--chunkcache-window-requests", "10"))


def test_flags_behind_the_dashes_are_the_servers() -> None:
    assert split_flags(["--k", "3", "--", "--page-size", "1", "--"]) == (
        ["--k", "3"],
        ["--page-size", "1", "--"],
    )
    assert parse(["--k", "3", "--", "--page-size", "1"])[0].server_flags == ["--page-size", "1"]


def test_requests_own_times_are_not_left_out_without_a_word(
    endpoints: Endpoints, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor are chunks; and one arm alone is compared with nothing."""
    data = tmp_path / "trace.jsonl"
    row = '{"passages": ["a", "b"], "lengths": [4, 4], "timestamp": %d}\n'
    data.write_text("".join(row % number for number in range(12)))
    argv = [*options(endpoints, tmp_path / "r", "--task", "trace", "--data", str(data)), "--k", "1"]
    assert main([*argv, "--arms", f"ours={endpoints[1].url}"]) == 0
    out, told = capsys.readouterr()
    assert "--load trace does" in told
    assert "--k 1 takes chunks from 12 of 12 requests" in told
    assert "ompared" not in out
    assert "/ ours" not in out
