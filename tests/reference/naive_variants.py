"""Reference of eval/joint/variants.py: what each block is decoded to, one block at a time, from the docstring's table."""

from __future__ import annotations

import torch
from torch import Tensor

from eval.joint.variants import EQUAL_FROM
from sglang_chunkcache.storage.codec import Codec, Quantized


def naive_roundtrip(
    keys: Tensor, values: Tensor, *, block_size: int, threshold: float, codec: Codec, bits: int
) -> tuple[Tensor, Tensor]:
    """Variants' KV as `decode_variants` gives it back."""
    leader = codec.decode(codec.encode(keys[0], values[0]))
    found = [
        torch.cat([base.unsqueeze(0), torch.zeros_like(each[1:])])
        for base, each in zip(leader, (keys, values), strict=True)
    ]
    num_variants, num_layers, num_tokens = keys.shape[:3]
    for variant in range(1, num_variants):
        for layer in range(num_layers):
            for start in range(0, num_tokens, block_size):
                at = slice(start, start + block_size)
                blocks = [each[variant, layer, at] for each in (keys, values)]
                alike = [_cosine(block, each[0, layer, at]) for block, each in zip(blocks, (keys, values), strict=True)]
                bases = [each[layer, at] for each in leader]
                if min(alike) > EQUAL_FROM:
                    decoded = bases
                elif alike[0] > threshold and bits:
                    left = [_difference(block, base) for block, base in zip(blocks, bases, strict=True)]
                    coded = _roundtrip(Quantized(bits), *left)
                    decoded = [(b.float() + c.float()).to(b.dtype) for b, c in zip(bases, coded, strict=True)]
                elif alike[0] > threshold:
                    norms = [
                        block.float().norm() / base.float().norm() for block, base in zip(blocks, bases, strict=True)
                    ]
                    decoded = [(base.float() * norm).to(base.dtype) for base, norm in zip(bases, norms, strict=True)]
                else:
                    decoded = _roundtrip(codec, *blocks)
                for out, block in zip(found, decoded, strict=True):
                    out[variant, layer, at] = block
    return found[0], found[1]


def _cosine(left: Tensor, right: Tensor) -> float:
    a, b = left.double().flatten(), right.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def _difference(block: Tensor, base: Tensor) -> Tensor:
    return (block.float() - base.float()).to(block.dtype)


def _roundtrip(codec: Codec, keys: Tensor, values: Tensor) -> list[Tensor]:
    return [each[0] for each in codec.decode(codec.encode(keys.unsqueeze(0), values.unsqueeze(0)))]
