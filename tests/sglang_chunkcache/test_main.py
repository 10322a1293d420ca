"""`sglang-chunkcache`: what `python -m` runs, by one name."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from retrieval import command_line
from sglang_chunkcache import __main__ as script
from sglang_chunkcache import __version__

Call = Callable[..., object]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Call:
    """Runs the script and returns its exit code."""
    monkeypatch.setattr(command_line, "started_as", None)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*argv: str) -> object:
        monkeypatch.setattr(sys, "argv", ["sglang-chunkcache", *argv])
        with pytest.raises(SystemExit) as stop:
            script.main()
        return stop.value.code

    return run


def test_version(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("--version") == 0
    assert capsys.readouterr().out == f"sglang-chunkcache {__version__}\n"


def test_commands_are_listed(call: Call, capsys: pytest.CaptureFixture[str]) -> None:
    """Where none is given that is a mistake."""
    codes = [call(), call("--help"), call("-h")]
    assert codes == [2, 0, 0]
    assert capsys.readouterr().out.count("preprocess ") == 3
    assert call("serv") == 2
    assert "choose from serve, check, preprocess, retrieval, eval" in capsys.readouterr().err


def test_a_command_runs_as_by_its_module(
    call: Call, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """SGLang's processes import the main module by its name; a user's selectors are in the current
    folder; the exit code is the command's."""
    source = """
import sys
assert sys.modules["__main__"].__spec__.name == "made_command"
sys.exit(int(sys.argv[1]))
"""
    (tmp_path / "made_command.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(script.COMMANDS, "made", ("made_command", ""))
    assert call("made", "7") == 7
    assert command_line.program("python -m made_command part") == "sglang-chunkcache made part"


def test_usage_is_that_of_the_script() -> None:
    """What it says can be typed."""
    command = [sys.executable, "-m", "sglang_chunkcache", "retrieval", "search", "x", "y", "--kk"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("usage: sglang-chunkcache retrieval search ")
    assert done.stderr.endswith("unrecognized arguments: --kk; did you mean --k?\n")


@pytest.mark.parametrize(
    "command",
    [
        "serve --model-path bundled",
        "check --url http://127.0.0.1:9 --calibrate-selection questions.jsonl",
        "preprocess --url http://127.0.0.1:9 --corpus c --neighbors n",
    ],
)
def test_missing_installation_is_one_line(command: str) -> None:
    """An adapter's extra has none of these packages."""
    code = (
        "import sys; sys.modules |= dict.fromkeys(('torch', 'msgspec'));"
        "from sglang_chunkcache.__main__ import main; main()"
    )
    done = subprocess.run([sys.executable, "-c", code, *command.split()], capture_output=True)
    last = done.stderr.decode().splitlines()[-1]
    assert done.returncode == 2
    assert last.startswith(f"sglang-chunkcache {command.split()[0]}: ")
    assert "needs the server's installation: " in last
