"""What Prometheus is told of the storage."""

from __future__ import annotations

from sglang_chunkcache.rank_metrics import RankMetrics

GAUGES = {
    "bytes": ("bytes", "livesum", "bytes of own entries, by kind: chains, variants, other"),
    "saved_bytes": ("saved_bytes", "livesum", "how many fewer than in the pool, by kind"),
    "entries": ("num_entries", "livesum", "entries that this server knows, others' included"),
    "load_ms_per_mib": ("load_ms_per_mib", "mostrecent", "estimate of a load of 1 MiB, in ms"),
}
COUNTERS = {
    "loads": ("loaded", "entries loaded"),
    "writes": ("written", "entries written"),
    "late": ("late", "loads that came after their request was planned"),
    "left": ("left", "loads not begun when their request was planned: too much was under way"),
    "waits": ("waits", "requests that waited for their loads"),
    "waits_in_vain": ("waits_in_vain", "of these, those whose loads were not there in the time"),
    "skipped": ("skipped", "loads left out because computing was estimated to be faster"),
    "problems": ("problems", "loads and writes that came to nothing, by reason"),
}


class StorageMetrics(RankMetrics):
    """Of `Storage.stats`. `tier`: disk or network."""

    def __init__(self, tier: str) -> None:
        super().__init__("chunkcache:storage_", GAUGES, COUNTERS, {"tier": tier})
