"""The storage's figures for Prometheus, told by its rank's own process. SGLang's `/metrics` sums up what ranks tell.

`prometheus_client` is imported with the first figures, for the reason that front/metrics.py gives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

GAUGES = {
    "bytes": ("num_bytes", "livesum", "bytes of the entries that this server has written"),
    "entries": ("num_entries", "livesum", "entries that this server knows, those of others included"),
    "load_ms_per_mib": ("load_ms_per_mib", "mostrecent", "milliseconds that a load of 1 MiB is estimated to take"),
}
"""Name -> (of the stats, how ranks are joined, help)."""
COUNTERS = {
    "loads": ("loaded", "entries loaded"),
    "writes": ("written", "entries written"),
    "late": ("late", "loads that came after their request was planned"),
    "unpaid": ("unpaid", "loads left out because computing was estimated to be faster"),
}
"""Name -> (of the stats, help)."""


class StorageMetrics:
    """Of one rank. `tier`: disk or network."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._exported: dict[str, Any] = {}
        self._told: dict[tuple[str, ...], int] = {}

    def show(self, stats: Mapping[str, Any]) -> None:
        """What `StorageTier.stats` says now."""
        if not self._exported:
            self._create()
        for name, (key, _, _) in GAUGES.items():
            if stats[key] is not None:
                self._exported[name].labels(self._tier).set(stats[key])
        for name, (key, _) in COUNTERS.items():
            self._raise(stats[key], name)
        for reason, number in stats["problems"].items():
            self._raise(number, "problems", reason)

    def _create(self) -> None:
        from prometheus_client import Counter, Gauge

        for name, (_, mode, text) in GAUGES.items():
            self._exported[name] = Gauge(f"chunkcache:storage_{name}", text, ["tier"], multiprocess_mode=mode)
        for name, (_, text) in COUNTERS.items():
            self._exported[name] = Counter(f"chunkcache:storage_{name}", text, ["tier"])
        text = "loads and writes that came to nothing, by reason"
        self._exported["problems"] = Counter("chunkcache:storage_problems", text, ["tier", "reason"])

    def _raise(self, number: int, name: str, *labels: str) -> None:
        """A counter to its number."""
        before = self._told.get((name, *labels), 0)
        self._exported[name].labels(self._tier, *labels).inc(number - before)
        self._told[name, *labels] = number
