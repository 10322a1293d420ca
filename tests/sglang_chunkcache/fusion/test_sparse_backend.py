"""What of a layer reaches the sparse attention, and when.
That passes are right: test_recompute.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from torch import Tensor

from sglang_chunkcache.fusion.recompute import SparseBackend
from tests.kit.tensors import Pool, make_layer


class Seen:
    """An attention that returns its queries and keeps what the pool held when it ran."""

    def plan(self, requests: Any) -> None: ...

    def run(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.keys, self.values = keys.clone(), values.clone()
        return queries


def test_a_layer_is_written_before_it_attends() -> None:
    """At the pass's slots, by heads, in the layer's own buffers. One that is more, as for the
    masked pass, writes nothing."""
    pool, seen, slots = Pool(torch.zeros(2, 2, 9, 2, 64)), Seen(), torch.tensor([7, 2, 5])
    runner = SimpleNamespace(req_to_token_pool=None, token_to_kv_pool=pool)
    backend = SparseBackend(runner, seen, slots)
    q, k, v = torch.randn(3, 256), torch.randn(3, 128), torch.randn(3, 128)
    with pytest.raises(ValueError, match="layer 1: the pass does not support capped logits"):
        backend.forward_extend(q, k, v, make_layer(1, 4, 2, 64, logit_cap=30.0), None)
    assert not pool.buffers.any()
    assert torch.equal(backend.forward_extend(q, k, v, make_layer(1, 4, 2, 64), None), q)
    for got, given in ((seen.keys, k), (seen.values, v)):
        assert torch.equal(got[slots].flatten(1), given)
        assert int(got.any(-1).any(-1).sum()) == 3
    assert not pool.buffers[0].any()
