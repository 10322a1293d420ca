"""Which tokens a pass runs, and what each may attend to.

    positions      0 1 2 3 4 5 6 7 8 9
    kv_positions   0 1 2 3 . . 6 7 8 9        gaps are simply left out
    queries                2       7          scattered; each sees the keys at or before its own position

Knows nothing of layers or heads. All of it is worked out on the host, once per pass, so positions belong on the CPU: a
device tensor costs a synchronisation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

BLOCK_ROWS = 1024
"""Queries per attention call: bounds the mask at 55 MB of bfloat16 for 27,000 keys."""


@dataclass(frozen=True)
class PassSequence:
    """Tokens of one request, run through the model at scattered positions.

    Args:
        token_ids: [n] int64, n >= 1.
        positions: [n] int64, strictly ascending.
        kv_slots: [m] int64, slots of the KV pool that the tokens may attend to.
        kv_positions: [m] int64, their positions, strictly ascending; a token sees those at or before its own.
        out_slots: [n] int64, where the tokens' K/V is written, in each layer before anything attends. They are among
            `kv_slots`, at the same positions. None: nothing is written.
        own: with `out_slots` None, whether the tokens also see each other's fresh K/V (and their own). Their positions
            must then not be among `kv_positions`. False: they see what the pool holds, at their own positions too.
    Raises:
        ValueError: shape or dtype differs from the above.
    """

    token_ids: Tensor
    positions: Tensor
    kv_slots: Tensor
    kv_positions: Tensor
    out_slots: Tensor | None = None
    own: bool = True

    def __post_init__(self) -> None:
        num_tokens, num_slots = self.token_ids.numel(), self.kv_slots.numel()
        if num_tokens == 0:
            raise ValueError("token_ids: expected at least one token, got none")
        fields = [("token_ids", self.token_ids, num_tokens), ("positions", self.positions, num_tokens)]
        fields += [("kv_slots", self.kv_slots, num_slots), ("kv_positions", self.kv_positions, num_slots)]
        if self.out_slots is not None:
            fields.append(("out_slots", self.out_slots, num_tokens))
        for name, tensor, length in fields:
            if tensor.shape != (length,) or tensor.dtype != torch.int64:
                raise ValueError(f"{name}: expected [{length}] int64, got {list(tensor.shape)} {tensor.dtype}")


class Block(NamedTuple):
    """Queries [start, end) of a sequence; the last of them sees its first `num_keys` keys, `masked` if some see fewer."""

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
    """[m + n] int64: brings (pool keys, own keys) into ascending order; None where they are already."""
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


def plan(sequences: Sequence[PassSequence], device: torch.device | str, *, block_rows: int = BLOCK_ROWS) -> PassLayout:
    """Lay the sequences out one behind the other.

    Raises:
        ValueError: no sequences; what `host_positions` says of one.
    """
    if not sequences:
        raise ValueError("sequences: expected at least one, got none")
    layouts, start = [], 0
    for sequence in sequences:
        end = start + sequence.token_ids.numel()
        layouts.append(_lay_out(sequence, slice(start, end), device, block_rows))
        start = end
    written = [(s, layout.rows) for s, layout in zip(sequences, layouts, strict=True) if s.out_slots is not None]
    slots = [s.out_slots.to(device) for s, _ in written if s.out_slots is not None]
    all_written = len(written) == len(sequences)
    rows = [torch.arange(rows.start, rows.stop) for _, rows in written]
    return PassLayout(
        token_ids=torch.cat([s.token_ids.to(device) for s in sequences]),
        positions=torch.cat([layout.positions for layout in layouts]),
        out_rows=None if all_written else torch.cat(rows or [torch.empty(0, dtype=torch.int64)]).to(device),
        out_slots=torch.cat(slots) if slots else torch.empty(0, dtype=torch.int64, device=device),
        sequences=tuple(layouts),
    )


def host_positions(sequence: PassSequence) -> tuple[Tensor, Tensor]:
    """`positions` and `kv_positions` of a sequence, on the CPU.

    Raises:
        ValueError: out of order; a token that could see nothing, or itself twice or not at all.
    """
    positions, kv_positions = sequence.positions.cpu(), sequence.kv_positions.cpu()
    _check_ascending("positions", positions)
    _check_ascending("kv_positions", kv_positions)
    own = sequence.own and sequence.out_slots is None
    tokens, keys = positions.numpy(), kv_positions.numpy()  # several times faster here than torch
    in_pool = torch.from_numpy(np.concatenate([[-1], keys])[np.searchsorted(keys, tokens, side="right")] == tokens)
    if own and bool(in_pool.any()):
        raise ValueError(f"position {int(positions[in_pool][0])} stands in kv_positions and would be seen twice")
    if sequence.out_slots is not None and not bool(in_pool.all()):
        raise ValueError(f"position {int(positions[~in_pool][0])} is written but stands not in kv_positions")
    if not own and (not kv_positions.numel() or int(kv_positions[0]) > int(positions[0])):
        raise ValueError(f"position {int(positions[0])} has nothing to attend to")
    return positions, kv_positions


def _lay_out(sequence: PassSequence, rows: slice, device: torch.device | str, block_rows: int) -> SequenceLayout:
    positions, kv_positions = host_positions(sequence)
    own = sequence.own and sequence.out_slots is None
    key_positions, order = kv_positions, None
    if own:
        key_positions, order = torch.cat([kv_positions, positions]).sort()
        if not kv_positions.numel() or int(kv_positions[-1]) < int(positions[0]):
            order = None
    visible = torch.searchsorted(key_positions, positions, right=True).tolist()
    blocks = [
        Block(start, end, visible[end - 1], visible[start] < visible[end - 1])
        for start, end in ((i, min(i + block_rows, len(visible))) for i in range(0, len(visible), block_rows))
    ]
    return SequenceLayout(
        rows=rows,
        positions=positions.to(device),
        kv_slots=sequence.kv_slots.to(device),
        own=own,
        key_order=None if order is None else order.to(device),
        key_positions=key_positions.to(device),
        blocks=tuple(blocks),
    )


def _check_ascending(name: str, positions: Tensor) -> None:
    if positions.numel() and (int(positions[0]) < 0 or bool((np.diff(positions.numpy()) <= 0).any())):
        raise ValueError(f"{name}: expected strictly ascending from 0 or above, got {positions.tolist()[:8]}...")
