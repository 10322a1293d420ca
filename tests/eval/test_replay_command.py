"""`python -m eval replay` as a user runs it: the trace format, the report, and every mistake in one clear line."""

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval.__main__ import main

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


def run_json(capsys: pytest.CaptureFixture[str], trace: Path, *options: str) -> dict[str, Any]:
    """The report: the last stdout line of a run that must succeed."""
    assert main(["replay", "--trace", str(trace), *options, "--json"]) == 0
    report = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert isinstance(report, dict)
    return report


@pytest.mark.parametrize("name", ["trace.jsonl", "trace.jsonl.gz"])
def test_report_has_hit_rate_and_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    """Plain or gzip; repeats and empty requests left out; ids 7 and "7" are one chunk; the default order is tree."""
    report = run_json(capsys, write_trace(tmp_path / name, TRACE))
    assert (report["num_requests"], report["num_chunks"], report["num_chunk_hits"]) == (3, 7, 2)
    assert report["chunk_hit_rate"] == 2 / 7
    settings = report["settings"]
    assert settings["trace"] == str(tmp_path / name)
    assert (settings["order"], settings["tail"], settings["eviction"], settings["capacity"]) == (
        "tree",
        "rank",
        "lru",
        0,
    )


def test_token_hits_are_told_where_every_request_has_lengths(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One request without them, and token rates would mix units."""
    with_lengths = [record for record in TRACE if "lengths" in record]
    report = run_json(capsys, write_trace(tmp_path / "with.jsonl", with_lengths))
    assert (report["num_token_hits"], report["token_hit_rate"]) == (12, 12 / 37)
    report = run_json(capsys, write_trace(tmp_path / "without.jsonl", [*with_lengths, {"passages": ["a"]}]))
    assert (report["num_token_hits"], report["token_hit_rate"]) == (None, None)


def test_options_reach_the_replay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Each one changes what it names."""
    trace = write_trace(tmp_path / "trace.jsonl", TRACE)
    report = run_json(capsys, trace, "--order", "retriever", "--k", "1", "--max-requests", "2", "--capacity", "1")
    assert (report["num_requests"], report["num_chunks"], report["num_chunk_hits"], report["peak_nodes"]) == (
        2,
        2,
        0,
        1,
    )
    report = run_json(
        capsys, trace, "--order", "frequency", "--eviction", "promoted", "--window", "1", "--threshold", "9"
    )
    assert report["num_chunk_hits"] == 0


def test_table_without_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For people: one line per setting and figure."""
    assert main(["replay", "--trace", str(write_trace(tmp_path / "trace.jsonl", TRACE))]) == 0
    assert "chunk_hit_rate   0.2857" in capsys.readouterr().out.splitlines()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "has no request with passages"),
        (b'{"passages": []}\n', "has no request with passages"),
        (b'{"passages": [1]}\n\n{"passages": [1]\n', "line 3: Expecting"),
        (b"[1, 2]\n", "line 1: must be a JSON object but is a list"),
        (b"null\n", "line 1: must be a JSON object but is null"),
        (b'{"question": "?"}\n', 'line 1: has neither "passages" nor "chunks"'),
        (b'{"passages": "abc"}\n', 'line 1: "passages" must be a list but is a string'),
        (b'{"passages": [1.5]}\n', 'line 1: "passages" must hold strings or integers but has a number'),
        (b'{"passages": [true]}\n', 'line 1: "passages" must hold strings or integers but has a boolean'),
        (b'{"chunks": [[1]]}\n', 'line 1: "chunks" must hold strings or integers but has a list'),
        (b'{"passages": [1, 2], "lengths": [3]}\n', 'line 1: "lengths" must be a list of 2 token counts'),
        (b'{"passages": [1], "lengths": 3}\n', 'line 1: "lengths" must be a list of 1 token counts'),
        (b'{"passages": [1], "lengths": [0]}\n', 'line 1: "lengths" must hold positive integers but has 0'),
        (b'{"passages": [1], "lengths": ["3"]}\n', "line 1: \"lengths\" must hold positive integers but has '3'"),
        (b'{"passages": ["\xff"]}\n', "cannot be read after line 0: 'utf-8' codec"),
        (b"[" * 100_000, "line 1: "),
    ],
)
def test_bad_trace_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, message: str
) -> None:
    """File, line and reason on stderr, exit code 2, nothing on stdout."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(content)
    assert main(["replay", "--trace", str(path)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"eval replay: {path}")
    assert message in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("trace.jsonl", None, "does not exist"),
        ("trace.jsonl.gz", b"plain text", "cannot be read after line 0: Not a gzipped file"),
        ("trace.jsonl.gz", gzip.compress(b'{"passages": [1]}\n' * 999)[:-9], "cannot be read after line"),
        ("trace.jsonl.gz", gzip.compress(b"x")[:10] + b"\xff" * 40, "cannot be read after line 0"),
    ],
)
def test_unreadable_file_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, content: bytes | None, message: str
) -> None:
    """Missing, not gzip, cut off, garbage inside."""
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    assert main(["replay", "--trace", str(path)]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_directory_is_no_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The same one line."""
    assert main(["replay", "--trace", str(tmp_path)]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "options",
    [["--order", "best"], ["--capacity", "-1"], ["--capacity", "many"], ["--window", "0"], ["--k", "0"], ["--bogus"]],
)
def test_bad_options_end_with_code_2(tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]) -> None:
    """argparse names the option."""
    with pytest.raises(SystemExit) as exit_info:
        main(["replay", "--trace", str(tmp_path / "trace.jsonl"), *options])
    assert exit_info.value.code == 2
    assert options[0] in capsys.readouterr().err


def test_unknown_command_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """With the commands there are."""
    assert main(["reply"]) == 2
    assert "unknown command 'reply'; there is replay" in capsys.readouterr().err


def test_help_lists_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    """Also what one gets, with code 2, for no command at all."""
    assert main(["--help"]) == 0
    assert main([]) == 2
    assert capsys.readouterr().out.count("  replay ") == 2


def test_command_runs_without_any_installed_package(tmp_path: Path) -> None:
    """`-S` hides site-packages: a fresh Python must do; the JSON is the last line and nothing is on stderr."""
    trace = write_trace(tmp_path / "trace.jsonl", TRACE)
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-S", "-m", "eval", "replay", "--trace", str(trace), "--json"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout.splitlines()[-1])["chunk_hit_rate"] == 2 / 7
    assert done.stderr == ""
