"""Several servers on one storage: what one has computed another loads, who deletes what,
and what becomes of what is gone."""

from __future__ import annotations

import threading
from typing import Any

import pytest

pytest.importorskip("sglang")

from radix_ext.cfo import Scored
from sglang_chunkcache.fusion.tier import entry_of
from sglang_chunkcache.storage import storage as module
from sglang_chunkcache.storage.jobs import Write
from sglang_chunkcache.wire.state import Asked
from tests.reference.fused_scheduler import FusedScheduler
from tests.sglang_chunkcache.fusion.test_promise import (
    HEAD,
    OTHER_HEAD,
    A,
    B,
    C,
    D,
    asks,
    fused,
    sources,
)
from tests.sglang_chunkcache.fusion.test_tier import Disk, disk, held, identity, store, wheres

__all__ = ["disk"]  # the fixture


class Pair:
    """Two servers on one storage, of which the second has asked for nothing."""

    def __init__(self, disk: Disk, **knobs: Any) -> None:
        self.disk = disk
        self.first, self.second = disk.server(beside="first"), disk.server(beside="second", **knobs)
        self.tiers = disk.tiers[-2:]

    def settle(self) -> list[dict[str, Any]]:
        return [self.disk.settle(tier) for tier in self.tiers]

    def asked(self, scheduler: FusedScheduler, *chunks: list[int], **fields: Any) -> None:
        """A request for them waits there, until nothing is left to do."""
        scheduler.cache.arrived(fused(*chunks, **fields))
        self.settle()

    def entries(self) -> list[str]:
        return [name for name in self.disk.storage.held if name.startswith("cc1-")]

    def pointers(self) -> list[str]:
        return [name for name in self.disk.storage.held if name.startswith("ccp1-")]


@pytest.fixture
def pair(disk: Disk) -> Pair:
    return Pair(disk)


def test_what_one_has_computed_another_moves(pair: Pair) -> None:
    """Behind the same head, with the chunks before it.
    It is no entry of the second's, and in no budget of its."""
    store(pair.first, A, B)
    pair.settle()
    req = fused(D, B)
    pair.second.cache.arrived(req)
    counts = pair.settle()[1]
    assert (counts["found"], counts["loaded"], counts["num_entries"], counts["num_bytes"]) == (
        1,
        1,
        1,
        0,
    )
    pair.second.serve(req, answer=[50])
    assert wheres(req) == ["gap", "host"]
    assert held(pair.second, B) == held(pair.first, B)
    assert pair.settle()[1]["late"] == 0


def test_measured_scores_come_along(pair: Pair) -> None:
    """Of several entries in one place, what knows most."""
    store(pair.first, A)
    pair.settle()
    store(pair.first, A, fusion=asks("h2o", 0.5))
    pair.settle()
    pair.asked(pair.second, A)
    (found,) = pair.second.store.find(identity(A))
    assert found.scored is Scored.ALL


def test_second_server_writes_nothing_that_is_there(pair: Pair) -> None:
    """Although it has computed it, too, and never looked.
    It uses the first one's entry from then on."""
    store(pair.first, A, B)
    pair.settle()
    store(pair.second, A, B)
    first, second = pair.settle()
    assert (first["written"], second["written"]) == (2, 0)
    assert (len(pair.entries()), len(pair.pointers())) == (2, 2)
    assert (second["num_entries"], second["num_bytes"]) == (2, 0)
    known = [
        {v.blob.row.name: v.blob.row.num_bytes for v in tier.storage.index.variants()}
        for tier in pair.tiers
    ]
    assert known[0] == known[1]


def test_lookup_that_comes_too_late_serves_the_next_request(pair: Pair) -> None:
    """Its loads count as late. A chunk that nobody has does not."""
    store(pair.first, A)
    pair.settle()
    pair.disk.storage.become("hanging")
    req = fused(A, C)
    pair.second.cache.arrived(req)
    pair.second.serve(req, answer=[50])
    assert sources(req) == []
    pair.disk.storage.become("healthy")
    assert pair.settle()[1]["late"] == 1
    pair.second.evict(100)
    again = fused(A)
    pair.second.serve(again, answer=[50])
    assert wheres(again) == ["host"]


def test_what_was_looked_up_is_known_for_a_while(pair: Pair) -> None:
    """A chunk that nobody has costs one call, and is found when another server has written it."""
    calls = pair.disk.storage.calls
    pair.asked(pair.second, A)
    assert len(calls) == 1
    pair.asked(pair.second, A)
    assert len(calls) == 1
    store(pair.first, A)
    pair.settle()
    pair.disk.now += module.LOOKED_UP_S
    pair.asked(pair.second, A)
    assert len(held(pair.second, A)) == 1


