"""Virtual slots over rows of the KV pool, against a model in sets."""

from __future__ import annotations

import random
from collections import Counter

import pytest

pytest.importorskip("torch")

import torch

from sglang_chunkcache.attention.slot_map import MappedSide, SlotMap

ROWS, SLOTS = 24, 72
ACTIONS = ["assign", "share", "expect", "came", "own", "unmap", "hold", "let_go", "pin", "unpin"]


class NaiveMap:
    """Each slot has a box; slots that share have the same one. What is computed anew has a new one,
    whatever row it is in."""

    def __init__(self) -> None:
        self.box = dict[int, object]()
        self.held = set[int]()
        self.shared = set[int]()
        self.awaited = set[object]()
        self.pinned = list[object]()

    def boxes(self) -> set[object]:
        return {*self.box.values(), *self.pinned}

    def num_used(self) -> int:
        return len(self.boxes())

    def num_evictable(self) -> int:
        return self.num_used() - len({self.box[slot] for slot in self.held}.union(self.pinned))


def tensor(slots: list[int]) -> torch.Tensor:
    return torch.tensor(slots, dtype=torch.int64)


@pytest.mark.parametrize("seed", range(3))
def test_equals_sets_over_random_walks(seed: int) -> None:
    """After every step the same rows are shared, used and evictable, and none is lost or given out
    twice. A walk runs out of rows long before it runs out of slots."""
    rng = random.Random(seed)
    mine, naive = SlotMap(ROWS, SLOTS), NaiveMap()
    refused, was = Counter[str](), dict[object, tuple[int, int]]()
    pins = list[torch.Tensor]()
    for _ in range(400):
        idle = [slot for slot in range(1, SLOTS + 1) if slot not in naive.box]
        used, free = [*naive.box], ROWS - naive.num_used()
        some = rng.sample(used, min(len(used), rng.randint(1, 6)))
        new = rng.sample(idle, min(len(idle), rng.randint(1, 6)))
        action = rng.choice((*ACTIONS, "share"))
        if action == "expect" and len(new) <= free:
            mine.expect(tensor(new), old=tensor(new), new=tensor(new))
            naive.box |= {slot: object() for slot in new}
            naive.held |= {*new}
            naive.shared |= {*new}
            naive.awaited |= {naive.box[slot] for slot in new}
        elif action == "came":
            mine.came(tensor(some))
            naive.awaited -= {naive.box[slot] for slot in some}
        elif action == "pin":
            pins.append(mine.rows(tensor(some)))
            mine.pin(pins[-1])
            naive.pinned += [naive.box[slot] for slot in some]
        elif action == "unpin" and pins:
            mine.unpin(pin := pins.pop(0))
            naive.pinned = naive.pinned[len(pin) :]
        elif action == "assign":
            if len(new) > free:
                refused["assign"] += 1
                with pytest.raises(IndexError, match=f"{free} are free"):
                    mine.assign(tensor(new))
                continue
            mine.assign(tensor(new))
            naive.box |= {slot: object() for slot in new}
            naive.held |= {*new}
        elif action == "share" and used:
            of = rng.choices(used, k=len(new))
            at = tensor(new)
            mine.share(at, mine.rows(tensor(of)), old=at, new=at)
            naive.box |= {slot: naive.box[source] for slot, source in zip(new, of, strict=True)}
            naive.held |= {*new}
            naive.shared |= {*new}
        elif action == "own":
            some = [slot for slot in some if slot in naive.held]
            moved = [slot for slot in some if slot in naive.shared]
            boxes = Counter([*naive.box.values(), *naive.pinned])
            leaving = [slot for slot in moved if boxes[naive.box[slot]] > 1]
            reserved = min(free, rng.randint(0, 4))
            mine.reserve(reserved)
            if len(leaving) > free:
                refused["own"] += 1
                with pytest.raises(IndexError):
                    mine.own(tensor(some), reserved=reserved)
                mine.release(reserved)
                continue
            left = mine.own(tensor(some), reserved=reserved)
            assert left == max(0, reserved - len(leaving))
            mine.release(left)
            naive.box |= {slot: object() for slot in moved}
            naive.shared -= {*moved}
        elif action == "unmap":
            mine.unmap(tensor(some))
            for slot in some:
                del naive.box[slot]
            naive.held -= {*some}
            naive.shared -= {*some}
        elif action == "hold":
            some = [slot for slot in some if slot not in naive.held]
            mine.hold(tensor(some))
            naive.held |= {*some}
        elif action == "let_go":
            some = [slot for slot in some if slot in naive.held]
            mine.let_go(tensor(some))
            naive.held -= {*some}
        counted = {"owners of rows", "holders of rows", "free + owned == all", "evictable"}
        assert {*mine.violations()} <= (counted if naive.pinned else set())
        rows = dict(zip(naive.box, mine.rows(tensor([*naive.box])).tolist(), strict=True))
        pairs = {(rows[slot], box) for slot, box in naive.box.items()}
        assert len(pairs) == len({*naive.box.values()})
        assert mine.num_used == naive.num_used()
        assert mine.num_evictable == naive.num_evictable()
        assert mine.num_saved == len(naive.box) - naive.num_used()
        held_rows = naive.num_used() - naive.num_evictable()
        assert mine.num_held == (held_rows, len(naive.held))
        shared = mine.is_shared(tensor(sorted(naive.box))).tolist()
        assert shared == [slot in naive.shared for slot in sorted(naive.box)]
        awaited = mine.are_awaited(mine.rows(tensor(sorted(naive.box)))).tolist()
        assert awaited == [naive.box[slot] in naive.awaited for slot in sorted(naive.box)]
        for box, (row, since) in was.items():
            assert mine.are_same(tensor([row]), since).item() == (box in naive.boxes())
        was |= {box: (row, mine.num_given) for row, box in pairs if box not in was}
    assert refused["assign"]
    for each in pins:
        mine.unpin(each)
    mine.unmap(tensor([*naive.box]))
    assert (mine.num_free, mine.num_mapped, mine.violations()) == (ROWS, 0, [])


