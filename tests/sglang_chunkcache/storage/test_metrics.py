"""What Prometheus is told of the storage: the stats' figures, and counters that never fall."""

from __future__ import annotations

import subprocess
import sys

import pytest

pytest.importorskip("prometheus_client")

TOLD = """
from prometheus_client import generate_latest
from sglang_chunkcache.storage.metrics import StorageMetrics

stats = {"num_entries": 3, "load_ms_per_mib": None, "loaded": 2, "written": 3, "late": 1}
stats |= {"unpaid": 0, "waits": 2, "waits_in_vain": 1, "bytes": {"chains": 400, "other": 100}}
stats |= {"saved_bytes": {"chains": 0}}
metrics = StorageMetrics("network")
metrics.show({**stats, "problems": {}})
stats |= {"bytes": {"chains": 300, "other": 100}, "loaded": 5, "load_ms_per_mib": 1.5}
metrics.show({**stats, "problems": {"gone": 2}})
print(generate_latest().decode())
"""


def test_figures_are_those_of_the_stats() -> None:
    """By tier. In a process of its own, since a registry takes each name once."""
    ran = subprocess.run([sys.executable, "-c", TOLD], capture_output=True, text=True, check=True)
    lines = [line for line in ran.stdout.splitlines() if line.startswith("chunkcache:storage_")]
    found = dict(line.rsplit(" ", 1) for line in lines)
    told = {name: float(value) for name, value in found.items() if "_created" not in name}
    assert told == {
        'chunkcache:storage_bytes{kind="chains",tier="network"}': 300,
        'chunkcache:storage_bytes{kind="other",tier="network"}': 100,
        'chunkcache:storage_saved_bytes{kind="chains",tier="network"}': 0,
        'chunkcache:storage_entries{tier="network"}': 3,
        'chunkcache:storage_load_ms_per_mib{tier="network"}': 1.5,
        'chunkcache:storage_loads_total{tier="network"}': 5,
        'chunkcache:storage_writes_total{tier="network"}': 3,
        'chunkcache:storage_late_total{tier="network"}': 1,
        'chunkcache:storage_waits_total{tier="network"}': 2,
        'chunkcache:storage_waits_in_vain_total{tier="network"}': 1,
        'chunkcache:storage_unpaid_total{tier="network"}': 0,
        'chunkcache:storage_problems_total{reason="gone",tier="network"}': 2,
    }
