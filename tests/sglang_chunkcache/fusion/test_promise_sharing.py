"""`Fuser` where chunks keep their source's position and share its slots (FusionRAG 4.3), case by case as in test_promise.py."""

from __future__ import annotations

from unittest import mock

import pytest

pytest.importorskip("sglang")

from radix_ext import IntegrityError
from sglang_chunkcache.fusion import promise
from sglang_chunkcache.scheduler.node import facts
from sglang_chunkcache.wire.report import Fallback
from tests.reference.fused_scheduler import FusedScheduler
from tests.reference.scheduler import FakeReq
from tests.sglang_chunkcache.fusion.test_promise import (
    HEAD,
    QUESTION,
    A,
    B,
    C,
    D,
    asks,
    finish,
    fused,
    make_scheduler,
    node_of,
    rag,
    report,
    start_of,
)

E = [9, 8, 9, 8]
"""As long as A and D: the chunks after it keep their positions."""
B_PLACE = slice(len(HEAD) + len(A), len(HEAD) + len(A) + len(B))


def row_of(scheduler: FusedScheduler, req: FakeReq) -> list[int]:
    """The request's slots of B."""
    return scheduler.slots(req, B_PLACE.start, B_PLACE.stop)


def test_chunk_that_keeps_its_position_has_its_sources_slots() -> None:
    """Nothing is copied and nothing taken: only D and what is prefilled need slots."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    source = node_of(scheduler, HEAD, A, B)
    before, free = (
        [scheduler.contents.slots[slot] for slot in source.value.tolist()],
        scheduler.allocator.available_size(),
    )
    req = fused(D, B)
    assert scheduler.admit(req, 100) == B_PLACE.stop
    assert row_of(scheduler, req) == source.value.tolist()
    assert [scheduler.contents.slots[slot] for slot in source.value.tolist()] == before
    assert free - scheduler.allocator.available_size() == len(D) + len(QUESTION)
    scheduler.check([req])
    finish(scheduler, req)
    told = report(req)
    assert (told.relocated, told.recomputed, told.shared) == (3, 0, 3)
    assert scheduler.cache.stats()["shared"] == {"tokens": 3, "bytes": 30, "tokens_ever": 3, "bytes_ever": 30}
    scheduler.check()


def test_critical_tokens_have_slots_of_their_own() -> None:
    """Two of three are recomputed, into two new slots; the source's hold what they held."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    source = node_of(scheduler, HEAD, A, B)
    before = [scheduler.contents.slots[slot] for slot in source.value.tolist()]
    req = fused(D, B, fusion=asks("query", 0.5))
    scheduler.admit(req, 100)
    shared = [mine == theirs for mine, theirs in zip(row_of(scheduler, req), source.value.tolist(), strict=True)]
    assert shared == [False, False, True]
    assert [scheduler.contents.slots[slot] for slot in source.value.tolist()] == before
    assert req.prefix_indices.tolist() == scheduler.slots(req, 0, B_PLACE.stop)
    scheduler.check([req])
    finish(scheduler, req)
    assert (report(req).recomputed, report(req).shared) == (2, 1)
    scheduler.check()


def test_chunk_recomputed_in_full_shares_nothing() -> None:
    """And the tree's books are closed again."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    req = fused(D, B, fusion=asks("query", 1.0))
    scheduler.serve(req, answer=[50])
    assert (report(req).recomputed, report(req).shared) == (3, 0)
    assert scheduler.cache.stats()["shared"]["tokens"] == 0
    scheduler.check()


def test_exclusive_slots_off_copies() -> None:
    """As everywhere else."""
    scheduler = make_scheduler(exclusive_slots="off")
    scheduler.serve(rag(A, B))
    req = fused(D, B)
    scheduler.admit(req, 100)
    assert not set(row_of(scheduler, req)) & set(node_of(scheduler, HEAD, A, B).value.tolist())
    finish(scheduler, req)
    assert report(req).shared == 0
    scheduler.check()


def test_two_requests_of_a_batch_recompute_different_tokens_of_one_chunk() -> None:
    """Each has its own; what neither recomputes is held three times."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    source = node_of(scheduler, HEAD, A, B)
    one, two = fused(D, B, fusion=asks("query", 0.3)), fused(E, B, fusion=asks("query", 0.6, "s"))
    assert [start_of(scheduler, req) for req in (one, two)] == [B_PLACE.stop] * 2
    scheduler.check([one, two])
    scheduler.forward()
    scheduler.check([one, two])
    rows = [source.value.tolist(), row_of(scheduler, one), row_of(scheduler, two)]
    assert [len(set(slots)) for slots in zip(*rows, strict=True)] == [3, 2, 1]
    finish(scheduler, one, two)
    assert scheduler.cache.stats()["shared"]["tokens"] == 3
    scheduler.check()


