"""What of a layer reaches the sparse attention, and when.
That passes are right: test_recompute.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.layers.radix_attention import AttentionType
from torch import Tensor

from sglang_chunkcache.fusion.recompute import SparseBackend


def make_layer(**changes: Any) -> Any:
    fields = {
        "layer_id": 1,
        "tp_q_head_num": 4,
        "tp_k_head_num": 2,
        "tp_v_head_num": 2,
        "qk_head_dim": 64,
        "v_head_dim": 64,
        "is_cross_attention": False,
        "attn_type": AttentionType.DECODER,
        "sliding_window_size": -1,
        "logit_cap": 0.0,
    }
    return SimpleNamespace(**{**fields, **changes})


class Pool:
    """Two layers' K/V by slot."""

    def __init__(self) -> None:
        self.buffers = torch.zeros(2, 2, 9, 2, 64)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.buffers[layer_id, 0]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.buffers[layer_id, 1]

    def set_kv_buffer(self, layer: Any, where: Any, keys: Tensor, values: Tensor) -> None:
        self.buffers[layer.layer_id, 0, where.loc], self.buffers[layer.layer_id, 1, where.loc] = (
            keys,
            values,
        )


class Seen:
    """An attention that returns its queries and keeps what the pool held when it ran."""

    def plan(self, requests: Any) -> None: ...

    def run(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        self.keys, self.values = keys.clone(), values.clone()
        return queries


def test_a_layer_is_written_before_it_attends() -> None:
    """At the pass's slots, by heads, in the layer's own buffers."""
    pool, seen = Pool(), Seen()
    backend = SparseBackend(
        SimpleNamespace(req_to_token_pool=None, token_to_kv_pool=pool),
        seen,
        torch.tensor([7, 2, 5]),
    )
    q, k, v = torch.randn(3, 256), torch.randn(3, 128), torch.randn(3, 128)
    out = backend.forward_extend(q, k, v, make_layer(), None)
    assert torch.equal(out, q)
    for got, given in ((seen.keys, k), (seen.values, v)):
        assert torch.equal(got[[7, 2, 5]].flatten(1), given)
        assert int(got.any(-1).any(-1).sum()) == 3
    assert not pool.buffers[0].any()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"sliding_window_size": 8}, "a sliding window"),
        ({"logit_cap": 30.0}, "capped logits"),
        ({"is_cross_attention": True}, "cross attention"),
    ],
)
def test_a_layer_that_is_more_is_refused(change: dict[str, Any], named: str) -> None:
    """As by the masked pass, before anything is written."""
    pool = Pool()
    backend = SparseBackend(
        SimpleNamespace(req_to_token_pool=None, token_to_kv_pool=pool), Seen(), torch.tensor([1])
    )
    with pytest.raises(ValueError, match=f"layer 1: the pass does not support {named}"):
        backend.forward_extend(
            torch.ones(1, 256), torch.ones(1, 128), torch.ones(1, 128), make_layer(**change), None
        )
    assert not pool.buffers.any()
