"""KV of several units in one layer as references to shared blocks, and back.

    tokens of a unit   [ block | block | block | tail ]   the tail, shorter than a block, is kept as
                                                          it is
    encoded            table: block -> shared block       scale: this block's norm over the leader's

Of each shared block the leader's norm is kept in the block itself, so a block that nothing joined,
and one that only its equals joined in bfloat16 or float16, is decoded bit by bit. All others get
the shared direction and their own norm.

Knows no slots: `decode` gives the tokens in the order in which `encode` took them, to be copied
back to where they came from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eval.joint.fast_fusion import FusedBlocks, fast_fusion


@dataclass(frozen=True, eq=False)
class JointLayer:
    """One layer's KV of several units."""

    lens: tuple[int, ...]
    """Tokens of each unit."""
    block_size: int
    """Tokens of a block."""
    table: Tensor
    """[num_blocks] int64: the shared block of each block, the units one after the other."""
    keys: Tensor
    """[num_shared, block_size, num_kv_heads, head_dim], the model's dtype."""
    values: Tensor
    """[num_shared, block_size, num_kv_heads, v_head_dim]."""
    key_scales: Tensor
    """[num_blocks] float32: what the shared block is multiplied by; 1 for a block of its own."""
    value_scales: Tensor
    tail_keys: Tensor
    """[num_tail_tokens, num_kv_heads, head_dim], the units one after the other."""
    tail_values: Tensor

    @property
    def references(self) -> Tensor:
        """[num_shared] int64: blocks that point to each shared one."""
        return torch.bincount(self.table, minlength=len(self.keys))

    @property
    def nbytes(self) -> int:
        """Of all that has to be kept; an entry of the table would take four bytes."""
        kept = (
            self.keys,
            self.values,
            self.key_scales,
            self.value_scales,
            self.tail_keys,
            self.tail_values,
        )
        return 4 * len(self.table) + sum(each.nbytes for each in kept)


def encode(
    keys: Tensor,
    values: Tensor,
    lens: Sequence[int],
    *,
    block_size: int,
    threshold: float,
    fixed: Tensor | None = None,
) -> JointLayer:
    """Fuse similar blocks of different units in one layer.

    Args:
        keys: [num_tokens, num_kv_heads, head_dim], the model's dtype, the units one after the
            other; only read. Rotated or not, but all units alike.
        values: [num_tokens, num_kv_heads, v_head_dim], likewise.
        lens: tokens of each unit.
        block_size: tokens of a block, at least 1.
        threshold: as in `fast_fusion`; from `NEVER` on all blocks stay their own.
        fixed: as in `fast_fusion`, of whole blocks. A fixed block comes back bit by bit, whatever
            joins it.
    Returns:
        New tensors, on the same device.
    Raises:
        ValueError: shapes disagree with the lens, a block size below 1, or as `fast_fusion`.
    """
    for name, each in (("keys", keys), ("values", values)):
        if each.ndim != 3 or len(each) != sum(lens):
            raise ValueError(
                f"{name}: expected [{sum(lens)}, num_kv_heads, head_dim], got {list(each.shape)}"
            )
    if block_size < 1:
        raise ValueError(f"block_size: expected 1 or more, got {block_size}")
    whole = _in_blocks(lens, block_size).to(keys.device)
    key_blocks, value_blocks = (
        each[whole].reshape(-1, block_size, *each.shape[1:]) for each in (keys, values)
    )
    flat = key_blocks.flatten(1), value_blocks.flatten(1)
    fused = fast_fusion(*flat, [length // block_size for length in lens], threshold, fixed=fixed)
    (shared_keys, key_scales), (shared_values, value_scales) = (
        _share(blocks, directions, fused, fixed)
        for blocks, directions in zip(flat, (fused.keys, fused.values), strict=True)
    )
    return JointLayer(
        tuple(lens),
        block_size,
        fused.table,
        shared_keys.view(-1, *key_blocks.shape[1:]),
        shared_values.view(-1, *value_blocks.shape[1:]),
        key_scales,
        value_scales,
        keys[~whole],
        values[~whole],
    )


def decode(layer: JointLayer) -> tuple[Tensor, Tensor]:
    """Keys and values of all tokens, in the shapes and the dtype that `encode` got. New tensors."""
    whole = _in_blocks(layer.lens, layer.block_size).to(layer.table.device)
    found = []
    for shared, scales, tail in (
        (layer.keys, layer.key_scales, layer.tail_keys),
        (layer.values, layer.value_scales, layer.tail_values),
    ):
        each, scaled = shared[layer.table], scales != 1
        factors = scales[scaled].view(-1, *[1] * (shared.ndim - 1))
        each[scaled] = (each[scaled].float() * factors).to(shared.dtype)
        tokens = tail.new_empty((len(whole), *tail.shape[1:]))
        tokens[whole], tokens[~whole] = each.flatten(0, 1), tail
        found.append(tokens)
    return found[0], found[1]


def relative_errors(layer: JointLayer, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """How far each decoded block is from the original, over the original's norm: what drift.py
    takes, measured.

    Args:
        keys: as `encode` got them.
        values: likewise.
    Returns:
        [num_blocks] float32 for keys and for values, 0 to 2 but for rounding; NaN for a block of
        zeros or one that is not finite.
    """
    whole = _in_blocks(layer.lens, layer.block_size).to(keys.device)
    errors = []
    for original, decoded in zip((keys, values), decode(layer), strict=True):
        before, after = (
            each[whole].float().reshape(-1, layer.block_size * each.shape[1:].numel())
            for each in (original, decoded)
        )
        norm = torch.linalg.vector_norm
        errors.append(norm(after - before, dim=1) / norm(before, dim=1))
    return errors[0], errors[1]


# Private, in order of use


def _in_blocks(lens: Sequence[int], block_size: int) -> Tensor:
    """[num_tokens] bool, CPU: the tokens of whole blocks."""
    lengths = torch.tensor(lens, dtype=torch.int64)
    ends = lengths.cumsum(0) - lengths % block_size
    return torch.arange(sum(lens)) < ends.repeat_interleave(lengths)


def _share(
    blocks: Tensor, directions: Tensor, fused: FusedBlocks, fixed: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The shared blocks, at their leaders' norms, and each block's scale."""
    norms = torch.linalg.vector_norm(blocks.float(), dim=1)
    kept = norms[fused.leaders]
    # a leader of zeros, whose direction is that of what joined it
    kept = kept.masked_fill(kept == 0, 1)
    is_shared = (fused.references > 1).unsqueeze(1)
    turned = is_shared if fixed is None else is_shared & ~fixed[fused.leaders].unsqueeze(1)
    shared = torch.where(
        turned, (directions * kept.unsqueeze(1)).to(blocks.dtype), blocks[fused.leaders]
    )
    scales = norms / kept[fused.table]
    # Not norm over norm for a block of its own: that is NaN where it is not finite.
    return shared, torch.where(is_shared[fused.table, 0], scales, 1.0)
