"""`Fuser` in the scheduler's order of calls, case by case;
test_promise_model.py drives it through random lives."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from sglang.srt.mem_cache.base_prefix_cache import CacheRequestOutcome

from radix_ext import IntegrityError
from radix_ext.costs import Line, Phase
from radix_ext.moved_plan import make_plan
from sglang_chunkcache.fusion import planning, promises
from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.scheduler.reporting import rank_state
from sglang_chunkcache.wire.report import Fallback
from sglang_chunkcache.wire.state import Asked, Cleared
from tests.kit import releases
from tests.kit.cache_integrity import check_integrity
from tests.kit.costs import EACH, GROWING
from tests.kit.fused import Rank, report, sources, wheres
from tests.kit.requests import HEAD, OTHER_HEAD, QUESTION, A, B, C, D, E, ahead, asks, fused, rag
from tests.reference.scheduler import FakeReq, answer_of

pytestmark = pytest.mark.matrix


# What is moved


def test_fused_kv_is_found_again_by_its_recipe_only() -> None:
    """The second request finds it into its question. Exact ones never see it nor report it."""
    rank = Rank(rag(A, B))
    again, other, exact = fused(B), fused(B, fusion=asks(recipe="s")), rag(B)
    found = [rank.serve(req, answer=[50]) for req in (fused(B), again, other, exact)]
    assert found == [5, 7, 5, 2]
    assert [report(req).fused_hit for req in (again, other)] == [5, 0]
    assert answer_of(exact).report is None


def test_gap_in_front_of_the_first_moved_chunk_is_exact() -> None:
    """Computed on nothing but exact KV, it serves everybody."""
    rank = Rank(rag(A, C))
    assert rank.together(fused(D, C)) == [len(HEAD + D + C)]
    assert rank.node(HEAD, D) is not None
    assert rank.node(HEAD, D, C, recipe="r") is not None
    assert rank.serve(rag(D, C)) == len(HEAD + D)


def test_promoted_chunk_is_computed_exactly_for_those_who_follow() -> None:
    """B could be moved as well as C; computed after the exact prefix it is found by everybody."""
    rank, wish = Rank(rag(A, B, C), capacity=100), {"grows": True, "promoted_len": 2}
    rank.fuser.pricing.costs = GROWING
    assert wheres(rank.ask(fused(B, C, **wish))) == ["gap", "device"]
    assert rank.node(HEAD, B) is not None
    assert rank.node(HEAD, B, C, recipe="r") is not None
    assert rank.serve(rag(B, C)) == len(HEAD + B)
    told = rank.ask(fused(B, C, fusion=asks(recipe="other"), **wish))
    assert (told.relocated, told.gap) == (0, 0), "the exact request has computed C after B"


def test_chain_does_not_grow_where_that_is_dear() -> None:
    rank = Rank(rag(A, B, C), capacity=100)
    rank.fuser.pricing.costs = EACH
    assert wheres(rank.ask(fused(B, C, promoted_len=2, grows=True))) == ["device", "device"]


@pytest.mark.parametrize(
    ("promoted_len", "grows", "is_found"), [(0, True, False), (2, False, False), (2, True, True)]
)
def test_chain_does_not_grow_otherwise(promoted_len: int, grows: bool, is_found: bool) -> None:
    """It is not promoted, nobody asks for it, or the prompt goes on in fused KV that was found."""
    rank = Rank(rag(A, B, C), *[fused(B)] * is_found, capacity=100)
    rank.fuser.pricing.costs = GROWING
    told = rank.ask(fused(B, C, promoted_len=promoted_len, grows=grows))
    assert wheres(told) == ["device"] * (1 if is_found else 2)
    assert rank.node(HEAD, B) is None
    assert rank.node(HEAD, B, C, recipe="r") is not None


def test_gap_behind_a_moved_chunk_is_approximate() -> None:
    """It was computed on moved KV, so it hangs below the recipe; as a source it may be moved on."""
    rank = Rank(rag(A, B, C), fused(B, D, C), capacity=100)
    assert rank.node(HEAD, B, D, recipe="r") is not None
    assert rank.serve(rag(B, D)) == len(HEAD)
    rank.evict(9)  # the exact request's own
    told = rank.ask(fused(D, head=OTHER_HEAD))
    assert sources(told) == [(None, "gap", 0, 0, None), (0, "device", 1, 0, 1)]


def test_critical_tokens_are_recomputed_and_counted() -> None:
    told = Rank(rag(C, A, B)).ask(fused(D, A, B, fusion=asks("query", 0.5)))
    assert (told.exact, told.relocated, told.recomputed, told.gap) == (2, 3, 4, 4)
    assert (told.fused_hit, told.focused, told.fallbacks) == (0, None, ())
    moved = [(1, "device", 1, 0, 1), (2, "device", 2, 1, 0.5)]
    assert sources(told) == [(0, "gap", 0, 0, None), *moved]
    assert "lookup" in told.ms


@pytest.mark.parametrize("other", [{"extra_key": "x"}, {"cache_salt": "x"}])
def test_tenants_do_not_share_sources(other: dict[str, Any]) -> None:
    rank = Rank(capacity=100)
    rank.store_chunks(A, B, keep=[1])
    stranger = fused(B, head=[], **other)
    assert rank.serve(stranger, answer=[50]) == 0
    assert report(stranger).fallbacks == (Fallback.NO_SOURCE,)
    assert rank.serve(fused(B, head=[])) == 3


def test_queue_is_ordered_by_what_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 128 waiting requests a round one or two are admitted: only these are planned."""
    rank = Rank(rag(A, B), fused(B))
    plan = mock.Mock(side_effect=make_plan)
    monkeypatch.setattr(planning, "make_plan", plan)
    waiting = [fused(B, A), fused(B, C), fused(A, C), rag(A, C)]
    for req in waiting * 3:
        rank.queue(req)
    assert [releases.found(req) for req in waiting] == [2, 2, 6, 6]
    assert not any(req.host_hit_length for req in waiting)
    assert not plan.called
    req = waiting[0]
    assert (rank.match(req), req.host_hit_length, plan.call_count) == (5, 4, 1)
    rank.queue(req)  # it was not admitted, and nothing is promised to it any more
    assert (releases.found(req), req.host_hit_length, state(req).fused) == (2, 0, None)
    assert rank.serve(req) == 9


