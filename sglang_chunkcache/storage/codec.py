"""Codecs: how one chunk's KV is kept outside the pool, whole or in fewer bytes.

    keys, values ── encode ──► parts ── decode ──► keys, values
    pool's dtype               host memory,         pool's dtype, each element
                               disk, network        within a known bound

The first two parts are the keys' and the values', tokens are every part's second dimension, and
sizes follow from the parts' shapes. It knows tensors alone: no chunk, no store, no storage.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor


class Sizes(NamedTuple):
    """Of a chunk's KV in the pool's dtype."""

    num_layers: int
    num_tokens: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype


class Codec(ABC):
    """One way to keep KV. Its methods read what they are given,
    queue on the current stream and never synchronise."""

    name: str

    @abstractmethod
    def encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """The parts, contiguous, on the same device; the tensors themselves where nothing is to be
        done.

        Args:
            keys: [num_layers, num_tokens, num_kv_heads, key_dim], the pool's dtype; any device.
            values: [num_layers, num_tokens, num_kv_heads, value_dim], likewise.
        """

    @abstractmethod
    def decode(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values as `encode` got them, but for `max_error`; on the parts' device."""

    @abstractmethod
    def sizes(self, parts: Sequence[Tensor]) -> Sizes:
        """Of the KV, from the shapes and dtypes of its parts."""

    @abstractmethod
    def shapes(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of each part."""

    @abstractmethod
    def max_error(self, dtype: torch.dtype) -> float:
        """How far an element may be off, over the largest absolute one of its token and head."""

    def check_heads(self, keys: Tensor, values: Tensor) -> None:
        """Raise ValueError where heads do not fit a part;
        of a pool's buffers, [num_slots, num_kv_heads, head_dim]."""
        self.encode(keys[:0].unsqueeze(0), values[:0].unsqueeze(0))  # no tokens, all checks

    def nbytes(self, sizes: Sizes) -> int:
        """Of all parts."""
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.shapes(sizes))

    def check(self, parts: Sequence[Tensor]) -> None:
        """Whether `decode` can use them. Waits for the device that they are on.

        Raises:
            ValueError: they are not this codec's; names what was expected and got.
        """
        got = [(tuple(each.shape), each.dtype) for each in parts]
        if (
            len(parts) < 2
            or any(each.dim() != 4 for each in parts[:2])
            or self.shapes(self.sizes(parts)) != got
        ):
            raise ValueError(
                "keys and values must be [num_layers, num_tokens, num_kv_heads, head_dim], as"
                f" {self.name} keeps them, but got {', '.join(str(shape) for shape, _ in got)}"
            )


