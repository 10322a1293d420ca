"""The storage below the store, in the scheduler's order of calls:
what is written, what comes back, and when nothing does."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch

from radix_ext import ChunkId, FusionRequest, chunk_id
from radix_ext.cfo import Scored
from radix_ext.eviction import NEW_ON_HOST
from radix_ext.variants import Variant
from sglang_chunkcache.fusion.calibration import Calibration
from sglang_chunkcache.fusion.store import ChunkScores
from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.scheduler.reporting import rank_state
from sglang_chunkcache.storage.entry import Layout
from sglang_chunkcache.storage.held import replaces
from sglang_chunkcache.storage.key import Place
from sglang_chunkcache.storage.manifest import Manifest, Row
from sglang_chunkcache.wire.state import Asked
from tests.kit.fused import Disk, disk, identity, wheres
from tests.kit.requests import HEAD, OTHER_HEAD, A, B, C, D, asks, fused, rag
from tests.reference.fused_scheduler import KV

__all__ = ["disk"]  # the fixture


def put(rank: Any, chunk: list[int], scores: Any = None, **fields: Any) -> None:
    """A variant of it into the store."""
    host = rank.fusion_pass.host
    blob = host.room(len(chunk))
    host.pool.contents.update((slot, KV(0, 0, None)) for slot in blob.slots.tolist())
    rank.store.put(identity(chunk), Variant((), blob, scores=scores, head="h", **fields))


# What outlives a server


def test_stored_chunks_survive_the_server(disk: Disk) -> None:
    first = disk.server()
    first.store_chunks(A, B)
    counts = disk.settle()
    assert (counts["written"], counts["num_entries"], counts["queue"]) == (2, 2, 0)
    assert wheres(first.ask(fused(B))) == ["device"]
    (before,) = first.stored(B)
    second = disk.restarted()
    assert disk.tier.load_most_used() == 2
    (found,) = second.stored(B)
    assert (found.prefix, found.head) == ((chunk_id(A),), str(HEAD))
    assert (found.priority, found.num_uses) == (before.priority, 1)
    assert second.tokens(found) == B
    assert wheres(second.ask(fused(D, B))) == ["gap", "host"]


def test_coded_chunks_survive_a_server_of_their_codec_alone(disk: Disk) -> None:
    for codec in ("none", "int8"):
        disk.server(store_codec=codec).store_chunks(A, B)
        told = disk.settle()
        other = told["bytes"]["other"]
        assert told["bytes"]["variants"] == told["num_bytes"] - other > 0
        # a head is one number here, and 8 bits and a scale of 32 in place of 32
        assert told["saved_bytes"]["variants"] == (-2 * len(A + B) if codec == "int8" else 0)
        disk.stop()
    assert other > 0
    for codec in ("none", "int8"):
        rank = disk.server(store_codec=codec)
        assert disk.tier.load_most_used() == 2
        (found,) = rank.stored(B)
        assert found.blob.codec.name == codec
        assert rank.tokens(found) == B
        assert wheres(rank.ask(fused(D, B))) == ["gap", "host"]
        disk.stop()
    assert len(disk.storage.held) == 4, "what the storage had was written again"


def test_storage_keeps_what_is_asked_for(disk: Disk) -> None:
    """A chunk that comes only once takes no place of one that is asked for again and again."""
    rank = disk.server(storage_bytes=600, window_requests=100)
    rank.store_chunks(A)
    disk.settle()
    for _ in range(9):
        rank.serve(rag(A), answer=[50])
    rank.store_chunks(B)
    told = disk.settle()
    assert told["num_entries"] == 1
    assert disk.tier.storage.index.find(disk.tier._chunk(identity(A)))


def test_storage_ages_across_a_restart(disk: Disk) -> None:
    """What was used when it was old is as old afterwards: it does not outlive what comes anew."""
    rank = disk.server()
    rank.store_chunks(A)
    disk.settle()
    disk.tier.storage.index.held.aging.left(5.0)
    rank.serve(fused(B, A), answer=[50])
    disk.settle()
    (stored,) = disk.tier.storage.index.find(disk.tier._chunk(identity(A)))
    assert stored.priority == 5 + NEW_ON_HOST + 1
    disk.restarted()
    index = disk.tier.storage.index
    (again,) = index.find(disk.tier._chunk(identity(A)))
    assert (again.priority, again.num_uses, index.held.aging.now(0)) == (
        stored.priority,
        1,
        5 + NEW_ON_HOST,
    )


def test_entries_of_a_codec_that_was_removed_are_others(disk: Disk) -> None:
    """Codec joint's int4 had the codec's own name: no server finds it, and it leaves by age."""
    disk.layout = Layout(1, 1, 2, 2, "float32")
    earlier = disk.server(store_codec="int4")
    disk.tier._how = ("positioned", "joint")
    disk.tier.storage.naming.keeps(disk.tier._how, disk.tier._layout)
    earlier.store_chunks(A, B)
    written = disk.settle()["bytes"]["variants"]
    later = disk.restarted(store_codec="int4")
    assert disk.tier.load_most_used() == 0
    told = disk.settle()
    assert told["bytes"] == {"chains": 0, "variants": 0, "other": written}
    assert (told["num_entries"], told["problems"]) == (2, {})
    later.store_chunks(C, D)
    told = disk.settle()["bytes"]
    assert told["other"] == written
    assert told["variants"] > 0
    disk.restarted(store_codec="int4")
    assert disk.tier.load_most_used() == 2


def test_what_is_measured_later_takes_the_entrys_place(disk: Disk) -> None:
    rank = disk.server()
    rank.store_chunks(A, B)
    disk.settle()
    names = set(disk.storage.held)
    rank.store_chunks(A, B, fusion=asks("h2o", 0.5))
    assert disk.settle()["written"] == 4
    assert len(disk.storage.held) == 2
    assert not names & set(disk.storage.held)
    before: Any = rank.stored(B)[0].scores
    rank = disk.restarted()
    disk.tier.load_most_used()
    found: Any = rank.stored(B)[0]
    assert found.scored is Scored.ALL
    assert (found.scores.inter, found.scores.prefix_lens) == (before.inter, before.prefix_lens)


def test_entry_is_replaced_by_what_loses_nothing() -> None:
    for old, new, expected in (
        (("", False, 0, False), ("", False, 0, False), False),
        (("", False, 1, False), ("", False, 1, True), True),
        (("", False, 2, False), ("", False, 0, True), False),
        (("", False, 0, True), ("", False, 2, False), False),
        (("", False, 2, True), ("", True, 0, False), True),
        (("", True, 0, False), ("", False, 2, True), False),
        (("", True, 2, True), ("here", False, 0, False), True),
        (("here", False, 0, False), ("here", False, 0, False), False),
        (("here", False, 0, False), ("", True, 2, True), False),
        (("elsewhere", False, 0, False), ("here", False, 0, False), True),
    ):
        assert replaces(measured(*new), measured(*old)) is expected, (old, new)


def measured(exact: str, preprocessed: bool, scored: int, has_outward: bool) -> Row:
    place = Place("m", "t", ChunkId("c"), "h", (), preprocessed, exact)
    return Row("n", place, 4, 100, scored, has_outward)


def test_scores_of_other_heads_are_left_out(disk: Disk) -> None:
    """They say nothing of these. Measured anew they are written anew."""
    rank = disk.server()
    rank.store_chunks(A, fusion=asks("h2o", 0.5))
    rank = disk.restarted()
    rank.fusion_pass.calibrated(Calibration(heads=((0, 1),)))
    disk.tier.storage.naming.reads(((0, 1),))
    disk.tier.load_most_used()
    assert rank.stored(A)[0].scored is Scored.ALL, "measured without heads, it holds with any"
    outward = torch.arange(4.0)
    put(rank, D, ChunkScores((), (), 1.0, torch.zeros(4), torch.zeros(4)), outward=outward)
    for heads, is_known in ((((0, 1),), True), (((1, 1),), False)):
        rank = disk.restarted()
        disk.tier.storage.start(0, heads)
        disk.tier.load_most_used()
        (found,) = rank.stored(D)
        assert (found.scored is Scored.ALL, found.outward is not None) == (is_known, is_known)
        if is_known:
            assert torch.equal(found.outward, outward)


def test_scores_that_do_not_fit_their_variant_are_left_out(disk: Disk) -> None:
    """Whoever may write an entry must not be able to end the server."""
    put(disk.server(), D, ChunkScores((1.0,), (3,), 1.0, torch.zeros(4)))
    rank = disk.restarted()
    assert disk.tier.load_most_used() == 1
    assert rank.stored(D)[0].scores is None


# What is loaded, and when


def test_arriving_request_has_its_chunks_loaded(disk: Disk) -> None:
    rank, req = disk.restarted(A, B, C), fused(B, A, C)
    rank.serve(rag(A), answer=[50])
    rank.cache.arrived(req)
    rank.cache.arrived(req)
    assert disk.settle()["loaded"] == 2
    assert [len(rank.held(chunk)) for chunk in (A, B, C)] == [0, 1, 1]
    assert wheres(rank.ask(req)) == ["host", "device", "host"]
    assert disk.settle()["late"] == 0


def test_what_comes_too_late_serves_the_next_request(disk: Disk) -> None:
    rank, req = disk.restarted(A), fused(A)
    disk.storage.gate.clear()
    rank.cache.arrived(req)
    assert rank.ask(req).sources == ()
    assert disk.tier.storage.stats()["late"] == 1
    disk.storage.gate.set()
    disk.settle()
    rank.evict(100)
    assert wheres(rank.ask(fused(A))) == ["host"]
    assert disk.tier.storage.stats()["late"] == 1


def test_request_that_never_arrived_is_asked_for_at_its_admission(disk: Disk) -> None:
    rank, explained = disk.restarted(A), fused(A)
    state(explained).is_asked_only = True
    rank.match(explained)
    rank.serve(rag(B, A), answer=[50])
    rank.evict(100)
    assert disk.settle()["loaded"] == 0
    rank.match(fused(A))
    assert disk.settle()["loaded"] == 1


def test_other_head_is_loaded_where_nothing_else_is(disk: Disk) -> None:
    disk.server().store_chunks(A, head=OTHER_HEAD)
    rank = disk.restarted()
    rank.serve(rag(A, head=[80, 81]), answer=[50])
    for num_loaded in (0, 1):
        rank.cache.arrived(fused(A))
        assert disk.settle()["loaded"] == num_loaded
        rank.evict(100)


def test_plain_request_loads_plain_kv(disk: Disk) -> None:
    """Preprocessing is built on what has seen no other chunk."""
    rank = disk.restarted(A, B)
    rank.cache.arrived(fused(B, A, fusion=FusionRequest("none", 0.0, "r", plain=True)))
    disk.settle()
    assert (rank.held(A), rank.held(B)) == ([()], [])


def test_start_takes_no_longer_than_it_may(disk: Disk) -> None:
    """A storage that hangs is waited for, but not for ever."""
    disk.restarted(A)
    disk.storage.gate.clear()
    assert disk.tier.load_most_used(0.2) == 0


def test_start_loads_what_was_used_most(disk: Disk) -> None:
    rank = disk.server()
    for chunk in (A, B, C):
        rank.store_chunks(chunk)
        disk.settle()
    rank.serve(fused(B, A), answer=[50])
    rank = disk.restarted(store_bytes=len(A) * disk.layout.token_bytes)
    assert disk.tier.load_most_used() == 1
    assert len(rank.held(A)) == 1
    disk.restarted()
    disk.tier.storage.start(9, ())
    assert disk.tier.load_most_used() == 0


def test_more_than_the_queue_holds_is_loaded_at_the_start(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = [[i, i + 1] for i in range(100, 110)]
    disk.server(capacity=400).store_chunks(*chunks)
    disk.stop()
    monkeypatch.setattr("sglang_chunkcache.storage.loader.MAX_WAITING", 3)
    disk.server()
    assert disk.tier.load_most_used() == len(chunks)


# Who finds nothing


def test_tenants_have_entries_of_their_own(disk: Disk) -> None:
    """Found with the tenant's request, never at the start; nothing tells the salt."""
    rank = disk.server()
    for salt in ("pepper", "paprika"):
        rank.store_chunks(A, cache_salt=salt, extra_key="key")
    assert disk.settle()["num_entries"] == 2
    disk.stop()
    files = b"".join(path.read_bytes() for path in disk.folder.iterdir())
    assert b"pepper" not in files + str(disk.storage.held.keys()).encode()
    rank = disk.server()
    assert disk.tier.load_most_used() == 0
    tenants: Any = (({"extra_key": "key", "cache_salt": "salt"}, 0), ({}, 0))
    for tenant, num in (*tenants, ({"extra_key": "key", "cache_salt": "pepper"}, 1)):
        rank.cache.arrived(fused(A, **tenant))
        assert (disk.settle()["loaded"], len(rank.held(A, **tenant))) == (num, num)