def test_request_of_the_same_batch_sees_slots_taken_later() -> None:
    """It has matched the promised nodes with the source's slots; its row and prefix have the critical tokens' slots, too."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    policy = asks("query", 0.5)
    one, two = fused(D, B, fusion=policy), fused(D, B, fusion=policy, tail=[40, 41])
    assert [start_of(scheduler, req) for req in (one, two)] == [B_PLACE.stop] * 2
    scheduler.forward()
    assert row_of(scheduler, one) == row_of(scheduler, two) == two.prefix_indices[B_PLACE].tolist()
    scheduler.evict(100)
    scheduler.check([one, two])
    finish(scheduler, one, two)
    scheduler.check()


def test_slots_outlive_their_source() -> None:
    """They leave with their last holder; an evicted source frees the slots that no other node holds."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B, tail=[30]))
    req = fused(D, B, fusion=asks("query", 0.5))
    scheduler.admit(req, 100)
    free = scheduler.allocator.available_size()
    assert scheduler.evict(100) == len(A) + 2 + 1  # B's two recomputed tokens and the question's last slot
    assert node_of(scheduler, HEAD, A, B) is None
    assert scheduler.allocator.available_size() == free + len(A) + 3
    scheduler.check([req])
    finish(scheduler, req)
    scheduler.check()
    scheduler.evict(100)
    assert scheduler.allocator.available_size() == 60


def test_source_outlives_those_who_share_it() -> None:
    """An exact request for it finds it."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B), answer=[50])
    scheduler.serve(fused(D, B), answer=[50])
    keeper = rag(A, B, tail=[60, 61])
    scheduler.admit(keeper, 100)
    scheduler.evict(100)
    assert node_of(scheduler, HEAD, D, B, recipe="r") is None
    scheduler.check([keeper])
    finish(scheduler, keeper)
    assert scheduler.cache.stats()["shared"]["tokens"] == 0
    scheduler.check()


def test_source_whose_slots_a_running_request_holds_is_evicted_last() -> None:
    """Old as it is, it is worth keeping: no slot would be free without it."""
    scheduler = make_scheduler(eviction="lru")
    scheduler.serve(rag(A, B, tail=[30]), answer=[50])
    req = fused(D, B)
    scheduler.admit(req, 100)
    scheduler.serve(FakeReq(range(200, 210)))
    scheduler.evict(1 + 10)  # the first request's question, and the plain one
    assert node_of(scheduler, HEAD, A, B) is not None
    scheduler.check([req])


@pytest.mark.parametrize("exclusive_slots", ["on", "off"])
@pytest.mark.parametrize("eviction", ["lru", "reused"])
def test_cold_chunks_leave_before_hot_ones(eviction: str, exclusive_slots: str) -> None:
    """Also where two that no request asks for any more share slots: alone neither frees them, and what is left of the pool would
    be theirs and their prefixes' for good."""
    scheduler = make_scheduler(100, eviction=eviction, exclusive_slots=exclusive_slots, window_requests=3)
    scheduler.serve(rag(A, B))
    scheduler.serve(fused(D, B))
    for token in range(100, 110):
        scheduler.serve(rag(C, tail=[token]))
    while node_of(scheduler, HEAD, A) or node_of(scheduler, HEAD, D):
        assert scheduler.evict(1)
        assert node_of(scheduler, HEAD, C) is not None
    scheduler.check()


