"""The attention bench's arms: ours, and what one would use without it, all planned and run like
`SparseAttention`.

    fa2, fa3                   ours, on the GPU
    reference                  ours on the CPU: plain torch, slow on purpose
    dense_fa2, dense_fa3       FlashInfer's causal prefill of all tokens, of which the recomputed
                               ones are then taken
    virtual_fa2, virtual_fa3   FlashInfer's causal prefill with a sequence for each contiguous run:
                               a lone token reads its whole prefix alone
    custom_mask                FlashInfer's packed mask, one entry a request: every query walks all
                               keys
    sdpa                       torch's with a mask, in blocks of queries over the keys that the last
                               of them sees
    dense                      on the CPU: `sdpa` of all tokens

SDPA gets its keys contiguous and its masks ready, FlashInfer its packed mask: none of that is timed
in a run. Building and packing FlashInfer's is part of its plan's time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from eval.bench.attention.reference import ReferenceAttention
from sglang_chunkcache.attention.base import HeadShape, SparseAttention, SparseRequest
from sglang_chunkcache.attention.flashinfer import KERNELS, FlashInferSparse
from sglang_chunkcache.attention.masked_layout import BLOCK_ROWS

MAX_INDEX_BYTES = 4 << 30
"""More slot indices than this are no way to run attention,
and building them takes longer than the cell."""
WORKSPACE_BYTES = 256 << 20
"""FlashInfer recommends 128 MiB; splitting keys of many heads takes more."""
CreateWrapper = Callable[[torch.device, str], Any]


@dataclass(frozen=True)
class Arm:
    """One way to attend. `make` may raise whatever its library does."""

    make: Callable[[], SparseAttention]
    whole: bool = False
    """All tokens are its queries."""
    contiguous: bool = False
    """It knows no slots: each request's are contiguous."""


def arms_of(shape: HeadShape, device: torch.device) -> dict[str, Arm]:
    """Every arm of the device's kind, by name."""
    scale = shape.head_dim**-0.5
    sdpa = partial(MaskedSDPA, scale)
    if device.type != "cuda":
        return {
            "reference": Arm(partial(ReferenceAttention, shape, scale=scale)),
            "sdpa": Arm(sdpa, contiguous=True),
            "dense": Arm(sdpa, whole=True, contiguous=True),
        }
    prefill = partial(FlashInferPrefill, shape, device)
    return {
        **{
            k: Arm(partial(FlashInferSparse, shape, device=device, scale=scale, kernel=k))
            for k in KERNELS
        },
        **{
            f"dense_{backend}": Arm(partial(prefill, backend), whole=True)
            for backend in ("fa2", "fa3")
        },
        **{f"virtual_{backend}": Arm(partial(prefill, backend)) for backend in ("fa2", "fa3")},
        # FlashInfer's FA3 takes no custom mask (`is_fa3_backend_supported`)
        "custom_mask": Arm(partial(prefill, "fa2", masked=True)),
        "sdpa": Arm(sdpa, contiguous=True),
    }


class Entry(NamedTuple):
    """Consecutive queries of one request, of which the last sees `num_keys` keys,
    each before it one less."""

    request: int
    num_rows: int
    num_keys: int


def runs_of(requests: Sequence[SparseRequest]) -> list[Entry]:
    """The contiguous runs of all requests, in order."""
    runs = []
    for number, request in enumerate(requests):
        visible = request.visible()
        # a run ends where the next query sees more than one key more
        ends = torch.cat(
            [(visible.diff() != 1).nonzero()[:, 0] + 1, torch.tensor([visible.numel()])]
        )
        lengths = ends.diff(prepend=torch.tensor([0]))
        runs += [
            Entry(number, *pair)
            for pair in zip(lengths.tolist(), visible[ends - 1].tolist(), strict=True)
        ]
    return runs


