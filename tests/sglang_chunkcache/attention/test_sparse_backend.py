"""Which attention the recompute pass gets and why, and what of a layer reaches it. That passes are right: test_recompute.py."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.layers.radix_attention import AttentionType
from torch import Tensor

from sglang_chunkcache.attention import flashinfer_cuda as variants
from sglang_chunkcache.attention import sparse_backend
from sglang_chunkcache.attention.choice import Choice
from sglang_chunkcache.attention.sparse_backend import SparseBackend, create


def make_layer(**changes: Any) -> Any:
    fields = {
        "layer_id": 1,
        "tp_q_head_num": 4,
        "tp_k_head_num": 2,
        "tp_v_head_num": 2,
        "qk_head_dim": 64,
        "v_head_dim": 64,
        "scaling": 0.125,
        "is_cross_attention": False,
        "attn_type": AttentionType.DECODER,
        "sliding_window_size": -1,
        "logit_cap": 0.0,
    }
    return SimpleNamespace(**{**fields, **changes})


def make_runner(*layers: Any, dtype: torch.dtype = torch.bfloat16, kv_dtype: torch.dtype | None = None) -> Any:
    """What `create` looks at."""
    layers = layers or (make_layer(), make_layer())
    inner = SimpleNamespace(layers=[SimpleNamespace(self_attn=SimpleNamespace(attn=layer)) for layer in layers])
    return SimpleNamespace(
        model=SimpleNamespace(model=inner),
        dtype=dtype,
        device="cpu",
        token_to_kv_pool=SimpleNamespace(dtype=kv_dtype or dtype),
    )


# The choice


@pytest.mark.parametrize("wish", ["masked", "virtual"])
def test_what_is_wished_for_needs_no_looking(wish: str) -> None:
    """Nothing is asked of the model, the machine or FlashInfer."""
    assert create(None, wish) == (None, {"kind": wish, "kernel": None, "reason": "asked for", "ms": {}})


REASONS = {
    "no CUDA": (make_runner(), "need CUDA, not cpu"),
    "dtype": (make_runner(dtype=torch.float32), "float32"),
    "head_dim": (make_runner(make_layer(qk_head_dim=80, v_head_dim=80)), "head_dim 80"),
    "scales": (make_runner(make_layer(), make_layer(scaling=0.5)), "layers differ"),
    "values": (make_runner(make_layer(v_head_dim=32)), "values of 32 dimensions under keys of 64"),
    "kv dtype": (make_runner(kv_dtype=torch.float16), "a KV cache of torch.float16 under a model of torch.bfloat16"),
}


@pytest.mark.parametrize(("runner", "reason"), REASONS.values(), ids=REASONS)
def test_auto_says_why_it_is_masked(runner: Any, reason: str) -> None:
    """A machine or model that cannot is no mistake."""
    attention, chosen = create(runner, "auto")
    assert attention is None
    assert reason in chosen.pop("reason")
    assert chosen == {"kind": "masked", "kernel": None, "ms": {}}


@pytest.mark.parametrize(("runner", "reason"), REASONS.values(), ids=REASONS)
def test_sparse_is_refused_by_the_same_reason(runner: Any, reason: str) -> None:
    """Who asks for it would otherwise measure something else."""
    with pytest.raises(ValueError, match=f"--recompute-attention sparse: .*{reason}"):
        create(runner, "sparse")


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which kernels could be tried."""
    monkeypatch.setattr(variants, "unsupported", lambda *args, **kwargs: None)
    monkeypatch.setattr(sparse_backend, "FlashInferSparse", lambda shape, **kwargs: (shape, kwargs))


def choose(monkeypatch: pytest.MonkeyPatch, *args: Any) -> None:
    monkeypatch.setattr(sparse_backend, "choose", lambda *_, **__: Choice(*args))


@pytest.mark.usefixtures("gpu")
def test_the_fastest_kernel_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the model's heads and scale; a kernel that is out is named."""
    choose(monkeypatch, "fa3", {"fa2": 2.0, "fa3": 1.0}, {"fa3_two_part": "nvcc: no"})
    attention, chosen = create(make_runner(), "auto")
    shape, kwargs = attention  # type: ignore[misc]
    assert (shape.num_qo_heads, shape.num_kv_heads, shape.head_dim, shape.dtype) == (4, 2, 64, torch.bfloat16)
    assert kwargs == {"device": torch.device("cpu"), "scale": 0.125, "kernel": "fa3"}
    assert chosen == {
        "kind": "sparse",
        "kernel": "fa3",
        "reason": "the fastest here; fa3_two_part left out: nvcc: no",
        "ms": {"fa2": 2.0, "fa3": 1.0},
    }


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("wish", ["auto", "sparse"])
def test_no_kernel_is_left(monkeypatch: pytest.MonkeyPatch, wish: str) -> None:
    """Every one with its reason, in the stats or in the refusal."""
    choose(monkeypatch, None, {}, {"fa2": "wrong: off by 3", "fa3": "nvcc: no"})
    reason = "fa2 left out: wrong: off by 3; fa3 left out: nvcc: no"
    if wish == "sparse":
        with pytest.raises(ValueError, match=reason):
            create(make_runner(), wish)
    else:
        assert create(make_runner(), wish) == (None, {"kind": "masked", "kernel": None, "reason": reason, "ms": {}})


@pytest.mark.usefixtures("gpu")
def test_an_error_on_the_way_is_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken compiler or a full GPU does not stop a server that can do without."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(sparse_backend, "choose", fail)
    assert create(make_runner(), "auto")[1]["reason"] == "RuntimeError: out of memory"
    with pytest.raises(ValueError, match="sparse: RuntimeError: out of memory"):
        create(make_runner(), "sparse")


# A layer


class Pool:
    """Two layers' K/V by slot."""

    def __init__(self) -> None:
        self.buffers = torch.zeros(2, 2, 9, 2, 64)

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.buffers[layer_id, 0]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.buffers[layer_id, 1]

    def set_kv_buffer(self, layer: Any, where: Any, keys: Tensor, values: Tensor) -> None:
        self.buffers[layer.layer_id, 0, where.loc], self.buffers[layer.layer_id, 1, where.loc] = keys, values


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
        SimpleNamespace(req_to_token_pool=None, token_to_kv_pool=pool), seen, torch.tensor([7, 2, 5])
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
    backend = SparseBackend(SimpleNamespace(req_to_token_pool=None, token_to_kv_pool=pool), Seen(), torch.tensor([1]))
    with pytest.raises(ValueError, match=f"layer 1: the pass does not support {named}"):
        backend.forward_extend(torch.ones(1, 256), torch.ones(1, 128), torch.ones(1, 128), make_layer(**change), None)
    assert not pool.buffers.any()
