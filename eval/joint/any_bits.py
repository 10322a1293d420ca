"""Quantized KV of other widths than the product's (sglang_chunkcache/storage/codec.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from sglang_chunkcache.storage.codec import Quantized


class AnyBits(Quantized):
    """Of 2 to 7 bits: first 4 bits of each number, then 2, then 1, as `bits` has them.

    A byte has bits of numbers that are far apart, so whole stretches of a head are shifted at once.
    """

    widths = range(2, 8)

    def _packed(self, levels: Tensor) -> Tensor:
        planes, left = [], self.bits
        for width in self._planes():
            left -= width
            intervals = ((levels >> left) & (2**width - 1)).chunk(8 // width, -1)
            plane = intervals[0].clone()
            for number, each in enumerate(intervals[1:], 1):
                plane |= each << (number * width)
            planes.append(plane)
        return torch.cat(planes, -1)

    def _unpacked(self, data: Tensor) -> Tensor:
        widths = self._planes()
        sizes = [data.shape[-1] * width // self.bits for width in widths]
        levels: Tensor | None = None
        for width, plane in zip(widths, torch.split(data, sizes, -1), strict=True):
            part = torch.cat([(plane >> at) & (2**width - 1) for at in range(0, 8, width)], -1)
            levels = part if levels is None else (levels << width) | part
        assert levels is not None
        return levels

    def _planes(self) -> list[int]:
        return [width for width in (4, 2, 1) if self.bits & width]


def quantized(bits: int) -> Quantized:
    """The product's codec, where it has this width."""
    return Quantized(bits) if bits in Quantized.widths else AnyBits(bits)
