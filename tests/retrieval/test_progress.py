"""Bars: at a terminal, and nowhere else."""

from __future__ import annotations

import os
import pty
import sys
import termios
from contextlib import suppress

import pytest

pytest.importorskip("tqdm")

from retrieval import progress


def drawn(*, shown_s: float, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a terminal gets of two stages."""
    monkeypatch.setattr(progress, "SHOWN_S", shown_s)
    terminal, stderr = pty.openpty()
    termios.tcsetwinsize(stderr, (24, 80))
    with os.fdopen(stderr, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        with progress.progress_bars() as report:
            report("train", 0, None)
            report("add", 1, 2)
            report("add", 2, 2)
    shown = b""
    with suppress(OSError):  # the end, once all is read
        while part := os.read(terminal, 65536):
            shown += part
    os.close(terminal)
    return shown.decode()


def test_bars_are_drawn_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage of minutes may have no update. What took its time stays."""
    shown = drawn(shown_s=0, monkeypatch=monkeypatch)
    assert "train    : 0" in shown
    assert "2/2" in shown
    assert shown.endswith("\n")


def test_short_stages_leave_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A quick command prints its result alone."""
    assert drawn(shown_s=1e9, monkeypatch=monkeypatch).endswith(" \r")


def test_a_pipe_gets_none(capfd: pytest.CaptureFixture[str]) -> None:
    with progress.progress_bars() as report:
        report("train", 0, None)
        report("add", 2, 2)
    assert capfd.readouterr() == ("", "")