# Promises


def test_source_that_left_since_the_match_is_computed() -> None:
    rank, req = Rank(rag(A, B)), fused(B)
    rank.evicted_before_load_back = len(QUESTION + B)
    assert rank.together(req) == [2]
    assert report(req).fallbacks == (Fallback.SOURCE_GONE,)
    assert rank.cache.stats()["fallbacks"] == {Fallback.SOURCE_GONE: 1}
    assert rank.node(HEAD, B) is not None


@pytest.mark.parametrize(
    ("capacity", "prefill_budget", "is_chunked", "tail_len", "found"),
    [(15, 20, True, 3, 2), (16, 20, True, 3, 5), (31, 6, False, 19, 2), (32, 6, False, 19, 5)],
)
def test_promise_leaves_room_for_the_batchs_extends(
    capacity: int, prefill_budget: int, is_chunked: bool, tail_len: int, found: int
) -> None:
    """SGLang dies where an admitted batch finds no slots. Nothing runs that would free any."""
    rank = Rank(capacity=capacity, prefill_budget=prefill_budget, is_chunked=is_chunked)
    # 10 slots, 9 of them are the source and what it stands on
    rank.serve(rag(A, B, tail=[30]))
    req = fused(B, tail=range(100, 100 + tail_len))
    assert rank.together(req) == [found]
    assert report(req).fallbacks == ((Fallback.NO_ROOM,) if found == 2 else ())


def test_promise_waits_for_slots_that_others_will_free() -> None:
    """And holds nothing meanwhile. Who has left the queue waits no more."""
    rank = Rank(rag(A, B, tail=[30]), capacity=20)
    running, req, gone = rag(C, tail=range(100, 106)), fused(B), fused(B)
    rank.start(running)
    rank.forward()
    before = rank.allocator.available_size(), rank.cache.evictable_size()
    for _ in range(3):
        assert [rank.add(req, 100), rank.add(gone, 100)] == [None, None]
        rank.check([running])
        assert (rank.allocator.available_size(), rank.cache.evictable_size()) == before
    assert rank.cache.stats()["waiting"] == {"no_room": 2, "now": 2}
    rank.cache.finish(SimpleNamespace(rid=gone.rid), CacheRequestOutcome.ABORT)
    rank.finish(running)
    assert rank.together(req) == [5]
    assert report(req).fallbacks == ()
    assert rank.cache.stats()["waiting"] == {"no_room": 2, "now": 0}


