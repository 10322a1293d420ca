"""`python -m eval replay` as a user runs it:
one cell, the comparison and its verdict, grids, folders, mistakes."""

from __future__ import annotations

import gzip
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main
from eval.replay.command import WORLD_REQUESTS
from eval.run import read_record
from radix_ext import TAIL_POLICIES, Replay

TRACE: list[dict[str, object]] = [
    {"passages": ["a", "b", "a"], "lengths": [5, 7, 5], "timestamp": 0.5},
    {"passages": []},
    {"chunks": ["b", "a", 7], "lengths": [7, 5, 3]},
    {"passages": ["7", "b"], "lengths": [3, 7], "id": 4},
]


def write_trace(path: Path, records: list[dict[str, object]]) -> Path:
    text = "\n".join(json.dumps(record) for record in records) + "\n\n"
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def replayed(capsys: pytest.CaptureFixture[str], trace: Path, *options: str) -> dict[str, Any]:
    """The one cell of a run that must succeed; its JSON is all of stdout."""
    folder = trace.parent / f"run-{len([*trace.parent.iterdir()])}"
    assert (
        main(
            [
                "replay",
                "--trace",
                str(trace),
                "--out",
                str(folder),
                "--json",
                "--order",
                "tree",
                *options,
            ]
        )
        == 0
    )
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    return dict(cell)


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_report_has_hit_rate_and_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Plain or gzip. Repeats and empty requests left out. Ids 7 and "7" are one chunk."""
    found = replayed(capsys, write_trace(tmp_path / name, TRACE))
    assert (found["num_requests"], found["num_chunks"], found["chunk_hit_rate"]["value"]) == (
        3,
        7,
        2 / 7,
    )
    assert {"order": "tree", "tail": "seen", "capacity": 0}.items() <= found["cell"].items()


def test_token_hits_are_told_where_every_request_has_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One request without them, and token rates would mix units."""
    with_lengths = [record for record in TRACE if "lengths" in record]
    found = replayed(capsys, write_trace(tmp_path / "with.jsonl", with_lengths))
    assert found["token_hit_rate"]["value"] == 12 / 37
    found = replayed(
        capsys, write_trace(tmp_path / "without.jsonl", [*with_lengths, {"passages": ["a"]}])
    )
    assert found["token_hit_rate"] is None


def test_options_reach_the_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each one changes what it names."""
    trace = write_trace(tmp_path / "trace.jsonl", TRACE)
    found = replayed(
        capsys, trace, "--order", "retriever", "--k", "1", "--max-requests", "2", "--capacity", "1"
    )
    assert [found[name] for name in ("num_requests", "num_chunks", "peak_nodes")] == [2, 2, 1]
    assert found["chunk_hit_rate"]["value"] == 0
    few = ("--order", "frequency", "--eviction", "promoted", "--window", "1", "--threshold", "9")
    assert replayed(capsys, trace, *few)["chunk_hit_rate"]["value"] == 0


def test_bad_trace_is_one_clear_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """File, line and reason on stderr, exit code 2, nothing on stdout;
    every mistake is in test_trace.py."""
    path = tmp_path / "trace.jsonl"
    path.write_text('{"passages": [1]}\n{"passages": "abc"}\n')
    assert main(["replay", "--trace", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert (
        captured.err
        == f"eval replay: {path}, line 2: passages must be a list of strings or integers\n"
    )


@pytest.mark.parametrize(
    "options",
    [
        ["--order", "best"],
        ["--capacity", "-1"],
        ["--capacity", "many"],
        ["--window", "0"],
        ["--k", "0"],
        ["--bogus"],
    ],
)
def test_bad_options_end_with_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    """argparse names the option."""
    with pytest.raises(SystemExit) as exit_info:
        main(["replay", "--trace", str(tmp_path / "trace.jsonl"), *options])
    assert exit_info.value.code == 2
    assert options[0] in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--data", "."], "--data requires --task"),
        (
            ["--capacity", "5", "--capacity-tokens", "5"],
            "give --capacity or --capacity-tokens, not both",
        ),
    ],
)
def test_options_that_contradict_each_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    """One clear line."""
    records = [{"passages": [1], "lengths": [2]}]
    trace = write_trace(tmp_path / "trace.jsonl", records)  # type: ignore[arg-type]
    assert main(["replay", "--trace", str(trace), *options]) == 2
    assert message in capsys.readouterr().err


def test_task_is_replayed_as_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The generated world's requests, by name; its chunks recur."""
    options = [
        "--task",
        "world",
        "--max-requests",
        "20",
        "--order",
        "retriever",
        "tree",
        "--out",
        str(tmp_path / "run"),
        "--json",
    ]
    assert main(["replay", *options]) == 0
    results = json.loads(capsys.readouterr().out)
    assert [cell["num_requests"] for cell in results["cells"]] == [20, 20]
    assert results["overlap"]["seen_before"]["value"] > 0


