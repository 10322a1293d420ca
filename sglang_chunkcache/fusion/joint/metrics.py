"""What Prometheus is told of joint encoding."""

from __future__ import annotations

from sglang_chunkcache.rank_metrics import RankMetrics

COUNTERS = {
    name: (name, text)
    for name, text in (
        ("requests", "requests whose KV was encoded jointly"),
        ("failed", "requests that asked for it and whose KV stayed as it was computed"),
        ("blocks", "KV blocks that were compared, those of all layers counted"),
        ("shared", "of these: blocks that would be left if equal ones were kept once"),
    )
}


class JointMetrics(RankMetrics):
    """Of `SlotEncoder.stats`."""

    def __init__(self) -> None:
        super().__init__("chunkcache:joint_", {}, COUNTERS)