def test_error_amid_a_commit_takes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither slots nor locks."""
    rank = Rank(rag(A, B))
    before = sorted(rank.tree_slots()), rank.allocator.available_size()
    with monkeypatch.context() as patch:
        patch.setattr(promises, "move_of", mock.Mock(side_effect=RuntimeError("planted")))
        with pytest.raises(RuntimeError, match="planted"):
            rank.admit(fused(D, B, fusion=asks("query", 0.5)), 100)
    assert (sorted(rank.tree_slots()), rank.allocator.available_size()) == before
    rank.check()
    assert rank.serve(fused(D, B)) == len(HEAD + D + B)


@pytest.mark.parametrize(
    ("one", "two", "starts", "fates"),
    [
        (fused(B), fused(B, tail=[40, 41]), [5, 5], (2, 0, 3, ())),
        (fused(B), fused(B, fusion=asks(recipe="s")), [5, 5], (2, 0, 3, ())),
        (fused(B), fused(B, C), [5, 7], (2, 0, 5, ())),
        (fused(A, head=OTHER_HEAD), fused(B, head=OTHER_HEAD), [7, 6], (0, 0, 3, ())),
        (fused(A, head=OTHER_HEAD), fused(B, head=[95, 96, 99]), [7, 6], (0, 0, 3, ())),
        (fused(A, head=OTHER_HEAD), rag(D, head=OTHER_HEAD), [7, 0], None),
    ],
    ids=["alike", "other recipe", "goes on", "empty head", "head begins alike", "exact"],
)
def test_requests_of_one_batch(
    one: FakeReq, two: FakeReq, starts: list[int], fates: tuple[Any, ...] | None
) -> None:
    """None reads what another is promised: each is filled by itself. One of two alike stays."""
    rank = Rank(rag(A, B, C))
    assert rank.together(one, two) == starts
    if fates is not None:
        told = report(two)
        assert (told.exact, told.fused_hit, told.relocated, told.fallbacks) == fates


@pytest.mark.parametrize(
    ("chunks", "head", "load", "one", "two", "starts", "loaded"),
    [
        # the second finds nothing of what the first is promised, and all of that in host memory
        ([E], OTHER_HEAD, 5, fused(A, head=OTHER_HEAD), fused(E, A, head=OTHER_HEAD), [7, 15], 11),
        # what host memory has is copied first: the pass reads it
        ([E], HEAD, 0, rag(E), fused(E, head=OTHER_HEAD), [10, 11], 0),
        # D is moved for the first from host memory, which does not make it exact for the second
        ([D, E], HEAD, 7, fused(D, A), fused(D, E), [10, 14], 12),
    ],
    ids=["behind an empty head", "moved", "from the same pool"],
)
def test_load_of_the_same_batch(
    chunks: Any, head: Any, load: int, one: FakeReq, two: FakeReq, starts: Any, loaded: int
) -> None:
    """From host memory: by the second request (`loaded`), else by the first. A is on the device."""
    hosted = [rag(*chunks, head=head) for _ in range(2)]
    rank = Rank(*hosted, capacity=80, prefill_budget=40, host_slots=200)
    host = rank.cache.tiers.host
    while host.stats()["waiting"]:
        rank.forward()
    rank.evict(80)
    rank.serve(rag(A))
    host.pricing.agreed = {Phase.LOAD: Line(fixed=load), Phase.EXTEND: Line(each=1.0)}
    assert rank.together(one, two) == starts
    assert (state(one).loaded, state(two).loaded) == (max(0, len(E) - loaded), loaded)
    assert report(two).fallbacks == ()


def test_promise_waits_for_its_batch() -> None:
    """Until then nobody can match its slots, and its sources stay."""
    rank, req, other = Rank(rag(A, B)), fused(B), fused(B, A)
    rank.start(req, other)
    put_off, rank.batch = rank.batch[:1], rank.batch[1:]
    rank.forward()
    rank.check([req, other])
    rank.batch = put_off
    rank.finish(req, other)
    assert report(req).relocated == len(B)


def test_what_cannot_be_filled_fails_its_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client gets an error, others of the batch their answers, nobody finds anything of it, and
    the server goes on."""
    rank, req, exact = Rank(rag(A, B)), fused(B), rag(A)
    tree, run = sorted(rank.tree_slots()), rank.fuser.fusion_pass.run

    def fail(moves: Any) -> None:
        run(moves)  # as this model's forward reads no slot that holds nothing
        raise RuntimeError("no memory")

    rank.add(req, 4)
    rank.add(exact, 100)
    with monkeypatch.context() as patch:
        patch.setattr(rank.fuser.fusion_pass, "run", fail)
        rank.forward()
    assert "nor computed" in getattr(req, releases.DROPPED).message
    assert getattr(exact, releases.DROPPED) is None
    rank.stash(req)
    rank.prefill(req, 100)
    rank.release(req, is_insert=True)
    assert sorted(rank.tree_slots()) == tree
    rank.finish(exact)
    assert rank.serve(fused(B)) == len(HEAD + B)


