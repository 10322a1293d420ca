"""One chunk's KV in the host pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from radix_ext.pool_slots import PoolSlots
from sglang_chunkcache.storage.codec import Codec
from sglang_chunkcache.storage.entry import Entry

if TYPE_CHECKING:
    from sglang_chunkcache.scheduler.host_pool import HostPool


class HostSlots(PoolSlots):
    slots: Tensor  # [num_tokens] int64, CPU
    _owner: HostPool

    @property
    def codec(self) -> Codec:
        """As which the KV is kept."""
        return self._owner.codec

    @property
    def saved_bytes(self) -> int:
        """How many fewer these are than of the same KV in the device pool's dtype."""
        return self.num_tokens * self._owner.saved_token_bytes

    def reader(self) -> Callable[[], tuple[Tensor, ...]]:
        """Gives the KV on another thread, as all copies that are queued by now have left it."""
        return partial(self._read, self._owner.fence())

    def writer(self) -> Callable[[Entry], None]:
        """Takes KV on another thread, once all copies that are queued by now are done."""
        return partial(self._write, self._owner.fence())

    def _read(self, fence: Callable[[], None]) -> tuple[Tensor, ...]:
        fence()
        return self._owner.read(self.slots)

    def _write(self, fence: Callable[[], None], entry: Entry) -> None:
        fence()
        self._owner.write(self.slots, *entry.kv)
