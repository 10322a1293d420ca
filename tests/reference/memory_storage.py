"""A HiCache storage of one process, for `dynamic`, that fails as it is told: `module_path` of tests/."""

from __future__ import annotations

import threading
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage


class MemoryStorage(HiCacheStorage):  # type: ignore[misc]
    """A dict. As HiCache's backends, `set` overwrites nothing."""

    def __init__(self, config: Any = None, kwargs: Any = None) -> None:
        self.config = config
        self.held: dict[str, Any] = {}
        self.calls: list[tuple[str, str]] = []
        self.fails = False
        """Every call raises."""
        self.forgets = False
        """`set` reports success and keeps nothing, as HiCache's `shm` does."""
        self.gate = threading.Event()
        """Calls wait until it is set."""
        self.gate.set()

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        self._called("get", key)
        if key not in self.held:
            return None
        target_location.copy_(self.held[key][: len(target_location)])
        return target_location

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        self._called("set", key)
        if not self.forgets:
            self.held.setdefault(key, value.clone())
        return True

    def exists(self, key: str) -> bool:
        return key in self.held

    def delete(self, key: str) -> None:
        self._called("delete", key)
        self.held.pop(key, None)

    def batch_get(self, keys: Any, target_locations: Any = None, target_sizes: Any = None) -> Any:
        raise NotImplementedError

    def batch_set(self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None) -> bool:
        raise NotImplementedError

    def _called(self, what: str, key: str) -> None:
        self.calls.append((what, key))
        self.gate.wait(30)
        if self.fails:
            raise ConnectionError("the storage was told to fail")