def test_world_has_no_end_but_its_replay_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --max-requests it once asked for all questions that there are."""
    assert (
        main(
            [
                "replay",
                "--task",
                "world",
                "--order",
                "tree",
                "--out",
                str(tmp_path / "run"),
                "--json",
            ]
        )
        == 0
    )
    assert json.loads(capsys.readouterr().out)["cells"][0]["num_requests"] == WORLD_REQUESTS


def test_task_without_passages_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Conversations alone retrieve nothing that could be replayed."""
    talk = [{"from": "human", "value": "Hello?"}, {"from": "gpt", "value": "Hello."}]
    (tmp_path / "talks.json").write_text(json.dumps([{"id": "x", "conversations": talk}]))
    assert main(["replay", "--task", "sharegpt", "--data", str(tmp_path / "talks.json")]) == 2
    assert capsys.readouterr().err == "eval replay: task sharegpt has no request with passages\n"


def test_verdict_names_the_policies_that_vary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two evictions at one capacity are two verdicts; stock's is LRU in both."""
    trace = write_trace(tmp_path / "trace.jsonl", popular_sets(200))
    options = ["--order", "retriever", "tree", "--eviction", "reused", "lru", "--capacity", "20"]
    _, results = compare(capsys, trace, *options)
    found = [
        line for line in results["verdict"] if line.startswith("Capacity for 20 chunks, eviction ")
    ]
    assert [line.split(": ")[1].startswith("stock SGLang finds") for line in found] == [True, True]


def test_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """With the commands there are."""
    assert main(["reply"]) == 2
    assert "unknown command 'reply'; choose from replay" in capsys.readouterr().err


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Also what one gets, with code 2, for no command at all."""
    assert main(["--help"]) == 0
    assert main([]) == 2
    assert capsys.readouterr().out.count("  replay ") == 2


# --- the comparison and its verdict ---


def popular_sets(n: int, *, seed: int = 0, num_sets: int = 10) -> list[dict[str, object]]:
    """Requests that share sets of chunks in turning order: reuse that only an order can find."""
    rng = random.Random(seed)
    sets = [[f"s{number}-{i}" for i in range(5)] for number in range(num_sets)]
    return [{"passages": rng.sample(rng.choice(sets), 5)} for _ in range(n)]


def compare(
    capsys: pytest.CaptureFixture[str], trace: Path, *options: str
) -> tuple[list[str], dict[str, Any]]:
    """(stdout lines, results) of a run without a setting of the grid."""
    folder = (
        Path(options[options.index("--out") + 1]) if "--out" in options else trace.parent / "run"
    )
    assert main(["replay", "--trace", str(trace), "--out", str(folder), *options]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"record: {folder}"
    record = read_record(folder)
    assert (record["kind"], record["complete"]) == ("replay", True)
    return lines, record["results"]


def test_comparison_of_a_clear_win(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sets in turning order: stock finds little, ours nearly all;
    nine cells, a verdict for each capacity, a record."""
    trace = write_trace(tmp_path / "trace.jsonl", popular_sets(400))
    lines, results = compare(capsys, trace)
    assert lines[-2 - len(results["verdict"]) : -2] == results["verdict"]
    assert [row["chunks found"] for row in results["tables"][0]["rows"]] == [
        f"{cell['chunk_hit_rate']['value']:.1%}" for cell in results["cells"]
    ]
    assert [(cell["cell"]["order"], cell["cell"]["capacity"]) for cell in results["cells"]] == [
        (order, capacity) for capacity in (0, 12, 6) for order in ("retriever", "frequency", "tree")
    ]
    unlimited = results["cells"][2]["chunk_hit_rate"]
    assert unlimited["low"] <= unlimited["value"] <= unlimited["high"]
    assert unlimited["value"] > 0.95
    assert results["cells"][0]["chunk_hit_rate"]["value"] < 0.6
    assert any("WORTH IT with unlimited capacity" in line for line in results["verdict"])


