"""`python -m sglang_chunkcache.check`: exit codes, one line for every mistake,
and the gate of the bundled model for real."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("requests")

from sglang_chunkcache import check
from sglang_chunkcache.check import main
from sglang_chunkcache.client import ServerError
from tests.sglang_chunkcache.fake_server import FakeServer

GOOD, BAD = {"moved_ulps": 1.0, "passed": True}, {"moved_ulps": 9.0, "passed": False}
FOUND = {"depth": 3}
MASKED: dict[str, Any] = {
    "kind": "masked",
    "kernel": None,
    "reason": "the kernels need CUDA, not cpu",
    "ms": {},
    "fallbacks": 0,
}


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


def answer_with(server: FakeServer, *gates: Any) -> None:
    ranks = [
        {} if gate is None else {"gate": gate, "moves": {"attention": MASKED}, "calibration": FOUND}
        for gate in gates
    ]
    server.reply = (200, json.dumps({"ranks": ranks}).encode())


# A running server


@pytest.mark.parametrize(
    ("gates", "code"), [([GOOD], 0), ([GOOD, GOOD], 0), ([BAD], 1), ([GOOD, BAD], 1)]
)
def test_gates_of_a_running_server(
    server: FakeServer, capsys: pytest.CaptureFixture[str], gates: list[dict[str, Any]], code: int
) -> None:
    """One failed rank fails the check. The table names ranks, the last line is JSON.
    Both have the attention that ran."""
    answer_with(server, *gates)
    assert main(["--url", server.url]) == code
    *table, line = capsys.readouterr().out.splitlines()
    assert json.loads(line) == {
        "passed": code == 0,
        "ranks": [{**gate, "attention": MASKED, "calibration": FOUND} for gate in gates],
    }
    assert sum(MASKED["reason"] in row for row in table) == len(gates)
    failed = [f"rank {rank}: FAILED" for rank, gate in enumerate(gates) if not gate["passed"]]
    assert [row for row in table if "FAILED" in row] == failed


def test_json_prints_one_line_and_the_key_is_sent(
    server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    answer_with(server, GOOD)
    assert main(["--url", server.url, "--json", "--api-key", "k"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    assert server.keys == ["Bearer k"]


@pytest.mark.parametrize("gates", [[None], [GOOD, None], [{}]], ids=str)
def test_a_server_without_a_gate(
    server: FakeServer, capsys: pytest.CaptureFixture[str], gates: list[Any]
) -> None:
    """An exact server has no figures: that is said, not passed."""
    answer_with(server, *gates)
    assert main(["--url", server.url]) == 2
    assert "not a server started with --reuse fused" in capsys.readouterr().err


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--url", "http://127.0.0.1:9"]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# Flags


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ([], "give --model-path, or --url"),
        (["--device", "cpu"], "give --model-path, or --url"),
        (["--calibrate-selection", "file", "--model-path", "m"], "calibration needs one"),
        (["--url", "u", "--model-path", "m"], "not for a running server: --model-path m"),
        (["--url", "u", "--calibrate", "file"], "--calibrate was removed: `python -m eval alpha`"),
        (["--url", "u", "--f1", "0.9"], "--f1 was removed: `python -m eval alpha`"),
    ],
)
def test_wrong_flags(capsys: pytest.CaptureFixture[str], flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(flags)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_the_model_path_may_be_given_with_an_equals_sign(monkeypatch: pytest.MonkeyPatch) -> None:
    flags: list[str] = []

    def measure(given: list[str]) -> dict[str, Any]:
        flags.extend(given)
        return GOOD

    monkeypatch.setattr(check, "_measure", measure)
    assert main(["--model-path=m", "--dtype", "float32"]) == 0
    assert flags == ["--model-path=m", "--dtype", "float32"]


# Calibration


@pytest.mark.parametrize("is_own", [True, False])
def test_selection_is_calibrated_on_ones_own_questions_or_made_up_ones(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    is_own: bool,
) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text(json.dumps({"question": "q", "chunks": ["a", "b"], "answers": ["x"]}))
    asked: list[Any] = []
    rank = {
        "dp_rank": 0,
        "depth": 3,
        "layer": 0,
        "heads": [],
        "figures": {"gain_by_depth": {"3": {"kl": 0.9, "kl_max": 0.8}}},
    }

    def post(client: Any, url: str, body: Any) -> dict[str, Any]:
        asked.append((url, body["examples"]))
        return {"ranks": [rank]}

    monkeypatch.setattr("sglang_chunkcache.client.Client.post", post)
    assert (
        main(["--url", "http://server", "--calibrate-selection", *([str(path)] if is_own else [])])
        == 0
    )
    assert asked == [
        ("/chunkcache/calibrate", [{"question": "q", "chunks": ("a", "b")}] if is_own else [])
    ]
    title, *table, line = capsys.readouterr().out.splitlines()
    assert title == "rank 0: deviation at depth 3, question in layer last"
    assert table[-1].split() == [
        "gain_by_depth",
        "3",
        "0.900",
        "mean",
        "0.800",
        "of",
        "the",
        "largest",
    ]
    assert json.loads(line) == {"ranks": [rank]}


def test_a_bad_file_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text("nonsense")
    assert main(["--url", "http://server", "--calibrate-selection", str(path)]) == 2
    assert f"{path}:1: needs question, chunks and answers" in capsys.readouterr().err


# The process that loads the model


def make_child(monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """The child runs `code` in place of loading a model; `out` is the file it is to write."""
    run = subprocess.run

    def run_code(command: list[str], **kwargs: Any) -> Any:
        assert command[1:3] == ["-m", "sglang_chunkcache.check"]
        out = f"import os; out = os.environ[{check._CHILD!r}]\n"
        return run([sys.executable, "-c", out + code], **kwargs)

    monkeypatch.setattr(subprocess, "run", run_code)


def test_figures_come_from_the_child(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By way of a file: what it prints is not shown."""
    make_child(
        monkeypatch,
        "print('noise'); open(out, 'w').write('{\"passed\": true, \"moved_ulps\": 1.0}')",
    )
    assert main(["--model-path", "m", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"passed": True, "ranks": [GOOD]}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "print('ValueError: --reuse fused is not supported with LoRA'); raise SystemExit(1)",
            "not supported with LoRA",
        ),
        ("print('check: error: no such flag'); raise SystemExit(2)", "error: no such flag"),
        ("print('killed')", "killed"),
        ("pass", "without a message"),
    ],
)
def test_a_child_that_fails_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str, message: str
) -> None:
    """The line of its output that says why, or the last ones."""
    make_child(monkeypatch, code)
    assert main(["--model-path", "m"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err


def test_a_child_that_hangs_is_stopped(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(check, "START_TIMEOUT_S", 0.5)
    make_child(monkeypatch, "import time; time.sleep(60)")
    assert main(["--model-path", "m"]) == 2
    assert "did not load within" in capsys.readouterr().err


@pytest.mark.nightly
@pytest.mark.engine
def test_the_bundled_model_passes() -> None:
    """The whole command, with SGLang's engine."""
    pytest.importorskip("sglang")
    command = [sys.executable, "-m", "sglang_chunkcache.check", "--model-path", "bundled", "--json"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    (gate,) = json.loads(done.stdout.splitlines()[-1])["ranks"]
    assert gate["passed"]
    assert gate["moved_ulps"] <= gate["max_ulps"]
    assert gate["kv_error"] <= gate["max_kv_error"]
    assert gate["logit_error"] <= gate["max_logit_error"] < gate["logit_error_unrecomputed"]
    assert (
        gate["scattered_error"] <= gate["max_scattered_error"] < gate["scattered_error_off_by_one"]
    )
    assert gate["conclusive"]
    assert gate["attention"]["kind"] in ("masked", "sparse")
    assert gate["attention"]["reason"]


@pytest.mark.nightly
@pytest.mark.engine
def test_a_flag_that_does_not_suit_is_named() -> None:
    """What the server would refuse at start, the check refuses too, in one line."""
    pytest.importorskip("sglang")
    command = [
        sys.executable,
        "-m",
        "sglang_chunkcache.check",
        "--model-path",
        "bundled",
        "--page-size",
        "16",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--page-size" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_server_errors_are_value_errors() -> None:
    """What a user can get wrong."""
    assert issubclass(ServerError, ValueError)
