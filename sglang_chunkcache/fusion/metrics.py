"""What Prometheus is told of the store."""

from __future__ import annotations

from sglang_chunkcache.rank_metrics import RankMetrics

GAUGES = {
    "bytes": ("bytes", "livesum", "bytes of KV in the store, by kind: captured, preprocessed"),
    "saved_bytes": (
        "saved_bytes",
        "livesum",
        "how many fewer these are than in the pool's dtype, by kind",
    ),
}


class StoreMetrics(RankMetrics):
    """Of `store` in `Fuser.stats`."""

    def __init__(self) -> None:
        super().__init__("chunkcache:store_", GAUGES, {})
