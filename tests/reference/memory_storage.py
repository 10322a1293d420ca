"""A HiCache storage of one process, for `dynamic`, that is healthy, slow, hangs or refuses as told:
`module_path` of tests/."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

from sglang.srt.mem_cache.hicache_storage import HiCacheStorage


class MemoryStorage(HiCacheStorage):  # type: ignore[misc]
    """A dict. As HiCache's backends, `set` overwrites nothing.

    `extra_config` of `config` may have `state` (healthy, slowed, hanging, refusing) and
    `ms_per_mib`, which slowed takes.
    """

    def __init__(self, config: Any = None, kwargs: Any = None) -> None:
        told = {} if config is None else config.extra_config or {}
        self.config = config
        self.held: dict[str, Any] = {}
        self.calls: list[tuple[str, str]] = []
        self.threads: set[int] = set()
        """That have called."""
        self.fails = False
        """Every call raises."""
        self.forgets = False
        """`set` reports success and keeps nothing, as HiCache's `shm` does."""
        self.seconds_per_byte = 0.0
        """What calls with bytes sleep."""
        self.sleep: Callable[[float], None] = time.sleep
        self.gate = threading.Event()
        """Calls wait until it is set."""
        self.gate.set()
        self.become(told.get("state", "healthy"), ms_per_mib=told.get("ms_per_mib", 0.0))

    def become(self, state: str, *, ms_per_mib: float = 0.0) -> None:
        """One of the four."""
        self.fails = state == "refusing"
        self.seconds_per_byte = ms_per_mib / 1000 / (1 << 20) if state == "slowed" else 0.0
        if state == "hanging":
            self.gate.clear()
        else:
            self.gate.set()

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Any:
        self._called("get", key)
        if key not in self.held:
            return None
        self._take_time(self.held[key])
        target_location.copy_(self.held[key][: len(target_location)])
        return target_location

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        self._called("set", key)
        self._take_time(value)
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

    def batch_set(
        self, keys: Any, values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        raise NotImplementedError

    def _called(self, what: str, key: str) -> None:
        self.calls.append((what, key))
        self.threads.add(threading.get_ident())
        self.gate.wait()
        if self.fails:
            raise ConnectionError("the storage was told to fail")

    def _take_time(self, data: Any) -> None:
        if self.seconds_per_byte:
            self.sleep(self.seconds_per_byte * len(data))
