"""The attention bench's arms: ours, and what one would use without it, all planned and run like `SparseAttention`.

    fa2, fa3, fa3_two_part    ours, on the GPU                    reference   ours on the CPU: plain torch, slow on purpose
    dense_fa2, dense_fa3      FlashInfer's causal prefill of all tokens, of which the recomputed ones are then taken
    virtual_fa2, virtual_fa3  FlashInfer's causal prefill with a sequence for each contiguous run: a lone token reads its whole
                              prefix alone
    custom_mask               FlashInfer's packed mask, one entry a request: every query walks all keys
    sdpa                      torch's with a mask, in blocks of queries over the keys that the last of them sees
    dense, virtual            on the CPU: the same by torch's SDPA

SDPA gets its keys contiguous and its masks ready, FlashInfer its packed mask: none of that is timed in a run. Building and
packing FlashInfer's is part of its plan's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from sglang_chunkcache.attention.base import HeadShape, SparseAttention, SparseRequest
from sglang_chunkcache.attention.flashinfer import KERNELS, FlashInferSparse
from sglang_chunkcache.attention.masked_layout import BLOCK_ROWS
from sglang_chunkcache.attention.reference import ReferenceAttention

MAX_INDEX_BYTES = 4 << 30
"""More page indices than this are no way to run attention, and building them takes longer than the cell."""
WORKSPACE_BYTES = 256 << 20
"""FlashInfer recommends 128 MiB; splitting keys of many heads takes more."""
CreateWrapper = Callable[[torch.device, str], Any]


@dataclass(frozen=True)
class Arm:
    """One way to attend. `make` may raise whatever its library does."""

    name: str
    make: Callable[[], SparseAttention]
    whole: bool = False
    """All tokens are its queries."""
    contiguous: bool = False
    """It knows no pages: each request's are contiguous."""


def arms_of(shape: HeadShape, *, device: torch.device, page_size: int) -> list[Arm]:
    """Every arm of the device's kind."""
    scale = shape.head_dim**-0.5
    masked = Arm("sdpa", lambda: MaskedSDPA(scale=scale, page_size=page_size), contiguous=True)

    def runs() -> RunsSDPA:
        return RunsSDPA(scale=scale, page_size=page_size)

    if device.type != "cuda":
        return [
            Arm("reference", lambda: ReferenceAttention(shape, scale=scale, page_size=page_size)),
            masked,
            Arm("dense", runs, whole=True, contiguous=True),
            Arm("virtual", runs, contiguous=True),
        ]

    def ours(kernel: str) -> Callable[[], SparseAttention]:
        return lambda: FlashInferSparse(shape, device=device, scale=scale, kernel=kernel, page_size=page_size)

    def stock(backend: str, *, masked: bool = False) -> Callable[[], SparseAttention]:
        return lambda: FlashInferPrefill(shape, device, scale, page_size, backend, masked)

    return [
        *(Arm(kernel, ours(kernel)) for kernel in KERNELS),
        *(Arm(f"dense_{backend}", stock(backend), whole=True) for backend in ("fa2", "fa3")),
        *(Arm(f"virtual_{backend}", stock(backend)) for backend in ("fa2", "fa3")),
        Arm("custom_mask", stock("fa2", masked=True)),
        masked,
    ]


class Run(NamedTuple):
    """Consecutive queries of one request, of which the last sees `num_keys` keys, each before it one less."""

    request: int
    num_rows: int
    num_keys: int


def runs_of(requests: Sequence[SparseRequest]) -> list[Run]:
    """The contiguous runs of all requests, in order; requests without queries have none."""
    runs = []
    for number, request in enumerate(requests):
        visible = request.visible()
        if visible.numel():
            ends = torch.cat([(visible.diff() != 1).nonzero()[:, 0] + 1, torch.tensor([visible.numel()])])
            lengths = ends.diff(prepend=torch.tensor([0]))
            runs += [Run(number, *pair) for pair in zip(lengths.tolist(), visible[ends - 1].tolist(), strict=True)]
    return runs


