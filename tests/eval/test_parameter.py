"""`serve --parameter`: the sweep of one setting, and the expected hits next to the measured ones. No server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main
from eval.errors import CommandError
from eval.run import Run
from eval.serve import command as serve
from eval.serve.arms import ARMS, server_flags
from eval.serve.command import PARAMETERS, parse
from eval.serve.latency import lane_name, summarize
from eval.serve.plan import Cell, Plan
from eval.serve.server_pool import key_of
from eval.task import Request, TextChunk

POOL = 1000
PROMPT, ANSWER, CHUNKS = 45, 5, 2


def sample(arm: str, cell: Cell, number: int, *, warm_up: bool = False, hits: int | None = 1) -> dict[str, Any]:
    """As the runner takes them; the prompt is always as long."""
    return {
        "arm": arm,
        "cell": dict(cell.label),
        "request": cell.requests[number].id,
        "warm_up": warm_up,
        "block": 0,
        "due_s": float(number),
        "done_s": number + 0.5,
        "prompt_tokens": PROMPT,
        "cached_tokens": 0,
        "completion_tokens": ANSWER,
        "num_chunks": CHUNKS,
        "fates": None,
        "metrics": {"ttft_s": 0.1 + 0.01 * number, "e2e_s": 0.5},
        "chunkcache": {"chunks_hit": hits},
    }


def fake_measure(run: Run, plan: Plan, cells: Sequence[Cell]) -> None:
    """Every request finds one of its two chunks, whatever it asks."""
    for cell in cells:
        for arm in plan.arms:
            flags = server_flags(arm, [*plan.server_flags, *cell.flags])
            plan.facts.setdefault("servers", {})[str(key_of(arm, cell))] = {
                "max_total_num_tokens": POOL,
                "flags": flags,
            }
            for number in range(len(cell.requests)):
                taken = sample(arm.name, cell, number, warm_up=number < plan.warm_up)
                run.add(f"{lane_name(cell.label, arm.name)}/{number}", taken)


@contextmanager
def no_model(args: Any, requests: Any, flags: Sequence[str]) -> Iterator[list[str]]:
    yield list(flags)


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A trace of one request over and over, and a measurement that starts nothing."""
    monkeypatch.setattr(serve, "measure", fake_measure)
    monkeypatch.setattr(serve, "model_flags", no_model)
    path = tmp_path / "trace.jsonl"
    path.write_text('{"passages": ["a", "b"], "lengths": [4, 4]}\n' * 20)
    return path


