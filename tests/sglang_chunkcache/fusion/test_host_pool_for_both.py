"""One pool in host memory for exact chains and for chunks that are moved: what is there once serves
both, and only what is exact serves exact requests."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest

from radix_ext import chunk_id
from radix_ext.variants import Variant
from sglang_chunkcache.fusion import tier
from sglang_chunkcache.fusion.promises import slots_of
from sglang_chunkcache.scheduler.node import HostNode, state
from tests.kit.chains import depth
from tests.kit.fused import Disk, Rank, disk, identity, sources, wheres
from tests.kit.requests import HEAD, OTHER_HEAD, A, B, C, D, E, ahead, asks, fused, rag

__all__ = ["disk"]  # the fixture


def hosted(*chunks: list[int], host_slots: int = 100, **knobs: Any) -> Rank:
    """Host memory alone has these chunks, as an exact chain."""
    rank = Rank(host_slots=host_slots, capacity=80, **knobs)
    for _ in range(2):
        rank.serve(rag(*chunks))
    rank.idle()
    rank.forward()
    rank.evict(80)
    return rank


def exact(rank: Rank, chunk: list[int]) -> list[bool]:
    return [variant.is_exact for variant in rank.stored(chunk)]


def test_exact_chain_in_host_memory_is_a_source() -> None:
    """At another position, behind other chunks, from its own place, as a copy on the device is."""
    rank = hosted(A, B)
    told = rank.ask(fused(C, B))
    assert wheres(told) == ["gap", "host"]
    assert sources(told)[-1][2:4] == (1, 0), "computed after A, which is not before it now"
    assert wheres(rank.ask(fused(A, head=OTHER_HEAD))) == ["host"]
    (a,) = rank.stored(A)
    assert isinstance(a, HostNode)
    assert (a.start, a.prefix, a.head) == (len(HEAD), (), str(HEAD))


def test_nothing_is_held_twice() -> None:
    """Chunks that have earned a place as sources are there as parts of their chain."""
    rank = Rank(host_slots=100, capacity=80)
    rank.serve(rag(A, B))
    for _ in range(3):
        rank.serve(rag(A, B, keep=[0, 1]))
        rank.serve(fused(A, B, keep=[0, 1]))
    rank.idle()
    rank.forward()
    assert (exact(rank, A), exact(rank, B)) == ([True], [True])
    stats = rank.fuser.stats()["store"]
    assert stats["bytes"]["captured"] == 0
    assert stats["bytes"]["exact"] == rank.cache.tiers.host.stats()["bytes"] == len(HEAD + A + B)
    assert rank.fusion_pass.num_captured == 0


def test_nothing_is_written_twice(disk: Disk) -> None:
    rank = disk.server(host_slots=100, capacity=80)
    rank.serve(rag(A, B))
    for _ in range(3):
        rank.serve(rag(A, B, keep=[0, 1]))
    rank.idle()
    rank.forward()
    told = disk.settle()
    assert told["num_entries"] == 3  # the head, A, B
    assert told["bytes"]["variants"] == 0


def test_what_was_captured_gives_way_to_what_is_exact() -> None:
    """B is captured alone while its chain is not worth keeping; later the chain is."""
    rank = Rank(host_slots=100, capacity=80)
    rank.serve(rag(A, B, keep=[1]))
    rank.idle()
    assert exact(rank, B) == [False]
    before = rank.cache.tiers.host.stats()["tokens"]
    rank.serve(rag(A, B))
    rank.idle()
    rank.forward()
    assert exact(rank, B) == [True]
    assert (before, rank.cache.tiers.host.stats()["tokens"]) == (len(B), len(HEAD + A + B))
    rank.evict(80)
    assert rank.serve(rag(A, B)) == len(HEAD + A + B)


def test_what_is_computed_behind_moved_chunks_serves_no_exact_request() -> None:
    """C is computed after A, which was moved: a source for others, and no part of a chain."""
    rank = hosted(A, B)
    rank.serve(fused(D, A, C, keep=[2]), answer=[50])
    rank.idle()
    (found,) = rank.stored(C)
    assert (found.is_exact, found.prefix) == (False, (chunk_id(D), chunk_id(A)))
    rank.evict(80)
    assert rank.serve(rag(D, A, C)) == len(HEAD)
    rank.evict(80)
    assert wheres(rank.ask(fused(E, C))) == ["gap", "host"]


def test_source_is_held_until_it_is_copied() -> None:
    """Its slots would be given to others: the storage's thread writes at once."""
    rank = hosted(A, B, host_slots=len(HEAD + A + B) + 1)
    req = fused(C, B)
    rank.start(req)
    (blob,) = slots_of(state(req).promise.plan)
    host = rank.cache.tiers.host
    assert blob.is_held
    assert host.nodes.room(len(A + B)) is None
    rank.fuser.store.clear()
    assert not rank.stored(B)
    rank.check([req])
    taken = host.nodes.room(len(A) + 1)  # all but B, and the head that is loaded
    assert taken is not None
    assert host.nodes.room(1) is None
    taken.give_back()
    rank.finish(req)
    assert not blob.is_held
    assert host.nodes.room(len(HEAD + A + B)) is not None


