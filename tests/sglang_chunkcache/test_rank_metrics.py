"""When figures are told, and that telling them harms nobody."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from sglang_chunkcache.rank_metrics import SHOWN_S, RankMetrics

pytest.importorskip("prometheus_client")

PROGRAM = """
from prometheus_client import generate_latest
from sglang_chunkcache.rank_metrics import RankMetrics
from sglang_chunkcache.storage.metrics import StorageMetrics

gauges = {"size": ("size", "livesum", "help"), "held": ("held", "livesum", "help")}
metrics = RankMetrics("chunkcache:x_", gauges, {"ends": ("ended", "help"), "all": ("n", "help")})
metrics.show({"size": 5, "held": {"new": 4}, "ended": {"done": 1}, "n": 7})
metrics.show({"size": 3, "held": {"new": 1, "old": 2}, "ended": {"done": 1, "lost": 2}, "n": 9})

stats = {"num_entries": 3, "load_ms_per_mib": None, "loaded": 2, "written": 3, "late": 1, "left": 2}
stats |= {"skipped": 0, "waits": 2, "waits_in_vain": 1, "bytes": {"chains": 400, "other": 100}}
stats |= {"saved_bytes": {"chains": 0}}
metrics = StorageMetrics("network")
metrics.show({**stats, "problems": {}})
stats |= {"bytes": {"chains": 300, "other": 100}, "loaded": 5, "load_ms_per_mib": 1.5}
metrics.show({**stats, "problems": {"gone": 2}})
print(generate_latest().decode())
"""


def test_figures_are_those_of_the_stats() -> None:
    """By tier for the storage. In a process of its own, since a registry takes each name once."""
    command = [sys.executable, "-c", PROGRAM]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    lines = [line for line in printed.splitlines() if line.startswith("chunkcache:")]
    found = dict(line.rsplit(" ", 1) for line in lines if "_created" not in line)
    tier = 'tier="network"'
    assert {name.removeprefix("chunkcache:"): float(value) for name, value in found.items()} == {
        "x_size": 3,
        'x_held{kind="new"}': 1,
        'x_held{kind="old"}': 2,
        'x_ends_total{reason="done"}': 1,
        'x_ends_total{reason="lost"}': 2,
        "x_all_total": 9,
        f'storage_bytes{{kind="chains",{tier}}}': 300,
        f'storage_bytes{{kind="other",{tier}}}': 100,
        f'storage_saved_bytes{{kind="chains",{tier}}}': 0,
        f"storage_entries{{{tier}}}": 3,
        f"storage_load_ms_per_mib{{{tier}}}": 1.5,
        f"storage_loads_total{{{tier}}}": 5,
        f"storage_writes_total{{{tier}}}": 3,
        f"storage_late_total{{{tier}}}": 1,
        f"storage_left_total{{{tier}}}": 2,
        f"storage_waits_total{{{tier}}}": 2,
        f"storage_waits_in_vain_total{{{tier}}}": 1,
        f"storage_skipped_total{{{tier}}}": 0,
        f'storage_problems_total{{reason="gone",{tier}}}': 2,
    }


def test_figures_are_due_now_and_then() -> None:
    """At once, then not before a second has passed."""
    now = 100.0
    metrics = RankMetrics("x", {}, {}, clock=lambda: now)
    assert metrics.is_due
    metrics.show({})
    assert not metrics.is_due
    now += SHOWN_S
    assert metrics.is_due


def test_what_cannot_be_told_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """The scheduler goes on."""
    metrics = RankMetrics("never:", {}, {"lost": ("lost", "help")})
    with caplog.at_level(logging.ERROR):
        for _ in range(2):
            metrics.show({})
    assert [record.getMessage() for record in caplog.records] == [
        "chunk cache: never:* are shown no more"
    ]
