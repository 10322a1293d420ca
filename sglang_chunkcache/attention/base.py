"""The contract of scattered attention: which queries see which keys, and what every implementation
offers.

    keys      0 1 2 3 4 5 6 7 8 9   one list a request, in order of position: slots of the KV pool
    queries     1         6   8     scattered; each sees the keys at or before its own position

Knows positions and slots, no layers and no SGLang. `reference` computes it; `masked` computes it as
laid out by `masked_layout`, `flashinfer` as laid out by `sparse_layout`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from sglang_chunkcache.attention.upload import upload


@dataclass(frozen=True)
class HeadShape:
    """What attention depends on of a model; `dtype` is that of queries, keys and values."""

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
    """Which keys of the pool the query tokens of one request see: those at or before their own
    positions.

    Positions are needed on the host, where layouts are computed: from a device, a copy would wait
    for it.

    Args:
        positions: [n] int64, CPU, strictly ascending, from 0; n may be 0.
        kv_slots: [m] int64 or int32, slots of the pool in order of position. Requests may share
            them.
        kv_positions: [m] int64, CPU, strictly ascending: gaps are left out. None: 0 to m - 1.
    Raises:
        ValueError: shape, dtype or order differs from the above.
    """

    positions: Tensor
    kv_slots: Tensor
    kv_positions: Tensor | None = None

    def __post_init__(self) -> None:
        if self.kv_slots.ndim != 1 or self.kv_slots.dtype not in (torch.int64, torch.int32):
            raise ValueError(
                f"kv_slots: expected [m] integers, got {list(self.kv_slots.shape)}"
                f" {self.kv_slots.dtype}"
            )
        for name, tensor in (("positions", self.positions), ("kv_positions", self.kv_positions)):
            if tensor is None:
                continue
            if tensor.ndim != 1 or tensor.dtype != torch.int64 or tensor.device.type != "cpu":
                raise ValueError(
                    f"{name}: expected [n] int64 on the CPU, got {list(tensor.shape)}"
                    f" {tensor.dtype}"
                )
            # The sign of the first is enough where they ascend.
            if tensor.numel() and (int(tensor[0]) < 0 or not _ascends(tensor)):
                raise ValueError(
                    f"{name}: expected strictly ascending from 0 or above, got"
                    f" {tensor.tolist()[:8]}..."
                )
        if self.kv_positions is not None and len(self.kv_positions) != self.num_keys:
            raise ValueError(
                f"kv_positions: expected {self.num_keys}, got {len(self.kv_positions)}"
            )

    @property
    def num_keys(self) -> int:
        """m."""
        return len(self.kv_slots)

    def key_positions(self) -> Tensor:
        """[m] int64, CPU: `kv_positions` written out."""
        return torch.arange(self.num_keys) if self.kv_positions is None else self.kv_positions

    def visible(self) -> Tensor:
        """[n] int64: how many keys each query sees; always the first ones.
        Raises ValueError where a query sees none."""
        if self.kv_positions is None:
            # Keys end where the cached ones do: a query behind them sees all.
            seen = (self.positions + 1).clamp(max=self.num_keys)
        else:  # 3x torch's speed
            seen = torch.from_numpy(
                np.searchsorted(self.kv_positions.numpy(), self.positions.numpy(), side="right")
            )
        # The first query sees the fewest keys, so no other one can see none where it sees some.
        if len(seen) and not int(seen[0]):
            raise ValueError(f"position {int(self.positions[0])} has nothing to attend to")
        return seen

    def has_key(self) -> Tensor:
        """[n] bool: whether a key of the pool has the query's own position."""
        if self.kv_positions is None:
            return self.positions < self.num_keys
        return torch.from_numpy(
            np.isin(self.positions.numpy(), self.kv_positions.numpy(), assume_unique=True)
        )


@dataclass(frozen=True)
class PassSequence:
    """Tokens of one request, run through the model at scattered positions.

    Args:
        token_ids: [n] int64, n >= 1.
        request: where the n tokens are and what they see of the pool.
        out_slots: [n] int64, where the tokens' K/V is written, in each layer before any token
            attends. They are among the request's slots, at the same positions. None: nothing is
            written.
        own: with `out_slots` None, whether the tokens also see each other's fresh K/V (and their
            own). The pool's keys must then not include their positions. False: they see what the
            pool holds, at their own positions too.
    Raises:
        ValueError: shape or dtype differs from the above; a token sees its own key twice.
    """

    token_ids: Tensor
    request: SparseRequest
    out_slots: Tensor | None = None
    own: bool = True

    def __post_init__(self) -> None:
        if not self.token_ids.numel():
            raise ValueError("token_ids: expected at least one token, got none")
        positions = self.request.positions
        for name, tensor in (("token_ids", self.token_ids), ("out_slots", self.out_slots)):
            if tensor is None:
                continue
            if tensor.shape != positions.shape or tensor.dtype != torch.int64:
                raise ValueError(
                    f"{name}: expected {list(positions.shape)} int64, got {list(tensor.shape)}"
                    f" {tensor.dtype}"
                )
        has_key = self.request.has_key()
        # A pool key at the position of a fresh one would count twice in the softmax.
        if self.sees_fresh and bool(has_key.any()):
            raise ValueError(
                f"position {int(positions[has_key][0])} is in kv_positions and would be seen twice"
            )
        if self.out_slots is not None and not bool(has_key.all()):
            raise ValueError(
                f"position {int(positions[~has_key][0])} is written but is not in kv_positions"
            )

    @classmethod
    def of_row(cls, token_ids: Tensor, slots: Tensor, positions: Tensor) -> PassSequence:
        """Tokens of a prompt at `positions`, as of `SparseRequest`, one at least, whose K/V is
        written again.

        token_ids: int64, CPU, and slots: int64, of the prompt from position 0 to the last one of
        `positions` or beyond.
        """
        # No token that runs sees beyond the last one of them.
        request = SparseRequest(positions, slots[: int(positions[-1]) + 1])
        return cls(token_ids[positions], request, slots[upload(positions, slots.device)])

    @property
    def sees_fresh(self) -> bool:
        """Whether the tokens see each other's fresh keys in addition to the pool's."""
        return self.own and self.out_slots is None


def _ascends(positions: Tensor) -> bool:
    values = positions.numpy()  # 6x torch's speed at 32k, once per request and pass
    return bool((values[1:] > values[:-1]).all())


class SparseAttention(Protocol):
    """Planned once a pass, run once a layer."""

    def plan(self, requests: Sequence[SparseRequest]) -> Tensor | None:
        """Lay out the pass.

        Returns:
            [n] int64, CPU: row i of the queries given to `run` is token `order[i]` of the requests'
                queries, concatenated.
            None: the rows keep the requests' order.
        Raises:
            ValueError: a query sees no key.
        """
        ...

    def run(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Attention of one layer.

        Args:
            queries: [n, num_qo_heads, head_dim], in the plan's order, rotated.
            keys: [num_slots, num_kv_heads, head_dim], the pool's; only read.
            values: Like `keys`.
        Returns:
            Like `queries`. Back in the requests' order: `result = torch.empty_like(out);
            result[order] = out`.
        Raises:
            RuntimeError: nothing is planned.
            ValueError: the queries are not as many as planned.
        """
        ...
