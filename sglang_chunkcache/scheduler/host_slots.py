"""KV in the host pool."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NoReturn, Protocol

from torch import Tensor

from radix_ext.pool_slots import PoolSlots, SlotBook
from sglang_chunkcache.scheduler.layer_loads import Clock
from sglang_chunkcache.storage.codec import NONE
from sglang_chunkcache.storage.entry import Entry


class Slots(Protocol):
    """What `HostPool` does."""

    num_slots: int
    num_layers: int
    token_bytes: int
    is_layered: bool

    @property
    def num_free(self) -> int: ...
    def follow(self) -> None: ...
    def alloc(self, num_tokens: int) -> Tensor | None: ...
    def free(self, slots: Tensor) -> None: ...
    def fence(self) -> Callable[[], None]: ...
    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]: ...
    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None: ...
    def save(self, device_slots: Tensor, slots: Tensor) -> None: ...
    def prepare(self, slots: Tensor) -> Tensor: ...
    def load(
        self, slots: Tensor, device_slots: Tensor, *, num_ahead: int, clock: Clock
    ) -> None: ...
    def copy(self, slots: Tensor, device_slots: Tensor, layers: range) -> None: ...
    def finish(self) -> bool: ...
    def close(self) -> None: ...


def _never(*args: object, **kwargs: object) -> NoReturn:
    raise AssertionError("no slot was given out")


class NoSlots(Slots):
    """No host memory: nothing fits, so that nothing is ever copied."""

    num_slots = num_layers = num_free = 0
    token_bytes, is_layered = 1, False

    def alloc(self, num_tokens: int) -> None:
        return None

    def finish(self) -> bool:
        return False

    def follow(self) -> None:
        return None

    close = follow
    fence = read = write = free = save = prepare = load = copy = _never


class HostSlots(PoolSlots):
    """One chunk's KV in the host pool.

    Args:
        slots: [num_tokens] int64, CPU.
    """

    codec, saved_bytes = NONE, 0
    slots: Tensor

    def __init__(self, pool: Slots, slots: Tensor, book: SlotBook) -> None:
        super().__init__(pool, slots, book)
        self._pool = pool

    def reader(self) -> Callable[[], tuple[Tensor, Tensor]]:
        """Gives the KV on another thread, as all copies that are queued by now have left it."""
        return partial(_read, self._pool, self.slots, self._pool.fence())

    def writer(self) -> Callable[[Entry], None]:
        """Takes KV on another thread, once all copies that are queued by now are done."""
        return partial(_write, self._pool, self.slots, self._pool.fence())


def _read(pool: Slots, slots: Tensor, fence: Callable[[], None]) -> tuple[Tensor, Tensor]:
    fence()
    return pool.read(slots)


def _write(pool: Slots, slots: Tensor, fence: Callable[[], None], entry: Entry) -> None:
    fence()
    keys, values = entry.kv
    pool.write(slots, keys, values)
