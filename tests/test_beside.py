"""Tests that are given away to a second session count as this session's own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(len(os.sched_getaffinity(0)) == 1, reason="nothing is given away on one core")

CONFTEST = """
import pytest
from tests.beside import pytest_runtestloop, register_second as pytest_configure

@pytest.fixture(scope="session")
def rag_server():
    return 7
"""
TESTS = """
import os, pathlib, pytest

def note(): pathlib.Path(str(os.getpid())).touch()
def test_here(): note()
def test_fails_here(): assert 0, "a failure here"
@pytest.mark.parametrize("odd", ["a::b[\\\\c ]"])
def test_there(rag_server, odd): note()
def test_fails_there(rag_server): assert rag_server == 8, "a failure there"
@pytest.mark.skip
def test_skipped_there(rag_server): pass
"""


@pytest.mark.parametrize(
    ("last", "closing"),
    [("assert rag_server", "2 failed, 3 passed, 1 skipped"), ("os._exit(3)", "3 failed, 2 passed, 1 skipped")],
    ids=["ends", "dies"],
)
def test_one_closing_line_is_true_of_all(tmp_path: Path, last: str, closing: str) -> None:
    """What failed in the second session is shown and counted, and so is a test that it owes."""
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_both.py").write_text(f"{TESTS}\ndef test_last_there(rag_server): {last}\n")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    command = [sys.executable, "-m", "pytest", "-p", "no:hypothesispytest"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 1, done.stdout
    assert closing in done.stdout.splitlines()[-1]
    assert "a failure here" in done.stdout
    assert "a failure there" in done.stdout
    assert ("its session ended with 3" in done.stdout) == (last == "os._exit(3)")
    assert len([path for path in tmp_path.iterdir() if path.name.isdigit()]) == 2