def test_other_weights_find_nothing(disk: Disk) -> None:
    """And keep what they left. An update under way leaves nothing in the store."""
    rank = disk.server()
    rank.store_chunks(A)
    disk.settle()
    disk.storage.gate.clear()
    rank.forget()
    rank.cache.arrived(fused(A))
    rank.weights = 1
    rank.flush()
    disk.storage.gate.set()
    for _ in range(2):
        assert disk.settle()["loaded"] == 1
        assert rank.held(A) == []
        rank.cache.arrived(fused(A))
    rank.store_chunks(A)
    assert disk.settle()["num_entries"] == 2
    rank.weights = 0
    rank.flush()
    rank.cache.arrived(fused(A))
    assert (disk.settle()["loaded"], len(rank.held(A))) == (2, 1)


def test_flush_leaves_the_storage_alone(disk: Disk) -> None:
    rank = disk.server()
    rank.store_chunks(A, B)
    disk.settle()
    rank.flush()
    assert rank.held(A) == []
    rank.cache.arrived(fused(A))
    disk.settle()
    assert len(rank.held(A)) == 1
    rank_state(rank.cache, 0, Asked(clear_store=True))
    assert (disk.settle()["num_entries"], disk.storage.held) == (0, {})
    assert disk.restarted().cache.stats()["storage"]["num_entries"] == 0


