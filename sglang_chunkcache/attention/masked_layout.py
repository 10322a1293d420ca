"""The masked pass on the device: which rows, slots and masks every layer uses.

    positions      0 1 2 3 4 5 6 7 8 9
    kv_positions   0 1 2 3 . . 6 7 8 9   gaps are simply left out
    queries                2       7     cut into blocks; a block reads the keys that its last query
                                         sees

Knows nothing of layers or heads. Computed on the host, once per pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sglang_chunkcache.attention.base import PassSequence
from sglang_chunkcache.attention.upload import upload

BLOCK_ROWS = 1024
"""Queries per attention call: bounds the mask at 55 MB of bfloat16 for 27,000 keys."""


class Block(NamedTuple):
    """Queries [start, end) of a sequence; the last of them sees its first `num_keys` keys,
    `masked` if some see fewer."""

    start: int
    end: int
    num_keys: int
    masked: bool


@dataclass(frozen=True)
class SequenceLayout:
    """One sequence of a pass, on the device. Keys are in ascending order of position."""

    rows: slice
    """Its tokens among the pass's."""
    positions: Tensor
    """[n] int64."""
    kv_slots: Tensor
    """[m] int64, read from the pool."""
    own: bool
    """Fresh keys join those from the pool."""
    key_order: Tensor | None
    """[m + n] int64: sorts (pool keys, own keys) by position; None: they are in order."""
    key_positions: Tensor
    """[m] or [m + n] int64, ascending."""
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class PassLayout:
    """All sequences of a pass, on the device."""

    token_ids: Tensor
    """[total] int64."""
    positions: Tensor
    """[total] int64."""
    out_rows: Tensor | None
    """[w] int64: the pass's tokens that are written; None: all."""
    out_slots: Tensor
    """[w] int64."""
    sequences: tuple[SequenceLayout, ...]


def plan(
    sequences: Sequence[PassSequence], device: torch.device | str, *, block_rows: int = BLOCK_ROWS
) -> PassLayout:
    """Lay the sequences out one after the other, at least one."""
    layouts, start = [], 0
    for sequence in sequences:
        end = start + sequence.token_ids.numel()
        layouts.append(_lay_out(sequence, slice(start, end), device, block_rows))
        start = end
    is_written = torch.cat(
        [torch.full((len(s.token_ids),), s.out_slots is not None) for s in sequences]
    )
    return PassLayout(
        token_ids=torch.cat([upload(s.token_ids, device) for s in sequences]),
        positions=torch.cat([layout.positions for layout in layouts]),
        out_rows=None if bool(is_written.all()) else upload(is_written.nonzero().flatten(), device),
        # By sequence, not joined on the host: slots may be on the device already.
        out_slots=torch.cat(
            [
                torch.empty(0, dtype=torch.int64, device=device),
                *(upload(s.out_slots, device) for s in sequences if s.out_slots is not None),
            ]
        ),
        sequences=tuple(layouts),
    )


def _lay_out(
    sequence: PassSequence, rows: slice, device: torch.device | str, block_rows: int
) -> SequenceLayout:
    request, order = sequence.request, None
    positions, key_positions = request.positions, request.key_positions()
    if sequence.sees_fresh:
        # The common case, fresh tokens behind all cached ones: no layer has to reorder its keys.
        in_order = not len(key_positions) or int(key_positions[-1]) < int(positions[0])
        key_positions = torch.cat([key_positions, positions])
        if not in_order:  # two ascending runs, which numpy merges and torch would sort
            order = torch.from_numpy(np.argsort(key_positions.numpy(), kind="stable"))
            key_positions = key_positions[order]
        visible = torch.searchsorted(key_positions, positions, right=True)
    else:
        visible = request.visible()
    blocks = []
    for start in range(0, len(visible), block_rows):
        end = min(start + block_rows, len(visible))
        first, last = int(visible[start]), int(visible[end - 1])
        # Without a mask scaled_dot_product_attention may take its fast kernels.
        blocks.append(Block(start, end, last, first < last))
    return SequenceLayout(
        rows=rows,
        positions=upload(positions, device),
        # Indexing the pool wants int64, a kernel's page table is int32.
        kv_slots=upload(request.kv_slots, device).to(torch.int64),
        own=sequence.sees_fresh,
        key_order=None if order is None else upload(order, device),
        key_positions=upload(key_positions, device),
        blocks=tuple(blocks),
    )
