"""Steps of a start: a line for each that takes its time, at a terminal, drawn by one process."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from contextlib import suppress

import pytest

from sglang_chunkcache import start_steps
from sglang_chunkcache.start_steps import WEIGHTS, shown_steps, step
from tests.polling import until


def test_steps_are_drawn_at_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """With seconds while they run, of other processes, too. SGLang's bar is not drawn over."""
    monkeypatch.setattr(start_steps, "SHOWN_S", 0.0)
    monkeypatch.setattr(start_steps, "POLL_S", 0.01)
    terminal, stderr = pty.openpty()
    os.set_blocking(terminal, False)
    shown = ""

    def has(text: str) -> bool:
        nonlocal shown
        with suppress(BlockingIOError):
            shown += os.read(terminal, 65536).decode()
        return text in shown

    with os.fdopen(stderr, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with shown_steps():
            code = "from sglang_chunkcache import start_steps; start_steps.step('gate')"
            subprocess.run([sys.executable, "-c", code], check=True)
            until(lambda: has("\rchunk cache: gate, 0 s\x1b[K\r"))
            step(WEIGHTS)
            until(lambda: has(f"\rchunk cache: {WEIGHTS}\x1b[K\r\n"))
        assert has(f"\rchunk cache: {WEIGHTS}: ")
    os.close(terminal)
    assert "\rchunk cache: gate: " in shown
    assert f"{WEIGHTS}, " not in shown
    step("later")  # a process may still name one


def test_a_pipe_gets_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    with shown_steps():
        step("gate")
        assert start_steps.FILE not in os.environ
    assert capfd.readouterr() == ("", "")
