"""Which of FlashInfer's kernels this machine runs our passes fastest with: tried at the start, not looked up.

Each kernel first has to be right, on a small pass against the reference; then a pass of 15% of 8k keys is timed, launches
alone (planning is the same for all). One that does not compile, raises or is wrong is left out and named. A kernel that
breaks the CUDA context takes the process down, here as anywhere.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_chunkcache.attention.base import HeadShape, SparseRequest
from sglang_chunkcache.attention.flashinfer import KERNELS, FlashInferSparse, Modules
from sglang_chunkcache.attention.flashinfer_cuda import unsupported
from sglang_chunkcache.attention.reference import attend

logger = logging.getLogger(__name__)

Timer = Callable[[Callable[[], object]], float]
"""Milliseconds of one call."""

TIMED_KEYS, CHECKED_KEYS = 8192, 1024
CHECKED_RUN = 256
"""Enough for a causal entry with every kernel."""

SHARE = 0.15
"""Recomputed tokens among all (FusionRAG's and Cache-Craft's ratio)."""

WARM_UPS, REPEATS = 3, 9
LAYERS = 8
"""Calls timed together: in a pass, too, the host starts the next layer while the GPU is at the last one."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Choice:
    """`kernel` is the fastest of `ms`; None: none is left."""

    kernel: str | None
    ms: dict[str, float]
    """kernel -> milliseconds a layer, of those that are right."""
    failed: dict[str, str]
    """kernel -> why it is out."""


@dataclass(frozen=True)
class _Pass:
    request: SparseRequest
    queries: Tensor
    keys: Tensor
    values: Tensor


def choose(
    shape: HeadShape,
    *,
    device: torch.device,
    scale: float,
    page_size: int = 1,
    modules: Modules | None = None,
    timer: Timer | None = None,
) -> Choice:
    """Try every kernel; the first call on a machine compiles them, which takes minutes.

    Args:
        modules: None: FlashInfer, if it is installed and runs here.
        timer: None: CUDA events, median of `REPEATS`.
    """
    if modules is None and (reason := unsupported(shape, page_size=page_size, device=device)):
        return Choice(None, {}, dict.fromkeys(KERNELS, reason))
    timer = timer or _cuda_ms
    ms: dict[str, float] = {}
    failed: dict[str, str] = {}
    generator = torch.Generator().manual_seed(0)
    small = _make_pass(shape, CHECKED_KEYS, CHECKED_RUN, page_size, generator, device)
    large = _make_pass(shape, TIMED_KEYS, 0, page_size, generator, device)
    for kernel in KERNELS:
        if device.type == "cuda" and kernel != "fa2" and torch.cuda.get_device_capability(device)[0] != 9:
            failed[kernel] = "FA3 needs a Hopper GPU"
            continue
        try:
            logger.info(
                "chunk cache: trying attention kernel %s; where it must be compiled, that takes minutes", kernel
            )
            attention = FlashInferSparse(
                shape, device=device, scale=scale, kernel=kernel, page_size=page_size, modules=modules
            )
            attention.warm_up()
            if error := _error(attention, small, page_size, scale):
                failed[kernel] = error
                continue
            ms[kernel] = timer(_planned(attention, large))
        except Exception as error:  # nvcc, ninja, the linker, CUDA: whatever it is, another kernel may do
            logger.warning("attention kernel %s is left out", kernel, exc_info=True)
            failed[kernel] = f"{type(error).__name__}: {error}".splitlines()[0]
    return Choice(min(ms, key=ms.__getitem__, default=None), ms, failed)


def _make_pass(
    shape: HeadShape, num_keys: int, run: int, page_size: int, generator: torch.Generator, device: torch.device
) -> _Pass:
    """One request: `SHARE` of all positions and a run of `run` of them; pages in no order."""
    chosen = torch.rand(num_keys, generator=generator) < SHARE
    chosen[num_keys // 4 :][:run] = True
    pages = torch.randperm(-(-num_keys // page_size), generator=generator)
    request = SparseRequest(chosen.nonzero().flatten(), pages.to(device), num_keys)
    sizes = (len(pages), page_size, shape.num_kv_heads, shape.head_dim)
    queries, keys, values = (
        torch.randn(size, generator=generator).to(device, shape.dtype)
        for size in ((len(request.positions), shape.num_qo_heads, shape.head_dim), sizes, sizes)
    )
    return _Pass(request, queries, keys, values)


def _error(attention: FlashInferSparse, small: _Pass, page_size: int, scale: float) -> str | None:
    """How far the kernel is from the reference, where that is further than rounding explains."""
    order = attention.plan([small.request])
    order = torch.arange(len(small.queries)) if order is None else order
    rows = order.to(small.queries.device)
    got = attention.run(small.queries[rows], small.keys, small.values).float()
    expected, _ = attend(small.queries, small.keys, small.values, [small.request], page_size=page_size, scale=scale)
    off = (got - expected[rows]).abs() / (1 + expected[rows].abs())
    allowed = 2 * torch.finfo(small.queries.dtype).eps
    return None if bool((off <= allowed).all()) else f"wrong: off by {float(off.max()):.2g}, {allowed:.2g} is rounding"


def _planned(attention: FlashInferSparse, large: _Pass) -> Callable[[], object]:
    attention.plan([large.request])  # the order matters to nobody: queries are random
    return lambda: attention.run(large.queries, large.keys, large.values)


def _cuda_ms(run: Callable[[], object]) -> float:
    for _ in range(WARM_UPS):
        run()
    times = []
    for _ in range(REPEATS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(LAYERS):
            run()
        end.record()
        end.synchronize()
        times.append(float(start.elapsed_time(end)) / LAYERS)
    return statistics.median(times)
