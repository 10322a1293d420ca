"""Codecs: how one chunk's KV is kept outside the pool, whole or in fewer bytes.

    keys, values ── encode ──► parts ── decode ──► keys, values
    pool's dtype               host memory,         pool's dtype, each element
                               disk, network        within a known bound

The first two parts are the keys' and the values', tokens are every part's second dimension, and
sizes follow from the parts' shapes. It knows tensors alone: no chunk, no store, no storage.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
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


class Codec:
    """A way to keep KV: this one as it is, bit by bit, whatever it is; others override it. Methods
    read what they are given, queue on the current stream and never synchronise."""

    name = "none"

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """The parts, contiguous, on the same device; the tensors themselves where nothing is to be
        done.

        Args:
            keys: [num_layers, num_tokens, num_kv_heads, key_dim], the pool's dtype; any device.
            values: [num_layers, num_tokens, num_kv_heads, value_dim], likewise.
        """
        return keys, values

    def decode(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values as `encode` got them, but for `max_error`; on the parts' device."""
        keys, values = parts
        return keys, values

    def sizes(self, parts: Sequence[Tensor]) -> Sizes:
        """Of the KV, from the shapes and dtypes of its parts."""
        keys, values = parts
        layers, tokens, heads, key_dim = keys.shape
        return Sizes(layers, tokens, heads, key_dim, values.shape[-1], keys.dtype)

    def shapes(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        dims = sizes.key_dim, sizes.value_dim
        return [((*sizes[:3], dim), sizes.dtype) for dim in dims]

    def max_error(self, dtype: torch.dtype) -> float:
        """How far an element may be off, over the largest absolute one of its token and head."""
        return 0.0

    def check_heads(self, keys: Tensor, values: Tensor) -> None:
        """Raise ValueError where heads do not fit a part;
        of a pool's buffers, [num_slots, num_kv_heads, head_dim]."""
        self.encode(keys[:0].unsqueeze(0), values[:0].unsqueeze(0))  # no tokens, all checks

    def nbytes(self, sizes: Sizes) -> int:
        return sum(prod(shape) * dtype.itemsize for shape, dtype in self.shapes(sizes))

    def check(self, parts: Sequence[Tensor]) -> None:
        """Raise ValueError where they are not this codec's; names what was expected and got. Waits
        for the device that they are on."""
        got = [(tuple(each.shape), each.dtype) for each in parts]
        has_kv = len(parts) >= 2 and all(each.dim() == 4 for each in parts[:2])
        if not has_kv or self.shapes(self.sizes(parts)) != got:
            raise ValueError(
                "keys and values must be [num_layers, num_tokens, num_kv_heads, head_dim], as"
                f" {self.name} keeps them, but got {', '.join(str(shape) for shape, _ in got)}"
            )


class Quantized(Codec):
    """Whole numbers of few bits, with a scale for each token of a head in a layer: x ~ s q, |q| <=
    m = 2^(bits - 1) - 1.

        s = max |x| / m in x's dtype        q = x / s, rounded

    Parts: keys and values as q + m, uint8, where a byte has two numbers the first half of a head
    lowest; their scales [num_layers, num_tokens, num_kv_heads]. Equals
    tests/reference/naive_codec.py bit by bit.

    Args:
        bits: of a number, one of `widths`. A head must fill whole bytes.
    """

    widths: Collection[int] = (8, 4)

    def __init__(self, bits: int) -> None:
        if bits not in self.widths:
            raise ValueError(f"bits: expected one of {list(self.widths)}, got {bits}")
        self.name, self.bits, self._most = f"int{bits}", bits, (1 << bits - 1) - 1

    def encode(self, keys: Tensor, values: Tensor) -> tuple[Tensor, ...]:
        """As `Codec` says. What is not finite gets a scale that is not, which `check` refuses.
        Raises ValueError: a head fills no whole bytes."""
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
        key_dim, value_dim = (each.shape[-1] * 8 // self.bits for each in parts[:2])
        layers, tokens, heads = parts[0].shape[:3]
        return Sizes(layers, tokens, heads, key_dim, value_dim, parts[-1].dtype)

    def shapes(self, sizes: Sizes) -> list[tuple[tuple[int, ...], torch.dtype]]:
        rows, dims = sizes[:3], (sizes.key_dim, sizes.value_dim)
        data = [((*rows, dim * self.bits // 8), torch.uint8) for dim in dims]
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
        *shape, dim = rows.shape
        data = rows.new_empty((*shape, dim * self.bits // 8), dtype=torch.uint8)
        scales = rows.new_empty(shape)
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
        scales = scales.masked_fill(~largest.isfinite(), torch.nan)
        return self._packed(levels.to(torch.uint8)), scales

    def _decoded(self, data: Tensor, scales: Tensor) -> Tensor:
        rows = scales.new_empty((*scales.shape, data.shape[-1] * 8 // self.bits))
        for part in _parts(data):
            levels = rows[part]  # in place: numbers up to 254 are exact in bfloat16, too
            levels.copy_(self._unpacked(data[part])).sub_(self._most)
            levels.mul_(scales[part].unsqueeze(-1))
        return rows

    def _packed(self, levels: Tensor) -> Tensor:
        """[..., dim] uint8 below 2^bits as [..., dim * bits / 8]."""
        if self.bits == 8:
            return levels
        low, high = levels.chunk(2, -1)  # so whole stretches of a head are shifted at once
        return low | high << 4

    def _unpacked(self, data: Tensor) -> Tensor:
        return data if self.bits == 8 else torch.cat([data & 15, data >> 4], -1)


NONE = Codec()
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
