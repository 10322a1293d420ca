"""The sparse attention under a pass of SGLang's model: K/V into the pool, then the operator. And which operator, if any.

A private SGLang backend like `MaskedAttention`, with the same promise: in each layer all fresh K/V is written before anything
attends. Nothing here waits for the device.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from sglang_chunkcache.attention import flashinfer_cuda as variants
from sglang_chunkcache.attention.base import HeadShape, SparseAttention
from sglang_chunkcache.attention.choice import choose
from sglang_chunkcache.attention.flashinfer import FlashInferSparse
from sglang_chunkcache.attention.masked import checked_heads

logger = logging.getLogger(__name__)


class SparseBackend(AttentionBackend):  # type: ignore[misc]
    """Runs one planned pass.

    Args:
        runner: SGLang's ModelRunner, page size 1; its pool is written at `out_slots`.
        attention: planned for this pass.
        out_slots: [n] int64, on the device, in the plan's order.
    """

    def __init__(self, runner: Any, attention: SparseAttention, out_slots: Tensor) -> None:
        super().__init__()
        self.req_to_token_pool = runner.req_to_token_pool  # SGLang finds both pools through the backend
        self.token_to_kv_pool = runner.token_to_kv_pool
        self._attention = attention
        self._write_loc = KVWriteLoc(out_slots)

    def forward_extend(
        self,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> Tensor:
        """SGLang's call, once a layer; returns [n, num_heads * head_dim]. Raises ValueError as `checked_heads` does."""
        queries, keys, values = checked_heads(layer, q, k, v, save_kv_cache, kwargs)
        pool = self.token_to_kv_pool
        pool.set_kv_buffer(layer, self._write_loc, keys, values)
        out = self._attention.run(queries, pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id))
        return out.flatten(1)


def create(runner: Any, wish: str) -> tuple[SparseAttention | None, dict[str, Any]]:
    """The attention of the recompute pass, chosen once for a loaded model.

    Args:
        runner: SGLang's ModelRunner with model and pools made; only read.
        wish: `--recompute-attention`: auto, masked, sparse or virtual.
    Returns:
        The operator, None where the pass does without; and what the stats show: `kind` (sparse, masked, virtual), `kernel`,
        `reason`, `ms` (kernel -> milliseconds as measured).
    Raises:
        ValueError: `sparse` is wished for and cannot be; names the reason.
    """
    if wish in ("masked", "virtual"):
        return None, described(wish, "asked for")
    try:
        attention, chosen = _fastest(runner)
    except Exception as error:  # a driver, a compiler: whatever it is, a pass without them is as right
        logger.warning("chunk cache: no sparse attention", exc_info=True)
        attention, chosen = None, described("masked", f"{type(error).__name__}: {error}")
    if attention is None and wish == "sparse":
        raise ValueError(f"--recompute-attention sparse: {chosen['reason']}")
    return attention, chosen


def described(kind: str, reason: str, kernel: str | None = None, ms: dict[str, float] | None = None) -> dict[str, Any]:
    """What the stats show of a choice."""
    return {"kind": kind, "kernel": kernel, "reason": reason, "ms": ms or {}}


# Private, in order of use


def _fastest(runner: Any) -> tuple[SparseAttention | None, dict[str, Any]]:
    """As `create` for auto."""
    shape, scale, reason = _shape_of(runner)
    device = torch.device(runner.device)
    if reason := reason or variants.unsupported(shape, page_size=1, device=device):
        return None, described("masked", reason)
    choice = choose(shape, device=device, scale=scale)
    left_out = [f"{kernel} left out: {why}" for kernel, why in choice.failed.items()]
    if choice.kernel is None:
        return None, described("masked", "; ".join(left_out), ms=choice.ms)
    attention = FlashInferSparse(shape, device=device, scale=scale, kernel=choice.kernel)
    return attention, described("sparse", "; ".join(["the fastest here", *left_out]), choice.kernel, choice.ms)


def _shape_of(runner: Any) -> tuple[HeadShape, float, str | None]:
    """Heads and scale of layer 0, and why one operator does not do for all layers and their pool."""
    layers = [layer.self_attn.attn for layer in runner.model.model.layers]
    kinds = {(a.tp_q_head_num, a.tp_k_head_num, a.qk_head_dim, a.v_head_dim, a.scaling) for a in layers}
    first, dtype, pool = layers[0], runner.dtype, runner.token_to_kv_pool
    shape = HeadShape(first.tp_q_head_num, first.tp_k_head_num, first.qk_head_dim, dtype)
    reason = None
    if len(kinds) > 1:
        reason = "layers differ in their heads"
    elif first.v_head_dim != first.qk_head_dim:
        reason = f"values of {first.v_head_dim} dimensions under keys of {first.qk_head_dim}"
    elif pool.dtype != dtype:
        reason = f"a KV cache of {pool.dtype} under a model of {dtype}"
    return shape, first.scaling, reason
