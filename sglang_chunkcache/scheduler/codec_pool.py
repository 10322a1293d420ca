"""A host pool in which a codec keeps the KV, in fewer bytes. Exact chains are in none.

    device pool ── encode ──► rows on the device ── HostPool ──► rows in host memory
                ◄── decode ──                    ◄────────────

A row is one head's numbers with their scale behind them, as bytes. SGLang's pools and copies take
it for a head of KV.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor

from sglang_chunkcache.attention.slot_map import rows_of
from sglang_chunkcache.scheduler.host_pool import HostPool
from sglang_chunkcache.storage.codec import NONE, Quantized, Sizes

ROW_SLOTS = 512
"""Of rows on the device, on their way from or to the host: 35 MB of a Llama-3-8B in int8."""
ALIGNMENT = 8
"""SGLang's kernels copy as many bytes of a token and layer, or a multiple."""


class CodecPool(HostPool):
    """As `HostPool`. `read` and `write` have the codec's parts.

    Args:
        codec: `check_heads` has taken the device pool's.
    """

    codec: Quantized

    def __init__(
        self, device_pool: Any, num_bytes: int, *, codec: Quantized, is_layered: bool = True
    ) -> None:
        self._kv_pool, self.codec = device_pool, codec
        _, heads, dim = device_pool.k_buffer[0].shape
        self._dtype: torch.dtype = device_pool.dtype
        self._data_bytes = dim * codec.bits // 8
        self._row_bytes = self._data_bytes + self._dtype.itemsize
        width = self._row_bytes
        while heads * width % ALIGNMENT:
            width += 1
        layers, device = device_pool.layer_num, device_pool.device
        rows = MHATokenToKVPool(ROW_SLOTS, 1, torch.uint8, heads, width, layers, device, False)
        super().__init__(rows, num_bytes, is_layered=is_layered, loads_into=device_pool)
        plain = NONE.nbytes(Sizes(layers, 1, heads, dim, dim, self._dtype))
        self.saved_token_bytes = plain - self.token_bytes
        self._row_sides = rows.k_buffer, rows.v_buffer
        self._rows = torch.arange(1, ROW_SLOTS + 1, device=device)
        """Slot 0 is SGLang's for padding."""

    def save(self, device_slots: Tensor, slots: Tensor) -> list[Tensor]:
        are_kept = []
        for rows, of_device, of_host in self._pieces(rows_of(self._kv_pool)(device_slots), slots):
            sides = self._kv_pool.k_buffer, self._kv_pool.v_buffer
            keys, values = (torch.stack([layer[of_device] for layer in side]) for side in sides)
            parts = self.codec.encode(keys, values)
            are_kept += [each.isfinite().all() for each in parts[2:]]
            for side, encoded in zip(self._row_sides, self._as_rows(parts), strict=True):
                for layer, row in zip(side, encoded, strict=True):
                    layer[1 : len(rows) + 1] = row
            super().save(rows, of_host)
        return are_kept

    def copy(self, slots: Tensor, rows: Tensor, layers: range) -> None:
        for encoded_rows, of_device, of_host in self._pieces(rows, slots):
            super().copy(of_host, encoded_rows, layers)
            for layer in layers:
                encoded = (side[layer][None, 1 : len(encoded_rows) + 1] for side in self._row_sides)
                keys, values = self.codec.decode(self._parts(*encoded))
                self._kv_pool.k_buffer[layer][of_device] = keys[0]
                self._kv_pool.v_buffer[layer][of_device] = values[0]

    def read(self, slots: Tensor) -> tuple[Tensor, ...]:
        return tuple(each.contiguous() for each in self._parts(*super().read(slots)))

    def write(self, slots: Tensor, *parts: Tensor) -> None:
        super().write(slots, *self._as_rows(parts))

    # Private, in order of use

    def _pieces(
        self, of_kv_pool: Tensor, slots: Tensor
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """As many at a time as there are rows."""
        for start in range(0, len(slots), ROW_SLOTS):
            of_host = slots[start : start + ROW_SLOTS]
            of_device = of_kv_pool[start : start + ROW_SLOTS]
            yield self._rows[: len(of_host)], of_device, of_host

    def _as_rows(self, parts: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        """Keys and values, [num_layers, num_tokens, num_kv_heads, width] uint8."""
        return self._row_of(parts[0], parts[2]), self._row_of(parts[1], parts[3])

    def _row_of(self, data: Tensor, scales: Tensor) -> Tensor:
        rows = data.new_empty((*data.shape[:-1], self._device_pool.head_dim))
        rows[..., : self._data_bytes] = data
        rows[..., self._data_bytes : self._row_bytes] = scales.unsqueeze(-1).view(torch.uint8)
        return rows

    def _parts(self, keys: Tensor, values: Tensor) -> list[Tensor]:
        """The codec's, of such rows."""
        data = (side[..., : self._data_bytes] for side in (keys, values))
        scales = (side[..., self._data_bytes : self._row_bytes] for side in (keys, values))
        return [*data, *(each.contiguous().view(self._dtype).squeeze(-1) for each in scales)]
