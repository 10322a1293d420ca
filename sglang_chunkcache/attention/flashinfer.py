"""The launches of a sparse pass on FlashInfer's kernels: planned once, run once a layer.

    kernel    "causal" launch    "limited" launch
    fa2       FA2, causal        FA2, our kernel variant
    fa3       FA3, causal        FA3, our kernel variant

Rows of a launch are a slice of the pass, so launches read and write views. Neither `plan` nor `run`
waits for the device, with one exception: FlashInfer's `plan` writes into pinned memory of its own
and queues a copy, so the next `plan` waits until that copy is done (the GPU is then a pass late,
not idle). FlashInfer itself waits while it compiles or loads a module, which `warm_up` does in
advance, and raises where a plan needs more workspace than there is.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from sglang_chunkcache.attention.base import HeadShape, SparseRequest
from sglang_chunkcache.attention.flashinfer_cuda import jit_args, unsupported_shape
from sglang_chunkcache.attention.sparse_layout import (
    Kind,
    Launch,
    SparseLayout,
    block_keys,
    plan_sparse,
    slot_indices,
)
from sglang_chunkcache.attention.upload import upload

KERNELS = ("fa2", "fa3")

BLOCK_ROWS = 128
"""Rows of a block, at most: FA2 packs a KV head's query heads into them, FA3 one head."""

FA3_BLOCK_ROWS = {64: 192, 128: 128}
"""FA3's rows by head size (FlashInfer's getCTATileSize)."""

MIN_SCALE = 5e-3
"""FlashInfer 0.6 hides a key by the logit -5e4, whose weight has to vanish after scaling:
at 5e-3 it is 2 ** -361. From 0.7 on hidden is minus infinity."""


class _Step(NamedTuple):
    rows: slice
    wrapper: Any
    extra: tuple[Any, ...]
    """The kernel variant's arguments of `run`, after the KV cache."""


