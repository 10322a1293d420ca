"""The launches of a sparse pass on FlashInfer's kernels: planned once, run once a layer.

    kernel          "causal" launch     "limited" launch        "full" launch
    fa2             FA2, causal         FA2, our variant        -
    fa3             FA3, causal         FA3, our variant        -
    fa3_two_part    FA3, causal         FA2, our variant        FA3; then merged with "limited"

Rows of a launch are a slice of the pass, so launches read and write views. Neither `plan` nor `run` waits for the device,
with one exception: FlashInfer's `plan` writes into pinned memory of its own and queues a copy, so the next `plan` waits
until that copy is through (the GPU is then a pass behind, not idle). FlashInfer itself waits while it compiles or loads a
module (`warm_up` has that behind it), and where a plan needs more workspace than there is, it raises.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from sglang_chunkcache.attention.base import HeadShape, SparseRequest
from sglang_chunkcache.attention.flashinfer_cuda import Backend, jit_args, unsupported_shape
from sglang_chunkcache.attention.sparse_layout import Launch, SparseLayout, page_indices, plan_sparse
from sglang_chunkcache.attention.upload import upload

Kind = Literal["causal", "full", "limited"]

KERNELS = ("fa2", "fa3", "fa3_two_part")

BLOCK_ROWS = 128
"""Rows of a block, at most: FA2 packs the query heads of a KV head into them, FA3 takes a head by itself."""

FA3_BLOCK_ROWS = {64: 192, 128: 128}
"""FA3's rows by head size (FlashInfer's getCTATileSize)."""

NEVER = 1 << 31
"""Rows that no run has: with fixed buffers everything goes to the launch with limits."""

MIN_SCALE = 5e-3
"""FlashInfer hides a key by the logit -5e4, whose weight has to vanish after scaling: at 5e-3 it is 2 ** -361."""


class Modules(Protocol):
    """What is used of the module `flashinfer`; tests hand over tests/reference/flashinfer.py."""

    @property
    def BatchPrefillWithPagedKVCacheWrapper(self) -> Callable[..., Any]: ...

    @property
    def merge_state_in_place(self) -> Callable[[Tensor, Tensor, Tensor, Tensor], None]: ...


class Capacity(NamedTuple):
    """Upper bounds of every pass to come. A CUDA graph then captures one `run` of `rows` rows and holds for all of them:
    addresses stay, and what a pass leaves over is padding. With FA2 a row costs num_qo_heads * group_size * head_dim * 4
    bytes of workspace, since FlashInfer always splits then."""

    rows: int
    entries: int
    """Of a launch: tiles of the layout."""
    indices: int
    """Of a launch."""


class _Step(NamedTuple):
    kind: str
    rows: slice
    wrapper: Any
    extra: tuple[Any, ...]
    """What the variant wants of `run` behind the KV cache."""


class FlashInferSparse:
    """`SparseAttention` by FlashInfer. Plans and runs belong on one stream; of two instances, too.

    Args:
        scale: Of the logits, before the softmax.
        kernel: One of `KERNELS`; "fa3" and "fa3_two_part" need Hopper.
        modules: None: FlashInfer.
        capacity: None: every pass as large as it is. With it, `run` takes and returns `capacity.rows` rows, those behind the
            plan's are padding, and `plan` raises where a pass does not fit.
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
        page_size: int = 1,
        modules: Modules | None = None,
        capacity: Capacity | None = None,
    ) -> None:
        if reason := unsupported_shape(shape, page_size=page_size):
            raise ValueError(reason)
        if kernel not in KERNELS or scale < MIN_SCALE:
            raise ValueError(
                f"expected a kernel of {KERNELS} and a scale from {MIN_SCALE} on, got {kernel} and {scale}"
            )
        self.tile_rows = tile_rows(shape, kernel)
        self._shape, self._scale, self._page_size = shape, scale, page_size
        self._device, self._kernel, self._capacity = device, kernel, capacity
        self._modules = modules or cast(Modules, importlib.import_module("flashinfer"))
        # Shared: holds a launch's partial results from one of its kernels to the next, and launches follow each other.
        self._workspace = torch.empty(self._workspace_bytes(), dtype=torch.uint8, device=device)
        self._forced_mask = torch.zeros(1, dtype=torch.uint8, device=device)
        self._limits = torch.zeros(capacity.rows if capacity else 0, dtype=torch.int32, device=device)
        self._wrappers: dict[str, Any] = {}
        self._layout: SparseLayout | None = None
        self._steps: list[_Step] = []
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    def warm_up(self) -> None:
        """Compile and load every module that a pass may need, by running one of each kind of launch. Minutes, the first time."""
        rows = 1 if self._capacity else self.tile_rows + 2
        positions = torch.arange(rows) + 2 * self._page_size
        if not self._capacity:
            positions[-2:] += torch.tensor([1, 2])  # two scattered rows behind a run
        num_keys = int(positions[-1]) + 1
        pages = torch.zeros(-(-num_keys // self._page_size), dtype=torch.int64, device=self._device)
        self.plan([SparseRequest(positions, pages, num_keys)])
        heads = (self._shape.num_kv_heads, self._shape.head_dim)
        cache = torch.zeros(1, self._page_size, *heads, dtype=self._shape.dtype, device=self._device)
        num_rows = self._capacity.rows if self._capacity else rows
        queries = cache.new_zeros(num_rows, self._shape.num_qo_heads, self._shape.head_dim)
        self.run(queries, cache, cache)

    def plan(self, requests: Sequence[SparseRequest]) -> Tensor | None:
        """Lay out the pass and upload it; see `SparseAttention.plan`.

        Raises:
            ValueError: a request does not fit the KV pool's pages, the pass not the capacity.
        """
        self._layout = None
        if self._copied is not None:
            self._copied.synchronize()
        layout = plan_sparse(
            requests,
            page_size=self._page_size,
            tile_rows=self.tile_rows,
            min_run=NEVER if self._capacity else None,
            two_part=self._kernel == "fa3_two_part",
        )
        launches = layout.launches if self._capacity is None else self._pad(layout.launches, self._capacity)
        num_pages = [request.kv_pages.numel() for request in requests]
        pages = [upload(request.kv_pages, self._device).int() for request in requests]
        # The end, too: padding reads where request 0 begins even if there is none.
        starts = torch.tensor([0, *num_pages]).cumsum(0)
        whole = torch.cat(pages) if pages else torch.empty(0, dtype=torch.int32, device=self._device)
        self._steps = [self._plan_launch(launch, whole, starts) for launch in launches]
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        self._layout = layout
        return layout.order

    def run(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """One layer; see `SparseAttention.run`. Raises ValueError where the queries are not as many as planned."""
        if self._layout is None:
            raise RuntimeError("plan comes before run")
        num_rows = self._capacity.rows if self._capacity else self._layout.num_rows
        if len(queries) != num_rows:
            raise ValueError(f"queries: expected {num_rows} rows as planned, got {len(queries)}")
        if self._page_size == 1 and keys.ndim == 3:
            keys, values = keys[:, None], values[:, None]
        out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        parts: dict[str, tuple[Tensor, Tensor]] = {}
        two_parts = any(step.kind == "full" for step in self._steps)
        for step in self._steps:
            query, target = queries[step.rows], out[step.rows]
            if step.kind == "causal" or not two_parts:
                step.wrapper.run(query, (keys, values), *step.extra, out=target)
            else:
                target = torch.empty_like(target) if step.kind == "full" else target
                parts[step.kind] = step.wrapper.run(query, (keys, values), *step.extra, out=target, return_lse=True)
        if two_parts:
            (part, lse), (other, other_lse) = parts["limited"], parts["full"]
            # The rows of "full" are the last ones of "limited".
            self._modules.merge_state_in_place(part[-len(other) :], lse[-len(other) :], other, other_lse)
        return out

    def _pad(self, launches: Sequence[Launch], capacity: Capacity) -> list[Launch]:
        """The same launches in every pass, those without a row too."""
        kinds: tuple[Kind, ...] = ("full", "limited") if self._kernel == "fa3_two_part" else ("limited",)
        found = {launch.kind: launch for launch in launches}
        return [_padded(found.get(kind), kind, capacity) for kind in kinds]

    def _plan_launch(self, launch: Launch, pages: Tensor, starts: Tensor) -> _Step:
        wrapper = self._wrappers.get(launch.kind)
        if wrapper is None:
            wrapper = self._wrappers[launch.kind] = self._create_wrapper(launch.kind)
        shape = self._shape
        # Views of one pinned block, so that copying them is queued, not waited for. Torch frees it after the copies only.
        limits = launch.last_page_len[:0] if launch.limits is None else launch.limits
        arrays = (launch.qo_indptr, launch.kv_indptr, launch.last_page_len, limits)
        block = torch.cat(arrays)
        block = block.pin_memory() if self._device.type == "cuda" else block
        qo_indptr, kv_indptr, last_page_len, limits = torch.split(block, [len(array) for array in arrays])
        wrapper.plan(
            qo_indptr,
            kv_indptr,
            page_indices(launch, pages, starts),
            last_page_len,
            shape.num_qo_heads,
            shape.num_kv_heads,
            shape.head_dim,
            self._page_size,
            packed_custom_mask=self._forced_mask if self._masks(launch.kind) else None,
            causal=launch.kind == "causal",
            sm_scale=self._scale,
            q_data_type=shape.dtype,
            max_token_per_sequence=int(qo_indptr.diff().max()),
        )
        if launch.kind != "limited":
            return _Step(launch.kind, launch.rows, wrapper, ())
        if self._capacity:
            self._limits.copy_(limits, non_blocking=True)
        else:
            self._limits = limits.to(self._device, non_blocking=True)
        return _Step(launch.kind, launch.rows, wrapper, (self._limits, self._scale))

    def _backend(self, kind: str) -> Backend:
        return "fa2" if self._kernel == "fa2" or (self._kernel == "fa3_two_part" and kind == "limited") else "fa3"

    def _masks(self, kind: str) -> bool:
        """Whether the kernel asks the variant on every tile only if it believes that there is a mask."""
        return kind == "limited" and self._backend(kind) == "fa2"

    def _create_wrapper(self, kind: str) -> Any:
        backend = self._backend(kind)
        args: dict[str, Any] = {"backend": backend}
        if kind == "limited":
            args["jit_args"] = jit_args(self._shape, backend)
        if self._capacity:
            num_entries = _num_entries(self._capacity)
            sizes = {"qo_indptr_buf": 1, "paged_kv_indptr_buf": 1, "paged_kv_last_page_len_buf": 0}
            args |= {name: self._ints(num_entries + more) for name, more in sizes.items()}
            args |= {"use_cuda_graph": True, "paged_kv_indices_buf": self._ints(self._capacity.indices)}
            if self._masks(kind):
                args |= {"custom_mask_buf": self._forced_mask.clone(), "mask_indptr_buf": self._ints(num_entries + 1)}
        return self._modules.BatchPrefillWithPagedKVCacheWrapper(self._workspace, **args)

    def _ints(self, size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int32, device=self._device)

    def _workspace_bytes(self) -> int:
        """What FA2 asks for where it splits the keys of an entry: a block's output and log-sum-exp, float32, for as many
        blocks as it starts, each counted with all query heads. FA3 asks for none."""
        device, shape = self._device, self._shape
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1
        num_blocks = max(1, 2 * num_sms // shape.num_kv_heads)
        if self._capacity:  # then it always splits
            packed = self._capacity.rows * shape.group_size
            num_blocks = max(num_blocks, -(-packed // BLOCK_ROWS) + _num_entries(self._capacity) - 1)
        needs_it = self._kernel != "fa3"
        return (1 << 20) + needs_it * num_blocks * BLOCK_ROWS * shape.num_qo_heads * (shape.head_dim + 1) * 4


def tile_rows(shape: HeadShape, kernel: str) -> int:
    """Rows of a block of the kernel that takes most of the work."""
    return max(16, BLOCK_ROWS // shape.group_size) if kernel == "fa2" else FA3_BLOCK_ROWS[shape.head_dim]


def _num_entries(capacity: Capacity) -> int:
    """Of a wrapper with fixed buffers: the layout's, and one of padding rows before and one behind them."""
    return capacity.entries + 2


def _padded(launch: Launch | None, kind: Kind, capacity: Capacity) -> Launch:
    """The launch over all rows and entries there is room for. Rows that are not its own see nothing: they come out as 0 with
    a log-sum-exp that weighs nothing, which FA2 and FA3 both provide for."""
    if launch is None:
        nothing = torch.zeros(0, dtype=torch.int32)
        zero = torch.zeros(1, dtype=torch.int32)
        limits = nothing if kind == "limited" else None
        launch = Launch(kind, slice(0, 0), zero, nothing.long(), nothing.long(), zero, nothing, limits)
    num_entries, rows = len(launch.last_page_len), launch.rows
    for name, needed in (("rows", rows.stop), ("entries", num_entries), ("indices", int(launch.kv_indptr[-1]))):
        if needed > getattr(capacity, name):
            raise ValueError(f"the pass needs {needed} {name}, the capacity is {getattr(capacity, name)}")

    def spread(values: Tensor, size: int, start: int, rest: int) -> Tensor:
        padded = torch.full((size,), rest, dtype=values.dtype)
        padded[:start] = 0
        padded[start : start + len(values)] = values
        return padded

    size = _num_entries(capacity)
    return launch._replace(
        rows=slice(0, capacity.rows),
        qo_indptr=spread(launch.qo_indptr + rows.start, size + 1, 1, capacity.rows),
        request=spread(launch.request, size, 1, 0),
        first_page=spread(launch.first_page, size, 1, 0),
        kv_indptr=spread(launch.kv_indptr, size + 1, 1, int(launch.kv_indptr[-1])),
        last_page_len=spread(launch.last_page_len, size, 1, 0),
        limits=None if launch.limits is None else spread(launch.limits, capacity.rows, rows.start, 0),
    )
