"""What our layouts of a cell cost before anything is computed: the same on every machine, but for the host's time."""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

from sglang_chunkcache.attention.base import HeadShape, SparseRequest
from sglang_chunkcache.attention.flashinfer import KERNELS, tile_rows
from sglang_chunkcache.attention.flashinfer_cuda import unsupported_shape
from sglang_chunkcache.attention.sparse_layout import plan_sparse

REPEATS = 5


def plan_figures(requests: Sequence[SparseRequest], shape: HeadShape, *, page_size: int) -> dict[str, dict[str, Any]]:
    """Kernel -> pairs that it walks, bytes of page indices, entries, and CPU time of the layout alone in milliseconds.

    Empty for a shape that the kernels do not know.
    """
    figures: dict[str, dict[str, Any]] = {}
    for kernel in () if unsupported_shape(shape, page_size=page_size) else KERNELS:
        rows, times = tile_rows(shape, kernel), []
        for _ in range(REPEATS):
            start = time.thread_time()
            layout = plan_sparse(requests, page_size=page_size, tile_rows=rows, two_part=kernel == "fa3_two_part")
            times.append(1000 * (time.thread_time() - start))
        figures[kernel] = {
            "executed_pairs": layout.executed_pairs(rows),
            "index_bytes": 4 * layout.num_indices(),
            "entries": sum(len(launch.request) for launch in layout.launches),
            "layout_ms": median(times),
        }
    return figures