# Ends of a request's life


@pytest.mark.parametrize(("num_evicted", "fates"), [(0, (2, 0, 3, 0)), (100, (0, 0, 3, 2))])
def test_retracted_before_its_first_token(num_evicted: int, fates: tuple[int, ...]) -> None:
    """It has inserted nothing, and is moved again."""
    rank, req = Rank(), fused(B)
    rank.store_chunks(A, B, keep=[1])
    rank.admit(req, 1)
    rank.release(req, is_insert=False)
    rank.evict(num_evicted)
    assert rank.together(req) == [5]
    told = report(req)
    assert (told.exact, told.fused_hit, told.relocated, told.gap) == fates


def test_retracted_after_its_first_token_goes_on_where_it_was() -> None:
    """Its output was computed on fused KV and is found under the recipe, not under exact keys."""
    rank, req = Rank(rag(A, B)), fused(B)
    rank.admit(req, 100)
    rank.sample(req, 50)
    for token in (51, 52):
        rank.decode(req, token)
    told = report(req)
    rank.release(req, is_insert=False)
    rank.check()
    assert rank.together(req) == [8]
    assert report(req) == told
    assert rank.serve(rag(B)) == 2


def test_prompt_cut_to_a_stub_is_survived() -> None:
    """So SGLang aborts a queued request, after we have planned for it."""
    rank, req = Rank(rag(A, B)), fused(B)
    rank.match(req)
    req.origin_input_ids = req.origin_input_ids[:1]
    rank.serve(req, answer=[50])


def test_forced_miss_computes_everything() -> None:
    """SGLANG_RADIX_FORCE_MISS takes the promise away too."""
    rank = Rank(rag(A, B), fused(B), capacity=100)
    rank.force_miss = True
    assert [rank.serve(fused(B, C), answer=[50]) for _ in range(2)] == [0, 0]


# Flush


def test_cleared_store_is_empty_and_the_tree_is_not() -> None:
    """What was preprocessed and what waits included; a promise under way is kept."""
    rank, req = Rank(), fused(B)
    for chunks in ([A], [A, B]):
        rank.serve(ahead(*chunks), answer=[50])
    rank.idle()
    rank.evict(100)
    assert rank.serve(rag(D, keep=[0]), answer=[50]) == 0
    assert rank.start(req) == [5]
    num_bytes = rank.store.stats().num_bytes
    cleared = rank_state(rank.cache, 0, Asked(clear_store=True)).cleared
    assert cleared == Cleared(2, 2, num_bytes)
    stats = rank.cache.stats()["store"]
    assert (stats["num_variants"], stats["num_bytes"], stats["pending"]) == (0, 0, 0)
    rank.finish(req)
    assert report(req).relocated == 3
    assert rank.serve(fused(D)) == 2 + 4 + 2
    assert rank_state(rank.cache, 0).cleared is None


def test_a_chunk_may_be_preprocessed_without_head_and_question() -> None:
    """Of such a prompt, less its last token, no chunk is whole: there is nothing to look for."""
    assert Rank().serve(ahead(A, head=[], tail=[])) == 0


def test_flush_forgets_pending_promises() -> None:
    """SGLang flushes when nothing runs; should it ever come between, no lock outlives it."""
    rank = Rank(rag(A, B))
    rank.start(fused(B))
    rank.flush()
    rank.batch.clear()
    rank.forward()
    rank.check()
    rank.serve(rag(A, B))
    assert rank.serve(fused(B)) == 5


# Books


def test_check_integrity_names_a_source_that_is_none() -> None:
    """A moved chunk booked as computed would be moved on, its errors with it."""
    rank = Rank(rag(A, B), fused(B))
    rank.cache.copies.add(rank.node(HEAD, B, recipe="r"))
    with pytest.raises(IntegrityError, match="findable as a source"):
        check_integrity(rank.cache)
