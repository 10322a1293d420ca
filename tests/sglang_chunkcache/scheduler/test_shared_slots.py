"""`SharedSlots` against sets of (node, slot), through random lives of nodes, and what it refuses."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sglang_chunkcache.scheduler.shared_slots import Holding, SharedSlots, violations
from tests.examples import examples


@dataclass
class Node:
    """A node as the naive model knows it."""

    holding: Holding
    slots: list[int]
    """Slot by offset; those it shares are the group's."""
    shares: set[int]
    """Offsets."""
    is_locked: bool


class SharedSlotsMachine(RuleBasedStateMachine):
    """Books and model do the same."""

    def __init__(self) -> None:
        super().__init__()
        self.books = SharedSlots()
        self.nodes: list[Node] = []
        self.next_slot = 0

    def new_slots(self, num: int) -> list[int]:
        self.next_slot += num
        return list(range(self.next_slot - num, self.next_slot))

    @rule(num_tokens=st.integers(1, 5), is_locked=st.booleans())
    def open(self, num_tokens: int, is_locked: bool) -> None:
        holding = self.books.open(num_tokens, is_locked=is_locked)
        self.nodes.append(Node(holding, self.new_slots(num_tokens), set(range(num_tokens)), is_locked))

    @precondition(lambda self: self.nodes)
    @rule(which=st.integers(0, 9))
    def join(self, which: int) -> None:
        other = self.nodes[which % len(self.nodes)]
        slots = [slot if offset in other.shares else self.new_slots(1)[0] for offset, slot in enumerate(other.slots)]
        self.nodes.append(Node(self.books.join(other.holding), slots, set(other.shares), False))

    @precondition(lambda self: self.nodes)
    @rule(which=st.integers(0, 9), is_locked=st.booleans())
    def lock(self, which: int, is_locked: bool) -> None:
        node = self.nodes[which % len(self.nodes)]
        self.books.set_locked(node.holding, is_locked)
        node.is_locked = is_locked

    @precondition(lambda self: self.nodes)
    @rule(which=st.integers(0, 9), wanted=st.sets(st.integers(0, 4)))
    def give_up(self, which: int, wanted: set[int]) -> None:
        node = self.nodes[which % len(self.nodes)]
        offsets = sorted(offset for offset in wanted & node.shares if self.num_holders(node.slots[offset]) > 1)
        self.books.give_up(node.holding, np.array(offsets, dtype=np.int64))
        for offset in offsets:
            node.shares.remove(offset)
            (node.slots[offset],) = self.new_slots(1)

    @precondition(lambda self: self.nodes)
    @rule(which=st.integers(0, 9))
    def leave(self, which: int) -> None:
        node = self.nodes.pop(which % len(self.nodes))
        freed = self.books.sole(node.holding)
        assert freed.tolist() == [self.num_holders(slot) == 0 for slot in node.slots]
        self.books.leave(node.holding)

    @rule()
    def clear(self) -> None:
        self.books.clear()
        self.nodes.clear()

    @invariant()
    def every_slot_counts_once(self) -> None:
        slots = {slot for node in self.nodes for slot in node.slots}
        protected = {slot for node in self.nodes if node.is_locked for slot in node.slots}
        by_lock = [sum(len(node.slots) for node in self.nodes if node.is_locked == locked) for locked in (False, True)]
        assert by_lock[0] - self.books.surplus_evictable == len(slots - protected)
        assert by_lock[1] - self.books.surplus_protected == len(protected)
        assert self.books.num_shared == sum(by_lock) - len(slots)
        assert self.books.num_holdings == len(self.nodes)

    @invariant()
    def books_agree_with_the_nodes(self) -> None:
        assert violations([(node.holding, node.is_locked, node.slots) for node in self.nodes]) == []

    @invariant()
    def what_others_lock_is_known(self) -> None:
        locked = [set(node.slots) for node in self.nodes if node.is_locked]
        for node in self.nodes:
            if not node.is_locked:
                expected = all(any(slot in slots for slots in locked) for slot in node.slots)
                assert self.books.is_locked_elsewhere(node.holding) == expected

    def num_holders(self, slot: int) -> int:
        return sum(slot in node.slots for node in self.nodes)


SharedSlotsMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=30)
TestSharedSlotsMachine = SharedSlotsMachine.TestCase


def pair() -> tuple[SharedSlots, Holding, Holding]:
    """A source of 3 tokens and one that shares them."""
    books = SharedSlots()
    source = books.open(3, is_locked=False)
    return books, source, books.join(source)


def test_what_nobody_else_holds_is_not_given_up() -> None:
    """The slot would be in no node and not free."""
    books, source, fused = pair()
    books.give_up(fused, np.array([1]))
    with pytest.raises(ValueError, match="no other holder"):
        books.give_up(source, np.array([1]))


def test_what_is_not_held_is_not_given_up() -> None:
    """A slot of its own has no share in the books."""
    books, _, fused = pair()
    books.give_up(fused, np.array([1]))
    with pytest.raises(ValueError, match="not held"):
        books.give_up(fused, np.array([0, 1]))


def test_violations_name_wrong_books() -> None:
    """Counts that no node explains, and a slot at two places."""
    _, source, fused = pair()
    assert violations([(source, False, [4, 5, 6]), (fused, False, [4, 5, 6])]) == []
    assert "owners [1, 1, 1]" in violations([(source, False, [4, 5, 6])])[0]
    assert "locks [1, 1, 1]" in violations([(source, True, [4, 5, 6]), (fused, False, [4, 5, 6])])[0]
    assert "is at two places" in violations([(source, False, [4, 5, 6]), (fused, False, [4, 6, 5])])[0]
    assert violations([(source, False, [4, 5, 6]), (fused, False, [4, 5, 7])]) == [
        "one offset of a shared chunk has two slots"
    ]
