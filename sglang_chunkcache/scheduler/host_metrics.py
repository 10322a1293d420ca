"""What Prometheus is told of `HostChains.stats`: exact chains in host memory."""

from __future__ import annotations

GAUGES = {
    name: (name, "livesum", text)
    for name, text in (
        ("nodes", "chunks in host memory, and heads before them"),
        ("tokens", "tokens in host memory"),
        ("bytes", "bytes of host memory that hold KV"),
        ("max_bytes", "bytes of host memory that may hold KV"),
        ("waiting", "chunks that wait to be saved"),
        ("layers_ahead", "layers of the last load that were copied before its forward"),
    )
}
COUNTERS = {
    name: (name, text)
    for name, text in (
        ("saved_tokens", "tokens copied to host memory"),
        ("loaded_tokens", "tokens loaded from host memory"),
        ("evicted_tokens", "tokens evicted from host memory"),
        ("loads", "loads from host memory"),
        ("skipped", "loads estimated to take longer than computing: a few are tried"),
        ("no_room", "loads cut short because the device was full"),
        ("missed", "chunks that were turned away, did not fit, or left the device first"),
        ("failed", "copies that failed"),
    )
}
