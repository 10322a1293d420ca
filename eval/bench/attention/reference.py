"""`attend` as an arm: attention in plain torch, for any device."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from sglang_chunkcache.attention.base import HeadShape, SparseRequest
from sglang_chunkcache.attention.reference import attend


class ReferenceAttention:
    """A `SparseAttention` that others are compared with."""

    def __init__(self, shape: HeadShape, *, scale: float) -> None:
        self._shape, self._scale = shape, scale
        self._requests: Sequence[SparseRequest] | None = None

    def plan(self, requests: Sequence[SparseRequest]) -> None:
        """Keep the requests; rows stay in their order."""
        self._requests = requests

    def run(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Like `SparseAttention.run`, with every dimension and dtype checked."""
        if self._requests is None:
            raise RuntimeError("plan comes before run")
        shape = self._shape
        num_rows = sum(request.positions.numel() for request in self._requests)
        cache = len(keys), shape.num_kv_heads, shape.head_dim
        for name, tensor, sizes in (
            ("queries", queries, (num_rows, shape.num_qo_heads, shape.head_dim)),
            ("keys", keys, cache),
            ("values", values, cache),
        ):
            if tuple(tensor.shape) != sizes or tensor.dtype != shape.dtype:
                raise ValueError(
                    f"{name}: expected {list(sizes)} {shape.dtype}, got {list(tensor.shape)}"
                    f" {tensor.dtype}"
                )
        return attend(queries, keys, values, self._requests, scale=self._scale)[0].to(shape.dtype)
