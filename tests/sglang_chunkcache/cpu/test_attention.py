"""SGLang's CPU attention without padding equals SGLang's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

from sglang_chunkcache.cpu import attention as cpu_backend
from sglang_chunkcache.cpu.attention import UnpaddedAttention

NUM_SLOTS, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 2, 8


def attend(
    cls: type,
    lens: list[tuple[int, int]],
    dtype: torch.dtype,
    *,
    decodes: bool = False,
    **kwargs: Any,
) -> torch.Tensor:
    """Attention of sequences of (prefix, extend) tokens, each on a row of scattered slots."""
    rng = torch.Generator().manual_seed(1)

    def made(num_tokens: int, num_heads: int) -> torch.Tensor:
        return torch.randn(num_tokens, num_heads, HEAD_DIM, generator=rng, dtype=dtype)

    keys, values = made(NUM_SLOTS, KV_HEADS), made(NUM_SLOTS, KV_HEADS)
    rows = torch.stack([torch.randperm(NUM_SLOTS, generator=rng) for _ in lens])
    prefix, extend = torch.tensor(lens).T
    queries = made(int(extend.sum()), HEADS)
    kv, whole = (queries, torch.empty_like(queries), keys, values), prefix + extend
    backend: Any = object.__new__(cls)
    settings = {"scaling": HEAD_DIM**-0.5, "enable_gqa": True, "causal": True, **kwargs}
    places: tuple[torch.Tensor, ...]
    places = rows, torch.arange(len(lens)), whole, prefix, extend
    if decodes:
        places, settings = places[:3], {**settings, "causal": False}
    name = "_run_sdpa_forward_decode" if decodes else "_run_sdpa_forward_extend"
    return getattr(backend, name)(*kv, *places, **settings)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "lens", [[(0, 7)], [(9, 1)], [(9, 5)], [(40, 13), (0, 3), (1, 1), (20, 20)]], ids=repr
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)], ids=str
)
def test_equals_sglangs(lens: list[tuple[int, int]], dtype: torch.dtype, tolerance: float) -> None:
    """After prefixes of any length. One key too many is seen in the second digit."""
    expected, got = (
        attend(cls, lens, dtype) for cls in (TorchNativeAttnBackend, UnpaddedAttention)
    )
    torch.testing.assert_close(got, expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("window", [None, 5])
def test_decoding_is_sglangs_bit_for_bit(dtype: torch.dtype, window: int | None) -> None:
    expected, got = (
        attend(cls, [(9, 1), (30, 1)], dtype, decodes=True, sliding_window_size=window)
        for cls in (TorchNativeAttnBackend, UnpaddedAttention)
    )
    assert torch.equal(got, expected)


def test_blocks_of_queries_join_seamlessly(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mask that starts anew at each block would hide or show a key too many."""
    whole = attend(UnpaddedAttention, [(17, 23)], torch.float32)
    monkeypatch.setattr(cpu_backend, "BLOCK_ROWS", 5)
    parts = attend(UnpaddedAttention, [(17, 23)], torch.float32)
    torch.testing.assert_close(parts, whole, atol=1e-5, rtol=0)


def test_anything_but_causal_is_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sliding windows and the like are not ours to rewrite."""
    called: list[Any] = []
    monkeypatch.setattr(
        TorchNativeAttnBackend, "_run_sdpa_forward_extend", lambda *args, **kw: called.append(kw)
    )
    attend(UnpaddedAttention, [(0, 3)], torch.float32, sliding_window_size=2)
    attend(UnpaddedAttention, [(0, 3)], torch.float32, causal=False)
    assert len(called) == 2


def test_registry_has_ours_without_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the name that the CPU platform and `--attention-backend` use."""
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    from sglang.srt.layers.attention import attention_registry
    from sglang.srt.mem_cache import registry

    from sglang_chunkcache import hooks, plugin

    monkeypatch.setattr(
        attention_registry, "ATTENTION_BACKENDS", dict(attention_registry.ATTENTION_BACKENDS)
    )
    monkeypatch.setattr(registry, "register_radix_cache_backend", lambda *args: None)
    monkeypatch.setattr(hooks, "register_hooks", lambda *args, **kwargs: None)
    plugin.register()
    monkeypatch.setattr(cpu_backend, "UnpaddedAttention", lambda runner: runner)
    runner = SimpleNamespace(use_mla_backend=False, token_to_kv_pool=None)
    assert attention_registry.ATTENTION_BACKENDS["torch_native"](runner) is runner
