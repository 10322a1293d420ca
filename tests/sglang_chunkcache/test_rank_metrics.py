"""When figures are told, and that telling them harms nobody."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest

from sglang_chunkcache.rank_metrics import SHOWN_S, RankMetrics

pytest.importorskip("prometheus_client")

PLAIN = """
from prometheus_client import generate_latest
from sglang_chunkcache.rank_metrics import RankMetrics

gauges = {"size": ("size", "livesum", "help"), "held": ("held", "livesum", "help")}
metrics = RankMetrics("chunkcache:x_", gauges, {"ends": ("ended", "help"), "all": ("n", "help")})
metrics.show({"size": 5, "held": {"new": 4}, "ended": {"done": 1}, "n": 7})
metrics.show({"size": 3, "held": {"new": 1, "old": 2}, "ended": {"done": 1, "lost": 2}, "n": 9})
print(generate_latest().decode())
"""


def test_figures_without_labels_of_their_own() -> None:
    """In a process of its own, since a registry takes each name once."""
    ran = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True, check=True)
    found = dict(
        line.rsplit(" ", 1) for line in ran.stdout.splitlines() if line.startswith("chunkcache:x_")
    )
    assert {name: float(value) for name, value in found.items() if "_created" not in name} == {
        "chunkcache:x_size": 3,
        'chunkcache:x_held{kind="new"}': 1,
        'chunkcache:x_held{kind="old"}': 2,
        'chunkcache:x_ends_total{reason="done"}': 1,
        'chunkcache:x_ends_total{reason="lost"}': 2,
        "chunkcache:x_all_total": 9,
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
