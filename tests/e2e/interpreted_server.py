"""A server without a GPU on which SGLang's Triton kernels run in Triton's interpreter: tokens
guessed ahead from n-grams, and models with convolutions between their attention.

python -m tests.e2e.interpreted_server FLAGS
"""

from __future__ import annotations

import os
import sys
from functools import wraps
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.functional import scaled_dot_product_attention

from tests.e2e import cpu_server

KERNELS = "sglang.kernels.ops.speculative."


def install() -> None:
    """In this process."""
    os.environ["TRITON_INTERPRET"] = "1"
    cpu_server.install()
    # Intel's are in Triton, those of other machines in sgl_kernel
    with patch("sglang.srt.utils.is_xpu", lambda: True):
        for name in ("spec_tree", "reconstruct_tree", "cache_locs"):
            import_module(KERNELS + name)
    from sglang_chunkcache.cpu.attention import UnpaddedAttention

    UnpaddedAttention.forward_extend = _verifying(UnpaddedAttention.forward_extend)


def _verifying(extend: Any) -> Any:
    """`forward_extend`, which also reads the tree of guesses: each sees all that came before the
    guesses, and those that it follows."""

    @wraps(extend)
    def extended(
        backend: Any,
        q: torch.Tensor,
        k: Any,
        v: Any,
        layer: Any,
        batch: Any,
        *args: Any,
        **options: Any,
    ) -> torch.Tensor:
        if not batch.forward_mode.is_target_verify():
            return extend(backend, q, k, v, layer, batch, *args, **options)  # type: ignore[no-any-return]
        pool, tree = backend.token_to_kv_pool, batch.spec_info
        pool.set_kv_buffer(layer, _write_loc(batch.out_cache_loc), k, v)
        queries = q.view(len(batch.seq_lens), -1, layer.tp_q_head_num, layer.head_dim)
        answers, start, width = [], 0, tree.draft_token_num
        for row, seq_len, asked in zip(
            batch.req_pool_indices, batch.seq_lens.tolist(), queries, strict=True
        ):
            num_keys = seq_len + width
            slots = backend.req_to_token_pool.req_to_token[row, :num_keys]
            keys, values = (
                side[slots].transpose(0, 1)[None] for side in pool.get_kv_buffer(layer.layer_id)
            )
            mask = tree.custom_mask[start : start + width * num_keys].view(width, num_keys)
            start += width * num_keys
            answers.append(
                scaled_dot_product_attention(
                    asked.transpose(0, 1)[None],
                    keys,
                    values,
                    attn_mask=mask,
                    scale=layer.scaling,
                    enable_gqa=True,
                )[0].transpose(0, 1)
            )
        return torch.cat(answers).reshape(q.shape)

    return extended


def _write_loc(slots: torch.Tensor) -> Any:
    from sglang.srt.layers.attention.torch_native_backend import KVWriteLoc

    return KVWriteLoc(slots, None)


if __name__ in ("__main__", "__mp_main__"):
    install()
if __name__ == "__main__":
    from sglang_chunkcache import launch_server

    launch_server.main(sys.argv[1:])