def test_source_that_has_left_is_computed() -> None:
    """Between match and promise: SGLang has no reason to, but its calls allow for it."""
    rank = hosted(A, B)
    req = fused(C, B)
    rank.match(req)
    rank.fuser.store.clear()
    assert rank.cache.tiers.fuser.commit(req, req.best_match_node) is None
    assert state(req).promise.declined == ["source_gone"]


def test_flush_gives_back_what_is_promised() -> None:
    """All that is in the pool is free: no lock of a tree that is gone keeps any."""
    rank = hosted(A, B)
    req = fused(C, B)
    rank.start(req)
    rank.batch.clear()
    rank.flush()
    host = rank.cache.tiers.host
    assert host.pool.num_free == host.pool.num_slots
    rank.check()


def test_clearing_the_store_leaves_exact_chains() -> None:
    rank = hosted(A, B)
    rank.serve(rag(D, C, keep=[1]))
    rank.idle()
    rank.evict(80)
    cleared = rank.fuser.keeper.clear_store()
    assert (cleared.chunks, cleared.variants) == (1, 1)
    assert rank.stored(C) == []
    assert rank.serve(rag(A, B)) == len(HEAD + A + B)


@pytest.mark.parametrize("keeps", [True, False])
def test_without_chains_the_pool_is_for_moved_chunks_alone(keeps: bool) -> None:
    rank = Rank(host_slots=100, capacity=80)
    rank.cache.tiers.host.write_back._keeps = keeps
    for _ in range(2):
        rank.serve(rag(A, B, keep=[1]))
    rank.idle()
    rank.forward()
    assert exact(rank, B) == [keeps]
    rank.evict(80)
    assert rank.serve(rag(A, B)) == keeps * len(HEAD + A + B)


def test_scores_of_a_chain_are_kept_with_it() -> None:
    """What was measured on the device is known in host memory and when the chain is back."""
    rank = Rank(host_slots=1000, capacity=80)
    req = rag(A, B, keep=[0, 1], fusion=asks("context", 0.5, recipe="c"))
    for _ in range(2):
        rank.serve(req)
        req = rag(A, B, keep=[0, 1], fusion=asks("context", 0.5, recipe="c"))
    rank.idle()
    rank.forward()
    (b,) = rank.stored(B)
    assert b.is_exact
    assert b.scores is not None
    num_scored = rank.fusion_pass.num_scored
    rank.evict(80)
    rank.serve(rag(A, B))
    rank.serve(rag(A, B, keep=[0, 1], fusion=asks("context", 0.5, recipe="c")))
    rank.idle()
    assert rank.fusion_pass.num_scored == num_scored