class FlashInferSparse:
    """`SparseAttention` by FlashInfer. Plans and runs of all instances belong on one stream.

    Args:
        scale: Of the logits, before the softmax.
        kernel: One of `KERNELS`; "fa3" needs Hopper.
        modules: with `BatchPrefillWithPagedKVCacheWrapper`; None: FlashInfer, which
            tests/reference/flashinfer.py models.
    Raises:
        ValueError: shape, scale or kernel is not supported.
    """

    def __init__(
        self,
        shape: HeadShape,
        *,
        device: torch.device,
        scale: float,
        kernel: str,
        modules: Any = None,
    ) -> None:
        if reason := unsupported_shape(shape):
            raise ValueError(reason)
        if kernel not in KERNELS or scale < MIN_SCALE:
            raise ValueError(
                f"expected a kernel of {KERNELS} and a scale from {MIN_SCALE} on, got {kernel} and"
                f" {scale}"
            )
        self.tile_rows = tile_rows(shape, kernel)
        self._shape, self._scale, self._device, self._kernel = shape, scale, device, kernel
        self._modules = modules or importlib.import_module("flashinfer")
        self._num_sms = 1
        if device.type == "cuda":
            self._num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        # Shared by the launches, which run one after the other: it holds partial results within a
        # launch only.
        self._workspace = torch.empty(self._workspace_bytes(), dtype=torch.uint8, device=device)
        wrapper = self._modules.BatchPrefillWithPagedKVCacheWrapper
        # Where FlashInfer can be told that the variant is the mask, no mask has to be given.
        self._owns_mask = "variant_owns_mask" in inspect.signature(wrapper).parameters
        self._forced_mask = (
            None if self._owns_mask else torch.zeros(1, dtype=torch.uint8, device=device)
        )
        self._wrappers: dict[Kind, Any] = {}
        self._layout: SparseLayout | None = None
        self._steps: list[_Step] = []
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def warm_up(self) -> None:
        """Compile and load what a pass may need, in one launch of each kind; minutes at first."""
        positions = torch.arange(self.tile_rows + 2)
        positions[-2:] += torch.tensor([1, 2])  # a run, then two scattered rows
        # One slot serves as all of them: what is computed does not matter here.
        slots = torch.zeros(int(positions[-1]) + 1, dtype=torch.int64, device=self._device)
        self.plan([SparseRequest(positions, slots)])
        shape = self._shape
        cache = torch.zeros(
            1, shape.num_kv_heads, shape.head_dim, dtype=shape.dtype, device=self._device
        )
        queries = cache.new_zeros(len(positions), shape.num_qo_heads, shape.head_dim)
        self.run(queries, cache, cache)

    def lay_out(self, requests: Sequence[SparseRequest]) -> SparseLayout:
        """The pass as this kernel takes it, on the host alone. Raises as `plan`."""
        return plan_sparse(requests, tile_rows=self.tile_rows)

    def busiest_keys(self, layout: SparseLayout) -> float:
        """Keys that the busiest multiprocessor walks, with which a layer's time grows.

        Blocks are spread evenly. FA3 splits none: where they are fewer than multiprocessors, the
        longest one lasts as long as all. FA2 then splits their keys.
        """
        is_fa2 = self._kernel == "fa2"
        heads = self._shape.num_kv_heads if is_fa2 else self._shape.num_qo_heads
        walked = (block_keys(launch, self.tile_rows) for launch in layout.launches)
        return sum(
            max(float(keys.sum()) * heads / self._num_sms, 0 if is_fa2 else float(keys.max()))
            for keys in walked
        )

    def plan(
        self, requests: Sequence[SparseRequest], layout: SparseLayout | None = None
    ) -> Tensor | None:
        """Lay out the pass and upload it; see `SparseAttention.plan`.
        layout: `lay_out` of the same requests; None: it is still to be made."""
        # A plan that raises an error leaves nothing that `run` could take for this pass.
        self._layout = None
        if self._copied is not None:
            self._copied.synchronize()
        layout = layout or self.lay_out(requests)
        starts = torch.tensor([0, *(request.num_keys for request in requests)]).cumsum(0)
        # The kernels take slot indices of int32.
        slots = torch.cat(
            [
                torch.empty(0, dtype=torch.int32, device=self._device),
                *(upload(request.kv_slots, self._device).int() for request in requests),
            ]
        )
        self._steps = [self._plan_launch(launch, slots, starts) for launch in layout.launches]
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        self._layout = layout
        return layout.order

    def run(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One layer; see `SparseAttention.run`."""
        if self._layout is None:
            raise RuntimeError("plan comes before run")
        if len(queries) != self._layout.num_rows:
            raise ValueError(
                f"queries: expected {self._layout.num_rows} rows as planned, got {len(queries)}"
            )
        # FlashInfer wants the page dimension, which SGLang's pool has not.
        cache = keys[:, None], values[:, None]
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for step in self._steps:
            step.wrapper.run(queries[step.rows], cache, *step.extra, out=out[step.rows])
        return out

    def _plan_launch(self, launch: Launch, slots: Tensor, starts: Tensor) -> _Step:
        wrapper = self._wrappers.get(launch.kind)
        if wrapper is None:
            wrapper = self._wrappers[launch.kind] = self._create_wrapper(launch.kind)
        shape = self._shape
        # Views of one pinned block, so that copies of them are queued without a wait. Torch frees
        # it after the copies.
        last_page_len = torch.ones_like(launch.kv_indptr[1:])  # a page is a slot
        limits = last_page_len[:0] if launch.limits is None else launch.limits
        arrays = (launch.qo_indptr, launch.kv_indptr, last_page_len, limits)
        block = torch.cat(arrays)
        block = block.pin_memory() if self._device.type == "cuda" else block
        qo_indptr, kv_indptr, last_page_len, limits = torch.split(
            block, [len(array) for array in arrays]
        )
        wrapper.plan(
            qo_indptr,
            kv_indptr,
            slot_indices(launch, slots, starts),
            last_page_len,
            shape.num_qo_heads,
            shape.num_kv_heads,
            shape.head_dim,
            1,
            packed_custom_mask=self._forced_mask if self._masks(launch.kind) else None,
            causal=launch.kind == "causal",
            sm_scale=self._scale,
            q_data_type=shape.dtype,
            # Else FlashInfer takes Python's `max` of a tensor, an operation for every entry.
            max_token_per_sequence=int(qo_indptr.diff().max()),
        )
        extra: tuple[Any, ...] = ()
        if launch.kind == "limited":
            extra = limits.to(self._device, non_blocking=True), self._scale
        return _Step(launch.rows, wrapper, extra)

    def _masks(self, kind: Kind) -> bool:
        """Whether only custom-mask mode applies the variant to every tile: it is then forced."""
        return kind == "limited" and self._kernel == "fa2"

    def _create_wrapper(self, kind: Kind) -> Any:
        args: dict[str, Any] = {"backend": self._kernel}
        if kind == "limited":
            args["jit_args"] = jit_args(self._shape, self._kernel)
        if self._owns_mask and self._masks(kind):
            args["variant_owns_mask"] = True
        return self._modules.BatchPrefillWithPagedKVCacheWrapper(self._workspace, **args)

    def _workspace_bytes(self) -> int:
        """What FA2 needs where it splits the keys of an entry: output and log-sum-exp, float32, of
        as many blocks as it starts, each counted with all query heads. FA3 needs none."""
        shape = self._shape
        # FA2 starts two blocks a multiprocessor, spread over the KV heads.
        num_blocks = max(1, 2 * self._num_sms // shape.num_kv_heads)
        num_rows = num_blocks * BLOCK_ROWS * shape.num_qo_heads if self._kernel != "fa3" else 0
        return (1 << 20) + 4 * num_rows * (shape.head_dim + 1)


def tile_rows(shape: HeadShape, kernel: str) -> int:
    """Rows of a block, of the kernel that does most of the work."""
    if kernel == "fa2":
        return max(16, BLOCK_ROWS // shape.group_size)
    return FA3_BLOCK_ROWS[shape.head_dim]
