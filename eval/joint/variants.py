"""The variants of one chunk as one of them, the leader, and what the others do not have in common with it.

    variant 0      the leader, by a codec
    variant i      block j against the leader's block j, which has the same tokens:
                     EQUAL   the leader's block, nothing else
                     LIKE    the leader's block and a residual of few bits; with none, its norms
                     OWN     a block of its own, by the leader's codec

Un-rotated. Unlike the tree of fast_fusion.py it compares a block with one other block, so it is linear in the variants, and the
last block of a chunk may be shorter. A leader stays as long as a variant that refers to it. It shows what thresholds and bits
do; a server has storage/codec.py's `Difference`, whose sizes do not depend on what is similar.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sglang_chunkcache.joint_encoding.fast_fusion import normalize
from sglang_chunkcache.storage.codec import Codec, Quantized

OWN, LIKE, EQUAL = range(3)
EQUAL_FROM = 0.99999
"""Similarity of keys and of values from which on a residual says nothing: .0045 of the norm, less than int8 errs by. Layer 0
of variants differs by the rounding of un-rotated keys alone."""


@dataclass(frozen=True, eq=False)
class JointVariants:
    """KV of several variants of one chunk."""

    block_size: int
    """Tokens of a block."""
    codec: Codec
    """Of the leader and of blocks of one's own."""
    bits: int
    """Of a residual's numbers; 0: none."""
    leader: tuple[Tensor, ...]
    kinds: Tensor
    """[num_variants - 1, num_layers, num_blocks] uint8."""
    own: tuple[Tensor, ...]
    """By the codec, [1, num_own_tokens, ...] in the order of `kinds`."""
    residuals: tuple[Tensor, ...]
    """Likewise of the blocks that are LIKE the leader's, by `Quantized(bits)`; empty without bits."""
    norms: Tensor
    """[2, num_like_blocks] float32, without bits: of keys and values, over the leader's. Else [2, 0]."""

    @property
    def nbytes(self) -> int:
        """Of all that has to be kept."""
        kept = (*self.leader, self.kinds, *self.own, *self.residuals, self.norms)
        return sum(each.nbytes for each in kept)


def encode_variants(
    keys: Tensor, values: Tensor, *, block_size: int, threshold: float, codec: Codec, bits: int
) -> JointVariants:
    """Encode variants of one chunk, the first as the leader.

    Args:
        keys: [num_variants, num_layers, num_tokens, num_kv_heads, head_dim], un-rotated, the model's dtype; only read.
        values: [num_variants, num_layers, num_tokens, num_kv_heads, v_head_dim], likewise.
        block_size: tokens of a block, at least 1.
        threshold: a block whose keys are more similar (cosine) to the leader's is not kept whole.
        codec: of the leader and of blocks of one's own.
        bits: of a residual's numbers, 2 to 8; 0: none.
    """
    leader = codec.encode(keys[0], values[0])
    units = [normalize(_blocks(each, block_size)) for each in (keys, values)]
    likeness = [(each[1:] * each[0]).sum(-1) for each in units]
    kinds = torch.where(likeness[0] > threshold, LIKE, OWN).to(torch.uint8)
    kinds[torch.minimum(*likeness) > EQUAL_FROM] = EQUAL
    own, like = (_tokens(kinds == kind, block_size, keys.shape[2]) for kind in (OWN, LIKE))
    of_own = codec.encode(*(each[1:][own].unsqueeze(0) for each in (keys, values)))
    residuals: tuple[Tensor, ...] = ()
    norms = keys.new_zeros((2, 0), dtype=torch.float32)
    pairs = list(zip((keys[1:], values[1:]), codec.decode(leader), strict=True))
    if bits:
        left = [(each[like].float() - base.expand_as(each)[like].float()).to(each.dtype) for each, base in pairs]
        residuals = Quantized(bits).encode(*(each.unsqueeze(0) for each in left))
    else:
        ratios = [_norms(each, block_size) / _norms(base, block_size).clamp_min(1e-30) for each, base in pairs]
        norms = torch.stack(ratios)[:, kinds == LIKE]
    return JointVariants(block_size, codec, bits, leader, kinds, of_own, residuals, norms)


def decode_variants(joint: JointVariants) -> tuple[Tensor, Tensor]:
    """Keys and values of all variants, in the shapes and the dtype that `encode_variants` got. New tensors."""
    leader = joint.codec.decode(joint.leader)
    own, like = (_tokens(joint.kinds == kind, joint.block_size, leader[0].shape[1]) for kind in (OWN, LIKE))
    own_rows = joint.codec.decode(joint.own)
    residuals = Quantized(joint.bits).decode(joint.residuals) if joint.bits else ()
    found = []
    for side, base in enumerate(leader):
        each = base.expand(1 + len(joint.kinds), *base.shape).clone()
        others = each[1:]
        if residuals:
            others[like] = (others[like].float() + residuals[side][0].float()).to(base.dtype)
        else:
            scales = torch.ones(joint.kinds.shape, device=base.device)
            scales[joint.kinds == LIKE] = joint.norms[side]
            scales = scales.repeat_interleave(joint.block_size, -1)[..., : base.shape[1], None, None]
            others.copy_((others.float() * scales).to(base.dtype))
        others[own] = own_rows[side][0]
        found.append(each)
    return found[0], found[1]


# Private, in order of use


def _blocks(tensor: Tensor, block_size: int) -> Tensor:
    """[.., num_tokens, num_kv_heads, head_dim] as [.., num_blocks, size], the last one filled up with zeros."""
    missing = -tensor.shape[-3] % block_size
    padded = torch.nn.functional.pad(tensor, (0, 0, 0, 0, 0, missing))
    return padded.reshape(*tensor.shape[:-3], -1, block_size * tensor.shape[-2:].numel())


def _tokens(is_taken: Tensor, block_size: int, num_tokens: int) -> Tensor:
    """[.., num_tokens] bool: the tokens of blocks that are."""
    return is_taken.repeat_interleave(block_size, -1)[..., :num_tokens]


def _norms(tensor: Tensor, block_size: int) -> Tensor:
    norms: Tensor = torch.linalg.vector_norm(_blocks(tensor, block_size).float(), dim=-1)
    return norms