def assumed(results: dict[str, Any]) -> str:
    """What the verdict says of heads, right before it judges."""
    number = next(i for i, line in enumerate(results["verdict"]) if line.startswith("Verdict"))
    return str(results["verdict"][number - 1])


def test_verdict_says_which_heads_it_assumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One system prompt for all, unless the trace says otherwise;
    one for each request is a clear loss."""
    records = popular_sets(400)
    _, common = compare(capsys, write_trace(tmp_path / "trace.jsonl", records))
    assert assumed(common).startswith(
        "Assumed: one system prompt for all requests, since no line names a `head`."
    )
    (tmp_path / "own").mkdir()
    own = [record | {"head": f"It is {number}."} for number, record in enumerate(records)]
    _, results = compare(capsys, write_trace(tmp_path / "own" / "trace.jsonl", own))
    assert assumed(results).startswith("Heads: 400 different ones in 400 requests. Chunks behind")
    assert {cell["chunk_hit_rate"]["value"] for cell in results["cells"]} == {0}
    assert any(
        line.startswith("Verdict: NOT WORTH IT with unlimited") for line in results["verdict"]
    )
    (tmp_path / "some").mkdir()
    some = [
        record | {"head": number % 2} if number % 4 else record
        for number, record in enumerate(records)
    ]
    _, results = compare(capsys, write_trace(tmp_path / "some" / "trace.jsonl", some))
    assert assumed(results).startswith(
        "Heads: 2 different ones in 300 requests; 100 requests name none and share one."
    )


def test_trace_without_any_overlap_is_not_worth_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """No chunk occurs twice: zero for every policy, and a verdict against ours."""
    records: list[dict[str, object]] = [
        {"passages": [f"{n}-{i}" for i in range(5)]} for n in range(300)
    ]
    _, results = compare(capsys, write_trace(tmp_path / "trace.jsonl", records))
    assert results["overlap"]["seen_before"]["value"] == 0
    assert {cell["chunk_hit_rate"]["high"] for cell in results["cells"]} == {0}
    (verdict,) = [line for line in results["verdict"] if line.startswith("Verdict")]
    assert (
        verdict
        == "Verdict: NOT WORTH IT with unlimited capacity; with capacity for 375 chunks; with"
        " capacity for 187 chunks."
    )


def test_short_trace_cannot_tell(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Ninety requests may differ by luck however much they differ."""
    _, results = compare(capsys, write_trace(tmp_path / "trace.jsonl", popular_sets(90)))
    told = "Verdict on only 90 requests: CANNOT BE TOLD FROM THIS TRACE with unlimited capacity"
    assert any(line.startswith(told) for line in results["verdict"])


