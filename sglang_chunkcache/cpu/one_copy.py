"""KV pool, allocator and attention with virtual slots (attention/slot_map.py), for a machine
without a GPU.

SGLang's allocator hands out virtual slots. What it writes goes through the map, and what attention
reads by the pool's getters, `buffer[slots]`, is resolved there, too: SGLang's attention and our
passes are unchanged. `k_buffer` and `v_buffer` have rows: who writes or copies these asks
`slot_map.rows_of` which.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MHATokenToKVPool, unwrap_write_loc
from torch import Tensor

from sglang_chunkcache import config
from sglang_chunkcache.attention.slot_map import MappedPool, MappedSide, SlotMap
from sglang_chunkcache.cpu.attention import UnpaddedAttention


class OneCopyPool(MHATokenToKVPool, MappedPool):  # type: ignore[misc]
    """SGLang's, of `size` rows."""

    def __init__(self, size: int, *args: Any, **settings: Any) -> None:
        super().__init__(size, *args, **settings)
        known = config.from_env() or config.ChunkCacheConfig()
        self.slot_map = SlotMap(size, known.virtual_slots * size)

    def set_kv_buffer(
        self, layer: Any, loc_info: Any, cache_k: Tensor, cache_v: Tensor, *scales: Any, **how: Any
    ) -> None:
        """Written slots have rows of their own."""
        slots, *_ = unwrap_write_loc(loc_info)
        rows = KVWriteLoc(self.slot_map.rows(slots))
        super().set_kv_buffer(layer, rows, cache_k, cache_v, *scales, **how)

    def get_key_buffer(self, layer_id: int) -> Any:
        """Indexed by [n] virtual slots."""
        return MappedSide(self.slot_map, super().get_key_buffer(layer_id), are_keys=True)

    def get_value_buffer(self, layer_id: int) -> Any:
        """Likewise."""
        return MappedSide(self.slot_map, super().get_value_buffer(layer_id), are_keys=False)


class OneCopyAttention(UnpaddedAttention):
    """Decodes without turning keys. Sequences whose keys stand where they were computed get the
    bits of the base."""

    def _run_sdpa_forward_decode(
        self,
        query: Tensor,
        output: Tensor,
        k_cache: Any,
        v_cache: Any,
        req_to_token: Tensor,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        encoder_lens: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        sides, plain = (k_cache.buffer, v_cache.buffer), list[int]()
        rows_and_lens = zip(req_pool_indices.tolist(), seq_lens.tolist(), strict=True)
        for index, (row, seq_len) in enumerate(rows_and_lens):
            groups = k_cache.groups(req_to_token[row, :seq_len])
            if groups is None:
                plain.append(index)
            else:
                output[index] = groups.attend(query[index], *sides, options["scaling"])
        if plain:
            places = req_to_token, req_pool_indices[plain], seq_lens[plain]
            output[plain] = super()._run_sdpa_forward_decode(
                query[plain], output[plain], k_cache, v_cache, *places, encoder_lens, **options
            )
        return output


class VirtualAllocator(TokenToKVPoolAllocator):  # type: ignore[misc]
    """Hands out virtual slots, each with a row of its own. `size` counts rows."""

    def clear(self) -> None:
        super().clear()
        self.slot_map: SlotMap = self._kvcache.slot_map
        self.slot_map.clear()
        self.free_pages = torch.arange(1, self.slot_map.num_slots + 1, device=self.device)

    def available_size(self) -> int:
        """Of what runs out first."""
        return min(self.num_free_slots, self.slot_map.num_free)

    @property
    def num_free_slots(self) -> int:
        return int(super().available_size())

    def alloc(self, need_size: int) -> Tensor | None:
        slots = self.take(need_size) if need_size <= self.available_size() else None
        if slots is not None:
            self.slot_map.assign(slots)
        return slots

    def take(self, num_slots: int) -> Tensor | None:
        """Slots that mean no row yet. None: so many are not free."""
        slots: Tensor | None = super().alloc(num_slots)
        return slots

    def free(self, free_index: Tensor) -> None:
        num_before = self.num_free_slots
        super().free(free_index)
        if self.num_free_slots > num_before:  # else they wait for the end of a group
            self.slot_map.unmap(free_index.to(torch.int64))
