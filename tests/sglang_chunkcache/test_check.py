"""`python -m sglang_chunkcache.check`: exit codes, one line for every mistake,
and the gate of the bundled model for real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("requests")

from sglang_chunkcache import check
from sglang_chunkcache.check import main
from tests.polling import until
from tests.sglang_chunkcache.fake_server import FakeServer

GOOD, BAD = {"moved_ulps": 1.0, "passed": True}, {"moved_ulps": 9.0, "passed": False}
FOUND = {"depth": 3}
MASKED = {"kind": "masked", "reason": "the kernels need CUDA, not cpu"}

Capture = pytest.CaptureFixture[str]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    yield fake
    fake.close()


def answer_with(server: FakeServer, *gates: Any) -> None:
    more = {"moves": {"attention": MASKED}, "calibration": FOUND}
    ranks = [{} if gate is None else {"gate": gate, **more} for gate in gates]
    server.reply = (200, json.dumps({"tree": {"kind": "chunk"}, "ranks": ranks}).encode())


# A running server


@pytest.mark.parametrize(("gates", "code"), [([GOOD], 0), ([GOOD, BAD], 1)])
def test_gates_of_a_running_server(
    server: FakeServer, capsys: Capture, gates: list[dict[str, Any]], code: int
) -> None:
    """One failed rank fails the check. Both outputs have the attention that ran."""
    answer_with(server, *gates)
    assert main(["--url", server.url]) == code
    *table, line = capsys.readouterr().out.splitlines()
    told = [{**gate, "attention": MASKED, "calibration": FOUND} for gate in gates]
    assert json.loads(line) == {"passed": code == 0, "ranks": told}
    assert sum("the kernels need CUDA" in row for row in table) == len(gates)
    assert ("rank 1: FAILED" in table) == bool(code)
    assert main(["--url", server.url, "--json", "--api-key", "k"]) == code
    assert capsys.readouterr().out.splitlines() == [line]
    assert server.keys == [None, "Bearer k"]


@pytest.mark.parametrize("gates", [[GOOD, None], [{}]], ids=str)
def test_a_server_without_a_gate(server: FakeServer, capsys: Capture, gates: list[Any]) -> None:
    """An exact server has no figures: that is said, not passed."""
    answer_with(server, *gates)
    assert main(["--url", server.url]) == 2
    assert "not a server started with --reuse fused (tree: chunk)" in capsys.readouterr().err


# Flags


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--device", "cpu"], "give --model-path, or --url"),
        (["--calibrate-selection", "file", "--model-path", "m"], "calibration needs one"),
        (["--url", "u", "--model-path", "m"], "not for a running server: --model-path m"),
        (["--url", "u", "--f1", "0.9"], "not for a running server: --f1 0.9"),
        (["--url", "u", "--jsno"], "--jsno; did you mean --json?"),
    ],
)
def test_wrong_flags(capsys: Capture, flags: list[str], message: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert message in capsys.readouterr().err


def test_mistakes_are_one_line(tmp_path: Path, capsys: Capture) -> None:
    """A server that is not there, and a bad file."""
    (tmp_path / "bad").write_text("nonsense")
    asked = ["--calibrate-selection", str(tmp_path / "bad")]
    for flags, message in (([], "127.0.0.1"), (asked, "bad:1: JSON is malformed")):
        assert main(["--url", "http://127.0.0.1:9", *flags]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line


# Calibration


@pytest.mark.parametrize("is_own", [True, False])
def test_selection_is_calibrated_on_ones_own_questions_or_made_up_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, tmp_path: Path, is_own: bool
) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text(json.dumps({"question": "q", "chunks": ["a", "b"], "answers": ["x"]}))
    asked: list[Any] = []
    figures = {"gain_by_depth": {"3": 0.9}}
    rank = {"dp_rank": 0, "depth": 3, "layer": 0, "heads": [], "figures": figures}

    def post(client: Any, url: str, body: Any) -> dict[str, Any]:
        asked.append((url, body["examples"]))
        return {"ranks": [rank]}

    monkeypatch.setattr("sglang_chunkcache.client.Client.post", post)
    flags = ["--url", "http://server", "--calibrate-selection", *([str(path)] if is_own else [])]
    assert main(flags) == 0
    examples = [{"question": "q", "chunks": ("a", "b")}] if is_own else []
    assert asked == [("/chunkcache/calibrate", examples)]
    *table, line = capsys.readouterr().out.splitlines()
    assert table[-1].split() == ["gain_by_depth", "3", "0.900"]
    assert json.loads(line) == {"ranks": [rank]}


# The process that loads the model


def make_child(monkeypatch: pytest.MonkeyPatch, code: str) -> list[str]:
    """The child runs `code` in place of loading a model; `out` is the file it is to write.
    Returns the flags it will be given."""
    start, flags = subprocess.Popen, list[str]()

    def start_code(command: list[str], **kwargs: Any) -> Any:
        assert command[1:3] == ["-m", "sglang_chunkcache.check"]
        flags.extend(command[3:])
        out = f"import os; out = os.environ[{check._CHILD!r}]\n"
        return start([sys.executable, "-c", out + code], **kwargs)

    monkeypatch.setattr(subprocess, "Popen", start_code)
    return flags


def test_figures_come_from_the_child(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    """By way of a file: what it prints is not shown."""
    code = "print('noise'); open(out, 'w').write('{\"passed\": true, \"moved_ulps\": 1.0}')"
    flags = make_child(monkeypatch, code)
    assert main(["--model-path=m", "--dtype", "float32", "--json"]) == 0
    assert flags == ["--model-path=m", "--dtype", "float32"]
    assert json.loads(capsys.readouterr().out) == {"passed": True, "ranks": [GOOD]}


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "print('ValueError: no LoRA'); print('later'); raise SystemExit(1)",
            "ValueError: no LoRA",
        ),
        ("print('killed')", "killed"),
        ("pass", "without a message"),
        ("import time; time.sleep(60)", "did not load within"),
    ],
)
def test_a_child_that_fails_is_explained(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture, code: str, message: str
) -> None:
    """By the line of its output that says why, or the last ones. One that hangs is stopped."""
    monkeypatch.setattr(check, "START_TIMEOUT_S", 0.5 if "sleep" in code else 60)
    make_child(monkeypatch, code)
    assert main(["--model-path", "m"]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert "later" not in err


def test_nothing_stays_of_a_check_that_is_interrupted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A scheduler that stays has the GPU's memory: the next check would not start."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    code = f"""
import signal, subprocess, sys, time
scheduler = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
open({str(tmp_path / "pid")!r}, "w").write(str(scheduler.pid))
os.kill(os.getppid(), signal.SIGALRM)
time.sleep(600)
"""
    make_child(monkeypatch, code)
    try:
        with pytest.raises(KeyboardInterrupt):
            main(["--model-path", "m"])
    finally:
        signal.signal(signal.SIGALRM, before)
    status = Path("/proc", (tmp_path / "pid").read_text(), "status")

    def is_gone() -> bool:
        return not status.exists() or "State:\tZ" in status.read_text()

    until(is_gone)


def run_for_real(*flags: str) -> subprocess.CompletedProcess[str]:
    pytest.importorskip("sglang")
    command = [sys.executable, "-m", "sglang_chunkcache.check", "--model-path", "bundled", *flags]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, check=False, env=env)


@pytest.mark.nightly
@pytest.mark.engine
def test_the_bundled_model_passes() -> None:
    """The whole command, with SGLang's engine."""
    done = run_for_real("--json")
    assert done.returncode == 0, done.stderr
    (gate,) = json.loads(done.stdout.splitlines()[-1])["ranks"]
    assert gate["passed"]
    assert gate["moved_ulps"] <= gate["max_ulps"]
    assert gate["kv_error"] <= gate["max_kv_error"]
    assert gate["logit_error"] <= gate["max_logit_error"] < gate["logit_error_unrecomputed"]
    scattered, most = gate["scattered_error"], gate["max_scattered_error"]
    assert scattered <= most < gate["scattered_error_off_by_one"]
    assert gate["conclusive"]
    assert gate["attention"]["kind"] in ("masked", "sparse")
    assert gate["attention"]["reason"]


@pytest.mark.nightly
@pytest.mark.engine
def test_a_flag_that_does_not_suit_is_named() -> None:
    """What the server would refuse at start, the check refuses too, in one line."""
    done = run_for_real("--page-size", "16")
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "--page-size" in line