def test_verdict_on_few_requests_says_so_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The verdict line; from 200 requests on without a remark on their number."""
    _, results = compare(capsys, write_trace(tmp_path / "trace.jsonl", popular_sets(150)))
    (told,) = [line for line in results["verdict"] if line.startswith("Verdict")]
    assert told.startswith("Verdict on only 150 requests: WORTH IT")


@pytest.mark.parametrize(
    ("num_sets", "capacities"),
    [(10, [0, 12, 6]), (6, [0, 7]), (2, [0])],
)
def test_sizes_below_one_request_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_sets: int, capacities: list[int]
) -> None:
    """No server runs with a pool that its largest request does not fit in,
    so nothing is said of one."""
    records = popular_sets(120, num_sets=num_sets)
    _, results = compare(capsys, write_trace(tmp_path / "trace.jsonl", records))
    assert [cell["cell"]["capacity"] for cell in results["cells"][::3]] == capacities


def test_ours_stands_beside_crafts_order(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two rates that are near each other need the interval of their difference,
    which is between the same requests."""
    _, results = compare(capsys, write_trace(tmp_path / "trace.jsonl", popular_sets(400)))
    craft, ours = (cell["chunk_hit_rate"]["value"] for cell in results["cells"][1:3])
    (found,) = [
        c for c in results["contrasts"] if c["a"] == "frequency" and c["cell"]["capacity"] == 0
    ]
    assert (found["b"], found["value"]) == ("tree", pytest.approx(ours - craft))
    assert (
        f"; to CRAFT's order {100 * found['value']:+.1f} points, 95% interval ["
        in results["verdict"][0]
    )
    _, results = compare(
        capsys,
        tmp_path / "trace.jsonl",
        "--order",
        "retriever",
        "tree",
        "--out",
        str(tmp_path / "2"),
    )
    assert "CRAFT" not in results["verdict"][0]


def test_block_that_leaves_too_few_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was once made shorter without a word;
    the default is a tenth of a short trace, and the record says so."""
    trace = write_trace(tmp_path / "trace.jsonl", popular_sets(120))
    assert main(["replay", "--trace", str(trace), "--block", "13"]) == 2
    assert (
        "--block 13 leaves fewer than 10 blocks of 120 requests: give at most 12"
        in capsys.readouterr().err
    )
    compare(capsys, trace)
    assert json.loads((tmp_path / "run" / "record.json").read_text())["spec"]["block"] == 12


def test_gain_around_the_threshold_cannot_be_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The interval holds the gain asked for: neither yes nor no."""
    trace = write_trace(tmp_path / "trace.jsonl", popular_sets(400))
    _, results = compare(capsys, trace)
    gain = next(c["value"] for c in results["contrasts"] if c["b"] == "tree")
    (tmp_path / "run" / "record.json").unlink()
    (tmp_path / "run" / "samples.jsonl").unlink()
    _, results = compare(capsys, trace, "--worth", f"{gain:.4f}")
    assert any(line.startswith("Verdict: CANNOT BE TOLD") for line in results["verdict"])


def test_token_capacities_come_from_the_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Operators know KV tokens: a quarter and an eighth of the distinct chunks' tokens,
    or what they name."""
    records = [{**record, "lengths": [10] * 5} for record in popular_sets(120)]
    trace = write_trace(tmp_path / "trace.jsonl", records)
    _, results = compare(capsys, trace)
    assert [cell["cell"]["capacity_tokens"] for cell in results["cells"][::3]] == [0, 125, 62]
    assert results["cells"][0]["token_hit_rate"]["value"] > 0
    assert replayed(capsys, trace, "--capacity-tokens", "125")["peak_nodes"] == 12
    write_trace(trace, popular_sets(5))
    assert main(["replay", "--trace", str(trace), "--capacity-tokens", "125"]) == 2
    assert "needs a trace with lengths on every request" in capsys.readouterr().err


def test_warm_up_is_served_and_not_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A warm cache: the second of two equal requests finds everything."""
    trace = write_trace(tmp_path / "trace.jsonl", [{"passages": [1, 2]}] * 2)
    found = replayed(capsys, trace, "--warm-up", "1")
    assert (found["num_requests"], found["chunk_hit_rate"]["value"]) == (1, 1.0)
    assert main(["replay", "--trace", str(trace), "--order", "tree", "--warm-up", "2"]) == 2
    assert "--warm-up 2 leaves none of 2 requests to measure" in capsys.readouterr().err


