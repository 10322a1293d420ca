"""SGLang's CPU attention without its padding: the backend `torch_native` on a machine without a
GPU, with `--stock` too.

SGLang's backend pads the queries of an extend to the whole sequence, so 40 new tokens after 6,000
cached ones cost a 6,000 by 6,000 attention, nearly all of a CPU's time after a prefix hit. Here
only the new tokens are queries:

    keys      p p p p | n n n        prefix, new
    queries             n n n        each sees the prefix and the new tokens up to itself
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

BLOCK_ROWS = 1024
"""Queries per call after a prefix: bounds the mask."""


def create(runner: Any) -> UnpaddedAttention:
    """The backend of one model runner, as SGLang's attention registry calls it."""
    if runner.use_mla_backend:
        _absorb()
    return UnpaddedAttention(runner)


class UnpaddedAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """Equal to its base where nothing is cached, and in decoding; after a prefix within rounding.
    Both are faster."""

    def _run_sdpa_forward_extend(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        extend_prefix_lens: Tensor,
        extend_seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """Arguments as in SGLang; anything but plain causal self-attention goes to the base."""
        window = options.get("sliding_window_size")
        is_causal = options.get("causal", False) and not options.get("is_cross_attn", False)
        if encoder_lens is not None or not is_causal or (window is not None and window > -1):
            places = req_to_token, req_pool_indices, seq_lens, extend_prefix_lens, extend_seq_lens
            return super()._run_sdpa_forward_extend(  # type: ignore[no-any-return]
                query, output, k_cache, v_cache, *places, encoder_lens, **options
            )
        start = 0
        lens = (req_pool_indices.tolist(), extend_prefix_lens.tolist(), extend_seq_lens.tolist())
        for row, prefix_len, extend_len in zip(*lens, strict=True):
            slots = req_to_token[row, : prefix_len + extend_len]
            # scaled_dot_product_attention wants one dtype, and the pool may keep another.
            keys, values = (
                side[slots].to(query.dtype).transpose(0, 1)[None]
                for side in _sides(k_cache, v_cache)
            )
            # Without a prefix no mask is built, so nothing has to be bounded.
            step = BLOCK_ROWS if prefix_len else max(1, extend_len)
            for first in range(0, extend_len, step):
                last = min(first + step, extend_len)
                # Keys behind the block's last query are left out, not masked.
                num_keys = prefix_len + last
                rows = slice(start + first, start + last)
                attended = scaled_dot_product_attention(
                    query[rows].transpose(0, 1)[None],
                    keys[:, :, :num_keys],
                    values[:, :, :num_keys],
                    # A single query sees all keys: no mask.
                    attn_mask=_mask(last - first, num_keys, query.dtype)
                    if prefix_len and last - first > 1
                    else None,
                    # torch's causal mask begins at the top left: it would hide a prefix.
                    is_causal=not prefix_len,
                    scale=options.get("scaling"),
                    enable_gqa=options.get("enable_gqa", False),
                )
                output[rows] = attended[0].transpose(0, 1)
            start += extend_len
        return output

    def _run_sdpa_forward_decode(
        self, query: Tensor, output: Tensor, k_cache: Any, v_cache: Any, *args: Any, **options: Any
    ) -> Tensor:
        sides = _sides(k_cache, v_cache)
        return super()._run_sdpa_forward_decode(  # type: ignore[no-any-return]
            query, output, *sides, *args, **options
        )


class _Side:
    """Keys or values of a layer, indexed by slots: by `index_select`, four times as fast as by
    brackets."""

    def __init__(self, buffer: Tensor) -> None:
        self._buffer = buffer

    def __getitem__(self, slots: Tensor) -> Tensor:
        return self._buffer.index_select(0, slots)


def _sides(*caches: Any) -> list[Any]:
    """What resolves slots itself stays as it is."""
    return [_Side(each) if isinstance(each, Tensor) else each for each in caches]


def _absorb() -> None:
    """Have SGLang attend to what its pool of MLA keeps. Without a prefix it would expand that, for
    kernels that do not read the pool."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register("torch_native", lambda *_: AttnForwardMethod.MLA)


def _mask(num_queries: int, num_keys: int, dtype: torch.dtype) -> Tensor:
    """[num_queries, num_keys] of 0 and -inf; the last query sees all keys."""
    hidden = torch.full((num_queries, num_keys), float("-inf"), dtype=dtype)
    return hidden.triu_(num_keys - num_queries + 1)
