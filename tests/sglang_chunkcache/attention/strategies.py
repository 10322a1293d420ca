"""Passes of sparse attention, drawn by Hypothesis:
what may be asked of an operator, with caches that show wrong reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from sglang_chunkcache.attention.base import HeadShape, SparseRequest
from sglang_chunkcache.attention.reference import attend

KINDS = ("empty", "one", "first", "last", "all", "clustered", "scattered")


@dataclass(frozen=True)
class Case:
    """A pass of one layer. Slots that are no request's key are NaN in `keys` and `values`,
    so reading one shows."""

    requests: list[SparseRequest]
    shape: HeadShape
    scale: float
    queries: Tensor = field(repr=False)
    """[n, num_qo_heads, head_dim] of `shape.dtype`, the requests concatenated."""
    keys: Tensor = field(repr=False)
    """[num_slots, num_kv_heads, head_dim] of `shape.dtype`."""
    values: Tensor = field(repr=False)
    """Like `keys`."""

    def attend(self) -> tuple[Tensor, Tensor]:
        """By the reference: output and log-sum-exp."""
        return attend(self.queries, self.keys, self.values, self.requests, scale=self.scale)


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    head_dims: Sequence[int] = (1, 8, 16, 40, 64),
    group_sizes: Sequence[int] = tuple(range(1, 9)),
    dtypes: Sequence[torch.dtype] = (torch.float32,),
    max_requests: int = 4,
    max_keys: int = 96,
    with_gaps: bool = True,
) -> Case:
    """1 to `max_requests` requests of 1 to `max_keys` keys in shared slots, their queries of any of
    `KINDS`.

    `with_gaps`: some requests leave positions out of their keys, some of which have queries all the
    same.
    """
    num_kv_heads = draw(st.integers(1, 2))
    group_size, head_dim = draw(st.sampled_from(group_sizes)), draw(st.sampled_from(head_dims))
    shape = HeadShape(
        num_kv_heads * group_size, num_kv_heads, head_dim, draw(st.sampled_from(dtypes))
    )
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_slots = 2 * max_keys  # shared by chance, yet some stay unread
    requests = [
        draw(_requests(generator, num_slots, max_keys, with_gaps))
        for _ in range(draw(st.integers(1, max_requests)))
    ]
    used = torch.zeros(num_slots, dtype=torch.bool)
    for request in requests:
        used[request.kv_slots] = True
    num_rows = sum(request.positions.numel() for request in requests)
    return Case(
        requests=requests,
        shape=shape,
        scale=draw(st.sampled_from([head_dim**-0.5, 0.3])),
        queries=_normal(generator, num_rows, shape.num_qo_heads, head_dim).to(shape.dtype),
        keys=_cache(generator, used, shape),
        values=_cache(generator, used, shape),
    )


@st.composite
def _requests(
    draw: st.DrawFn,
    generator: np.random.Generator,
    num_slots: int,
    max_keys: int,
    with_gaps: bool,
) -> SparseRequest:
    num_keys = draw(st.integers(1, max_keys))
    slots = generator.permutation(num_slots)[:num_keys]
    kv_positions, first, end = None, 0, num_keys
    if with_gaps and draw(st.booleans()):
        first = draw(st.integers(0, 20))
        end = first + num_keys + draw(st.integers(0, 20))
        later = 1 + first + generator.permutation(end - first - 1)[: num_keys - 1]
        kv_positions = torch.from_numpy(np.sort(np.append(later, first)))
    kind = draw(st.sampled_from(KINDS))
    return SparseRequest(
        positions=torch.from_numpy(_positions(kind, first, end, generator)),
        kv_slots=torch.from_numpy(slots).to(draw(st.sampled_from([torch.int64, torch.int32]))),
        kv_positions=kv_positions,
    )


def _positions(
    kind: str, first: int, end: int, generator: np.random.Generator
) -> NDArray[np.int64]:
    """Ascending positions in [first, end)."""
    count = end - first
    interval = np.cumsum(generator.random(count) < 0.1)
    chosen = {
        "empty": np.arange(0),
        "one": generator.integers(count, size=1),
        "first": np.arange(1),
        "last": np.arange(count - 1, count),
        "all": np.arange(count),
        "clustered": np.flatnonzero((generator.random(count + 1) < 0.5)[interval]),
        "scattered": np.flatnonzero(generator.random(count) < generator.uniform(0.05, 0.6)),
    }
    return first + chosen[kind]


def _cache(generator: np.random.Generator, used: Tensor, shape: HeadShape) -> Tensor:
    cache = _normal(generator, *used.shape, shape.num_kv_heads, shape.head_dim)
    cache[~used] = torch.nan
    return cache.to(shape.dtype)


def _normal(generator: np.random.Generator, *sizes: int) -> Tensor:
    return torch.from_numpy(generator.standard_normal(sizes, dtype=np.float32))
