"""Kernel variants for FlashInfer, in CUDA: a row sees the first `limits[row]` keys of its entry.

FlashInfer compiles a module per dtype, head size and kernel variant at its first use. A kernel
variant is a struct whose members the kernels call; FA2 and FA3 call different ones, so there are
two. `limits` is [rows] int32, concatenated over all entries, as `qo_indptr` counts them. Knows
nothing of layouts and launches.
"""

from __future__ import annotations

import zlib
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

from sglang_chunkcache.attention.base import HeadShape

VERSIONS = ("0.6.18", "0.7.1", "0.7.2")
"""The FlashInfers whose kernels were read: the structs below rely on more than its public
interface. Each kernel's numbers are checked once more before it is used (choice.py)."""

DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16"}
HEAD_DIMS = (64, 128)
MAX_GROUP_SIZE = 8
"""Query heads per KV head up to which the tests go."""

VARIANT_NAME = "ChunkcacheLimits"

# NOTE: the kernels read `qo_len`, `kv_len`, `window_left` and `sm_scale_log2` of the kernel
# variant; unset, they are garbage.
# NOTE: LogitsMask is called on every tile only in custom-mask mode, which the caller forces; else
# inner tiles skip it.
# NOTE: tiles are whole, so it is called for rows at or past qo_len too, whose limits are another
# entry's or past the buffer.
_FA2 = """
struct ChunkcacheLimits : AttentionVariantBase {
  static constexpr bool use_softmax = true;

  uint32_t qo_len, kv_len, window_left;
  float sm_scale_log2;
  const int32_t* limits;

  template <typename Params>
  __device__ __host__ ChunkcacheLimits(const Params& params, uint32_t batch_idx,
                                       uint8_t* smem_ptr) {
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = kv_len;
    sm_scale_log2 = params.sm_scale * math::log2e;
    limits = params.limits + params.q_indptr[batch_idx];
  }

  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    return qo_idx < qo_len && kv_idx < static_cast<uint32_t>(limits[qo_idx]);
  })
};
"""

# NOTE: the main loop always passes batch 0; only the constructor gets the entry's first row.
# NOTE: hidden is -math::inf, whatever that is: until 0.6 finite (-5e4, before scaling), and a true
# infinity makes a tile without any key NaN; from 0.7 on infinite, and the softmax sees to that.
_FA3 = """
struct ChunkcacheLimits {
  float sm_scale_log2;
  uint32_t num_rows;
  const int32_t* limits;

  template <typename MainloopParams, typename BlockCoord>
  __device__ __host__ ChunkcacheLimits(const MainloopParams& params,
                                       const BlockCoord& block_coord) {
    auto [q_tile_idx, qo_head_idx, kv_head_idx, qo_indptr, kv_indptr, qo_len, kv_len, batch_idx] =
        block_coord;
    sm_scale_log2 = params.additional_params.sm_scale * math::log2e;
    num_rows = qo_len;
    limits = params.additional_params.limits + qo_indptr;
  }

  template <int NUM_ROWS_PER_THREAD>
  __device__ auto GetAttentionUpdater() {
    return OnlineSoftmax<NUM_ROWS_PER_THREAD, /*WITH_SCALE=*/true>(sm_scale_log2);
  }

  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {
    const bool is_seen = qo_idx < num_rows && kv_idx < static_cast<uint32_t>(limits[qo_idx]);
    return is_seen ? logits : T(-math::inf);
  })
};
"""

SOURCES = {"fa2": _FA2, "fa3": _FA3}


def jit_args(shape: HeadShape, backend: str) -> tuple[Any, ...]:
    """`jit_args` of a FlashInfer wrapper, whose `run` then takes `limits` and the scale, too."""
    source = SOURCES[backend]
    # The name is the module's key in FlashInfer's cache on disk, so it includes a checksum of the
    # source.
    checksum = zlib.crc32(source.encode())
    name = f"chunkcache_limits_{backend}_{DTYPES[shape.dtype]}_{shape.head_dim}_{checksum:08x}"
    dtypes = (shape.dtype, shape.dtype, shape.dtype, torch.int32)
    heads = (shape.head_dim, shape.head_dim)
    extra = (["limits"], ["int32_t"], ["sm_scale"], ["double"])
    return (name, *dtypes, *heads, *extra, VARIANT_NAME, source)


def unsupported(shape: HeadShape, *, device: torch.device) -> str | None:
    """Why FlashInfer's kernels cannot be used, for a log; None: no reason is known yet."""
    if reason := unsupported_shape(shape):
        return reason
    if device.type != "cuda":
        return f"the kernels need CUDA, not {device.type}"
    if (capability := torch.cuda.get_device_capability(device)) < (8, 0):
        return (
            f"the kernels need compute capability 8.0 or above, not {capability[0]}.{capability[1]}"
        )
    if find_spec("flashinfer") is None:
        return "flashinfer is not installed"
    try:
        found = version("flashinfer-python")
    except PackageNotFoundError:
        return "flashinfer is installed without its version"
    if found not in VERSIONS:
        return f"flashinfer is {found}, the kernels were written for {', '.join(VERSIONS)}"
    return None


def unsupported_shape(shape: HeadShape) -> str | None:
    """The part of `unsupported` that depends on the model alone."""
    if shape.dtype not in DTYPES:
        return f"dtype {shape.dtype}: bfloat16 and float16 are supported"
    if shape.head_dim not in HEAD_DIMS:
        return f"head_dim {shape.head_dim}: {' and '.join(map(str, HEAD_DIMS))} are supported"
    if shape.num_qo_heads % shape.num_kv_heads or not 1 <= shape.group_size <= MAX_GROUP_SIZE:
        return (
            f"{shape.num_qo_heads} query heads for {shape.num_kv_heads} KV heads: 1 to"
            f" {MAX_GROUP_SIZE} for each are supported"
        )
    return None