def test_reserve_is_nobody_elses() -> None:
    """Copy-on-write inside a forward cannot fail, whatever is allocated meanwhile."""
    mine, first, second = SlotMap(6, 12), tensor([1, 2, 3]), tensor([4, 5, 6])
    mine.assign(first)
    mine.share(second, mine.rows(first), old=first, new=first)
    mine.reserve(2)
    with pytest.raises(IndexError, match="2 rows are wanted, 1 are free"):
        mine.assign(tensor([7, 8]))
    mine.assign(tensor([7]))
    assert mine.own(tensor([4, 5]), reserved=2) == 0
    assert mine.num_used == 6
    with pytest.raises(IndexError, match="1 rows to be computed, 0 reserved, 0 free"):
        mine.own(second, reserved=0)
    assert mine.violations() == []


class AddsDistance:
    """In place of a rotation: a moved key is larger by the distance."""

    def turning(self, old: torch.Tensor, new: torch.Tensor) -> object:
        return lambda keys: keys + (new - old)[:, None, None]


def test_keys_turn_where_positions_differ() -> None:
    """What is at its own position is read bit for bit, as are all values."""
    mine, own = SlotMap(8, 16), tensor([1, 2, 3])
    mine.turn_by(AddsDistance())  # type: ignore[arg-type]
    mine.assign(own)
    buffer = torch.zeros(9, 1, 2)
    buffer[mine.rows(own)] = torch.tensor([0.1, 0.2, 0.3])[:, None, None]
    at = tensor([0, 1, 2])
    mine.share(tensor([4, 5, 6]), mine.rows(own), old=at, new=at + 7)
    mine.share(tensor([7]), mine.rows(own[:1]), old=at[:1], new=at[:1])
    slots = torch.tensor([5, 1, 7], dtype=torch.int32)
    keys, values = (MappedSide(mine, buffer, are_keys=side) for side in (True, False))
    assert keys[slots][:, 0, 0].tolist() == pytest.approx([7.2, 0.1, 0.1])
    assert keys[slots, 0].shape == (3, 2)
    assert values[slots][:, 0, 0].tolist() == pytest.approx([0.2, 0.1, 0.1])
    mine.own(tensor([5]), reserved=0)
    buffer[mine.rows(tensor([5]))] = 9.0
    assert keys[slots][:, 0, 0].tolist() == pytest.approx([9.0, 0.1, 0.1])
    assert keys[own][1, 0, 0] == pytest.approx(0.2), "the source keeps what it had"


def test_slots_written_in_place_are_resolved_anew() -> None:
    """SGLang writes into a request's row and reads the same memory again."""
    mine = SlotMap(4, 4)
    mine.assign(tensor([1, 2]))
    buffer, row = torch.arange(5.0).view(5, 1, 1), tensor([1])
    side = MappedSide(mine, buffer, are_keys=True)
    before = side[row].item()
    row[0] = 2
    assert side[row].item() != before
