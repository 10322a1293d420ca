"""What the attention bench measures: which tokens of a context are recomputed, where its KV lies, the work and its layouts.

    scattered   each token as likely as any other           clustered   runs of about 64 tokens, anywhere
    .X..X...XX.....X..                                       ...XXXX......XXXX.

Requests of a batch have the same context and ratio, other positions and pages of their own, in random order over the pool.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import torch
from torch import Tensor

from sglang_chunkcache.attention.base import HeadShape, SparseRequest
from sglang_chunkcache.attention.flashinfer import KERNELS, tile_rows
from sglang_chunkcache.attention.flashinfer_cuda import unsupported_shape
from sglang_chunkcache.attention.sparse_layout import plan_sparse

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

    @property
    def name(self) -> str:
        """As samples call it."""
        return f"{self.pattern}/{self.context}/{self.batch}/{self.ratio:g}"


def cells_of(
    patterns: Sequence[str], contexts: Sequence[int], batches: Sequence[int], ratios: Sequence[float]
) -> list[Cell]:
    """The grid, context by context and batch by batch; at ratio 1 all patterns are one, after the others."""
    cells = [
        Cell(pattern if ratio < 1 else "all", context, batch, ratio)
        for context in contexts
        for batch in batches
        for pattern in patterns
        for ratio in ratios
    ]
    unique = dict.fromkeys(cells)
    return sorted(unique, key=lambda cell: (contexts.index(cell.context), batches.index(cell.batch), cell.ratio == 1))


def positions_of(pattern: str, context: int, ratio: float, seed: int) -> Tensor:
    """[round(ratio * context), at least 1] int64, ascending; the same for the same seed."""
    count = max(1, round(ratio * context))
    generator = torch.Generator().manual_seed(seed)
    if pattern == "all" or count == context:
        return torch.arange(context)[:count]
    if pattern == "scattered":
        return torch.randperm(context, generator=generator)[:count].sort().values
    lengths = list(_run_lengths(count, context - count + 1, generator))
    # Between two runs there is at least one token that is not recomputed; the others may lie anywhere.
    free = context - count - (len(lengths) - 1)
    cuts = torch.randint(free + 1, (len(lengths),), generator=generator).sort().values
    run = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return torch.arange(count) + cuts[run] + run


def make_requests(cell: Cell, *, page_size: int, whole: bool = False, contiguous: bool = False) -> list[SparseRequest]:
    """The cell's batch. Pages are those of a pool that has just enough of them.

    Args:
        whole: all tokens are queries, as dense prefill has them.
        contiguous: pages in order, for attention that knows no pages.
    """
    num_pages = -(-cell.context // page_size)
    generator = torch.Generator().manual_seed(cell.context + cell.batch)
    pages = torch.randperm(cell.batch * num_pages, generator=generator)
    if contiguous:
        pages = torch.arange(cell.batch * num_pages)
    return [
        SparseRequest(
            positions=torch.arange(cell.context)
            if whole
            else positions_of(cell.pattern, cell.context, cell.ratio, seed=number),
            kv_pages=pages[number * num_pages : (number + 1) * num_pages],
            num_keys=cell.context,
        )
        for number in range(cell.batch)
    ]


def make_kv(cell: Cell, shape: HeadShape, *, page_size: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(keys, values), [num_pages, page_size, num_kv_heads, head_dim] each, normally distributed."""
    size = (cell.batch * -(-cell.context // page_size), page_size, shape.num_kv_heads, shape.head_dim)
    generator = torch.Generator(device).manual_seed(0)
    keys, values = (torch.randn(size, dtype=shape.dtype, device=device, generator=generator) for _ in range(2))
    return keys, values


def make_queries(count: int, shape: HeadShape, *, device: torch.device) -> Tensor:
    """[count, num_qo_heads, head_dim], normally distributed."""
    generator = torch.Generator(device).manual_seed(1)
    size = (count, shape.num_qo_heads, shape.head_dim)
    return torch.randn(size, dtype=shape.dtype, device=device, generator=generator)


def work_of(requests: Sequence[SparseRequest], shape: HeadShape, *, page_size: int) -> dict[str, int]:
    """What any implementation has to do: query-key pairs, their FLOPs, and bytes in and out with each key read once."""
    visible = [request.visible() for request in requests]
    num_queries = sum(counts.numel() for counts in visible)
    pairs = sum(int(counts.sum()) for counts in visible)
    # Pages that requests share are read once; of two requests that share one, the longer list counts.
    held = torch.zeros(1 + max(int(request.kv_pages.max()) for request in requests), dtype=torch.int64)
    for request, counts in zip(requests, visible, strict=True):
        num_keys = int(counts[-1]) if counts.numel() else 0
        pages = request.kv_pages[: -(-num_keys // page_size)].long()
        filled = (num_keys - page_size * torch.arange(pages.numel())).clamp(max=page_size)
        held.scatter_reduce_(0, pages, filled, "amax")
    numbers = 2 * num_queries * shape.num_qo_heads + 2 * int(held.sum()) * shape.num_kv_heads
    return {
        "queries": num_queries,
        "pairs": pairs,
        "flops": 4 * shape.head_dim * shape.num_qo_heads * pairs,
        "bytes": numbers * shape.head_dim * shape.dtype.itemsize,
    }


def layouts_of(requests: Sequence[SparseRequest], shape: HeadShape, *, page_size: int) -> dict[str, dict[str, float]]:
    """Kernel -> pairs that its layout executes over needed ones, MiB of page indices, and CPU seconds of the layout alone.

    Empty for a shape that the kernels do not know.
    """
    needed = work_of(requests, shape, page_size=page_size)["pairs"]
    figures: dict[str, dict[str, float]] = {}
    for kernel in () if unsupported_shape(shape, page_size=page_size) else KERNELS:
        rows, times = tile_rows(shape, kernel), []
        for _ in range(LAYOUT_REPEATS):
            start = time.thread_time()
            layout = plan_sparse(requests, page_size=page_size, tile_rows=rows, two_part=kernel == "fa3_two_part")
            times.append(time.thread_time() - start)
        size = 4 * layout.num_indices() / 2**20
        executed = layout.executed_pairs(rows) / needed
        figures[kernel] = {"executed_over_needed": executed, "index_mib": size, "layout_s": median(times)}
    return figures


def _run_lengths(count: int, most: int, generator: torch.Generator) -> Iterator[int]:
    """Lengths that sum to `count`, at most `most` of them; the last one takes what is left."""
    for _ in range(most - 1):
        length = int(torch.randint(RUN_LEN // 2, RUN_LEN + RUN_LEN // 2 + 1, (), generator=generator))
        if length >= count:
            break
        yield length
        count -= length
    yield count
