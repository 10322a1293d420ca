"""What the attention bench measures: which tokens of a context are recomputed, where its KV lies,
the work and its layouts.

    scattered   each token as likely as any other      clustered   runs of about 64 tokens, anywhere
    .X..X...XX.....X..                                  ...XXXX......XXXX.

Requests of a batch have the same context and ratio, other positions and slots of their own, in
random order over the pool.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import median

import torch
from torch import Tensor

from sglang_chunkcache.attention.base import HeadShape, SparseRequest
from sglang_chunkcache.attention.flashinfer import KERNELS, tile_rows
from sglang_chunkcache.attention.sparse_layout import SparseLayout, block_keys, plan_sparse

PATTERNS = ("scattered", "clustered")
RUN_LEN = 64
"""Tokens of a clustered run, on average; each has half as many to half as many more."""
LAYOUT_REPEATS = 5


@dataclass(frozen=True)
class Cell:
    """One point of the grid. `pattern` is "all" where everything is recomputed."""

    pattern: str
    context: int
    batch: int
    ratio: float


def cells_of(
    contexts: Sequence[int], batches: Sequence[int], ratios: Sequence[float]
) -> list[Cell]:
    """The grid, context by context and batch by batch; at ratio 1 all patterns are one."""
    grid = product(contexts, batches, PATTERNS, ratios)
    cells = (
        Cell(pattern if ratio < 1 else "all", context, batch, ratio)
        for context, batch, pattern, ratio in grid
    )
    return list(dict.fromkeys(cells))


def positions_of(pattern: str, context: int, ratio: float, seed: int) -> Tensor:
    """[round(ratio * context), at least 1] int64, ascending; the same for the same seed."""
    count = max(1, round(ratio * context))
    generator = torch.Generator().manual_seed(seed)
    if pattern == "all" or count == context:
        return torch.arange(context)[:count]
    if pattern == "scattered":
        return torch.randperm(context, generator=generator)[:count].sort().values
    # at most one run more than there are tokens to part them
    lengths = list(_run_lengths(count, context - count + 1, generator))
    # Between two runs there is at least one token that is not recomputed; the others may lie
    # anywhere.
    free = context - count - (len(lengths) - 1)
    cuts = torch.randint(free + 1, (len(lengths),), generator=generator).sort().values
    run = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return torch.arange(count) + cuts[run] + run


def make_requests(
    cell: Cell, *, whole: bool = False, contiguous: bool = False
) -> list[SparseRequest]:
    """The cell's batch. Slots are those of a pool that has just enough of them.

    Args:
        whole: all tokens are queries, as dense prefill has them.
        contiguous: slots in order, for attention that knows none.
    """
    generator = torch.Generator().manual_seed(cell.context + cell.batch)
    slots = torch.randperm(cell.batch * cell.context, generator=generator)
    if contiguous:
        slots = slots.sort().values
    pattern, ratio = ("all", 1.0) if whole else (cell.pattern, cell.ratio)
    return [
        SparseRequest(positions_of(pattern, cell.context, ratio, seed=number), own)
        for number, own in enumerate(slots.view(cell.batch, cell.context))
    ]


def pairs_of(requests: Sequence[SparseRequest]) -> int:
    """Query-key pairs, which any implementation has to compute."""
    return sum(int(request.visible().sum()) for request in requests)


def layouts_of(requests: Sequence[SparseRequest], shape: HeadShape) -> dict[str, dict[str, float]]:
    """Kernel -> pairs that its layout executes over needed ones, MiB of slot indices,
    and CPU seconds of the layout alone."""
    figures: dict[str, dict[str, float]] = {}
    for kernel in KERNELS:
        rows, times = tile_rows(shape, kernel), []
        for _ in range(LAYOUT_REPEATS):
            # the layout runs on this thread: other work of the machine does not count
            start = time.thread_time()
            layout = plan_sparse(requests, tile_rows=rows)
            times.append(time.thread_time() - start)
        executed = executed_pairs(layout, rows) / pairs_of(requests)
        size = 4 * num_indices(layout) / 2**20
        figures[kernel] = {
            "executed_over_needed": executed,
            "index_mib": size,
            "layout_s": median(times),
        }
    return figures


def executed_pairs(layout: SparseLayout, tile_rows: int) -> int:
    """Pairs computed by kernels that take `tile_rows` rows of an entry at a time, padding rows
    included."""
    return tile_rows * sum(int(block_keys(each, tile_rows).sum()) for each in layout.launches)


def num_indices(layout: SparseLayout) -> int:
    """Slot indices of all launches."""
    return sum(int(launch.kv_indptr[-1]) for launch in layout.launches)


def _run_lengths(count: int, most: int, generator: torch.Generator) -> Iterator[int]:
    """Lengths that sum to `count`, at most `most` of them; the last one takes what is left."""
    for _ in range(most - 1):
        length = int(
            torch.randint(RUN_LEN // 2, RUN_LEN + RUN_LEN // 2 + 1, (), generator=generator)
        )
        if length >= count:
            break
        yield length
        count -= length
    yield count