@dataclass
class FlashInferPrefill:
    """FlashInfer's own paged prefill: a causal entry for each run, or, `masked`, an entry with a
    mask for each request.

    `figures` holds what a plan took in MiB.
    """

    shape: HeadShape
    device: torch.device
    backend: str
    masked: bool = False
    create: CreateWrapper | None = None
    figures: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._wrapper = (self.create or _create_wrapper)(self.device, self.backend)

    def plan(self, requests: Sequence[SparseRequest]) -> None:
        """Raises ValueError where the slot indices or the mask are too many."""
        entries = runs_of(requests)
        if self.masked:
            entries = [
                Entry(i, r.positions.numel(), int(r.visible()[-1])) for i, r in enumerate(requests)
            ]
        _, num_rows, num_keys = torch.tensor(entries).unbind(1)
        size = 4 * int(num_keys.sum())
        # checked before `torch.cat` makes them
        if size > MAX_INDEX_BYTES:
            raise ValueError(f"slot indices of {len(entries)} entries take {size / 2**30:.1f} GiB")
        self.figures = {"index_mib": size / 2**20}
        slots = [request.kv_slots.to(self.device, torch.int32) for request in requests]
        self._wrapper.plan(
            # on the host, where FlashInfer plans: from the device it would wait for a copy
            _indptr(num_rows),
            _indptr(num_keys),
            torch.cat([slots[entry.request][: entry.num_keys] for entry in entries]),
            torch.ones(len(entries), dtype=torch.int32),  # of the last page
            self.shape.num_qo_heads,
            self.shape.num_kv_heads,
            self.shape.head_dim,
            1,
            causal=not self.masked,
            sm_scale=self.shape.head_dim**-0.5,
            q_data_type=self.shape.dtype,
            max_token_per_sequence=int(num_rows.max()),  # else FlashInfer looks for it in a loop
            **({"custom_mask": self._mask(requests, entries)} if self.masked else {}),
        )

    def run(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Like `SparseAttention.run`."""
        cache = keys[:, None], values[:, None]  # in pages of one slot
        out: Tensor = self._wrapper.run(queries, cache, out=torch.empty_like(queries))
        return out

    def _mask(self, requests: Sequence[SparseRequest], entries: Sequence[Entry]) -> Tensor:
        """[sum of rows * keys] bool, request by request. Not packed: FlashInfer 0.6.18 takes the
        place of a request's mask in a packed one in bits where its kernel reads bytes, so that
        batches would read others' masks."""
        num_bits = sum(entry.num_rows * entry.num_keys for entry in entries)
        if num_bits >= 2**31:
            raise ValueError(
                f"the mask has {num_bits:.2g} entries, and FlashInfer counts them in 32 bits"
            )
        self.figures["mask_mib"] = num_bits / 8 / 2**20
        rows = (
            torch.arange(entry.num_keys, device=self.device)
            < request.visible().to(self.device)[:, None]
            for entry, request in zip(entries, requests, strict=True)
        )
        return torch.cat([row.flatten() for row in rows])


@dataclass
class MaskedSDPA:
    """torch's SDPA with a mask, block by block, as the masked pass does it;
    each request's slots are contiguous."""

    scale: float

    def plan(self, requests: Sequence[SparseRequest]) -> None:
        """Masks are built by the first run."""
        self._requests = [(int(request.kv_slots[0]), request.visible()) for request in requests]
        self._masks: dict[int, Tensor] = {}

    def run(self, queries: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Like `SparseAttention.run`."""
        out, start = torch.empty_like(queries), 0
        for first, visible in self._requests:
            for part in torch.split(visible, BLOCK_ROWS):
                rows, seen = slice(start, start + len(part)), slice(first, first + int(part[-1]))
                # kept over the runs, so that only the untimed check builds masks
                if start not in self._masks:
                    self._masks[start] = _additive_mask(part, queries)
                out[rows] = _sdpa(
                    queries[rows], keys[seen], values[seen], self._masks[start], self.scale
                )
                start = rows.stop
        return out


# Private, in order of use


def _create_wrapper(device: torch.device, backend: str) -> Any:
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    return BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend=backend)


def _indptr(counts: Tensor) -> Tensor:
    return torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)]).int()


def _additive_mask(visible: Tensor, queries: Tensor) -> Tensor:
    """[queries, keys] of 0 and -inf.
    Rows begin at multiples of 8, else torch copies the mask in every call."""
    num_keys = int(visible[-1])
    mask = queries.new_zeros(len(visible), -(-num_keys // 8) * 8)[:, :num_keys]
    hidden = torch.arange(num_keys, device=queries.device) >= visible.to(queries.device)[:, None]
    return mask.masked_fill_(hidden, float("-inf"))


def _sdpa(queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[rows, num_qo_heads, head_dim]; query heads that share a KV head are adjacent,
    keys are not copied."""
    query = queries.view(len(queries), keys.shape[-2], -1, queries.shape[2]).permute(1, 2, 0, 3)
    key, value = (
        pool.transpose(0, 1)[:, None].expand(-1, query.shape[1], -1, -1) for pool in (keys, values)
    )
    out = scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)
    return out.flatten(0, 1).transpose(0, 1)