def test_exact_chain_takes_the_place_of_a_preprocessed_variant() -> None:
    """It is what a prefill computes there. Otherwise each request would evict others in vain, and
    what follows in the chain would be kept nowhere."""
    rank = Rank(host_slots=len(HEAD + A + B + B + D + E) + 4, capacity=80)
    for _ in range(2):
        rank.serve(rag(A))
    rank.idle()
    rank.forward()
    rank.serve(ahead(A, B), answer=[50])
    rank.idle()
    for _ in range(2):
        rank.serve(rag(E))
    rank.idle()
    rank.forward()
    assert exact(rank, B) == [False]
    for _ in range(3):
        rank.serve(rag(A, B, D, keep=[0, 1, 2]))
        rank.idle()
        rank.forward()
    assert [exact(rank, chunk) for chunk in (A, B, D, E)] == [[True]] * 4
    counts = rank.cache.tiers.host.counts
    assert (counts.missed, counts.evicted_tokens) == (0, 0)


def test_nothing_leaves_for_what_finds_no_room() -> None:
    rank = Rank(host_slots=40, capacity=80)
    for chunk in (A, E, D):
        for _ in range(2):
            rank.serve(rag(chunk))
    rank.idle()
    rank.forward()
    rank.evict(80)
    host = rank.cache.tiers.host
    rank.start(fused(A, head=OTHER_HEAD))
    before = host.stats()["tokens"]
    assert host.nodes.room(38) is None
    assert host.stats()["tokens"] == before
    assert host.nodes.room(30) is not None


def test_heads_do_not_lie_in_front_of_what_is_to_leave() -> None:
    """They stay for what is behind them, so that every eviction would pass all of them."""
    rank = Rank(host_slots=1000, capacity=80)
    for number in range(9):
        for _ in range(2):
            rank.serve(rag(A, head=[100 + number]))
    rank.idle()
    rank.forward()
    assert rank.store.held.lowest() is not None  # which brings the order up to date
    stays = mock.Mock(wraps=rank.store.held._stays)
    rank.store.held.stay_if(stays)
    lowest = rank.store.held.lowest()
    assert isinstance(lowest, HostNode)
    assert lowest.identity.chunk == chunk_id(A)
    stays.assert_called_once_with(lowest)


# With a storage


def test_chain_of_the_storage_is_moved(disk: Disk) -> None:
    """Of its entries one is loaded for a request that wants it elsewhere; it is there once."""
    rank = disk.server(host_slots=100, capacity=80)
    for _ in range(2):
        rank.serve(rag(A, B))
    rank.idle()
    rank.forward()
    told = disk.settle()
    assert told["num_entries"] == 3  # the head, A, B
    rank = disk.restarted(host_slots=100, capacity=80)
    req = fused(C, B)
    rank.cache.arrived(req)
    disk.settle()
    assert exact(rank, B) == [False]
    (found,) = rank.stored(B)
    assert (found.start, found.prefix, found.head) == (len(HEAD + A), (chunk_id(A),), str(HEAD))
    assert wheres(rank.ask(req)) == ["gap", "host"]
    assert disk.settle()["num_entries"] == 3, "nothing is written twice"
    assert rank.fuser.tier is not None
    (stored,) = rank.fuser.tier.storage.index.find(rank.fuser.tier._chunk(identity(B)))
    assert stored.num_uses == 1, "as the request that found it has counted"


def test_exact_chain_replaces_what_was_loaded_to_be_moved(disk: Disk) -> None:
    rank = disk.server(host_slots=100, capacity=80)
    for _ in range(2):
        rank.serve(rag(A, B))
    rank.idle()
    rank.forward()
    rank = disk.restarted(host_slots=100, capacity=80)
    rank.cache.arrived(fused(C, B))
    disk.settle()
    req = rag(A, B)
    rank.cache.arrived(req)
    disk.settle()
    assert (exact(rank, A), exact(rank, B)) == ([True], [True])
    assert rank.serve(req) == len(HEAD + A + B)
    assert rank.cache.tiers.host.stats()["tokens"] == len(HEAD + A + B)


def test_captured_variants_survive_the_server(disk: Disk) -> None:
    """In slots here, in bytes there."""
    disk.server(host_slots=100, capacity=80).store_chunks(A, B)
    assert disk.settle()["written"] == 2
    rank = disk.restarted(host_slots=100, capacity=80)
    assert rank.fuser.tier is not None
    assert rank.fuser.tier.load_most_used(share=max(len(A), len(B)) / 100) == 1, (
        "of a share of the pool no more"
    )
    assert rank.fuser.tier.load_most_used() >= 1
    assert wheres(rank.ask(fused(D, B))) == ["gap", "host"]
    (found,) = rank.stored(B)
    assert isinstance(found, Variant)
    assert found.start == len(HEAD + A)


