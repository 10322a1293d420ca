"""Several servers on one storage: what one has computed another loads, who deletes what,
and what becomes of what is gone."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from sglang_chunkcache.fusion.tier import entry_of
from sglang_chunkcache.scheduler.reporting import rank_state
from sglang_chunkcache.storage import others as module
from sglang_chunkcache.storage.jobs import Write
from sglang_chunkcache.wire.state import Asked
from tests.kit.fused import Disk, Rank, disk, identity, wheres
from tests.kit.requests import HEAD, OTHER_HEAD, A, B, C, D, fused, rag

__all__ = ["disk"]  # the fixture


class Pair:
    """Two servers on one storage, of which the second has asked for nothing."""

    def __init__(self, disk: Disk, **knobs: Any) -> None:
        self.disk, self.storage = disk, disk.storage
        self.first, self.second = (
            disk.server(overlapped=name, **knobs) for name in ("first", "second")
        )
        self.tiers = disk.tiers[-2:]

    def settle(self) -> list[dict[str, Any]]:
        return [self.disk.settle(tier) for tier in self.tiers]

    def written(self, rank: Rank, *chunks: list[int], **fields: Any) -> dict[str, Any]:
        """It stores them; what it counts once nothing is left to do."""
        rank.store_chunks(*chunks, **fields)
        return self.settle()[rank is self.second]

    def asked(self, *chunks: list[int], **fields: Any) -> dict[str, Any]:
        """A request for them waits at the second, until nothing is left to do there; what it
        counts."""
        self.second.cache.arrived(fused(*chunks, **fields))
        return self.settle()[1]

    def entries(self) -> list[str]:
        return [name for name in self.storage.held if name.startswith("cc1-")]

    def damage(self) -> str:
        """The only entry; its name."""
        (name,) = self.entries()
        self.storage.held[name][-1] ^= 1
        return name


@pytest.fixture
def pair(disk: Disk) -> Pair:
    return Pair(disk)


def test_what_one_has_computed_another_moves(pair: Pair) -> None:
    pair.written(pair.first, A, B)
    counts = pair.asked(D, B)
    assert (counts["found"], counts["loaded"]) == (1, 1)
    assert (counts["num_entries"], counts["num_bytes"]) == (1, 0)
    assert wheres(pair.second.ask(fused(D, B))) == ["gap", "host"]
    assert pair.second.held(B) == pair.first.held(B)
    assert pair.settle()[1]["late"] == 0


def test_chain_of_another_is_moved_and_is_a_chain(disk: Disk) -> None:
    """One entry of B serves the request that moves it and the one that goes on from A."""
    pair = Pair(disk, host_slots=100, capacity=80)
    for _ in range(2):
        pair.first.serve(rag(A, B))
    pair.first.idle()
    pair.first.forward()
    assert pair.settle()[0]["num_entries"] == 3  # the head, A, B
    assert pair.asked(C, B)["loaded"] == 2, "the head, B"
    assert wheres(pair.second.ask(fused(C, B))) == ["gap", "host"]
    req = rag(A, B)
    pair.second.cache.arrived(req)
    assert pair.settle()[1]["loaded"] == 4
    assert pair.second.serve(req) == len(HEAD + A + B)
    assert pair.settle()[1]["written"] == 0


# Lookups


def test_lookup_that_comes_too_late_serves_the_next_request(pair: Pair) -> None:
    pair.written(pair.first, A)
    pair.storage.become("hanging")
    req = fused(A, C)
    pair.second.cache.arrived(req)
    assert pair.second.ask(req).sources == ()
    pair.storage.become("healthy")
    assert pair.settle()[1]["late"] == 1
    pair.second.evict(100)
    assert wheres(pair.second.ask(fused(A))) == ["host"]


def test_what_was_looked_up_is_known_for_a_while(pair: Pair) -> None:
    """A chunk that nobody has costs one call, and is found when another server has written it."""
    for _ in range(2):
        pair.asked(A)
        assert len(pair.storage.calls) == 1
    pair.written(pair.first, A)
    pair.disk.now += module.LOOKED_UP_S
    pair.asked(A)
    assert len(pair.second.held(A)) == 1


def test_known_lookups_are_bounded(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_LOOKED_UP", 2)
    for chunk in (A, B, C):
        pair.asked(chunk)
    known = [chunk.chunk for chunk in pair.tiers[1].storage.others._looked_up]
    assert known == [identity(B).chunk, identity(C).chunk]


def test_failed_lookup_is_no_answer(pair: Pair) -> None:
    pair.written(pair.first, A)
    pair.storage.become("refusing")
    assert pair.asked(A)["problems"] == {"failed": 1}
    pair.storage.become("healthy")
    pair.asked(A)
    assert len(pair.second.held(A)) == 1


@pytest.mark.parametrize("step", ["flush", "clear"])
def test_lookup_that_is_overtaken_is_not_taken(pair: Pair, step: str) -> None:
    """It would come back after `clear_store` has said that nothing is left."""
    pair.written(pair.first, A)
    pair.storage.become("hanging")
    pair.second.cache.arrived(fused(A))
    if step == "flush":
        pair.second.flush()
    else:
        rank_state(pair.second.cache, 0, Asked(clear_store=True))
    pair.storage.become("healthy")
    counts = pair.settle()[1]
    assert (counts["found"], counts["loaded"], counts["num_entries"]) == (0, 0, 0)
    assert pair.second.held(A) == []
    if step == "flush":
        pair.asked(A)
        assert len(pair.second.held(A)) == 1


def test_other_head_is_looked_up_behind_this_one(pair: Pair) -> None:
    """What the index has behind another head is no answer for this one."""
    pair.second.store_chunks(A, head=OTHER_HEAD)
    pair.written(pair.first, A)
    pair.second.forget()
    pair.asked(A)
    heads = {variant.head for variant in pair.second.stored(A)}
    assert heads == {str(HEAD), str(OTHER_HEAD)}


# Who finds nothing


# Who deletes what


@pytest.mark.parametrize("problem", ["gone", "damaged"])
def test_entry_of_another_that_nobody_can_use_is_deleted(pair: Pair, problem: str) -> None:
    """With its pointer, by who finds out: a storage that evicts by itself leaves pointers."""
    pair.written(pair.first, A)
    name = pair.damage()
    if problem == "gone":
        del pair.storage.held[name]
    assert pair.asked(A)["problems"] == {problem: 1}
    assert pair.storage.held == {}
    assert pair.written(pair.second, A)["written"] == 1


def test_entry_that_two_write_at_once_is_of_both(pair: Pair) -> None:
    """What the second has a row of is in its budget, though it has learnt of the first's."""
    pair.written(pair.first, A)
    (stored,) = pair.tiers[0].storage.index.held
    (variant,) = pair.first.stored(A)
    row, second = stored.blob.row, pair.tiers[1].storage
    second.others._take_over(row, len(A), is_asked=True)
    assert pair.settle()[1]["num_bytes"] == 0
    for _ in range(2):
        second.writes._written(0, print, Write(row, entry_of(variant, ()), 0, is_confirmed=True))
        counts = pair.settle()[1]
        assert (counts["num_entries"], counts["num_bytes"]) == (1, row.num_bytes)
    assert len(pair.storage.held) == 2, "nothing is deleted"