def test_what_is_remembered_of_lookups_is_bounded(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The oldest leaves."""
    monkeypatch.setattr(module, "MAX_LOOKED_UP", 2)
    for chunk in (A, B, C):
        pair.asked(pair.second, chunk)
    assert [chunk.chunk for chunk in pair.tiers[1].storage._looked_up] == [
        identity(B).chunk,
        identity(C).chunk,
    ]


def test_failed_lookup_is_no_answer(pair: Pair) -> None:
    """It is asked again with the next request."""
    store(pair.first, A)
    pair.settle()
    pair.disk.storage.become("refusing")
    pair.asked(pair.second, A)
    assert pair.settle()[1]["problems"] == {"failed": 1}
    pair.disk.storage.become("healthy")
    pair.asked(pair.second, A)
    assert len(held(pair.second, A)) == 1


def test_storage_of_one_process_is_not_looked_up(disk: Disk) -> None:
    """Its manifest knows all."""
    scheduler = disk.server()
    scheduler.cache.arrived(fused(A))
    disk.settle()
    assert disk.storage.calls == []


def test_tenants_find_their_own(pair: Pair) -> None:
    """Also across servers; nothing tells the salt."""
    store(pair.first, A, cache_salt="pepper")
    pair.settle()
    for tenant, num in (({}, 0), ({"cache_salt": "salt"}, 0), ({"cache_salt": "pepper"}, 1)):
        pair.asked(pair.second, A, **tenant)
        assert len(held(pair.second, A, **tenant)) == num
    told = str(pair.disk.storage.held.keys()).encode() + b"".join(
        bytes(data.numpy()) for data in pair.disk.storage.held.values()
    )
    assert b"pepper" not in told


def test_other_weights_find_nothing_of_another_server(pair: Pair) -> None:
    """The model's name is in the pointer's."""
    store(pair.first, A)
    pair.settle()
    pair.second.weights = 1
    pair.second.flush()
    pair.asked(pair.second, A)
    assert pair.settle()[1]["found"] == 0


def test_eviction_deletes_what_the_server_has_written(disk: Disk) -> None:
    """With its pointer. What another has written it forgets: that one still has it."""
    first = disk.server(beside="first")
    store(first, A)
    size = disk.settle()["num_bytes"]
    second = disk.server(
        beside="second", storage_bytes=size + size // 2, store_chunks=1, store_variants=2
    )
    for chunk in (A, C, D):
        second.cache.arrived(fused(chunk))
        disk.settle()
        store(second, chunk)
        disk.settle()
    assert disk.settle()["num_evicted"] >= 2
    names = {v.blob.row.name for tier in disk.tiers for v in tier.storage.index.variants()}
    assert {name for name in disk.storage.held if name.startswith("cc1-")} == names
    assert len(disk.storage.held) == 2 * len(names)
    disk.tiers[0]._store.clear()
    first.evict(100)
    first.cache.arrived(fused(A))
    assert disk.settle(disk.tiers[0])["loaded"] == 1


def test_entry_that_its_writer_deletes_is_gone_for_others(pair: Pair) -> None:
    """It is counted and computed."""
    store(pair.first, A)
    pair.settle()
    pair.asked(pair.second, A)
    pair.second.store.clear()
    (stored,) = pair.tiers[0].storage.index.variants()
    pair.tiers[0].storage.index.drop(stored)
    pair.settle()
    assert pair.disk.storage.held == {}
    req = fused(A)
    pair.second.cache.arrived(req)
    counts = pair.settle()[1]
    assert (counts["problems"], counts["num_entries"]) == ({"gone": 1}, 0)
    pair.second.serve(req, answer=[50])
    assert sources(req) == []


def test_pointer_to_what_is_gone_leaves_with_who_finds_out(pair: Pair) -> None:
    """A storage that evicts by itself leaves pointers behind, and they would fill the places."""
    store(pair.first, A)
    pair.settle()
    (name,) = pair.entries()
    del pair.disk.storage.held[name]
    pair.asked(pair.second, A)
    assert pair.settle()[1]["problems"] == {"gone": 1}
    assert pair.disk.storage.held == {}
    store(pair.second, A)
    assert pair.settle()[1]["written"] == 1


def test_damaged_entry_of_another_is_deleted(pair: Pair) -> None:
    """Nobody can use it. It is computed and written anew."""
    store(pair.first, A)
    pair.settle()
    (name,) = pair.entries()
    pair.disk.storage.held[name][-1] ^= 1
    pair.asked(pair.second, A)
    assert pair.settle()[1]["problems"] == {"damaged": 1}
    assert pair.entries() == []
    store(pair.second, A)
    assert pair.settle()[1]["written"] == 1


def test_damaged_bytes_that_stay_are_refused_once(pair: Pair) -> None:
    """A class without `delete` would give them again and again,
    and keep no others under their name."""
    pair.disk.storage.delete = None  # type: ignore[assignment,method-assign]
    store(pair.first, A)
    pair.settle()
    (name,) = pair.entries()
    pair.disk.storage.held[name][-1] ^= 1
    for _ in range(3):
        pair.disk.now += module.LOOKED_UP_S
        pair.asked(pair.second, A)
        store(pair.second, A)
        pair.second.store.clear()
        pair.second.evict(100)
    counts = pair.settle()[1]
    assert (counts["problems"], counts["written"], counts["num_entries"]) == ({"damaged": 1}, 0, 0)
    assert sum(call == ("get", name) for call in pair.disk.storage.calls) == 1


def test_clear_deletes_what_the_server_knows(pair: Pair) -> None:
    """Others' entries included. What it never asked for stays."""
    store(pair.first, A)
    store(pair.first, B)
    pair.settle()
    pair.asked(pair.second, A)
    pair.second.cache.rank_state(0, Asked(clear_store=True))
    assert pair.settle()[1]["num_entries"] == 0
    (name,) = pair.entries()
    assert name in {
        v.blob.row.name
        for v in pair.tiers[0].storage.index.variants()
        if v.blob.row.place.chunk == identity(B).chunk
    }
    pair.asked(pair.second, A)
    assert held(pair.second, A) == []
    pair.asked(pair.second, B)
    assert len(held(pair.second, B)) == 1


def test_what_is_looked_up_during_a_clear_is_not_taken(pair: Pair) -> None:
    """It would come back after `clear_store` has said that nothing is left."""
    store(pair.first, A)
    pair.settle()
    pair.disk.storage.become("hanging")
    pair.second.cache.arrived(fused(A))
    pair.second.cache.rank_state(0, Asked(clear_store=True))
    pair.disk.storage.become("healthy")
    counts = pair.settle()[1]
    assert (counts["found"], counts["loaded"], counts["num_entries"]) == (0, 0, 0)


def test_lookup_that_a_flush_overtakes_is_made_again(pair: Pair) -> None:
    """Its answer is not taken, so it is not known either."""
    store(pair.first, A)
    pair.settle()
    pair.disk.storage.become("hanging")
    pair.second.cache.arrived(fused(A))
    pair.second.flush()
    pair.disk.storage.become("healthy")
    pair.settle()
    assert held(pair.second, A) == []
    pair.asked(pair.second, A)
    assert len(held(pair.second, A)) == 1


def test_entry_that_two_write_at_once_is_of_both(pair: Pair) -> None:
    """What the second has a row of must be in its budget, although it has learnt of the first one's
    meanwhile."""
    store(pair.first, A)
    pair.settle()
    (stored,) = pair.tiers[0].storage.index.variants()
    (variant,) = pair.first.store.find(identity(A))
    pair.tiers[1].storage._take_over(stored.blob.row, len(A))
    assert pair.settle()[1]["num_bytes"] == 0
    entry = entry_of(variant, ())
    for _ in range(2):
        pair.tiers[1].storage._written(
            0, print, Write(stored.blob.row, entry, 0, is_confirmed=True)
        )
        counts = pair.settle()[1]
        assert (counts["num_entries"], counts["num_bytes"]) == (1, stored.blob.row.num_bytes)
    assert len(pair.disk.storage.held) == 2, "nothing is deleted"


def test_pointer_that_lies_about_sizes_is_not_followed(pair: Pair) -> None:
    """It must not make a server ask for memory that is not there."""
    store(pair.first, A)
    pair.settle()
    (stored,) = pair.tiers[0].storage.index.variants()
    row = stored.blob.row
    for wrong in (row._replace(num_bytes=1 << 60), row._replace(num_tokens=row.num_tokens + 1)):
        pair.tiers[1].storage._take_over(wrong, row.num_tokens)
        assert pair.settle()[1]["num_entries"] == 0
    pair.tiers[1].storage._take_over(row, row.num_tokens)
    assert pair.settle()[1]["num_entries"] == 1


def test_other_head_is_looked_up_behind_this_one(pair: Pair) -> None:
    """What the index has behind another head is no answer for this one."""
    store(pair.second, A, head=OTHER_HEAD)
    store(pair.first, A)
    pair.settle()
    pair.second.store.clear()
    pair.second.evict(100)
    pair.asked(pair.second, A)
    assert {variant.head for variant in pair.second.store.find(identity(A))} == {
        str(HEAD),
        str(OTHER_HEAD),
    }


@pytest.mark.parametrize("state", ["healthy", "slowed", "hanging", "refusing"])
def test_scheduler_never_waits(disk: Disk, state: str) -> None:
    """Nothing of the storage is called on its thread, whatever the storage does;
    every request is answered."""
    pair = Pair(disk)
    store(pair.first, A, B)
    pair.settle()
    disk.storage.threads.clear()
    disk.storage.calls.clear()
    disk.storage.become(state, ms_per_mib=20_000)
    for chunks in ((A, B), (B, C), (C, A), (D, B, A)):
        for scheduler in (pair.first, pair.second):
            req = fused(*chunks, keep=range(len(chunks)))
            scheduler.cache.arrived(req)
            scheduler.serve(req, answer=[50])
            scheduler.idle()
            scheduler.evict(10)
    assert disk.storage.calls, "the thread is at work"
    pair.tiers[1].storage.stats()
    assert threading.get_ident() not in disk.storage.threads
    disk.storage.become("healthy")
    pair.settle()
