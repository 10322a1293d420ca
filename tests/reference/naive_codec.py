"""Reference of storage/codec.py: one row of numbers at a time, in Python's floats,
from the formulas of its docstring."""

from __future__ import annotations

from fractions import Fraction

import torch
from torch import Tensor


def naive_encode(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """[..., dim] -> ([..., dim * bits / 8] uint8, [...] scales of the rows' dtype)."""
    encoded = [_row(row, bits) for row in rows.flatten(0, -2)]
    data = torch.tensor([packed for packed, _ in encoded], dtype=torch.uint8)
    scales = torch.tensor([scale for _, scale in encoded]).to(rows.dtype)
    return data.view(*rows.shape[:-1], -1), scales.view(rows.shape[:-1])


def naive_decode(data: Tensor, scales: Tensor, bits: int) -> Tensor:
    """The rows in the scales' dtype."""
    rows = [
        [(level - _most(bits)) * float(scale) for level in _unpack(packed.tolist(), bits)]
        for packed, scale in zip(data.flatten(0, -2), scales.flatten(), strict=True)
    ]
    return torch.tensor(rows, dtype=torch.float64).to(scales.dtype).view(*data.shape[:-1], -1)


def _most(bits: int) -> int:
    return (1 << bits - 1) - 1


def _row(row: Tensor, bits: int) -> tuple[list[int], float]:
    most, numbers = _most(bits), [float(each) for each in row]
    scale = float((torch.tensor(max(map(abs, numbers))) / most).to(row.dtype))
    levels = [0] * len(numbers)
    if scale:
        levels = [
            max(-most, min(most, round(Fraction(each) / Fraction(scale)))) for each in numbers
        ]
    return _pack([level + most for level in levels], bits), scale


def _pack(levels: list[int], bits: int) -> list[int]:
    """Of each number its highest bits first, in planes of 4, 2 and 1;
    in a byte the first stretch of the row lowest."""
    if bits == 8:
        return levels
    packed, below = [], bits
    for width in (4, 2, 1):
        if not bits & width:
            continue
        below -= width
        per_byte = 8 // width
        interval = len(levels) // per_byte
        for i in range(interval):
            parts = [levels[i + n * interval] >> below & (2**width - 1) for n in range(per_byte)]
            packed.append(sum(part << n * width for n, part in enumerate(parts)))
    return packed


def _unpack(packed: list[int], bits: int) -> list[int]:
    if bits == 8:
        return packed
    dim = len(packed) * 8 // bits
    levels, start = [0] * dim, 0
    for width in (4, 2, 1):
        if not bits & width:
            continue
        per_byte = 8 // width
        interval = dim // per_byte
        for i in range(interval):
            for n in range(per_byte):
                at = i + n * interval
                levels[at] = levels[at] << width | packed[start + i] >> n * width & (2**width - 1)
        start += interval
    return levels