def test_room_for_critical_tokens_is_reserved() -> None:
    """Taken with the promise: neither a later promise nor an extend gets it, and what is not needed is given back."""
    scheduler = make_scheduler(limits={})
    scheduler.serve(rag(A, B))
    free = scheduler.allocator.available_size()
    policy = asks("query", 0.3)  # one token, at most two
    req = fused(D, B, fusion=policy)
    start_of(scheduler, req)
    assert free - scheduler.allocator.available_size() == len(D) + 2
    assert scheduler.cache.num_reserved == 2
    scheduler.check([req])
    scheduler.evict(100)
    scheduler.check([req])
    scheduler.forward()
    assert scheduler.cache.num_reserved == 0
    scheduler.check([req])
    finish(scheduler, req)
    assert report(req).recomputed == 1


def test_promise_without_room_for_its_critical_tokens_is_declined() -> None:
    """One slot short."""
    held = len(HEAD) + len(A) + len(B)
    for spare, expected in ((len(D) + 2, B_PLACE.stop), (len(D) + 1, len(HEAD))):
        scheduler = make_scheduler(held + 20 + spare, prefill_budget=20)
        scheduler.serve(rag(A, B, tail=[30]))
        assert scheduler.admit(fused(D, B, fusion=asks("query", 0.3), tail=[30]), 100) == expected


def test_critical_tokens_without_slots_stay_as_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Should a selector take more than was foreseen, nothing is written into the source's slots, and it is told."""
    monkeypatch.setattr("sglang_chunkcache.fusion.promise.max_critical", lambda *args: 1)
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    req = fused(D, B, fusion=asks("query", 0.9))
    scheduler.serve(req, answer=[50])
    assert report(req).fallbacks == (Fallback.NO_OWN_SLOTS,)
    assert (report(req).recomputed, report(req).shared) == (1, 2)
    scheduler.check()


@pytest.mark.parametrize(("capacity", "recomputed"), [(60, 3), (36, 1)], ids=["roomy", "full"])
def test_failing_pass_computes_what_has_slots(capacity: int, recomputed: int) -> None:
    """All of it where slots are free; else shared KV stays as moved, which is KV all the same."""
    scheduler = make_scheduler(capacity)
    scheduler.serve(rag(A, B, tail=[30, 31]))
    keeper = rag(A, B, tail=[30, 31])
    scheduler.admit(keeper, 100)  # one slot can be evicted
    scheduler.fusion_pass.fails = True
    req, plain = fused(D, B), FakeReq(range(100, 117))
    assert start_of(scheduler, req) == B_PLACE.stop
    assert start_of(scheduler, plain) == 0
    scheduler.forward()
    scheduler.check([req, keeper, plain])
    scheduler.release(plain, is_insert=False)
    finish(scheduler, req)
    assert report(req).fallbacks == (Fallback.PASS_FAILED,)
    assert (report(req).recomputed, report(req).shared) == (recomputed, 3 - recomputed)
    scheduler.check([keeper])


def test_flush_forgets_shared_slots() -> None:
    """Pool and books are as new."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    start_of(scheduler, fused(D, B, fusion=asks("query", 0.5)))
    scheduler.flush()
    scheduler.batch.clear()
    assert scheduler.cache.stats()["shared"]["tokens"] == 0
    scheduler.check()


def test_check_integrity_names_shared_slots_that_are_not_booked() -> None:
    """Two nodes with one slot free it twice."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    scheduler.serve(fused(D, B))
    scheduler.cache.shared.leave(facts(node_of(scheduler, HEAD, D, B, recipe="r")).holding)
    with pytest.raises(IntegrityError, match="two owners"):
        scheduler.cache.check_integrity()


@pytest.mark.parametrize("step", ["_insert", "move_of", "share", "OwnSlots"])
def test_error_in_the_middle_of_a_commit_takes_nothing(monkeypatch: pytest.MonkeyPatch, step: str) -> None:
    """Locks, slots and nodes are as before, each slot with one owner."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    before = sorted(scheduler.tree_slots()), scheduler.allocator.available_size(), scheduler.cache.num_reserved
    owner = {"share": scheduler.cache, "_insert": scheduler.fuser}.get(step, promise)
    monkeypatch.setattr(owner, step, mock.Mock(side_effect=RuntimeError("planted")))
    with pytest.raises(RuntimeError, match="planted"):
        scheduler.admit(fused(D, B, fusion=asks("query", 0.5)), 100)
    after = sorted(scheduler.tree_slots()), scheduler.allocator.available_size(), scheduler.cache.num_reserved
    assert after == before
    scheduler.cache.check_integrity()
