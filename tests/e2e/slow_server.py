"""A server whose copies from host memory and whose searches sleep, as a file says that may change
while it runs.

    SLOW_SERVER_SWITCH=FILE python -m tests.e2e.slow_server FLAGS

JSON, every key optional: `us_per_token` that a load from host memory sleeps, over its layers;
`in_line`: all layers before the forward; `search_ms` that a search of all lists sleeps.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from retrieval.retriever import Retriever
from sglang_chunkcache import launch_server
from sglang_chunkcache.scheduler.layer_loads import LayerLoads

SWITCH = "SLOW_SERVER_SWITCH"
NUM_LISTS = 128
"""Of a search of all."""


def install(switch: Path) -> None:
    """In this process."""

    def asked(name: str, default: Any = 0) -> Any:
        return json.loads(switch.read_text(encoding="utf-8")).get(name, default)

    start, search_dense = LayerLoads.start, Retriever._search_dense

    def start_slowed(
        loads: LayerLoads, copy: Any, phase: Any, work: Any, *, num_ahead: int, clock: Any
    ) -> int:
        seconds = asked("us_per_token") * 1e-6 * work.tokens / loads.num_layers

        def slow(layers: range) -> None:
            if seconds:
                time.sleep(seconds * len(layers))
            copy(layers)

        num_ahead = loads.num_layers if asked("in_line", False) else num_ahead
        return start(loads, slow, phase, work, num_ahead=num_ahead, clock=clock)

    def search_dense_slowed(retriever: Retriever, *args: Any, nprobe: int, **options: Any) -> Any:
        time.sleep(asked("search_ms") / 1000 * min(nprobe, NUM_LISTS) / NUM_LISTS)
        return search_dense(retriever, *args, nprobe=nprobe, **options)

    LayerLoads.start = start_slowed  # type: ignore[method-assign, assignment]
    Retriever._search_dense = search_dense_slowed  # type: ignore[method-assign, assignment]


if __name__ in ("__main__", "__mp_main__"):
    install(Path(os.environ[SWITCH]))
if __name__ == "__main__":
    launch_server.main(sys.argv[1:])
