"""Log-sum-exps equal a float64 computation, by the kernel and by pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from sglang_chunkcache.attention import lse
from sglang_chunkcache.attention.lse import log_sum_exp, log_sum_exp_by_pieces

TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 2e-3}
SCALE = 0.3


def make_heads(num_tokens: int, num_heads: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (3 * torch.randn(num_tokens, num_heads, 16, generator=generator)).to(dtype)


def assert_near(found: Tensor, queries: Tensor, keys: Tensor, *, is_causal: bool) -> None:
    """To a float64 computation."""
    assert (found.dtype, found.shape) == (torch.float32, (queries.shape[1], len(queries)))
    shared = keys.double().repeat_interleave(queries.shape[1] // keys.shape[1], 1)
    logits = torch.einsum("nhd,mhd->hnm", queries.double(), shared) * SCALE
    if is_causal:
        logits.masked_fill_(torch.ones(logits.shape[1:], dtype=torch.bool).triu(1), float("-inf"))
    atol = TOLERANCES[queries.dtype]
    torch.testing.assert_close(found.double(), logits.logsumexp(-1), rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 6])
@pytest.mark.parametrize(
    ("n", "m", "is_causal"), [(50, 70, False), (50, 1, False), (1, 70, False), (50, 50, True)]
)
@pytest.mark.parametrize("compute", [log_sum_exp, log_sum_exp_by_pieces])
def test_equals_float64(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    num_kv_heads: int,
    n: int,
    m: int,
    is_causal: bool,
    compute: Callable[..., Tensor],
) -> None:
    monkeypatch.setattr(lse, "PIECE_BYTES", 7 * 4 * 6 * m)
    queries, keys = make_heads(n, 6, dtype, 0), make_heads(m, num_kv_heads, dtype, 1)
    found = compute(queries, keys, scale=SCALE, is_causal=is_causal)
    assert_near(found, queries, keys, is_causal=is_causal)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_on_cuda_equals_float64(dtype: torch.dtype, is_causal: bool) -> None:
    """By flash attention in half precision, by pieces in float32."""
    queries, keys = make_heads(50, 6, dtype, 0), make_heads(50, 2, dtype, 1)
    found = log_sum_exp(queries.cuda(), keys.cuda(), scale=SCALE, is_causal=is_causal).cpu()
    assert_near(found, queries, keys, is_causal=is_causal)
