"""KV in the host pool, and who still needs it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NoReturn, Protocol

from torch import Tensor

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


class SlotBook:
    """All slots that a pool has given out, and how many of them are held."""

    def __init__(self) -> None:
        self.out = set[HostSlots]()
        self.num_held = 0


class HostSlots:
    """One chunk's KV in the host pool. The pool gets the slots back once the KV is not wanted any
    more and nobody reads or writes it.

    Args:
        slots: [num_tokens] int64, CPU.
        book: has them from now on, until the pool has them back.
    """

    codec, saved_bytes = NONE, 0

    def __init__(self, pool: Slots, slots: Tensor, book: SlotBook) -> None:
        self.slots, self._book = slots, book
        self._pool, self._num_holds, self._is_given_back = pool, 0, False
        book.out.add(self)

    @property
    def num_tokens(self) -> int:
        return len(self.slots)

    @property
    def nbytes(self) -> int:
        """Host memory of these slots."""
        return len(self.slots) * self._pool.token_bytes

    @property
    def is_held(self) -> bool:
        """Whether somebody reads or writes them."""
        return self._num_holds > 0

    @property
    def is_given_back(self) -> bool:
        """Whether the pool gets them once nobody holds them."""
        return self._is_given_back

    def hold(self) -> None:
        """Somebody reads or writes the slots until `let_go`."""
        if not self._num_holds:
            self._book.num_held += len(self.slots)
        self._num_holds += 1

    def let_go(self) -> None:
        self._num_holds -= 1
        if not self._num_holds:
            self._book.num_held -= len(self.slots)
            self._free_unneeded()

    def give_back(self) -> None:
        """Nobody finds the KV any more. No effect the second time."""
        if not self._is_given_back:
            self._is_given_back = True
            self._free_unneeded()

    def reader(self) -> Callable[[], tuple[Tensor, Tensor]]:
        """Gives the KV on another thread, as all copies that are queued by now have left it."""
        return partial(_read, self._pool, self.slots, self._pool.fence())

    def writer(self) -> Callable[[Entry], None]:
        """Takes KV on another thread, once all copies that are queued by now are done."""
        return partial(_write, self._pool, self.slots, self._pool.fence())

    def _free_unneeded(self) -> None:
        if self._is_given_back and not self._num_holds:
            self._pool.free(self.slots)
            self._book.out.remove(self)


def _read(pool: Slots, slots: Tensor, fence: Callable[[], None]) -> tuple[Tensor, Tensor]:
    fence()
    return pool.read(slots)


def _write(pool: Slots, slots: Tensor, fence: Callable[[], None], entry: Entry) -> None:
    fence()
    keys, values = entry.kv
    pool.write(slots, keys, values)
