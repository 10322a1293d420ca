"""`python -m eval replay` as a user runs it:
one cell, the comparison and its verdict, grids, folders, mistakes."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main
from eval.replay.exact import Replay
from eval.replay.ordering import TAIL_POLICIES
from eval.replay.task_trace import GENERATED_REQUESTS
from eval.run import read_record

Request = dict[str, Any]
Results = dict[str, Any]
RunReplay = Callable[..., Results]

TRACE: list[Request] = [
    {"passages": ["a", "b", "a"], "lengths": [5, 7, 5], "timestamp": 0.5},
    {"passages": []},
    {"chunks": ["b", "a", 7], "lengths": [7, 5, 3]},
    {"passages": ["7", "b"], "lengths": [3, 7], "id": 4},
]


def write_trace(path: Path, records: Sequence[Request]) -> Path:
    text = "\n".join(json.dumps(record) for record in records) + "\n\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def popular_sets(n: int, *, num_sets: int = 10) -> list[Request]:
    """Requests that share sets of chunks in turning order: reuse that only an order can find."""
    rng = random.Random(0)
    sets = [[f"s{number}-{i}" for i in range(5)] for number in range(num_sets)]
    return [{"passages": rng.sample(rng.choice(sets), 5)} for _ in range(n)]


def turn(conversation: int | str, *passages: str) -> Request:
    return {"passages": [*passages], "conversation": conversation}


@pytest.fixture
def replay(tmp_path: Path) -> RunReplay:
    """Replays requests into a folder of its own, which must succeed; its results."""
    numbers = itertools.count()

    def run(requests: Sequence[Request], options: str = "") -> Results:
        number = next(numbers)
        trace = write_trace(tmp_path / f"{number}.jsonl.gz", requests)
        folder = tmp_path / f"run-{number}"
        command = ["replay", "--trace", str(trace), "--out", str(folder)]
        assert main([*command, *options.split()]) == 0
        record = read_record(folder)
        assert (record["kind"], record["complete"]) == ("replay", True)
        return dict(record["results"])

    return run


def verdict_of(results: Results) -> str:
    """The sentence, if there is one."""
    return next((line for line in results["verdict"] if line.startswith("Verdict")), "")


def hits(results: Results) -> list[float]:
    return [cell["chunk_hit_rate"]["value"] for cell in results["cells"]]


def axis(results: Results, name: str) -> list[Any]:
    """A setting of each cell."""
    return [cell["cell"][name] for cell in results["cells"]]


def contrast(results: Results, a: str, b: str, capacity: int = 0) -> float:
    """The one of chunks saved."""
    (found,) = [
        c["value"]
        for c in results["contrasts"]
        if (c["a"], c["b"], c["cell"]["capacity"]) == (a, b, capacity)
    ]
    return float(found)


def test_report_has_hit_rate_and_settings(replay: RunReplay) -> None:
    """Repeats and empty requests left out. Ids 7 and "7" are one chunk."""
    (found,) = replay(TRACE, "--order tree")["cells"]
    counts = (found["num_requests"], found["num_chunks"], found["chunk_hit_rate"]["value"])
    assert counts == (3, 7, 2 / 7)
    assert {"order": "tree", "tail": "seen", "capacity": 0}.items() <= found["cell"].items()


def test_token_hits_are_told_where_every_request_has_lengths(replay: RunReplay) -> None:
    """One request without them, and token rates would mix units."""
    records = [record for record in TRACE if "lengths" in record]
    (found,) = replay(records, "--order tree")["cells"]
    assert found["token_hit_rate"]["value"] == 12 / 37
    (found,) = replay([*records, {"passages": ["a"]}], "--order tree")["cells"]
    assert found["token_hit_rate"] is None


def test_options_reach_the_replay(replay: RunReplay) -> None:
    """Each one changes what it names."""
    (found,) = replay(TRACE, "--order retriever --k 1 --max-requests 2 --capacity 1")["cells"]
    assert [found[name] for name in ("num_requests", "num_chunks", "peak_nodes")] == [2, 2, 1]
    assert found["chunk_hit_rate"]["value"] == 0
    few = "--order frequency --eviction promoted --window 1 --threshold 9"
    assert hits(replay(TRACE, few)) == [0]


@pytest.mark.parametrize("options", ["--order best", "--capacity -1", "--capacity many"])
def test_bad_options_end_with_code_2(capsys: pytest.CaptureFixture[str], options: str) -> None:
    with pytest.raises(SystemExit) as exit_info:
        main(["replay", "--trace", "trace.jsonl", *options.split()])
    assert exit_info.value.code == 2
    assert options.split()[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--trace bad.jsonl", "bad.jsonl, line 2: passages must be a list of strings or integers"),
        ("--trace t.jsonl --data .", "--data requires --task"),
        ("--generate 9 --components t.jsonl", "--components requires --trace"),
        ("--generate 9 --capacity 5 --capacity-tokens 5", "not both"),
        ("--trace t.jsonl --capacity-tokens 5", "needs a trace with lengths on every request"),
        ("--trace t.jsonl --host 5", "--host needs --capacity or --capacity-tokens"),
        (
            "--trace t.jsonl --capacity 5 --host 5 --host-worth 1.5",
            "--host-worth must be from 0 to 1 but got 1.5",
        ),
        ("--trace t.jsonl --ranks 2 --reuse fused", "--ranks is not replayed with --reuse fused"),
        ("--trace t.jsonl --at-once 8", "--at-once requires --task"),
        ("--trace t.jsonl --in-flight 8", "--in-flight needs --ranks 2 or more"),
        ("--trace t.jsonl --warm-up 120", "--warm-up 120 leaves none of 120 requests to measure"),
        (
            "--trace t.jsonl --block 13",
            "--block 13 leaves fewer than 10 blocks of 120 requests: give at most 12",
        ),
        ("--task sharegpt --data talks.json", "task sharegpt has no request with passages"),
        ("--generate 30 --k 51", "at most 50 chunks but --k is 51"),
        ("--sys-x 9 --block 13", "blocks of 9 requests"),
        ("--fusionrag 30 --k 501", "at most 500 chunks but --k is 501"),
    ],
)
def test_what_cannot_be_replayed_is_one_clear_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: str,
    message: str,
) -> None:
    """On stderr, exit code 2, nothing on stdout; mistakes in a trace are in test_trace.py."""
    monkeypatch.chdir(tmp_path)
    write_trace(Path("t.jsonl"), popular_sets(120))
    write_trace(Path("bad.jsonl"), [{"passages": [1]}, {"passages": "abc"}])
    talk = [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hello."}]
    Path("talks.json").write_text(json.dumps([{"id": "x", "conversations": talk}]))
    assert main(["replay", *options.split()]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), err.startswith("eval replay: ")) == ("", 1, True)
    assert message in err


@pytest.mark.parametrize(
    ("options", "num"),
    [
        ("world --max-requests 20", 20),
        ("world", GENERATED_REQUESTS),
        ("recurring", GENERATED_REQUESTS),
    ],
)
def test_task_is_replayed_as_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: str, num: int
) -> None:
    """A generated task's requests, by name; its chunks recur, and it has no end of its own."""
    command = ["replay", "--json", "--out", str(tmp_path / "run"), "--task"]
    assert main([*command, *f"{options} --order retriever tree".split()]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [cell["num_requests"] for cell in results["cells"]] == [num, num]
    assert results["overlap"]["seen_before"]["value"] > 0


def test_sys_x_is_replayed_and_says_how_often_first_chunks_recur(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["replay", "--sys-x", "200", "--order", "retriever", "--out"]
    assert main([*command, str(tmp_path / "shown")]) == 0
    assert "same first chunks  earlier requests, mean  requests with any\n" in (
        capsys.readouterr().out
    )
    assert main([*command, str(tmp_path / "run"), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    density = [row["earlier"] for row in results["overlap"]["density"]]
    assert len(density) == 5
    assert density == sorted(density, reverse=True)
    assert density[0] > 0.1


def test_commands_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    """Also, with code 2, for no command or one that there is not."""
    assert [main(argv) for argv in (["--help"], [], ["reply"])] == [0, 2, 2]
    out, err = capsys.readouterr()
    assert out.count("  replay ") == 2
    assert "unknown command 'reply'; choose from replay" in err


# --- the comparison and its verdict ---


def test_comparison_of_a_clear_win(
    replay: RunReplay, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Sets in turning order: stock finds little, ours nearly all."""
    results = replay(popular_sets(400))
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"record: {tmp_path / 'run-0'}"
    assert lines[-2 - len(results["verdict"]) : -2] == results["verdict"]
    assert [row["chunks found"] for row in results["tables"][0]["rows"]] == [
        f"{rate:.1%}" for rate in hits(results)
    ]
    assert axis(results, "order") == ["retriever", "frequency", "tree"] * 3
    assert axis(results, "capacity") == [0] * 3 + [12] * 3 + [6] * 3
    stock, craft, ours = hits(results)[:3]
    unlimited = results["cells"][2]["chunk_hit_rate"]
    assert stock < 0.6 < 0.95 < ours
    assert unlimited["low"] <= ours <= unlimited["high"]
    assert "WORTH IT with unlimited capacity" in verdict_of(results)
    # two rates that are near each other need the interval of their difference
    gain = contrast(results, "frequency", "tree")
    assert gain == pytest.approx(ours - craft)
    assert f"; to CRAFT's order {100 * gain:+.1f} points, 95% inter" in results["verdict"][0]
    assert "CRAFT" not in replay(popular_sets(400), "--order retriever tree")["verdict"][0]


def test_gain_around_the_threshold_cannot_be_told(replay: RunReplay) -> None:
    """The interval holds the gain asked for: neither yes nor no."""
    gain = contrast(replay(popular_sets(400)), "retriever", "tree")
    results = replay(popular_sets(400), f"--worth {gain:.4f}")
    assert verdict_of(results).startswith("Verdict: CANNOT BE TOLD")


def test_verdict_says_which_heads_it_assumed(replay: RunReplay) -> None:
    """One for all, unless the trace says otherwise; one for each is a clear loss."""
    records = popular_sets(400)
    own = [record | {"head": f"It is {n}."} for n, record in enumerate(records)]
    some = [record | {"head": n % 2} if n % 4 else record for n, record in enumerate(records)]
    for requests, told in (
        (records, "Assumed: one system prompt for all requests, since no line names a `head`."),
        (own, "Heads: 400 different ones in 400 requests. Chunks behind"),
        (some, "Heads: 2 different ones in 300 requests; 100 requests name none and share one."),
    ):
        results = replay(requests)
        place = results["verdict"].index(verdict_of(results))
        assert results["verdict"][place - 1].startswith(told)
        assert ({*hits(results)} == {0}) is (requests is own)
        assert ("NOT WORTH IT with unlimited" in verdict_of(results)) is (requests is own)


def test_trace_without_any_overlap_is_not_worth_it(replay: RunReplay) -> None:
    """No chunk occurs twice: zero for every policy, and a verdict against ours."""
    results = replay([{"passages": [f"{n}-{i}" for i in range(5)]} for n in range(300)])
    assert results["overlap"]["seen_before"]["value"] == 0
    assert {cell["chunk_hit_rate"]["high"] for cell in results["cells"]} == {0}
    assert verdict_of(results) == (
        "Verdict: NOT WORTH IT with unlimited capacity; with capacity for 375 chunks; with"
        " capacity for 187 chunks."
    )


@pytest.mark.parametrize(
    ("num_requests", "told"),
    [
        (90, "Verdict on only 90 requests: CANNOT BE TOLD FROM THIS TRACE with unlimited"),
        (150, "Verdict on only 150 requests: WORTH IT"),
        (200, "Verdict: WORTH IT"),
    ],
)
def test_verdict_on_few_requests_says_so(replay: RunReplay, num_requests: int, told: str) -> None:
    """Ninety may differ by luck however much they differ."""
    assert verdict_of(replay(popular_sets(num_requests))).startswith(told)


def test_verdict_names_the_policies_that_vary(replay: RunReplay) -> None:
    """Two evictions at one capacity are two verdicts; stock's is LRU in both."""
    options = "--order retriever tree --eviction reused lru --capacity 20"
    told = replay(popular_sets(200), options)["verdict"]
    found = [line for line in told if line.startswith("Capacity for 20 chunks, eviction ")]
    assert [line.split(": ")[1].startswith("stock SGLang finds") for line in found] == [True, True]


@pytest.mark.parametrize(("num_sets", "capacities"), [(10, [0, 12, 6]), (6, [0, 7]), (2, [0])])
def test_sizes_below_one_request_are_left_out(
    replay: RunReplay, tmp_path: Path, num_sets: int, capacities: list[int]
) -> None:
    """No server runs with a pool that its largest request does not fit in."""
    results = replay(popular_sets(120, num_sets=num_sets))
    assert axis(results, "capacity")[::3] == capacities
    assert read_record(tmp_path / "run-0")["spec"]["block"] == 12, "a tenth of a short trace"


@pytest.mark.parametrize(
    ("length", "capacities", "told"),
    [
        (10, [0], "tokens, enough for all of these requests: no smaller cache is replayed."),
        (1000, [0, 50_000], "A server's KV pool has room for 50,000 to 1,000,000 tokens. --cap"),
        (10_000, [0, 125_000, 62_500], "--capacity-tokens N replays yours."),
    ],
)
def test_token_capacities_come_from_the_lengths(
    replay: RunReplay,
    capsys: pytest.CaptureFixture[str],
    length: int,
    capacities: list[int],
    told: str,
) -> None:
    """A quarter and an eighth of the distinct chunks' tokens that a server's pool is not below, or
    what is named."""
    records = [{**record, "lengths": [length] * 5} for record in popular_sets(120)]
    results = replay(records)
    assert axis(results, "capacity_tokens")[::3] == capacities
    assert results["cells"][0]["token_hit_rate"]["value"] > 0
    assert told in capsys.readouterr().out
    (cell,) = replay(records, f"--order tree --capacity-tokens {12.5 * length:.0f}")["cells"]
    assert cell["peak_nodes"] == 12
    assert "KV pool" not in capsys.readouterr().out


def test_warm_up_is_served_and_not_measured(replay: RunReplay) -> None:
    """A warm cache: the second of two equal requests finds everything."""
    (found,) = replay([{"passages": [1, 2]}] * 2, "--order tree --warm-up 1")["cells"]
    assert (found["num_requests"], found["chunk_hit_rate"]["value"]) == (1, 1.0)


def test_later_turns_hit_nothing_and_drop_what_was_shown(replay: RunReplay) -> None:
    """CRAFT 4.3 and fig. 12: reduction by order and by conversation are told apart."""
    turns = [turn("x", "a", "b"), turn("y", "b", "a"), turn("x", "a", "c")]
    results = replay(turns, "--order retriever tree")
    assert axis(results, "dedup") == ["off", "shown"]
    for cell, expected in zip(results["cells"], ((0, 0, 0), (2 / 6, 1 / 6, 0)), strict=True):
        found = cell["reduction"]["chunks"]
        names = ("general", "conversation_scoped", "history_lost")
        assert tuple(found[name]["value"] for name in names) == expected
    (gain,) = results["contrasts"]
    assert gain["value"] == pytest.approx(3 / 6)


def test_histories_that_are_lost_count_against_a_cache(replay: RunReplay) -> None:
    """What must be computed once more is no saving, however much was found elsewhere."""
    turns = [turn("x", "a", "b"), {"passages": ["o"]}, {"passages": ["p"]}, turn("x", "a")]
    results = replay(turns, "--order tree --capacity 2 0")
    saved = [cell["saved"]["chunks"]["value"] for cell in results["cells"]]
    assert dict(zip(axis(results, "capacity"), saved, strict=True)) == {2: (1 - 2) / 5, 0: 1 / 5}


def test_deduplication_is_no_gain_of_ours(replay: RunReplay) -> None:
    """An application can drop chunks already shown with stock SGLang."""
    results = replay([turn(n, f"{n}a", f"{n}b") for n in range(100) for _ in range(2)])
    assert axis(results, "order")[:4] == ["retriever", "retriever", "frequency", "tree"]
    assert axis(results, "dedup")[:4] == ["off", "shown", "shown", "shown"]
    for a, b, gain in (
        ("retriever", "retriever shown", 0.5),
        ("retriever shown", "frequency", 0),
        ("retriever shown", "tree", 0),
        ("frequency", "tree", 0),
    ):
        assert contrast(results, a, b) == gain
    assert any(
        "deduplication alone gains +50.0 points, 95% interval [+50.0, +50.0]" in line
        for line in results["verdict"]
    )
    assert verdict_of(results).startswith("Verdict: NOT WORTH IT with unlimited capacity")


def test_order_is_worth_it_beyond_deduplication(replay: RunReplay) -> None:
    """What ours finds in first turns no application finds by dropping chunks."""
    firsts = [turn(n, *each["passages"]) for n, each in enumerate(popular_sets(200))]
    results = replay([each for each in firsts for _ in range(2)])
    assert verdict_of(results).startswith("Verdict: WORTH IT with unlimited capacity")
    general = [results["cells"][i]["reduction"]["chunks"]["general"]["value"] for i in (1, 3)]
    gain = contrast(results, "retriever shown", "tree")
    assert gain == pytest.approx(general[1] - general[0])


def test_grid_without_stocks_deduplication_has_no_verdict(replay: RunReplay) -> None:
    """It would mix two effects; only equal deduplication is judged."""
    turns = [turn(n, f"{n}a") for n in range(100) for _ in range(2)]
    results = replay(turns, "--order retriever tree")
    assert any(line.startswith("No verdict: an application can") for line in results["verdict"])
    assert verdict_of(results) == ""
    results = replay(turns, "--order retriever tree --dedup off shown")
    assert verdict_of(results) == (
        "Verdict: NOT WORTH IT with unlimited capacity, dedup off; with unlimited capacity,"
        " dedup shown."
    )


def test_turn_behind_an_empty_one_is_no_first_turn(replay: RunReplay, tmp_path: Path) -> None:
    """Its chunks come after a question; the empty turn is in no figure."""
    results = replay([{"passages": ["a"]}, turn(1), turn(1, "a")], "--order tree")
    assert results["overlap"]["total"] == 1
    row = json.loads((tmp_path / "run-0/samples.jsonl").read_text().splitlines()[-1])
    assert (row["chunks"], row["hits"], row["dropped"], row["lost"]) == ([1, 1], *[[0, 0]] * 3)


def test_host_tier_beside_the_device_alone(replay: RunReplay) -> None:
    """Shares by tier add up; one cell without host, whatever the rules."""
    records = [{**record, "lengths": [10] * 5} for record in popular_sets(200)]
    options = "--capacity-tokens 60 --host 0 5000 --host-admission reused all"
    results = replay(records, f"--order retriever tree {options}")
    assert axis(results, "order") == ["retriever"] * 3 + ["tree"] * 3
    assert axis(results, "host_admission") == [None, "reused", "all"] * 2
    *_, alone, _, tiered = results["cells"]
    assert "tiers" not in alone
    for unit, rate in (("chunks", "chunk_hit_rate"), ("tokens", "token_hit_rate")):
        device, host = (tiered["tiers"][unit][name]["value"] for name in ("device", "host"))
        assert device + host == pytest.approx(tiered[rate]["value"])
        assert host > 0
    copies = tiered["host"]
    assert copies["loaded_tokens"] == 10 * copies["loaded"] == round(1e4 * host)
    assert copies["offloaded_tokens"] == copies["num_tokens"] > 60
    (gain,) = [
        c["value"]
        for c in results["contrasts"]
        if (c["a"], c["b"], c["metric"]) == ("tree", "tree host", "saved_share")
        and c["cell"] == tiered["cell"]
    ]
    rates = [cell["chunk_hit_rate"]["value"] for cell in (tiered, alone)]
    assert gain == pytest.approx(rates[0] - rates[1])
    told = "Verdict: WORTH IT with capacity for 60 tokens, host 0; with "
    assert verdict_of(results).startswith(told)
    assert [row["loaded"] for row in results["tables"][0]["rows"]][::3] == ["-", "-"]


# --- grids and folders ---


def test_grid_leaves_out_what_would_be_the_same_replay(replay: RunReplay) -> None:
    """A tail matters to `tree`, an eviction at limited capacity, a window to counts."""
    tails = " ".join(TAIL_POLICIES)
    options = f"--order retriever tree --tail {tails} --eviction lru reused --window 1 1000"
    results = replay(TRACE, f"{options} --k 1 2")
    assert len(results["cells"]) == 2 * (1 + 1 + 2 + 2)
    assert {*axis(results, "eviction")} == {None}
    stock = [cell["cell"]["tail"] for cell in results["cells"] if cell["cell"]["order"] != "tree"]
    assert stock == [None, None]


def test_grid_cell_equals_the_single_replay(replay: RunReplay) -> None:
    """However many cells are asked for, each is the replay of its settings alone."""
    orders, options = ("retriever", "frequency", "tree"), "--capacity 20 --window 5"
    together = replay(popular_sets(60), f"--order {' '.join(orders)} {options}")["cells"]
    for cell, order in zip(together, orders, strict=True):
        (alone,) = replay(popular_sets(60), f"--order {order} {options}")["cells"]
        assert alone["chunk_hit_rate"] == cell["chunk_hit_rate"]


def test_interrupted_grid_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C leaves a valid record of the cells so far; the same command takes only the others."""
    trace = write_trace(tmp_path / "trace.jsonl", popular_sets(30))
    command = ["replay", "--trace", str(trace), "--out", str(tmp_path / "run")]
    command += ["--order", "retriever", "tree"]
    replayed: list[object] = []

    def second_is_interrupted(*args: Any, **kwargs: Any) -> Any:
        replayed.append(args)
        if len(replayed) == 2:
            raise KeyboardInterrupt
        return Replay(*args, **kwargs)

    monkeypatch.setattr("eval.replay.cells.Replay", second_is_interrupted)
    assert main(command) == 130
    record = read_record(tmp_path / "run")
    assert (record["complete"], len(record["results"]["cells"])) == (False, 1)
    write_trace(trace, popular_sets(30)[::-1])
    assert main(command) == 2  # halves of two traces would make one wrong record
    assert "was begun with other settings: trace_sha256" in capsys.readouterr().err
    write_trace(trace, popular_sets(30))
    assert main([*command, "--json"]) == 0
    assert len(replayed) == 3
    assert len(json.loads(capsys.readouterr().out)["cells"]) == 2


def test_comparison_runs_without_any_installed_package(tmp_path: Path) -> None:
    """A stranger's first command, with the folder it makes where it is run."""
    trace = write_trace(tmp_path / "trace.jsonl", TRACE)
    done = subprocess.run(
        [sys.executable, "-S", "-m", "eval", "replay", "--trace", str(trace)],
        cwd=tmp_path,
        env={"PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        check=True,
    )
    (folder,) = (tmp_path / "runs").iterdir()
    record = read_record(folder)
    assert record["complete"]
    assert len(record["results"]["cells"]) == 3  # four chunks have no smaller sizes worth asking
    assert done.stderr == ""