@pytest.mark.parametrize("problem", ["gone", "damaged", "failing"])
def test_slots_of_a_load_that_fails_are_given_back(disk: Disk, problem: str) -> None:
    disk.server(host_slots=100, capacity=80).store_chunks(A)
    disk.settle()
    rank = disk.restarted(host_slots=100, capacity=80)
    if problem == "gone":
        disk.storage.held.clear()
    elif problem == "damaged":
        for data in disk.storage.held.values():
            data[-1] ^= 1
    else:
        disk.storage.fails = True
    rank.cache.arrived(fused(A, head=OTHER_HEAD))
    disk.storage.fails = problem == "failing"
    disk.settle()
    disk.storage.fails = False
    host = rank.cache.tiers.host
    assert host.pool.num_free == host.pool.num_slots
    assert wheres(rank.ask(fused(A, head=OTHER_HEAD))) == []


def test_what_raises_at_a_loads_end_gives_its_slots_back(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk.server(host_slots=100, capacity=80).store_chunks(A)
    disk.settle()
    rank = disk.restarted(host_slots=100, capacity=80)
    monkeypatch.setattr(tier, "variant_of", lambda *args: 1 / 0)
    rank.cache.arrived(fused(A, head=OTHER_HEAD))
    disk.settle()
    assert rank.cache.tiers.host.pool.num_free == rank.cache.tiers.host.pool.num_slots


@pytest.mark.parametrize("comes", ["captured", "loaded"])
def test_variant_keeps_its_slots_where_a_watcher_raises(
    disk: Disk, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    """The store has it by then: slots given back would be overwritten under it."""
    rank = disk.server(host_slots=100, capacity=80)
    if comes == "loaded":
        rank.store_chunks(A)
        rank = disk.restarted(host_slots=100, capacity=80)
    with monkeypatch.context() as patch:
        patch.setattr(rank.store, "watchers", [*rank.store.watchers, lambda *told: 1 / 0])
        if comes == "captured":
            rank.store_chunks(A)
        else:
            rank.cache.arrived(fused(A, head=OTHER_HEAD))
        disk.settle()
    (found,) = rank.stored(A)
    assert not found.blob.is_given_back
    assert rank.cache.tiers.host.pool.num_free == rank.cache.tiers.host.pool.num_slots - len(A)
    rank.store.clear()
    disk.settle()
    assert rank.cache.tiers.host.pool.num_free == rank.cache.tiers.host.pool.num_slots


def test_reference_pass_that_fails_to_save_gives_all_slots_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `FusionPass` does."""
    rank = Rank(host_slots=100, capacity=80)
    pool, saved = rank.cache.tiers.host.pool, []
    save = pool.save

    def fail_the_second(*slots: Any) -> None:
        saved.append(slots)
        if len(saved) == 2:
            raise RuntimeError("planted")
        save(*slots)

    monkeypatch.setattr(pool, "save", fail_the_second)
    rank.serve(rag(A, B, keep=[0, 1]), answer=[50])
    rank.forward()
    assert rank.fuser.stats()["fallbacks"] == {"capture_failed": 2}
    assert pool.num_free == pool.num_slots


def test_chain_whose_parent_is_read_is_written_without_a_gap(disk: Disk) -> None:
    """A pending move holds A, which nobody writes; B behind it is new."""
    rank = disk.server(host_slots=100, capacity=80)
    for _ in range(2):
        rank.serve(rag(A))
    rank.idle()
    rank.forward()
    disk.settle()
    rank.cache.tiers.storage.clear()
    disk.settle()
    (a,) = rank.stored(A)
    rank.serve(rag(A, B))
    a.blob.hold()
    rank.serve(rag(A, B))
    rank.idle()
    rank.forward()
    disk.settle()
    a.blob.let_go()
    assert rank.fuser.tier is not None
    entries = rank.fuser.tier.storage.index.held
    assert sorted(map(depth, entries)) == [0, 1, 2]
