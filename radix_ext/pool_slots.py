"""Slots of a pool in host memory, and who still needs what they hold. What a slot is, only the pool
knows: a token's KV on a server, in a replay nothing."""

from __future__ import annotations

from collections.abc import Sized
from typing import Any, Protocol


class Pool(Protocol):
    """Slots, one a token."""

    num_slots: int
    token_bytes: int

    @property
    def num_free(self) -> int: ...
    def alloc(self, num_tokens: int) -> Any: ...
    def free(self, slots: Any) -> None: ...


class SlotBook:
    """All slots that a pool has given out, and how many of them are held."""

    def __init__(self) -> None:
        self.out = set[PoolSlots]()
        self.num_held = 0


class PoolSlots:
    """One chunk's KV in the pool, which gets the slots back once the KV is not wanted any more and
    nobody reads or writes it. `book` has them until then."""

    def __init__(self, pool: Pool, slots: Sized, book: SlotBook) -> None:
        self.slots, self.num_tokens = slots, len(slots)
        self.is_given_back = False  # whether the pool gets them once nobody holds them
        self._owner, self._book, self._num_holds = pool, book, 0
        book.out.add(self)

    @property
    def nbytes(self) -> int:
        """Host memory of these slots."""
        return self.num_tokens * self._owner.token_bytes

    @property
    def is_held(self) -> bool:
        return self._num_holds > 0

    def hold(self) -> None:
        """Somebody reads or writes the slots until `let_go`."""
        if not self._num_holds:
            self._book.num_held += self.num_tokens
        self._num_holds += 1

    def let_go(self) -> None:
        self._num_holds -= 1
        if not self._num_holds:
            self._book.num_held -= self.num_tokens
            self._free_unneeded()

    def give_back(self) -> None:
        """Nobody finds the KV any more. No effect the second time."""
        if not self.is_given_back:
            self.is_given_back = True
            self._free_unneeded()

    def _free_unneeded(self) -> None:
        if self.is_given_back and not self._num_holds:
            self._owner.free(self.slots)
            self._book.out.remove(self)