def test_what_is_being_written_is_cleared_too(disk: Disk) -> None:
    """It would come back after `clear_store` has said that nothing is left."""
    rank = disk.server()
    disk.storage.gate.clear()
    rank.store_chunks(A, B)
    rank_state(rank.cache, 0, Asked(clear_store=True))
    disk.storage.gate.set()
    counts = disk.settle()
    assert (counts["written"], counts["num_entries"], disk.storage.held) == (2, 0, {})
    disk.stop()
    assert Manifest(disk.folder).rows() == []


def test_update_without_a_flush_stops_the_storage(disk: Disk) -> None:
    """KV of two weights is mixed then, and no name says so. A flush starts it again."""
    rank = disk.server()
    rank.store_chunks(A)
    disk.settle()
    rank.cache.doubt_weights()
    rank.weights = 1
    rank.store_chunks(B)
    rank.forget()
    rank.cache.arrived(fused(A))
    counts = disk.settle()
    assert (counts["off"], counts["written"], counts["loaded"]) == (True, 1, 0)
    put(rank, C, preprocessed=True)
    rank.weights = 0
    rank.flush()
    assert rank.held(C) == [], "these are the old weights, but it was computed with others"
    rank.store_chunks(B)
    counts = disk.settle()
    assert (counts["off"], counts["written"]) == (False, 2)


