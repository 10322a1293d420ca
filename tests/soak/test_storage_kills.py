"""A process with storage and loader alone, killed 200 times:
nothing is lost that was confirmed, nothing torn is found."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.soak.sizes import scaled

pytest.importorskip("sglang")

pytestmark = pytest.mark.nightly
MAX_LEFT_OVER = 3
"""Files a kill: of the entry that was being written, of its row,
and of one that was being deleted."""


def test_kills_lose_and_tear_nothing(tmp_path: Path) -> None:
    """At whatever moment of a start, a write or a deletion."""
    kills = scaled(200)
    command = [sys.executable, "-m", "tests.soak.killed_storage", str(tmp_path), str(kills), "0"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3600, check=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert (found["lost"], found["torn"], found["wrong"]) == (0, 0, 0), found
    assert min(found["confirmed"], found["deleted"], found["read"]) > kills / 10, (
        "the children did not work"
    )
    assert found["left_over"] <= MAX_LEFT_OVER * kills, found
