"""One copy of what comes from host memory, and of what has left the tree: who loads which rows, and
whose they are."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("sglang")

from radix_ext.costs import Line, Phase
from sglang_chunkcache.fusion import sharing
from sglang_chunkcache.fusion.outcome import outcome_of
from sglang_chunkcache.wire.report import Fallback
from tests.kit.fused import Disk, Rank, disk, report, sources, wheres
from tests.kit.requests import A, E, asks, fused, rag
from tests.reference.one_copy import MappedContents
from tests.reference.scheduler import FakeReq

__all__ = ["disk"]  # the fixture

HALF = asks("query", 0.5)
"""Recomputes the first half of what is moved."""


def make_rank(**knobs: Any) -> Rank:
    """The store has A and E, the tree has nothing."""
    rank = Rank(capacity=80, prefill_budget=1000, one_copy="on", **knobs)
    rank.store_chunks(A, E)
    rank.evict(80)
    return rank


def moved(head: int, **fields: Any) -> FakeReq:
    """E behind a head of its own, of so many tokens."""
    return fused(E, head=[100 + head] * head, **fields)


def num_loaded(rank: Rank) -> int:
    contents = rank.contents.slots
    assert isinstance(contents, MappedContents)
    return contents.num_loaded


def run(rank: Rank, *reqs: FakeReq) -> None:
    """Prefilled in one batch, and running."""
    for req in reqs:
        assert rank.add(req, 100) is not None
    rank.forward()
    for req in reqs:
        rank.sample(req, 50)
    rank.check(rank.running)


def end(rank: Rank, *reqs: FakeReq) -> None:
    for req in reqs:
        rank.release(req, is_insert=True)
    rank.check(rank.running)


def test_batch_loads_a_chunk_once() -> None:
    """As it was computed: each reads it at its own place."""
    rank, reqs = make_rank(), [moved(3), moved(5)]
    run(rank, *reqs)
    assert [wheres(report(req)) for req in reqs] == [["host"], ["host"]]
    assert [report(req).shared for req in reqs] == [0, len(E)]
    assert (num_loaded(rank), rank.allocator.slot_map.num_saved) == (len(E), len(E))
    end(rank, *reqs)


def test_later_requests_share_while_a_row_lives() -> None:
    """The first one has ended, and its node has left the tree, while the second reads its rows."""
    rank, reqs = make_rank(), [moved(head) for head in (2, 3, 4, 5)]
    for now, before in zip(reqs[:3], [None, *reqs[:2]], strict=True):
        run(rank, now)
        if before is not None:
            end(rank, before)
        rank.evict(80)
    assert [report(req).shared for req in reqs[:3]] == [0, len(E), len(E)]
    assert num_loaded(rank) == len(E)
    end(rank, reqs[2])
    rank.evict(80)
    assert rank.allocator.slot_map.num_used == 0
    run(rank, reqs[3])
    assert (report(reqs[3]).shared, num_loaded(rank)) == (0, 2 * len(E))
    end(rank, reqs[3])


def test_what_lives_on_the_device_is_priced_as_there() -> None:
    """Though its source is in host memory, from where loading would not pay."""
    rank, first = make_rank(), moved(3, fusion=replace(asks(), always=True))
    computed = dict.fromkeys((Phase.EXTEND, Phase.RECOMPUTE), Line(each=1.0))
    free = {phase: Line() for phase in Phase}
    rank.fuser.pricing.costs = {**free, **computed, Phase.HOST: Line(fixed=1000.0)}
    run(rank, first)
    run(rank, second := moved(4))
    end(rank, first, second)
    rank.evict(80)
    run(rank, last := moved(5))
    assert [report(req).relocated for req in (first, second, last)] == [len(E), len(E), 0]
    assert (wheres(report(second)), num_loaded(rank)) == (["host"], len(E))
    assert report(last).fallbacks == (Fallback.NOT_WORTH_IT,)
    end(rank, last)


def test_copy_that_has_left_the_tree_is_shared_as_its_twin_in_the_store() -> None:
    rank = make_rank()
    rank.store_chunks(E, head=[7])
    reader, late = moved(3), moved(4)
    run(rank, reader)
    rank.evict(80)
    assert rank.node([7], E) is None
    run(rank, late)
    assert (wheres(report(reader)), wheres(report(late))) == (["device"], ["host"])
    assert (report(late).shared, num_loaded(rank)) == (len(E), 0)
    end(rank, reader, late)


def test_what_was_recomputed_is_loaded_for_others() -> None:
    """Its row has the first request's own KV by then."""
    rank, own, late = make_rank(), moved(3, fusion=HALF), moved(4)
    run(rank, own)
    run(rank, late)
    assert (report(own).shared, report(late).shared) == (0, len(E) // 2)
    assert num_loaded(rank) == len(E) + len(E) // 2
    end(rank, own, late)


@pytest.mark.parametrize("is_read_by_another", [False, True])
def test_own_rows_take_no_more_than_copies_would(is_read_by_another: bool) -> None:
    """What nobody else reads is recomputed where it was loaded, and is others' no more."""
    rank, own = make_rank(), moved(3, fusion=HALF)
    run(rank, own, *([moved(4)] if is_read_by_another else []))
    first, second = (rank.allocator.slot_map.rows(s) for s in _halves(rank, own))
    num_more = len(E) // 2 if is_read_by_another else 0
    assert len({*first.tolist(), *second.tolist()}) == len(E)
    used = sum(len(req.all_ids) - 1 for req in rank.running) - num_more
    assert rank.allocator.slot_map.num_used == used
    end(rank, *rank.running)


def _halves(rank: Rank, req: FakeReq) -> Any:
    return rank.rows.req_to_token[req.kv.req_pool_idx, 3 : 3 + len(E)].long().chunk(2)


def test_what_the_storage_has_is_loaded_once_after_a_restart(disk: Disk) -> None:
    rank = disk.restarted(A, E, capacity=80, prefill_budget=1000, one_copy="on")
    reqs = [moved(3), moved(5)]
    for req in reqs:
        rank.cache.arrived(req)
    disk.settle()
    run(rank, *reqs)
    assert [wheres(report(req)) for req in reqs] == [["host"], ["host"]]
    assert ([report(req).shared for req in reqs], num_loaded(rank)) == ([0, len(E)], len(E))
    end(rank, *reqs)
    rank.evict(80)
    assert rank.allocator.slot_map.num_used == 0


def test_what_has_failed_to_come_is_loaded_by_whoever_shares_it() -> None:
    """The second request shares rows that the first one's pass was to fill."""
    rank, reqs = make_rank(), [moved(3), moved(4)]
    assert all(rank.add(req, 100) is not None for req in reqs)
    first, second = rank.batch
    rank.batch, rank.fusion_pass.fails = [first], "early"
    rank.forward()
    assert num_loaded(rank) == 0
    rank.batch = [second]
    rank.forward()
    assert num_loaded(rank) == len(E)
    for req in reqs:
        rank.sample(req, 50)
    assert report(reqs[0]).fallbacks == (Fallback.PASS_FAILED,)
    assert (report(reqs[1]).fallbacks, report(reqs[1]).shared) == ((), len(E))
    end(rank, *reqs)


def test_tenants_share_nothing() -> None:
    rank = make_rank()
    rank.store_chunks(E, cache_salt="theirs")
    rank.evict(80)
    run(rank, first := moved(3))
    run(rank, stranger := moved(4, extra_key="nothing is stored for"))
    assert report(stranger).sources == ()
    end(rank, first, stranger)
    rank.evict(80)
    reqs = [moved(3), moved(4, cache_salt="theirs")]
    run(rank, *reqs)
    assert [report(req).shared for req in reqs] == [0, 0]
    assert num_loaded(rank) == 3 * len(E)
    end(rank, *reqs)


def test_rows_that_are_shared_stay_while_room_is_made_for_the_rest() -> None:
    """They are evictable: the request that had them has ended."""
    rank = make_rank()
    run(rank, first := moved(8))
    end(rank, first)
    others = rank.allocator.alloc(rank.allocator.slot_map.num_free - 4)
    late = fused([*range(40, 50)], E, head=[104])
    assert rank.add(late, 100) is not None
    assert rank.node([108] * 8, E, recipe="r") is None, "it was evicted for the gap"
    rank.allocator.free(others)
    rank.forward()
    rank.sample(late, 50)
    assert (report(late).shared, num_loaded(rank)) == (len(E), len(E))
    end(rank, late)


def test_rows_are_a_source_while_they_live() -> None:
    """Of a chunk that neither the tree nor the store has any more. A share of a share turns from
    where the row was computed."""
    rank, reqs = Rank(capacity=80, prefill_budget=1000, one_copy="on"), [moved(3), moved(4)]
    rank.serve(fused(A, E, head=[7]))
    for req in reqs:
        run(rank, req)
        rank.evict(80)
    assert rank.node([7], A, E) is None
    assert [wheres(report(req)) for req in reqs] == [["device"], ["device"]]
    assert sources(report(reqs[1])) == sources(report(reqs[0])), "the same evidence"
    end(rank, reqs[0])
    rank.evict(80)
    run(rank, last := moved(5))
    assert [report(req).shared for req in (*reqs, last)] == [len(E)] * 3
    assert num_loaded(rank) == 0
    end(rank, reqs[1], last)
    rank.evict(80)
    assert rank.ask(moved(6)).sources == (), "its last row is gone"


def test_rows_are_no_source_where_some_are_gone() -> None:
    """One that reads them has recomputed half. Another one that reads all makes up for it."""
    rank = Rank(capacity=80, prefill_budget=1000, one_copy="on")
    rank.serve(fused(A, E, head=[7]))
    run(rank, half := moved(3, fusion=HALF), whole := moved(4))
    rank.evict(80)
    run(rank, late := moved(5))
    assert report(late).shared == len(E)
    end(rank, whole, late)
    rank.evict(80)
    run(rank, later := moved(6))
    assert (report(half).shared, report(later).sources) == (len(E) // 2, ())
    assert Fallback.SOURCE_GONE not in report(later).fallbacks, "nothing was promised"
    end(rank, half, later)


def test_rows_that_are_awaited_are_no_source() -> None:
    """The variant that was to fill them has left the store."""
    rank, reqs = make_rank(), [moved(3), moved(4)]
    assert rank.add(reqs[0], 100) is not None
    rank.fuser.keeper.clear_store()
    assert rank.add(reqs[1], 100) is not None
    rank.forward()
    for req in reqs:
        rank.sample(req, 50)
    assert [wheres(report(req)) for req in reqs] == [["host"], []]
    assert Fallback.SOURCE_GONE not in report(reqs[1]).fallbacks, "nothing was promised"
    run(rank, late := moved(5))
    assert (wheres(report(late)), report(late).shared) == (["device"], len(E))
    end(rank, *reqs, late)


def test_rows_that_go_before_the_promise_are_missed() -> None:
    """As any source that is gone: the chunk is computed."""
    rank = Rank(capacity=80, prefill_budget=1000, one_copy="on")
    rank.serve(fused(A, E, head=[7]))
    run(rank, reader := moved(3))
    rank.evict(80)
    late = moved(4)
    rank.match(late)
    end(rank, reader)
    rank.evict(80)
    assert rank.fuser.commit(late, late.last_node) is None
    assert outcome_of(late).declined == [Fallback.SOURCE_GONE]
    assert rank.allocator.slot_map.num_used == 0


def test_chunk_forgets_places_whose_rows_are_gone() -> None:
    """It is asked for all the time, and always comes from another place."""
    rank = Rank(capacity=80, prefill_budget=1000, one_copy="on")
    for head in range(4):
        rank.serve(rag(A, E, head=[100 + head]))
        rank.together(fused(E, head=[100 + head]))
        rank.evict(80)
    assert rank.fusion_pass.sharing is not None
    assert [len(known) for known in rank.fusion_pass.sharing._known.values()] == [1]


def test_flush_forgets_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """And rows that nothing means any more are not remembered for ever."""
    monkeypatch.setattr(sharing, "SWEPT_FROM", 1)
    rank = make_rank()
    known = rank.fusion_pass.sharing
    assert known is not None
    known._sweep_at = 1
    for chunk in (E, A, E, A):
        rank.together(fused(chunk, head=[9, 9, 9]))
        rank.evict(80)
    assert len(known._known) <= 2
    rank.flush()
    assert not known._known
    assert rank.ask(moved(3)).sources == ()
    assert rank.allocator.slot_map.num_given > 0, "a row's number would be another's"
