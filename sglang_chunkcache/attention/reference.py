"""Attention of scattered queries over paged keys, the obvious way: every kernel is compared with
it.

    out[i] = softmax(scale * queries[i] @ keys[:visible[i]]) @ values[:visible[i]]

in float32, head by head.

Plain torch on any device, any head size; each request's logits are in memory at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sglang_chunkcache.attention.base import HeadShape, SparseRequest


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    requests: Sequence[SparseRequest],
    *,
    page_size: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Attention of all requests' queries, concatenated.

    Args:
        queries: [n, num_qo_heads, head_dim], any floating dtype; n is the sum over the requests.
        keys: [num_pages, page_size, num_kv_heads, head_dim], or without the second at page size 1;
            only read.
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
        seen_keys = _gather(keys, request, page_size, num_heads)
        logits = torch.einsum("nhd,mhd->nhm", queries[rows].float(), seen_keys) * scale
        hidden = torch.arange(request.num_keys) >= request.visible()[:, None]
        logits.masked_fill_(hidden[:, None].to(logits.device), float("-inf"))
        lse[rows] = logits.logsumexp(-1)
        out[rows] = torch.einsum(
            "nhm,mhd->nhd", logits.softmax(-1), _gather(values, request, page_size, num_heads)
        )
    return out, lse


def _gather(cache: Tensor, request: SparseRequest, page_size: int, num_heads: int) -> Tensor:
    """[num_keys, num_heads, head_dim] float32:
    the request's keys or values, each KV head repeated for its group."""
    num_kv_heads, head_dim = cache.shape[-2:]
    pages = cache.reshape(-1, page_size, num_kv_heads, head_dim)[
        request.kv_pages.to(cache.device).long()
    ]
    return (
        pages.flatten(0, 1)[: request.num_keys]
        .float()
        .repeat_interleave(num_heads // num_kv_heads, dim=1)
    )


class ReferenceAttention:
    """`attend` as a `SparseAttention`, for any device."""

    def __init__(self, shape: HeadShape, *, scale: float, page_size: int = 1) -> None:
        self._shape = shape
        self._scale = scale
        self._page_size = page_size
        self._requests: Sequence[SparseRequest] | None = None

    def plan(self, requests: Sequence[SparseRequest]) -> None:
        """Keep the requests; rows stay in their order.
        Raises ValueError where pages and keys do not fit."""
        for request in requests:
            request.check_pages(self._page_size)
        self._requests = requests

    def run(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Like `SparseAttention.run`, with every dimension and dtype checked:
        other implementations are compared with it."""
        if self._requests is None:
            raise RuntimeError("plan comes before run")
        shape = self._shape
        num_rows = sum(request.positions.numel() for request in self._requests)
        for name, tensor, sizes in (
            ("queries", queries, (num_rows, shape.num_qo_heads, shape.head_dim)),
            ("keys", keys, (*keys.shape[:-2], shape.num_kv_heads, shape.head_dim)),
            ("values", values, (*keys.shape[:-1], shape.head_dim)),
        ):
            if tuple(tensor.shape) != sizes or tensor.dtype != shape.dtype:
                raise ValueError(
                    f"{name}: expected {list(sizes)} {shape.dtype}, got {list(tensor.shape)}"
                    f" {tensor.dtype}"
                )
        out, _ = attend(
            queries, keys, values, self._requests, page_size=self._page_size, scale=self._scale
        )
        return out.to(self._shape.dtype)
