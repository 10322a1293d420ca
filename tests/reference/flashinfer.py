"""FlashInfer's paged prefill wrapper in torch, of 0.6.18 and (`SINCE_07`) of 0.7: what its kernels
compute, what it refuses, what it silently gets wrong.

Replaces the module `flashinfer` where there is no GPU: the names, constructor, `plan` and `run` are
FlashInfer's, as far as we use them (tests/contract/test_flashinfer.py compares). Where the real one
would read wild memory or wait for the device, this one raises. Knows one kernel variant by its
name, `ChunkcacheLimits`. Computes in float32, entry by entry.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

VARIANT = "ChunkcacheLimits"

KV_TILE = 64
"""Keys per tile of FA2 at head_dim 128 and 128 rows;
the tile at an entry's end is where an unforced mask is still asked."""

INT_WORKSPACE_BYTES = 8 << 20
"""On the device and once more in pinned memory, of each wrapper."""

MASKED = -5e4
"""`math::inf` of FlashInfer 0.6, negative: finite, before scaling."""


class BatchPrefillWithPagedKVCacheWrapper:
    """kv_layout NHD only."""

    masked = MASKED
    owns_mask = False

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        backend: str = "auto",
        jit_args: tuple[Any, ...] | None = None,
    ) -> None:
        if kv_layout != "NHD" or backend not in ("fa2", "fa3"):
            raise ValueError(f"not modelled: layout {kv_layout}, backend {backend}")
        if jit_args is not None and jit_args[11] != VARIANT:
            raise ValueError(f"not modelled: variant {jit_args[11]}")
        self.device = float_workspace_buffer.device
        self.backend = backend
        self._int_workspace = torch.empty(
            INT_WORKSPACE_BYTES, dtype=torch.uint8, pin_memory=self.device.type == "cuda"
        )
        self._kv_lens = torch.empty(0, dtype=torch.int32, device=self.device)
        self._jit_args = jit_args
        self._mask: Tensor | None = None
        self._arrays: tuple[Tensor, ...] = ()
        self._num_rows: int | None = None

    def plan(
        self,
        qo_indptr: Tensor,
        paged_kv_indptr: Tensor,
        paged_kv_indices: Tensor,
        paged_kv_last_page_len: Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        packed_custom_mask: Tensor | None = None,
        causal: bool = False,
        sm_scale: float | None = None,
        q_data_type: torch.dtype = torch.float16,
        max_token_per_sequence: int | None = None,
    ) -> None:
        """Keep the pass."""
        host = {
            "qo_indptr": qo_indptr,
            "paged_kv_indptr": paged_kv_indptr,
            "paged_kv_last_page_len": paged_kv_last_page_len,
        }
        for name, tensor in host.items():
            if tensor.device.type != "cpu":
                raise ValueError(f"{name} is on {tensor.device}: FlashInfer would wait for it")
        for name, tensor in {**host, "paged_kv_indices": paged_kv_indices}.items():
            if tensor.dtype != torch.int32:
                raise ValueError(f"{name} is {tensor.dtype}: the kernels would read it as int32")
        if paged_kv_indices.device != self.device or len(paged_kv_indices) < int(
            paged_kv_indptr[-1]
        ):
            raise ValueError(
                "paged_kv_indices: not on the device, or fewer than paged_kv_indptr counts"
            )
        if (
            not len(qo_indptr) == len(paged_kv_indptr) == len(paged_kv_last_page_len) + 1
            or len(qo_indptr) < 2
        ):
            raise ValueError(
                "qo_indptr, paged_kv_indptr: expected [batch_size + 1], at least one entry"
            )
        if (qo_indptr.diff() < 0).any() or (paged_kv_indptr.diff() < 0).any():
            raise ValueError("qo_indptr, paged_kv_indptr should be non-negative steps")
        if paged_kv_last_page_len[paged_kv_indptr.diff() == 0].any():
            raise ValueError(
                "paged_kv_last_page_len: keys of an entry without pages, which FA3 would read"
            )
        if max_token_per_sequence is None:
            raise ValueError(
                "max_token_per_sequence: FlashInfer would look for it in a Python loop"
            )
        self._heads = (num_qo_heads, num_kv_heads, head_dim_qk, page_size)
        self._causal, self._scale, self._dtype = causal, sm_scale, q_data_type
        if self._jit_args is not None and tuple(self._jit_args[1:7]) != (
            *(q_data_type,) * 3,
            torch.int32,
            *(head_dim_qk,) * 2,
        ):
            raise ValueError("the variant was compiled for another dtype or head size")
        self._copy_kv_lens(paged_kv_indptr, paged_kv_last_page_len, page_size)
        for array in host.values():
            self._copy_array(array)
        if packed_custom_mask is not None:
            self._copy_mask_indptr(qo_indptr, paged_kv_indptr)
        self._arrays = (*(array.clone() for array in host.values()), paged_kv_indices)
        self._mask = packed_custom_mask
        self._num_rows = int(qo_indptr[-1])

    def _copy_kv_lens(self, indptr: Tensor, last_page_len: Tensor, page_size: int) -> None:
        """From memory of its own, which is pageable."""
        lens = ((indptr.diff() - 1) * page_size + last_page_len).int()
        self._kv_lens = torch.empty(len(lens), dtype=torch.int32, device=self.device)
        self._kv_lens.copy_(lens, non_blocking=True)

    def _copy_array(self, array: Tensor) -> None:
        """From the caller's memory."""
        array.to(self.device, non_blocking=True)

    def _copy_mask_indptr(self, qo_indptr: Tensor, kv_indptr: Tensor) -> None:
        """Likewise pageable."""
        lens = qo_indptr.diff() * kv_indptr.diff()
        torch.cat([qo_indptr[:1], lens.cumsum(0)]).to(self.device, non_blocking=True)

    def run(
        self,
        q: Tensor,
        paged_kv_cache: tuple[Tensor, Tensor],
        *args: Any,
        out: Tensor | None = None,
        lse: Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        """Attention [rows, num_qo_heads, head_dim] and, if wanted, the log-sum-exp [rows,
        num_qo_heads], to base 2."""
        if self._num_rows is None:
            raise RuntimeError("plan info is not initialized")
        if self._mask is not None and self.backend == "fa3":
            raise RuntimeError(
                "BatchPrefillWithPagedKVCacheSM90Run failed with error: operation not supported"
            )
        num_qo_heads, num_kv_heads, head_dim, page_size = self._heads
        keys, values = paged_kv_cache
        if q.shape != (self._num_rows, num_qo_heads, head_dim):
            raise ValueError(
                f"q.shape {list(q.shape)} does not match qo_indptr[-1] ({self._num_rows}) and the"
                " plan's heads"
            )
        if (
            keys.shape[1:] != (page_size, num_kv_heads, head_dim)
            or keys.stride() != values.stride()
        ):
            raise ValueError(
                "paged_kv_cache: expected [num_pages, page_size, num_kv_heads, head_dim], both with"
                " the same strides"
            )
        if {q.dtype, keys.dtype, values.dtype} != {self._dtype}:
            raise ValueError(f"dtypes {q.dtype}, {keys.dtype}: planned for {self._dtype}")
        limits, scale = self._extra(args, self._num_rows)
        out = torch.zeros_like(q) if out is None else _checked("out", out, q.shape, self._dtype)
        lse = (
            q.new_empty(q.shape[:2], dtype=torch.float32)
            if lse is None
            else _checked("lse", lse, q.shape[:2], torch.float32)
        )
        for entry in range(len(self._arrays[2])):
            rows, flat = self._gather(entry, keys, values)
            part, part_lse = self._attend(
                q[rows].float(), *flat, None if limits is None else limits[rows], scale
            )
            out[rows] = part.to(out.dtype)
            lse[rows] = part_lse
        return (out, lse) if return_lse else out

    @property
    def _is_masked(self) -> bool:
        return self._mask is not None or self.owns_mask

    def _extra(self, args: tuple[Any, ...], num_rows: int) -> tuple[Tensor | None, float]:
        if self._jit_args is None:
            if args or self._scale is None:
                raise ValueError("expected no further arguments, and sm_scale in plan")
            return None, self._scale
        limits, scale = args
        if (
            limits.dtype != torch.int32
            or limits.device != self.device
            or limits.shape != (num_rows,)
        ):
            raise ValueError(
                f"limits: expected [{num_rows}] int32, got {list(limits.shape)} {limits.dtype}:"
                " wild reads"
            )
        return limits, scale

    def _gather(
        self, entry: int, keys: Tensor, values: Tensor
    ) -> tuple[slice, tuple[Tensor, Tensor]]:
        """The entry's rows, and its keys and values, [kv_len, num_qo_heads, head_dim] float32."""
        qo_indptr, kv_indptr, last_page_len, indices = self._arrays
        first, last = kv_indptr[entry : entry + 2].tolist()
        num_qo_heads, num_kv_heads, _, page_size = self._heads
        kv_len = (last - first - 1) * page_size + int(last_page_len[entry]) if last > first else 0
        seen_keys, seen_values = (
            cache[indices[first:last].long()].flatten(0, 1)[:kv_len].float()
            for cache in (keys, values)
        )
        group = num_qo_heads // num_kv_heads
        flat = (
            seen_keys.repeat_interleave(group, dim=1),
            seen_values.repeat_interleave(group, dim=1),
        )
        return slice(*qo_indptr[entry : entry + 2].tolist()), flat

    def _attend(
        self, q: Tensor, keys: Tensor, values: Tensor, limits: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor]:
        if not len(keys) or not len(q):
            return torch.zeros_like(q), torch.full(q.shape[:2], self.masked)
        logits = torch.einsum("nhd,mhd->nhm", q, keys)
        hidden = self._hidden(len(q), len(keys), limits)[:, None]
        logits = torch.where(hidden, self.masked, logits) * scale
        # a row without any key is zero where hidden is infinite
        out = torch.einsum("nhm,mhd->nhd", logits.softmax(-1).nan_to_num(), values)
        return out, logits.logsumexp(-1) / math.log(2)

    def _hidden(self, num_rows: int, num_keys: int, limits: Tensor | None) -> Tensor:
        """[rows, keys]: which keys the kernels mask.
        With a mask (FA2 alone takes one) causal is ignored."""
        key, row = torch.arange(num_keys), torch.arange(num_rows)[:, None]
        causal = self._causal and not self._is_masked
        last = num_keys - num_rows + row if causal else num_keys
        hidden = key > last
        if limits is None:
            return hidden.expand(num_rows, num_keys)
        asked = (
            key >= last // KV_TILE * KV_TILE
            if self.backend == "fa2" and not self._is_masked
            else torch.tensor(True)
        )
        return hidden | (asked & (key >= limits[:, None]))


class MaskOwningWrapper(BatchPrefillWithPagedKVCacheWrapper):
    """0.7's, where hidden is infinite, and a variant may be all of the mask."""

    masked = -math.inf

    def __init__(
        self,
        float_workspace_buffer: Tensor,
        kv_layout: str = "NHD",
        backend: str = "auto",
        jit_args: tuple[Any, ...] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        super().__init__(float_workspace_buffer, kv_layout, backend, jit_args)
        if variant_owns_mask and (backend != "fa2" or jit_args is None):
            raise ValueError("variant_owns_mask: FA2 with a variant only")
        self.owns_mask = variant_owns_mask


SINCE_07 = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=MaskOwningWrapper)


def _checked(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    if tensor.shape != shape or tensor.dtype != dtype or not tensor.is_contiguous():
        raise ValueError(
            f"{name}: expected contiguous {list(shape)} {dtype}, got {list(tensor.shape)}"
            f" {tensor.dtype}"
        )
    return tensor
