"""Log-sum-exp of attention logits, as attention kernels compute it on the way: no weight is kept.

The mass of a query on some of its keys is exp(lse of these - lse of all), so masses on parts of a
prompt need one call each.
"""

from __future__ import annotations

import torch
from torch import Tensor

PIECE_BYTES = 128 << 20
"""Largest piece of logits in memory at a time, where no kernel returns the log-sum-exp."""

MAX_FLASH_DIM = 256
"""torch's flash attention on CUDA takes heads up to this size, in steps of 8."""


def log_sum_exp(queries: Tensor, keys: Tensor, *, scale: float, is_causal: bool = False) -> Tensor:
    """log sum exp(scale * query . key) over the keys that a query sees. Queued on the current
    stream, no sync.

    By flash attention on the CPU, and on CUDA in half precision; elsewhere by
    `log_sum_exp_by_pieces`, which it equals within the dtype's rounding.

    Args:
        queries: [n, num_heads, head_dim], rotated; only read.
        keys: [m, num_kv_heads, head_dim], m at least 1, dtype and device of `queries`, rotated;
            only read. num_kv_heads divides num_heads.
        is_causal: query i sees keys 0 to i, and n is m; else every query sees every key.
    Returns:
        [num_heads, n] float32.
    """
    # torch's public scaled_dot_product_attention returns no log-sum-exp.
    flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    if keys.is_cuda:
        dim = keys.shape[-1]
        if keys.dtype not in (torch.bfloat16, torch.float16) or dim % 8 or dim > MAX_FLASH_DIM:
            return log_sum_exp_by_pieces(queries, keys, scale=scale, is_causal=is_causal)
        flash = torch.ops.aten._scaled_dot_product_flash_attention
    query, key = _by_kv_head(queries, keys)
    # keys as values: the output is not read
    lse: Tensor = flash(query, key, key, 0.0, is_causal, scale=scale)[1]
    return lse.flatten(0, 1)


def log_sum_exp_by_pieces(
    queries: Tensor, keys: Tensor, *, scale: float, is_causal: bool = False
) -> Tensor:
    """As `log_sum_exp`, from logits in float32, `PIECE_BYTES` of them (but one query's at least) at
    a time."""
    query, key = _by_kv_head(queries.float(), keys.float())
    rows = max(1, PIECE_BYTES // (4 * queries.shape[1] * len(keys)))
    places = torch.arange(len(keys), device=keys.device)
    parts = []
    for start in range(0, len(queries), rows):
        logits = (query[:, :, start : start + rows] @ key.mT).mul_(scale)
        if is_causal:
            seen = places[start : start + rows, None]
            logits.masked_fill_(places > seen, float("-inf"))
        parts.append(logits.logsumexp(-1))
    return torch.cat(parts, 2).flatten(0, 1)


def _by_kv_head(queries: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Both [num_kv_heads, query heads of each, n or m, head_dim]; keys are not copied."""
    num_kv_heads = keys.shape[1]
    query = queries.reshape(len(queries), num_kv_heads, -1, queries.shape[2]).permute(1, 2, 0, 3)
    return query, keys.transpose(0, 1)[:, None].expand(-1, query.shape[1], -1, -1)