# What fails


@pytest.mark.parametrize("problem", ["damaged", "gone"])
def test_entry_of_no_use_is_computed_and_written_anew(disk: Disk, problem: str) -> None:
    disk.server().store_chunks(A, B)
    disk.settle()
    (name,) = [v.blob.row.name for v in disk.tier.storage.index.held if v.prefix]
    good = disk.storage.held[name].clone()
    disk.storage.held[name][-1] ^= 1
    if problem == "gone":
        del disk.storage.held[name]
    rank, req = disk.restarted(), fused(B, A)
    rank.cache.arrived(req)
    counts = disk.settle()
    assert (counts["loaded"], counts["problems"], counts["num_entries"]) == (1, {problem: 1}, 1)
    assert rank.held(B) == []
    assert wheres(rank.ask(req)) == ["gap", "host"]
    rank.evict(100)
    rank.store_chunks(A, B)
    assert disk.settle()["num_entries"] == 2
    assert torch.equal(disk.storage.held[name], good)


def test_storage_that_fails_harms_no_request(disk: Disk) -> None:
    rank = disk.server()
    disk.storage.fails = True
    for chunk in (A, B, C, D, [5, 5], [5, 6]):
        rank.store_chunks(chunk)
        disk.settle()
    counts = disk.settle()
    assert (counts["paused"], counts["num_entries"]) == (True, 0)
    assert counts["problems"] == {"failed": 4}, "while it pauses nothing is given to it"
    disk.storage.fails = False
    disk.tier.storage.loader.worker.breaker.paused_until = 0.0  # it is over
    rank.evict(100)
    assert wheres(rank.ask(fused(B))) == ["host"]
    assert disk.settle()["num_entries"] == 1


def test_a_failure_while_loading_is_asked_for_leaves_the_request_alone(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank, req = disk.restarted(A), fused(A)
    fail = mock.Mock(side_effect=RuntimeError("a bug"))
    monkeypatch.setattr(disk.tier, "_load", fail)
    rank.cache.arrived(req)
    assert fail.called
    assert rank.ask(req).sources == ()
