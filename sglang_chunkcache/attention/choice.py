"""Which attention the recompute pass uses: FlashInfer's kernels that are right on this machine, of
which each pass takes one, or the mask.

Kernels are tried at the start, not looked up. Each kernel is first compared with the reference on a
small pass; then its launches are timed on a pass of 15% of 8k keys (planning is the same for all).
A kernel that does not compile, raises or is wrong is left out and named. A kernel that breaks the
CUDA context ends the process, here as anywhere.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from sglang_chunkcache.attention.base import HeadShape, SparseRequest
from sglang_chunkcache.attention.flashinfer import KERNELS, FlashInferSparse
from sglang_chunkcache.attention.flashinfer_cuda import unsupported
from sglang_chunkcache.attention.per_pass import KernelPerPass
from sglang_chunkcache.attention.reference import attend

logger = logging.getLogger(__name__)

Timer = Callable[[Callable[[], object]], float]
"""Milliseconds of one call."""

TIMED_KEYS, CHECKED_KEYS = 8192, 1024
CHECKED_RUN = 256
"""Enough for a causal entry with every kernel."""

SHARE = 0.15
"""Recomputed tokens among all (FusionRAG's and Cache-Craft's ratio)."""

LAYERS = 8
"""Calls timed together: as in a pass, the host is a layer ahead of the GPU."""


@dataclass(frozen=True)
class Choice:
    """`attention` holds the kernels of `ms`; None: there are none."""

    attention: KernelPerPass | None
    ms: dict[str, float]
    """kernel -> milliseconds a layer, of those that are right."""
    failed: dict[str, str]
    """kernel -> why it is left out."""


@dataclass(frozen=True)
class _Pass:
    request: SparseRequest
    queries: Tensor
    keys: Tensor
    values: Tensor


def create(runner: Any, option: str) -> tuple[KernelPerPass | None, dict[str, Any]]:
    """The attention of the recompute pass, chosen once for a loaded model.

    Args:
        runner: SGLang's ModelRunner with model and pools made; only read.
        option: `--recompute-attention`: auto, masked or sparse.
    Returns:
        The sparse attention, None for the mask; and what the stats show: `kind` (sparse, masked),
        `kernel` (their names), `reason`, `ms` (kernel -> milliseconds as measured).
    Raises:
        ValueError: the option is `sparse`, which this machine or model cannot run; names the
            reason.
    """
    if option == "masked":
        return None, described("masked", "asked for")
    try:
        attention, chosen = _right(runner)
    except Exception as error:  # a driver, a compiler, memory: the masked pass is as right
        logger.warning("chunk cache: no sparse attention", exc_info=True)
        attention, chosen = None, described("masked", f"{type(error).__name__}: {error}")
    if attention is None and option == "sparse":
        raise ValueError(f"--recompute-attention sparse: {chosen['reason']}")
    return attention, chosen


def described(
    kind: str, reason: str, kernel: str | None = None, ms: dict[str, float] | None = None
) -> dict[str, Any]:
    """A choice as the stats show it."""
    return {"kind": kind, "kernel": kernel, "reason": reason, "ms": ms or {}}


def choose(
    shape: HeadShape,
    *,
    device: torch.device,
    scale: float,
    modules: Any = None,
    timer: Timer | None = None,
) -> Choice:
    """Try every kernel; the first call on a machine compiles them, which takes minutes.

    Args:
        modules: None: FlashInfer.
        timer: None: Triton's `do_bench`, which empties the L2 cache between its calls by writing
            256 MB of GPU memory.
    """
    right: dict[str, FlashInferSparse] = {}
    ms: dict[str, float] = {}
    ms_per_key: dict[str, float] = {}
    failed: dict[str, str] = {}
    # On the CPU and seeded, so that every machine checks the same numbers.
    generator = torch.Generator().manual_seed(0)
    small = _make_pass(shape, CHECKED_KEYS, CHECKED_RUN, generator, device)
    large = _make_pass(shape, TIMED_KEYS, 0, generator, device)
    is_other_gpu = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] != 9
    for kernel in KERNELS:
        if kernel != "fa2" and is_other_gpu:
            failed[kernel] = "FA3 needs a Hopper GPU"
            continue
        try:
            logger.info(
                "chunk cache: trying attention kernel %s; compiling it takes minutes, once a"
                " machine",
                kernel,
            )
            attention = FlashInferSparse(
                shape, device=device, scale=scale, kernel=kernel, modules=modules
            )
            attention.warm_up()
            if error := _error(attention, small, scale):
                failed[kernel] = error
                continue
            layout = attention.lay_out([large.request])
            attention.plan([large.request], layout)  # in any order: queries are random
            run = partial(attention.run, large.queries, large.keys, large.values)
            ms[kernel] = (timer or _cuda_ms)(run)
            ms_per_key[kernel] = ms[kernel] / attention.busiest_keys(layout)
            right[kernel] = attention
        except Exception as error:  # nvcc, ninja, the linker, CUDA: another kernel may still work
            logger.warning("chunk cache: attention kernel %s is left out", kernel, exc_info=True)
            failed[kernel] = f"{type(error).__name__}: {error}".splitlines()[0]
    return Choice(KernelPerPass(right, ms_per_key) if right else None, ms, failed)


def _right(runner: Any) -> tuple[KernelPerPass | None, dict[str, Any]]:
    """`create` for auto, errors included."""
    shape, scale, reason = _shape_of(runner)
    device = torch.device(runner.device)
    if reason := reason or unsupported(shape, device=device):
        return None, described("masked", reason)
    choice = choose(shape, device=device, scale=scale)
    left_out = [f"{kernel} left out: {why}" for kernel, why in choice.failed.items()]
    if choice.attention is None:
        return None, described("masked", "; ".join(left_out), ms=choice.ms)
    reason = "; ".join(["the fastest here, for each pass", *left_out])
    return choice.attention, described("sparse", reason, ", ".join(choice.ms), choice.ms)


def _shape_of(runner: Any) -> tuple[HeadShape, float, str | None]:
    """Heads and scale of layer 0, and why one `SparseAttention` cannot serve all layers."""
    layers = [layer.self_attn.attn for layer in runner.model.model.layers]
    kinds = {
        (a.tp_q_head_num, a.tp_k_head_num, a.qk_head_dim, a.v_head_dim, a.scaling) for a in layers
    }
    first, dtype, kept = layers[0], runner.dtype, runner.token_to_kv_pool.dtype
    shape = HeadShape(first.tp_q_head_num, first.tp_k_head_num, first.qk_head_dim, dtype)
    reasons = {
        "layers differ in their heads": len(kinds) > 1,
        f"values of {first.v_head_dim} dimensions under keys of {first.qk_head_dim}": (
            first.v_head_dim != first.qk_head_dim
        ),
        f"a KV cache of {kept} under a model of {dtype}": kept != dtype,
    }
    return shape, first.scaling, next((why for why, holds in reasons.items() if holds), None)


def _make_pass(
    shape: HeadShape, num_keys: int, run: int, generator: torch.Generator, device: torch.device
) -> _Pass:
    """One request: `SHARE` of all positions and a run of `run` of them."""
    chosen = torch.rand(num_keys, generator=generator) < SHARE
    # A run among the scattered rows, so that the causal launch is checked as well.
    chosen[num_keys // 4 :][:run] = True
    # In no order, as a request's slots are once the pool has seen evictions.
    slots = torch.randperm(num_keys, generator=generator)
    request = SparseRequest(chosen.nonzero().flatten(), slots.to(device))
    cache = (num_keys, shape.num_kv_heads, shape.head_dim)
    queries, keys, values = (
        torch.randn(size, generator=generator).to(device, shape.dtype)
        for size in ((len(request.positions), shape.num_qo_heads, shape.head_dim), cache, cache)
    )
    return _Pass(request, queries, keys, values)


def _error(attention: FlashInferSparse, small: _Pass, scale: float) -> str | None:
    """How far the kernel is from the reference, where that is further than rounding explains."""
    order = attention.plan([small.request])
    order = torch.arange(len(small.queries)) if order is None else order
    rows = order.to(small.queries.device)
    got = attention.run(small.queries[rows], small.keys, small.values).float()
    expected, _ = attend(small.queries, small.keys, small.values, [small.request], scale=scale)
    # Absolute near 0, where terms have cancelled: the sum has their error.
    off = (got - expected[rows]).abs() / (1 + expected[rows].abs())
    allowed = 2 * torch.finfo(small.queries.dtype).eps
    if bool((off <= allowed).all()):
        return None
    return f"wrong: off by {float(off.max()):.2g}, {allowed:.2g} is rounding"


def _cuda_ms(run: Callable[[], object]) -> float:
    from triton.testing import do_bench  # only here: without CUDA nothing needs Triton

    def layers() -> None:
        for _ in range(LAYERS):
            run()

    # The median: what else runs on the GPU delays single calls.
    return float(do_bench(layers, return_mode="median")) / LAYERS
