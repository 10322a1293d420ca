"""Attention of scattered queries over cached keys, the obvious way: every kernel is compared with
it.

    out[i] = softmax(scale * queries[i] @ keys[:visible[i]]) @ values[:visible[i]]

in float32, head by head.

Plain torch on any device, any head size; each request's logits are in memory at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_chunkcache.attention.base import SparseRequest


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    requests: Sequence[SparseRequest],
    *,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of all requests' queries, concatenated.

    Args:
        queries: [n, num_qo_heads, head_dim], any floating dtype; n is the sum over the requests.
        keys: [num_slots, num_kv_heads, head_dim]; only read.
        values: Like `keys`.
    Returns:
        out [n, num_qo_heads, head_dim] and lse [n, num_qo_heads], the natural logarithm of the
        softmax's denominator, both float32.
    """
    num_rows, num_heads, head_dim = queries.shape
    out = torch.empty(num_rows, num_heads, head_dim, dtype=torch.float32, device=queries.device)
    lse = torch.empty(num_rows, num_heads, dtype=torch.float32, device=queries.device)
    start = 0
    for request in requests:
        rows = slice(start, start + request.positions.numel())
        start = rows.stop
        if not request.positions.numel():
            continue
        seen_keys, seen_values = (_gather(cache, request, num_heads) for cache in (keys, values))
        logits = torch.einsum("nhd,mhd->nhm", queries[rows].float(), seen_keys) * scale
        hidden = torch.arange(request.num_keys) >= request.visible()[:, None]
        logits.masked_fill_(hidden[:, None].to(logits.device), float("-inf"))
        lse[rows] = logits.logsumexp(-1)
        out[rows] = torch.einsum("nhm,mhd->nhd", logits.softmax(-1), seen_values)
    return out, lse


def _gather(cache: Tensor, request: SparseRequest, num_heads: int) -> Tensor:
    """[num_keys, num_heads, head_dim] float32:
    the request's keys or values, each KV head repeated for its group."""
    seen = cache[request.kv_slots.to(cache.device)]
    return seen.float().repeat_interleave(num_heads // cache.shape[1], dim=1)
