"""Slots that more than one tree node holds: how many hold each, how many of those are locked. Counts only: no tensor, no tree.

    group    the slots of one chunk as it was computed, known by offset: 0 1 2 3 4 5
    source   holds 0 1 2 3 4 5        owners   3 2 2 3 2 3
    fused    holds 0 1 . 3 4 5        tokens 2 of the one and 1, 4 of the other are critical: slots of their own
    fused    holds 0 . 2 3 . 5

SGLang counts each node's tokens as evictable or protected by that node's lock, so it counts a slot once a holder. A slot is
protected if any of its holders is locked, and counts once: the surplus here is what SGLang counts too many.

Invariants:
- 0 <= locks <= owners for each slot.
- The surpluses are never negative.
- A slot without owners is free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


class Group:
    """The slots of one chunk, by offset from its first token."""

    def __init__(self, num_tokens: int) -> None:
        self.owners: NDArray[np.int64] = np.zeros(num_tokens, dtype=np.int64)
        """[num_tokens]: nodes that hold the slot."""
        self.locks: NDArray[np.int64] = np.zeros(num_tokens, dtype=np.int64)
        """[num_tokens]: locked nodes that hold the slot."""

    @property
    def surplus_protected(self) -> int:
        """Locked holders beyond a slot's first."""
        return int(self.locks.sum() - (self.locks > 0).sum())

    @property
    def surplus_evictable(self) -> int:
        """Unlocked holders of a slot that is protected, or beyond its first."""
        return int((self.owners - self.locks).sum() - ((self.owners > 0) & (self.locks == 0)).sum())


@dataclass(eq=False)
class Holding:
    """What one node holds of a group; the node's other slots are its own."""

    group: Group
    offsets: NDArray[np.bool_]
    """[num_tokens]"""
    is_locked: bool


class SharedSlots:
    """All groups of one tree. Nodes are known by their holdings."""

    def __init__(self) -> None:
        self.clear()

    def open(self, num_tokens: int, *, is_locked: bool) -> Holding:
        """A new group, and the holding of the node that has computed it."""
        return self._enter(Group(num_tokens), np.ones(num_tokens, dtype=np.bool_), is_locked)

    def join(self, other: Holding) -> Holding:
        """Another, unlocked node that holds what `other` holds."""
        return self._enter(other.group, other.offsets.copy(), False)

    def set_locked(self, holding: Holding, is_locked: bool) -> None:
        """The holding's node is locked now, or is no more. No effect where it is as it was."""
        if holding.is_locked == is_locked:
            return
        holding.is_locked = is_locked
        self._change(holding.group, holding.offsets, 0, 1 if is_locked else -1)

    def give_up(self, holding: Holding, offsets: NDArray[np.int64]) -> None:
        """The node has slots of its own at `offsets` now, which are among those it holds.

        Raises:
            ValueError: an offset that it does not hold, or that no other node holds: the slot would be lost.
        """
        given = np.zeros_like(holding.offsets)
        given[offsets] = True
        if (given & ~holding.offsets).any():
            raise ValueError(f"offsets {np.flatnonzero(given & ~holding.offsets)[:8]} are not held")
        if (holding.group.owners[given] == 1).any():
            raise ValueError(f"offsets {np.flatnonzero(given & (holding.group.owners == 1))[:8]} have no other holder")
        holding.offsets &= ~given
        self._change(holding.group, given, -1, -int(holding.is_locked))

    def sole(self, holding: Holding) -> NDArray[np.bool_]:
        """[num_tokens]: the node's tokens whose slots no other node holds. They are free once it leaves."""
        is_sole: NDArray[np.bool_] = ~holding.offsets | (holding.group.owners == 1)
        return is_sole

    @staticmethod
    def is_locked_elsewhere(holding: Holding) -> bool:
        """Whether each slot of an unlocked node stays protected without it."""
        return bool(holding.offsets.all() and (holding.group.locks > 0).all())

    def leave(self, holding: Holding) -> None:
        """The node leaves the tree, or holds nothing of the group any more."""
        self._change(holding.group, holding.offsets, -1, -int(holding.is_locked))
        holding.offsets = np.zeros_like(holding.offsets)
        self.num_holdings -= 1

    def clear(self) -> None:
        """Forget all, as the tree does."""
        self.num_holdings = 0
        self.surplus_evictable = self.surplus_protected = 0

    @property
    def num_shared(self) -> int:
        """Slots saved: what all nodes hold, less the slots there are."""
        return self.surplus_evictable + self.surplus_protected

    def _enter(self, group: Group, offsets: NDArray[np.bool_], is_locked: bool) -> Holding:
        self.num_holdings += 1
        self._change(group, offsets, 1, int(is_locked))
        return Holding(group, offsets, is_locked)

    def _change(self, group: Group, offsets: NDArray[np.bool_], owners: int, locks: int) -> None:
        self.surplus_evictable -= group.surplus_evictable
        self.surplus_protected -= group.surplus_protected
        group.owners[offsets] += owners
        group.locks[offsets] += locks
        self.surplus_evictable += group.surplus_evictable
        self.surplus_protected += group.surplus_protected


def violations(held: Sequence[tuple[Holding, bool, Sequence[int]]]) -> list[str]:
    """What is wrong with the books, given for each node of the tree that holds: its holding, its lock and its slots."""
    groups: dict[Group, list[tuple[Holding, bool, Sequence[int]]]] = {}
    for entry in held:
        groups.setdefault(entry[0].group, []).append(entry)
    found = []
    owner_of: dict[int, tuple[Group, int]] = {}
    for group, members in groups.items():
        owners, locks = np.zeros_like(group.owners), np.zeros_like(group.locks)
        for holding, is_locked, slots in members:
            owners[holding.offsets] += 1
            locks[holding.offsets] += is_locked
            for offset in np.flatnonzero(holding.offsets).tolist():
                if owner_of.setdefault(slots[offset], (group, offset)) != (group, offset):
                    found.append(f"slot {slots[offset]} is at two places of shared chunks")
        if not np.array_equal(owners, group.owners) or not np.array_equal(locks, group.locks):
            found.append(
                f"owners {owners.tolist()}, locks {locks.tolist()} but booked {group.owners.tolist()}, {group.locks.tolist()}"
            )
        if len({slot for slot, place in owner_of.items() if place[0] is group}) != int((owners > 0).sum()):
            found.append("one offset of a shared chunk has two slots")
    return found