@dataclass
class FlashInferPrefill:
    """FlashInfer's own paged prefill: a causal entry for each run, or, `masked`, an entry with a mask for each request.

    `figures` holds what a plan took in bytes. Requests without queries are not for it.
    """

    shape: HeadShape
    device: torch.device
    scale: float
    page_size: int
    backend: str
    masked: bool = False
    create: CreateWrapper | None = None
    figures: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._wrapper = (self.create or _create_wrapper)(self.device, self.backend)

    def plan(self, requests: Sequence[SparseRequest]) -> None:
        """Raises ValueError where the page indices or the mask are too many."""
        runs = runs_of(requests)
        if self.masked:
            runs = [Run(i, r.positions.numel(), int(r.visible()[-1])) for i, r in enumerate(requests)]
        num_rows, num_keys = (torch.tensor(numbers, dtype=torch.int64) for numbers in list(zip(*runs, strict=True))[1:])
        num_pages = -(-num_keys // self.page_size)
        self.figures = {"index_bytes": 4 * int(num_pages.sum())}
        if self.figures["index_bytes"] > MAX_INDEX_BYTES:
            raise ValueError(f"page indices of {len(runs)} entries take {self.figures['index_bytes'] / 2**30:.1f} GiB")
        pages = [request.kv_pages.to(self.device, torch.int32) for request in requests]
        counts = zip(runs, num_pages.tolist(), strict=True)
        self._wrapper.plan(
            _indptr(num_rows),
            _indptr(num_pages),
            torch.cat([pages[run.request][:count] for run, count in counts]),
            (num_keys - (num_pages - 1) * self.page_size).int(),
            self.shape.num_qo_heads,
            self.shape.num_kv_heads,
            self.shape.head_dim,
            self.page_size,
            causal=not self.masked,
            sm_scale=self.scale,
            q_data_type=self.shape.dtype,
            max_token_per_sequence=int(num_rows.max()),  # else FlashInfer looks for it in a loop
            **({"custom_mask": self._mask(requests, runs)} if self.masked else {}),
        )

    def run(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Like `SparseAttention.run`; keys and values with their page size."""
        out: Tensor = self._wrapper.run(queries, (keys, values), out=torch.empty_like(queries))
        return out

    def _mask(self, requests: Sequence[SparseRequest], runs: Sequence[Run]) -> Tensor:
        """[sum of rows * keys] bool, request by request. Not packed: FlashInfer 0.6.18 takes the place of a request's mask in a
        packed one in bits where its kernel reads bytes, so that batches would read others' masks."""
        num_entries = sum(run.num_rows * run.num_keys for run in runs)
        self.figures["mask_bytes"] = sum(-(-run.num_rows * run.num_keys // 8) for run in runs)
        if num_entries >= 2**31:
            raise ValueError(f"the mask has {num_entries:.2g} entries, and FlashInfer counts them in 32 bits")
        rows = (
            torch.arange(run.num_keys, device=self.device) < requests[run.request].visible().to(self.device)[:, None]
            for run in runs
        )
        return torch.cat([row.flatten() for row in rows])


@dataclass
class MaskedSDPA:
    """torch's SDPA with a mask, block by block, as the masked pass does it."""

    scale: float
    page_size: int

    def plan(self, requests: Sequence[SparseRequest]) -> None:
        """Raises ValueError for pages that are not contiguous."""
        keys = _key_slices(requests, self.page_size)
        self._requests = [(slice_, request.visible()) for slice_, request in zip(keys, requests, strict=True)]
        self._masks: dict[int, Tensor] = {}

    def run(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Like `SparseAttention.run`. The first one builds the masks."""
        out, start = torch.empty_like(queries), 0
        for slice_, visible in self._requests:
            for part in torch.split(visible, BLOCK_ROWS):
                rows, seen = slice(start, start + len(part)), slice(slice_.start, slice_.start + int(part[-1]))
                if start not in self._masks:
                    self._masks[start] = _additive_mask(part, queries)
                out[rows] = _sdpa(queries[rows], keys, values, seen, self._masks[start], self.scale)
                start = rows.stop
        return out


@dataclass
class RunsSDPA:
    """torch's SDPA, causal, once a run."""

    scale: float
    page_size: int

    def plan(self, requests: Sequence[SparseRequest]) -> None:
        """Raises ValueError for pages that are not contiguous."""
        keys = _key_slices(requests, self.page_size)
        self._runs: list[tuple[slice, slice]] = []
        start = 0
        for run in runs_of(requests):
            first = keys[run.request].start
            self._runs.append((slice(start, start + run.num_rows), slice(first, first + run.num_keys)))
            start += run.num_rows

    def run(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Like `SparseAttention.run`."""
        out = torch.empty_like(queries)
        for rows, seen in self._runs:
            num_rows, num_keys = rows.stop - rows.start, seen.stop - seen.start
            mask: Any = None
            if 1 < num_rows < num_keys:
                mask = causal_lower_right(num_rows, num_keys)
            out[rows] = _sdpa(queries[rows], keys, values, seen, mask, self.scale, causal=num_rows == num_keys)
        return out


# Private, in order of use


def _create_wrapper(device: torch.device, backend: str) -> Any:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)


def _indptr(counts: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()


def _key_slices(requests: Sequence[SparseRequest], page_size: int) -> list[slice]:
    """Which of the pool's tokens each request's keys are."""
    for request in requests:
        if bool((request.kv_pages.diff() != 1).any()):
            raise ValueError("kv_pages: expected contiguous pages")
    starts = [int(request.kv_pages[0]) * page_size for request in requests]
    return [slice(start, start + request.num_keys) for start, request in zip(starts, requests, strict=True)]


def _additive_mask(visible: Tensor, queries: Tensor) -> Tensor:
    """[queries, keys] of 0 and -inf. Rows begin at multiples of 8, else torch copies the mask in every call."""
    num_keys = int(visible[-1])
    mask = queries.new_zeros(len(visible), -(-num_keys // 8) * 8)[:, :num_keys]
    hidden = torch.arange(num_keys, device=queries.device) >= visible.to(queries.device)[:, None]
    return mask.masked_fill_(hidden, float("-inf"))


def _sdpa(
    queries: Tensor, keys: Tensor, values: Tensor, seen: slice, mask: Any, scale: float, *, causal: bool = False
) -> Tensor:
    """[rows, num_qo_heads, head_dim]; query heads that share a KV head are adjacent, keys are not copied."""
    num_kv_heads = keys.shape[-2]
    query = queries.reshape(len(queries), num_kv_heads, -1, queries.shape[2]).permute(1, 2, 0, 3)
    key, value = (
        pool.flatten(0, -3)[seen].transpose(0, 1)[:, None].expand(-1, query.shape[1], -1, -1) for pool in (keys, values)
    )
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=causal, scale=scale)
    return out.flatten(0, 1).transpose(0, 1)