class Plain(Codec):
    """As it is, bit by bit, whatever it is."""

    name = "none"

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        return keys, values

    def decode(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        keys, values = parts
        return keys, values

    def sizes(self, parts: Sequence[Tensor]) -> Sizes:
        keys, values = parts
        layers, tokens, heads, key_dim = keys.shape
        return Sizes(layers, tokens, heads, key_dim, values.shape[-1], keys.dtype)

    def shapes(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        rows = sizes[:3]
        return [((*rows, sizes.key_dim), sizes.dtype), ((*rows, sizes.value_dim), sizes.dtype)]

    def max_error(self, dtype: torch.dtype) -> float:
        return 0.0


class Quantized(Codec):
    """Whole numbers of few bits, with a scale for each token of a head in a layer: x ~ s q, |q| <=
    m = 2^(bits - 1) - 1.

        s = max |x| / m in x's dtype        q = x / s, rounded

    Parts: keys and values as q + m, packed along a head, uint8; their scales [num_layers,
    num_tokens, num_kv_heads]. Equals tests/reference/naive_codec.py bit by bit.

    Args:
        bits: of a number, 2 to 8. A head must fill whole bytes.
    """

    def __init__(self, bits: int) -> None:
        if not 2 <= bits <= 8:
            raise ValueError(f"bits: expected 2 to 8, got {bits}")
        self.name, self.bits, self._most = f"int{bits}", bits, (1 << bits - 1) - 1

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """As `Codec` says. What is not finite gets a scale that is not, which `check` refuses.

        Raises:
            ValueError: a head fills no whole bytes.
        """
        for name, each in (("keys", keys), ("values", values)):
            if each.shape[-1] * self.bits % 8:
                raise ValueError(
                    f"{name}: expected heads of whole bytes in {self.name}, got heads of"
                    f" {each.shape[-1]}"
                )
        (key_data, key_scales), (value_data, value_scales) = map(self._encoded, (keys, values))
        return key_data, value_data, key_scales, value_scales

    def decode(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        keys, values, key_scales, value_scales = parts
        return self._decoded(keys, key_scales), self._decoded(values, value_scales)

    def sizes(self, parts: Sequence[Tensor]) -> Sizes:
        keys, values = parts[:2]
        layers, tokens, heads = keys.shape[:3]
        key_dim, value_dim = (each.shape[-1] * 8 // self.bits for each in (keys, values))
        return Sizes(layers, tokens, heads, key_dim, value_dim, parts[-1].dtype)

    def shapes(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        rows = sizes[:3]
        data = [
            ((*rows, dim * self.bits // 8), torch.uint8) for dim in (sizes.key_dim, sizes.value_dim)
        ]
        return [*data, (rows, sizes.dtype), (rows, sizes.dtype)]

    def max_error(self, dtype: torch.dtype) -> float:
        """Half a step and, as of the scale, one rounding to the dtype."""
        rounding = torch.finfo(dtype).eps / 2
        return (1 + rounding) * (1 / (2 * self._most) + rounding)

    def check(self, parts: Sequence[Tensor]) -> None:
        super().check(parts)
        # Scales alone: whatever bits the levels have, they are numbers.
        if not all(each.isfinite().all() for each in parts[2:]):
            raise ValueError(f"{self.name} keeps no KV that is not finite")

    # Private, in order of use

    def _encoded(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        data = rows.new_empty(
            (*rows.shape[:-1], rows.shape[-1] * self.bits // 8), dtype=torch.uint8
        )
        scales = rows.new_empty(rows.shape[:-1])
        for part in _parts(rows):
            data[part], scales[part] = self._quantized(rows[part])
        return data, scales

    def _quantized(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        largest = rows.abs().amax(-1)
        scales = (
            (largest.float() / self._most)
            # Rounded up, the scale of the largest numbers times `_most` would not be finite.
            .clamp(max=_largest_scale(rows.dtype, self._most))
            .to(rows.dtype)
        )
        # By the scale as it is kept, since that is what decoding multiplies by; rows of zeros by 1,
        # else 0 / 0 would be NaN, which no uint8 is.
        steps = scales.float().masked_fill(scales == 0, 1).unsqueeze(-1)
        # A subnormal scale can be far off after its rounding, and give levels beyond the last one.
        levels = (rows.float() / steps).round_().clamp_(-self._most, self._most).add_(self._most)
        return _packed(levels.to(torch.uint8), self.bits), torch.where(
            largest.isfinite(), scales, torch.nan
        )

    def _decoded(self, data: Tensor, scales: Tensor) -> Tensor:
        rows = scales.new_empty((*scales.shape, data.shape[-1] * 8 // self.bits))
        for part in _parts(data):
            levels = rows[part]  # in place: numbers up to 254 are exact in bfloat16, too
            levels.copy_(_unpacked(data[part], self.bits)).sub_(self._most).mul_(
                scales[part].unsqueeze(-1)
            )
        return rows


NONE = Plain()
CODECS: Mapping[str, Codec] = {each.name: each for each in (NONE, Quantized(8), Quantized(4))}
"""By name, as `--chunkcache-store-codec` has them."""


# Private, in order of use


def _parts(rows: Tensor) -> list[slice]:
    """All layers at once; on a CPU one after the other, so that what is between two steps stays in
    its caches."""
    if rows.device.type != "cpu":
        return [slice(None)]
    return [slice(layer, layer + 1) for layer in range(len(rows))]


def _largest_scale(dtype: torch.dtype, most: int) -> float:
    """The largest of the dtype that times `most` is finite."""
    info = torch.finfo(dtype)
    scale = torch.tensor(info.max / most, dtype=dtype)
    if float(scale) * most > info.max:  # rounded up: the next one below it
        scale = (scale.double() * (1 - info.eps)).to(dtype)
    return float(scale)


def _packed(levels: Tensor, bits: int) -> Tensor:
    """[..., dim] uint8 below 2^bits as [..., dim * bits / 8]: first 4 bits of each number, then 2,
    then 1, as `bits` has them.

    A byte has bits of numbers that are far apart, so whole stretches of a head are shifted at once.
    """
    if bits == 8:
        return levels
    planes, left = [], bits
    for width in _widths(bits):
        left -= width
        intervals = ((levels >> left) & (2**width - 1)).chunk(8 // width, -1)
        plane = intervals[0].clone()
        for number, each in enumerate(intervals[1:], 1):
            plane |= each << (number * width)
        planes.append(plane)
    return torch.cat(planes, -1)


def _unpacked(data: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return data
    widths = _widths(bits)
    levels: Tensor | None = None
    for width, plane in zip(
        widths,
        torch.split(data, [data.shape[-1] * width // bits for width in widths], -1),
        strict=True,
    ):
        part = torch.cat([(plane >> at) & (2**width - 1) for at in range(0, 8, width)], -1)
        levels = part if levels is None else (levels << width) | part
    assert levels is not None
    return levels


def _widths(bits: int) -> list[int]:
    return [width for width in (4, 2, 1) if bits & width]