def test_later_turns_hit_nothing_and_drop_what_was_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """CRAFT 4.3 and fig. 12: reduction by order and by conversation are told apart;
    stock drops nothing."""
    records: list[dict[str, object]] = [
        {"passages": ["a", "b"], "conversation": "x"},
        {"passages": ["b", "a"], "conversation": "y"},
        {"passages": ["a", "c"], "conversation": "x"},
    ]
    trace = write_trace(tmp_path / "trace.jsonl", records)
    _, results = compare(capsys, trace, "--order", "retriever", "tree")
    stock, ours = results["cells"]
    assert (stock["cell"]["dedup"], ours["cell"]["dedup"]) == ("off", "shown")
    shares = {name: share["value"] for name, share in stock["reduction"]["chunks"].items()}
    assert shares == {"general": 0, "conversation_scoped": 0, "history_lost": 0}
    shares = {name: share["value"] for name, share in ours["reduction"]["chunks"].items()}
    assert shares == {"general": 2 / 6, "conversation_scoped": 1 / 6, "history_lost": 0}
    (contrast,) = results["contrasts"]
    assert contrast["value"] == pytest.approx(3 / 6)


def test_histories_that_are_lost_count_against_a_cache(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What must be computed once more is no saving, however much was found elsewhere."""
    turns: list[dict[str, object]] = [
        {"passages": ["a", "b"], "conversation": "x"},
        {"passages": ["o"]},
        {"passages": ["p"]},
        {"passages": ["a"], "conversation": "x"},
    ]
    trace = write_trace(tmp_path / "trace.jsonl", turns)
    _, results = compare(capsys, trace, "--order", "tree", "--capacity", "2", "0")
    saved = {
        cell["cell"]["capacity"]: cell["saved"]["chunks"]["value"] for cell in results["cells"]
    }
    assert saved == {2: (1 - 2) / 5, 0: 1 / 5}


def turn(conversation: int, *passages: str) -> dict[str, object]:
    return {"passages": [*passages], "conversation": conversation}


def test_deduplication_is_no_gain_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Second turns that show the first's chunks again:
    an application can drop them with stock SGLang, so nothing is won."""
    turns = [turn(n, f"{n}a", f"{n}b") for n in range(100) for _ in range(2)]
    lines, results = compare(capsys, write_trace(tmp_path / "trace.jsonl", turns))
    assert [(cell["cell"]["order"], cell["cell"]["dedup"]) for cell in results["cells"][:4]] == [
        ("retriever", "off"),
        ("retriever", "shown"),
        ("frequency", "shown"),
        ("tree", "shown"),
    ]
    found = {
        (c["a"], c["b"]): c["value"] for c in results["contrasts"] if c["cell"]["capacity"] == 0
    }
    assert found == {
        ("retriever", "retriever shown"): 0.5,
        ("retriever shown", "frequency"): 0,
        ("retriever shown", "tree"): 0,
        ("frequency", "tree"): 0,
    }
    gain = (
        "Unlimited capacity: stock SGLang with an application that leaves out chunks already shown"
        " saves 50.0% of chunks, "
    )
    assert (
        f"{gain}0.0% without that: deduplication alone gains +50.0 points, 95% interval [+50.0,"
        " +50.0]." in lines
    )
    assert any(line.startswith("Verdict: NOT WORTH IT with unlimited capacity") for line in lines)


def test_order_is_worth_it_beyond_deduplication(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """First turns share sets in turning order:
    what ours finds there no application finds by dropping chunks."""
    firsts = [[*map(str, request["passages"])] for request in popular_sets(200)]  # type: ignore[call-overload]
    turns = [turn(n, *passages) for n, passages in enumerate(firsts) for _ in range(2)]
    _, results = compare(capsys, write_trace(tmp_path / "trace.jsonl", turns))
    (verdict,) = [line for line in results["verdict"] if line.startswith("Verdict")]
    assert verdict.startswith("Verdict: WORTH IT with unlimited capacity")
    (ours,) = [
        c
        for c in results["contrasts"]
        if (c["a"], c["b"], c["cell"]["capacity"]) == ("retriever shown", "tree", 0)
    ]
    general = [results["cells"][i]["reduction"]["chunks"]["general"]["value"] for i in (1, 3)]
    assert ours["value"] == pytest.approx(general[1] - general[0])


def test_grid_without_stocks_deduplication_has_no_verdict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ours with deduplication against stock without it would mix two effects;
    only equal deduplication is judged."""
    trace = write_trace(
        tmp_path / "trace.jsonl", [turn(n, f"{n}a") for n in range(100) for _ in range(2)]
    )
    _, results = compare(capsys, trace, "--order", "retriever", "tree")
    assert any(
        line.startswith("No verdict: an application can leave out") for line in results["verdict"]
    )
    assert not any(line.startswith("Verdict") for line in results["verdict"])
    options = [
        "--order",
        "retriever",
        "tree",
        "--dedup",
        "off",
        "shown",
        "--out",
        str(tmp_path / "both"),
    ]
    _, results = compare(capsys, trace, *options)
    (verdict,) = [line for line in results["verdict"] if line.startswith("Verdict")]
    assert (
        verdict
        == "Verdict: NOT WORTH IT with unlimited capacity, dedup off; with unlimited capacity,"
        " dedup shown."
    )


def test_turn_behind_an_empty_one_is_no_first_turn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its chunks come after the question of a turn that retrieved nothing;
    that turn is in no figure."""
    opening: dict[str, object] = {"passages": [], "conversation": 1}
    trace = write_trace(tmp_path / "trace.jsonl", [{"passages": ["a"]}, opening, turn(1, "a")])
    _, results = compare(capsys, trace, "--order", "tree")
    assert results["overlap"]["total"] == 1
    row = json.loads((tmp_path / "run" / "samples.jsonl").read_text().splitlines()[-1])
    assert [row[name] for name in ("chunks", "hits", "dropped", "lost")] == [
        [1, 1],
        [0, 0],
        [0, 0],
        [0, 0],
    ]


# --- host memory ---


def test_host_tier_beside_the_device_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Shares by tier add up to what is found; copies and loads are told;
    one cell without host, whatever the rules."""
    records = [{**record, "lengths": [10] * 5} for record in popular_sets(200)]
    trace = write_trace(tmp_path / "trace.jsonl", records)
    options = ["--order", "retriever", "tree", "--capacity-tokens", "60", "--host", "0", "5000"]
    lines, results = compare(capsys, trace, *options, "--host-admission", "reused", "all")
    assert [
        (cell["cell"]["order"], cell["cell"]["host_admission"]) for cell in results["cells"]
    ] == [(order, rule) for order in ("retriever", "tree") for rule in (None, "reused", "all")]
    *_, alone, _, tiered = results["cells"]
    assert "tiers" not in alone
    for unit, rate in (("chunks", "chunk_hit_rate"), ("tokens", "token_hit_rate")):
        parts = tiered["tiers"][unit]
        assert parts["device"]["value"] + parts["host"]["value"] == pytest.approx(
            tiered[rate]["value"]
        )
        assert parts["host"]["value"] > 0
    assert (
        tiered["host"]["loaded_tokens"]
        == 10 * tiered["host"]["loaded"]
        == round(1e4 * parts["host"]["value"])
    )
    assert tiered["host"]["offloaded_tokens"] == tiered["host"]["num_tokens"] > 60
    (found,) = [
        c
        for c in results["contrasts"]
        if (c["b"], c["cell"]) == ("tree host", tiered["cell"])
        and c["a"] == "tree"
        and c["metric"] == "saved_share"
    ]
    assert found["value"] == pytest.approx(
        tiered["chunk_hit_rate"]["value"] - alone["chunk_hit_rate"]["value"]
    )
    assert any(
        line.startswith("Tree with capacity for 60 tokens, host 5,000, all: ") for line in lines
    )
    assert any(
        line.startswith("Verdict: WORTH IT with capacity for 60 tokens, host 0; with ")
        for line in lines
    )
    assert [row["loaded"] for row in results["tables"][0]["rows"]][::3] == ["-", "-"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--host", "5"], "--host needs --capacity or --capacity-tokens"),
        (
            ["--capacity", "5", "--host", "5", "--reuse", "fused"],
            "--host is not replayed with --reuse fused",
        ),
        (
            ["--capacity", "5", "--host", "5", "--host-worth", "1.5"],
            "--host-worth must be from 0 to 1 but got 1.5",
        ),
    ],
)
def test_impossible_host_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    """Before anything is replayed."""
    assert (
        main(["replay", "--trace", str(write_trace(tmp_path / "trace.jsonl", TRACE)), *options])
        == 2
    )
    assert message in capsys.readouterr().err


# --- grids and folders ---


def test_grid_leaves_out_what_would_be_the_same_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A tail matters to `tree` only, an eviction at limited capacity,
    a window where something counts."""
    trace = write_trace(tmp_path / "trace.jsonl", TRACE)
    options = [
        "--order",
        "retriever",
        "tree",
        "--tail",
        *TAIL_POLICIES,
        "--eviction",
        "lru",
        "reused",
    ]
    _, results = compare(capsys, trace, *options, "--window", "1", "1000", "--k", "1", "2")
    cells = [cell["cell"] for cell in results["cells"]]
    assert len(cells) == 2 * (1 + 1 + 2 + 2)
    assert {cell["eviction"] for cell in cells} == {None}
    assert [cell["tail"] for cell in cells if cell["order"] == "retriever"] == [None, None]


def test_grid_cell_equals_the_single_replay(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """However many cells are asked for, each is the replay of its settings alone."""
    trace = write_trace(tmp_path / "trace.jsonl", popular_sets(60))
    _, results = compare(
        capsys,
        trace,
        "--order",
        "retriever",
        "frequency",
        "tree",
        "--capacity",
        "20",
        "--window",
        "5",
    )
    for cell in results["cells"]:
        alone = replayed(
            capsys, trace, "--order", cell["cell"]["order"], "--capacity", "20", "--window", "5"
        )
        assert alone["chunk_hit_rate"] == cell["chunk_hit_rate"]


def test_interrupted_grid_goes_on_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C leaves a valid record of the cells so far; the same command takes only the others."""
    trace = write_trace(tmp_path / "trace.jsonl", popular_sets(30))
    command = [
        "replay",
        "--trace",
        str(trace),
        "--order",
        "retriever",
        "tree",
        "--out",
        str(tmp_path / "run"),
    ]
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
    capsys.readouterr()
    assert main([*command, "--json"]) == 0
    assert len(replayed) == 3
    assert len(json.loads(capsys.readouterr().out)["cells"]) == 2


def test_other_trace_of_the_same_name_is_no_continuation(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two halves of two traces would make one wrong record."""
    trace = write_trace(tmp_path / "trace.jsonl", TRACE)
    command = ["replay", "--trace", str(trace), "--k", "1", "2", "--out", str(tmp_path / "run")]
    assert main(command) == 0
    record = json.loads((tmp_path / "run" / "record.json").read_text())
    (tmp_path / "run" / "record.json").write_text(json.dumps(record | {"complete": False}))
    write_trace(trace, TRACE[:1])
    assert main(command) == 2
    assert "was begun with other settings: trace_sha256" in capsys.readouterr().err


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