def run(trace: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(results, record) of a run that must succeed."""
    out = trace.parent / "run"
    assert main(["serve", "--task", "trace", "--data", str(trace), "--out", str(out), *options]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    record = json.loads((out / "record.json").read_text())
    assert record["results"] == results
    return results, record


def test_a_run(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Threshold 30 is never reached in 20 requests: CRAFT's server then inserts nothing, and a replay says so."""
    results, record = run(trace, capsys, "--parameter", "threshold", "--values", "1", "30", "--warm-up", "4")
    assert (record["kind"], record["complete"], record["spec"]["parameter"]) == ("serve", True, "threshold")
    assert [(row["arm"], row["cell"]) for row in results["cells"]] == [
        ("craft", {"threshold": 1}),
        ("craft", {"threshold": 30}),
    ]
    assert [row["n"] for row in results["cells"]] == [16, 16]
    assert [row["hit_share"] for row in results["cells"]] == [0.5, 0.5]
    assert [row["metrics"]["expected_hit_share"] for row in results["cells"]] == [{"mean": 1.0}, {"mean": 0.0}]


def test_only_servers_that_tell_and_replay_have_hits(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Moved KV is no prefix, and stock SGLang has no chunks."""
    options = ("--parameter", "k", "--values", "1", "2", "--arms", "stock-lpm", "ours", "fused")
    results, _ = run(trace, capsys, *options)
    expected = {
        (row["arm"], row["cell"]["k"]): row["metrics"].get("expected_hit_share", {}).get("mean")
        for row in results["cells"]
    }
    assert expected == {
        (arm, k): 1.0 if arm == "ours" else None for arm in ("stock-lpm", "ours", "fused") for k in (1, 2)
    }


def test_flags_of_all_servers_are_replayed(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Otherwise the figure would be that of another server: one that promotes at the tenth access finds nothing of it here."""
    options = ("--parameter", "k", "--values", "1", "2", "--arms", "craft", "--", "--chunkcache-promotion-threshold=30")
    results, _ = run(trace, capsys, *options)
    assert [row["metrics"]["expected_hit_share"] for row in results["cells"]] == [{"mean": 0.0}] * 2


def test_later_turns_are_counted_on_neither_side() -> None:
    """Of a later turn the server counts the first turn's chunks, found again: that is no hit of this turn's."""
    first, later, alone = (
        Request(f"t:{n}", "?", tuple(TextChunk(x, x) for x in names), conversation=talk)
        for n, (names, talk) in enumerate([("ab", "c"), ("cd", "c"), ("aab", None)])
    )
    cell = Cell({}, [first, later, alone])
    samples = [sample("ours", cell, number, hits=hits) for number, hits in enumerate((0, 2, 1))]
    flags = server_flags(ARMS["ours"], [])
    facts = {"servers": {"ours": {"flags": flags}}}
    (row,) = summarize(samples, facts=facts, against="ours", arms=[ARMS["ours"]], cells=[cell])["cells"]
    assert row["hit_share"] == 1 / 4
    assert row["metrics"]["hit_share"] == {"mean": 1 / 4}
    assert row["metrics"]["expected_hit_share"] == {"mean": 2 / 4}


def test_the_pool_counts_in_chunks() -> None:
    """1,000 tokens hold 20 requests of 50 tokens with two chunks each: 40 chunks. Failed requests count nowhere."""
    requests = [
        Request(f"t:{n}", "?", tuple(TextChunk(x, x) for x in names)) for n, names in enumerate(["ab", "cd", "ab"])
    ]
    cell = Cell({"window": 10}, requests, flags=("--chunkcache-window-requests", "10"))
    samples = [
        sample("ours", cell, 0, warm_up=True, hits=0),
        sample("ours", cell, 1),
        sample("ours", cell, 2, hits=None),
    ]
    samples.append({**sample("ours", cell, 1), "error": "HTTP 500", "metrics": {}, "prompt_tokens": None})
    server = {"max_total_num_tokens": POOL, "flags": server_flags(ARMS["ours"], cell.flags)}
    facts = {"servers": {str(key_of(ARMS["ours"], cell)): server}}
    (row,) = summarize(samples, facts=facts, against="ours", arms=[ARMS["ours"]], cells=[cell])["cells"]
    assert row["pool_chunks"] == 40
    assert row["hit_share"] == 0.5
    assert row["metrics"]["expected_hit_share"] == {"mean": 0.5}
    server["max_total_num_tokens"] = 50
    (row,) = summarize(samples, facts=facts, against="ours", arms=[ARMS["ours"]], cells=[cell])["cells"]
    assert (row["pool_chunks"], row["metrics"]["expected_hit_share"]) == (2, {"mean": 0.0})


@pytest.mark.parametrize(("name", "parameter"), [(n, p) for n, p in PARAMETERS.items() if p.values])
def test_defaults(name: str, parameter: Any) -> None:
    """Values of the papers, arms to which they mean something; every one of them an arm there is."""
    args = parse(["--parameter", name])
    assert getattr(args, parameter.option) == list(parameter.values)
    assert args.arms == list(parameter.arms)
    assert set(parameter.arms) <= ARMS.keys()


def test_a_rate_needs_values_and_an_open_loop() -> None:
    """Rates have no default, since they depend on the machine; the user's kind of load counts."""
    with pytest.raises(CommandError, match="--parameter rate needs --values"):
        parse(["--parameter", "rate"])
    args = parse(["--parameter", "rate", "--values", "1", "2.5"])
    assert (args.rate, args.load) == ([1.0, 2.5], "poisson")
    args = parse(["--parameter", "rate", "--values", "1", "2", "--load", "bursty", "--arms", "ours", "stock-fcfs"])
    assert (args.load, args.arms) == ("bursty", ["ours", "stock-fcfs"])


def test_flags_of_the_servers_go_through() -> None:
    """Flags after -- are SGLang's."""
    args = parse(["--parameter", "window", "--values", "10", "--requests", "30", "--", "--mem-fraction-static", "0.5"])
    assert (args.windows, args.requests, args.server_flags) == ([10], 30, ["--mem-fraction-static", "0.5"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--parameter", "window", "--arms", "stock-lpm"],
            "--windows needs an arm that starts a server with our cache",
        ),
        (["--parameter", "ratio", "--arms", "ours"], "--ratios needs an arm that moves KV"),
        (["--parameter", "k", "--values", "2", "2"], "a value is given twice"),
        (["--parameter", "batch", "--load", "poisson"], "--clients needs --load closed"),
        (["--values", "3"], "--values needs --parameter"),
    ],
)
def test_nonsense_gets_one_line(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Before any server is started."""
    assert main(["serve", *options]) == 2
    error = capsys.readouterr().err.strip()
    assert message in error
    assert "\n" not in error
