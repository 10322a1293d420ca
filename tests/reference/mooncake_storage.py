"""Mooncake's store as a HiCache storage, for `dynamic`:
values by name over TCP, without HiCache's pages."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

BUFFER_BYTES = 64 << 20
"""Of values on their way."""


class MooncakeStorage(HiCacheStorage):  # type: ignore[misc]
    """`extra_config` has `master`, its address, and `segment_mib`,
    the memory that this server gives to the store."""

    def __init__(self, config: Any, kwargs: Any = None) -> None:
        from mooncake.store import MooncakeDistributedStore

        self._store = MooncakeDistributedStore()
        told = config.extra_config
        segment = int(told["segment_mib"]) << 20
        failed = self._store.setup(
            "127.0.0.1", "P2PHANDSHAKE", segment, BUFFER_BYTES, "tcp", "", told["master"]
        )
        if failed:
            raise ConnectionError(f"mooncake: {failed}")

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        found = self._store.get(key)  # b"": not there
        return torch.frombuffer(bytearray(found), dtype=torch.uint8) if found else None

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return bool(self._store.put(key, value.numpy().tobytes()) == 0)

    def exists(self, key: str) -> bool:
        return bool(self._store.is_exist(key) == 1)

    def delete(self, key: str) -> None:
        """What was read a few seconds ago is leased, and stays until the store needs room."""
        self._store.remove(key)

    def close(self) -> None:
        self._store.close()

    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any:
        raise NotImplementedError

    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise NotImplementedError