def test_pointer_that_lies_about_sizes_is_not_followed(pair: Pair) -> None:
    """It must not make a server ask for memory that is not there."""
    pair.written(pair.first, A)
    (stored,) = pair.tiers[0].storage.index.held
    row = stored.blob.row
    for told, num_taken in (
        (row._replace(num_bytes=1 << 60), 0),
        (row._replace(num_tokens=row.num_tokens + 1), 0),
        (row, 1),
    ):
        pair.tiers[1].storage.others._take_over(told, row.num_tokens, is_asked=True)
        assert pair.settle()[1]["num_entries"] == num_taken


@pytest.mark.parametrize("state", ["healthy", "slowed", "hanging", "refusing"])
def test_scheduler_never_waits(pair: Pair, state: str) -> None:
    pair.written(pair.first, A, B)
    pair.storage.threads.clear()
    pair.storage.calls.clear()
    pair.storage.become(state, ms_per_mib=20_000)
    for chunks in ((A, B), (B, C), (C, A), (D, B, A)):
        for rank in (pair.first, pair.second):
            req = fused(*chunks, keep=range(len(chunks)))
            rank.cache.arrived(req)
            rank.serve(req, answer=[50])
            rank.idle()
            rank.evict(10)
    assert pair.storage.calls, "the thread is at work"
    pair.tiers[1].storage.stats()
    assert threading.get_ident() not in pair.storage.threads
    pair.storage.become("healthy")
    pair.settle()
