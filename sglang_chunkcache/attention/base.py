"""Words of the sparse attention: whose queries, over which keys, and what every implementation offers.

    keys       0 1 2 3 | 4 5 6 7 | 8 9        one list a request, in order of position, in pages of the KV pool
    queries      1           6     8          scattered; each sees the keys at or before its own position

Knows positions and pages; no layers, no SGLang. `reference` computes it, `sparse_layout` says how kernels may,
`flashinfer_sparse` has them do it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class HeadShape:
    """What of a model its attention depends on, on one rank. `dtype` is that of queries, keys and values alike."""

    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head."""
        return self.num_qo_heads // self.num_kv_heads


@dataclass(frozen=True)
class SparseRequest:
    """Query tokens of one request over its KV.

    Args:
        positions: [n] int64, CPU, strictly ascending, from 0; n may be 0.
        kv_pages: [ceil(num_keys / page_size)] int64 or int32, pages of the pool in order of position (slots, at page size 1).
            Requests may share pages.
        num_keys: m, keys in those pages.
        kv_positions: [m] int64, CPU, strictly ascending; None: 0 to m - 1.
    Raises:
        ValueError: shape or dtype differs from the above; a query sees no key.
    """

    positions: Tensor
    kv_pages: Tensor
    num_keys: int
    kv_positions: Tensor | None = None

    def __post_init__(self) -> None:
        if self.kv_pages.ndim != 1 or self.kv_pages.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"kv_pages: expected [pages] integers, got {list(self.kv_pages.shape)} {self.kv_pages.dtype}"
            )
        if not isinstance(self.num_keys, int) or self.num_keys < 0:
            raise ValueError(f"num_keys: expected a number of keys, got {self.num_keys}")
        fields = [("positions", self.positions)]
        if self.kv_positions is not None:
            fields.append(("kv_positions", self.kv_positions))
        for name, tensor in fields:
            if tensor.ndim != 1 or tensor.dtype != torch.int64 or tensor.device.type != "cpu":
                raise ValueError(f"{name}: expected [n] int64 on the CPU, got {list(tensor.shape)} {tensor.dtype}")
            if tensor.numel() and (int(tensor[0]) < 0 or not _ascends(tensor)):
                raise ValueError(f"{name}: expected strictly ascending from 0 or above, got {tensor.tolist()[:8]}...")
        if self.kv_positions is not None and len(self.kv_positions) != self.num_keys:
            raise ValueError(f"kv_positions: expected {self.num_keys}, got {len(self.kv_positions)}")
        first_key = 0 if self.kv_positions is None else int(self.kv_positions[0]) if self.num_keys else -1
        if self.positions.numel() and (not self.num_keys or int(self.positions[0]) < first_key):
            raise ValueError(f"position {int(self.positions[0])} has nothing to attend to")

    def check_pages(self, page_size: int) -> None:
        """Raises ValueError where `kv_pages` are not exactly what `num_keys` fill at this page size."""
        if self.kv_pages.shape != (-(-self.num_keys // page_size),):
            raise ValueError(
                f"kv_pages: expected {-(-self.num_keys // page_size)} pages of {page_size} for {self.num_keys} keys, "
                f"got {list(self.kv_pages.shape)}"
            )

    def visible(self) -> Tensor:
        """[n] int64: how many keys each query sees; always the first ones, at least one."""
        if self.kv_positions is None:
            return (self.positions + 1).clamp(max=self.num_keys)
        seen = np.searchsorted(self.kv_positions.numpy(), self.positions.numpy(), side="right")  # 3x torch's speed
        return torch.from_numpy(seen)


def _ascends(positions: Tensor) -> bool:
    values = positions.numpy()  # 6x torch's speed at 32k, once per request and pass
    return bool((values[1:] > values[:-1]).all())


class SparseAttention(Protocol):
    """Planned once a pass, run once a layer."""

    def plan(self, requests: Sequence[SparseRequest]) -> Tensor | None:
        """Lay out the pass: [n] int64, CPU, with row i of what `run` gets being token `order[i]` of the requests' queries, one
        request behind the other; None: they stay in their order.

        Raises:
            ValueError: a request does not fit the KV pool's pages.
        """
        ...

    def run(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of one layer.

        Args:
            queries: [n, num_qo_heads, head_dim], in the plan's order, rotated.
            keys: [num_pages, page_size, num_kv_heads, head_dim], or without the second at page size 1; only read.
            values: Like `keys`.
        Returns:
            Like `queries`. Back in the requests' order: `result = torch.empty_like(out); result[order] = out`.
        Raises:
            RuntimeError: nothing is planned.
            ValueError: the queries are not as many as planned.
        """
        ...
