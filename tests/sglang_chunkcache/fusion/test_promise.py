"""`Fuser` in the scheduler's order of calls, case by case;
test_promise_model.py drives it through random lives."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("sglang")

from sglang.srt.mem_cache.base_prefix_cache import InitLoadBackParams

from radix_ext import FusionRequest, IntegrityError, chunk_id, fused_chunk
from radix_ext.costs import Line, Phase
from radix_ext.fusion_request import QUESTION as QUESTION_NAME
from radix_ext.moved_plan import Limits, make_plan
from sglang_chunkcache.fusion import promise
from sglang_chunkcache.own_selectors import own_needs
from sglang_chunkcache.scheduler.chunk_key import ChunkKey
from sglang_chunkcache.scheduler.node import facts, state
from sglang_chunkcache.wire.events import Evicted, Inserted
from sglang_chunkcache.wire.report import Explanation, Fallback, Report, Source
from sglang_chunkcache.wire.spans import unpack
from sglang_chunkcache.wire.state import Asked, Cleared, ExplainRequest
from tests.reference.chains import chain_of
from tests.reference.fused_scheduler import KV, FusedScheduler
from tests.reference.scheduler import SECRET, FakeReq, answer_of, config, marked, walk

HEAD, A, B, C, D, QUESTION = [90, 91], [1, 2, 3, 4], [1, 2, 5], [7, 8], [6, 6, 6, 6], [30, 31, 32]
OTHER_HEAD, E = [95, 96, 97], [60, 61, 62, 63, 64, 65, 66, 67]


def asks(
    selector: str = "none", ratio: float = 0.0, recipe: str = "r", *, fresh: Sequence[int] = ()
) -> FusionRequest:
    needs = own_needs(selector, "eval.selectors")
    return FusionRequest(selector, ratio, recipe, fresh=frozenset(fresh), own_needs=needs)


def rag(
    *chunks: list[int],
    head: list[int] = HEAD,
    tail: list[int] = QUESTION,
    fusion: FusionRequest | None = None,
    keep: Sequence[int] = (),
    promoted_len: int = 0,
    is_preprocessing: bool = False,
    exact_gaps: int = 0,
    **namespace: Any,
) -> FakeReq:
    """A request of the front: head, chunks, question."""
    ids, spans = list(head), []
    for chunk in chunks:
        spans.append((len(ids), len(ids) + len(chunk)))
        ids += chunk
    request = marked(
        spans,
        namespace=str(head),
        fusion=fusion,
        keep=keep,
        promoted_len=promoted_len,
        is_preprocessing=is_preprocessing,
        exact_gaps=exact_gaps,
    )
    return FakeReq([*ids, *tail], request, **namespace)


def fused(*chunks: list[int], **kwargs: Any) -> FakeReq:
    """One that lets KV be moved."""
    return rag(*chunks, **{"fusion": asks(), **kwargs})


def make_scheduler(
    capacity: int = 60, *, limits: Any = None, prefill_budget: int = 20, **knobs: Any
) -> FusedScheduler:
    others = ("is_chunked", "store_bytes", "storage", "host_slots")
    more: dict[str, Any] = {key: knobs.pop(key) for key in others if key in knobs}
    if limits is not None:
        more["limits"] = Limits(**{"max_pass_tokens": 1000, "max_gap_tokens": 1000, **limits})
    return FusedScheduler(
        capacity, config(reuse="fused", **knobs), prefill_budget=prefill_budget, **more
    )


def report(req: FakeReq) -> Report:
    """What the front is told of the request's KV."""
    found = answer_of(req).report
    assert found is not None
    return found


def sources(req: FakeReq) -> list[tuple[Any, ...]]:
    """Per piece: span, where from, chunks before the source, of these before it now, CFO."""
    return [
        (each.span, each.where, each.num_before, each.overlap, each.cfo)
        for each in report(req).sources
    ]


def node_of(scheduler: FusedScheduler, *path: list[int], recipe: str | None = None) -> Any:
    """The node whose keys from the root down are these tokens; None if there is none."""
    for keys, node in walk(scheduler.cache):
        taint = keys[-1].fused.recipe if isinstance(keys[-1], ChunkKey) and keys[-1].fused else None
        if [list(key.token_ids) for key in keys] == list(path) and taint == recipe:
            return node
    return None


def start_of(scheduler: FusedScheduler, req: FakeReq) -> int:
    """Admitted into the batch; what need not be prefilled."""
    matched = scheduler.add(req, 100)
    assert matched is not None
    return matched


def finish(scheduler: FusedScheduler, *reqs: FakeReq) -> None:
    """Prefill what is left, one token, done."""
    for req in reqs:
        while not scheduler.is_prefilled(req):
            scheduler.stash(req)
            assert scheduler.prefill(req, 100)
    for req in reqs:
        scheduler.sample(req, 50)
    for req in reqs:
        scheduler.release(req, is_insert=True)


# What is moved


def test_chunk_is_moved_from_where_it_was_computed() -> None:
    """C stood behind A and B and now stands behind the head:
    its KV is there, re-positioned, and known as approximate."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B, C))
    req = fused(C)
    assert scheduler.admit(req, 100) == 4
    assert scheduler.content(req, 0, 4)[2:] == [KV(7, 2, None), KV(8, 3, None)]
    scheduler.check([req])
    finish(scheduler, req)
    scheduler.check()


def test_fused_kv_is_found_again_by_its_recipe_only() -> None:
    """The next question about the same chunks moves nothing;
    another recipe and exact requests never see it."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    first, again, other, exact = fused(B), fused(B), fused(B, fusion=asks(recipe="s")), rag(B)
    assert scheduler.serve(first, answer=[50]) == 5
    assert scheduler.serve(again, answer=[50]) == 7  # into the question, up to its last token
    assert report(again).fused_hit == 5
    assert scheduler.serve(other, answer=[50]) == 5
    assert report(other).fused_hit == 0
    assert scheduler.serve(exact, answer=[50]) == 2
    scheduler.check()


def test_exact_and_fused_copies_live_side_by_side() -> None:
    """Once B is computed exactly behind the head, a fused request stands on that."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    scheduler.serve(fused(B))
    scheduler.serve(rag(B))
    assert node_of(scheduler, HEAD, B) is not node_of(scheduler, HEAD, B, recipe="r")
    req = fused(B, tail=[40, 41])
    scheduler.serve(req, answer=[50])
    assert (report(req).exact, report(req).fused_hit) == (5, 0)
    scheduler.check()


def test_gap_in_front_of_the_first_moved_chunk_is_exact() -> None:
    """Computed on nothing but exact KV, it serves everybody."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, C))
    req = fused(D, C)
    assert scheduler.admit(req, 100) == len(HEAD) + len(D) + len(C)
    scheduler.check([req])
    finish(scheduler, req)
    assert node_of(scheduler, HEAD, D) is not None
    assert node_of(scheduler, HEAD, D, C, recipe="r") is not None
    assert scheduler.serve(rag(D, C)) == len(HEAD) + len(D)
    scheduler.check()


def test_promoted_chunk_is_computed_exactly_for_those_who_follow() -> None:
    """B could be moved as well as C; computed after the exact prefix it is found by everybody."""
    scheduler = make_scheduler(100)
    scheduler.serve(rag(A, B, C))
    req = fused(B, C, exact_gaps=1, promoted_len=2)
    scheduler.serve(req, answer=[50])
    assert [each[:2] for each in sources(req)] == [(0, "gap"), (1, "device")]
    assert node_of(scheduler, HEAD, B) is not None
    assert node_of(scheduler, HEAD, B, C, recipe="r") is not None
    assert scheduler.serve(rag(B, C)) == len(HEAD) + len(B)
    again = fused(B, C, exact_gaps=1, promoted_len=2, fusion=asks(recipe="other"))
    scheduler.serve(again, answer=[50])
    # the exact request has computed C after B
    assert (report(again).relocated, report(again).gap) == (0, 0)
    scheduler.check()


@pytest.mark.parametrize(
    ("promoted_len", "exact_gaps", "is_found"), [(0, 1, False), (2, 0, False), (2, 1, True)]
)
def test_chain_does_not_grow_otherwise(promoted_len: int, exact_gaps: int, is_found: bool) -> None:
    """It is not promoted, nobody asks for it, or the prompt goes on in fused KV that was found."""
    scheduler = make_scheduler(100)
    scheduler.serve(rag(A, B, C))
    if is_found:
        scheduler.serve(fused(B), answer=[50])
    scheduler.serve(fused(B, C, promoted_len=promoted_len, exact_gaps=exact_gaps), answer=[50])
    assert node_of(scheduler, HEAD, B) is None
    assert node_of(scheduler, HEAD, B, C, recipe="r") is not None
    scheduler.check()


def test_gap_behind_a_moved_chunk_is_approximate() -> None:
    """It was computed on moved KV, so it hangs below the recipe; as a source it may be moved on."""
    scheduler = make_scheduler(100)
    scheduler.serve(rag(A, B, C))
    scheduler.serve(fused(B, D, C))
    assert node_of(scheduler, HEAD, B, D, recipe="r") is not None
    assert scheduler.serve(rag(B, D)) == len(HEAD)
    scheduler.evict(9)  # the exact request's own
    req = fused(D, head=OTHER_HEAD)
    scheduler.serve(req, answer=[50])
    assert sources(req) == [(None, "gap", 0, 0, None), (0, "device", 1, 0, 1)]
    scheduler.check()


def test_uncached_head_is_computed_too() -> None:
    """A new system prompt in front of known chunks."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A))
    req = fused(A, head=OTHER_HEAD)
    assert scheduler.admit(req, 100) == 7
    assert node_of(scheduler, OTHER_HEAD) is not None
    finish(scheduler, req)
    assert scheduler.serve(rag(D, head=OTHER_HEAD)) == 3
    scheduler.check()


def test_prompt_that_ends_in_a_chunk_computes_that_chunk() -> None:
    """One token must be prefilled and chunks are moved whole."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    assert scheduler.admit(fused(B, A, tail=[]), 100) == len(HEAD) + len(B)


def test_critical_tokens_are_recomputed_and_counted() -> None:
    """4 of 7 moved tokens, and 2 of a gap."""
    scheduler = make_scheduler()
    scheduler.serve(rag(C, A, B))
    req = fused(D, A, B, fusion=asks("query", 0.5))
    scheduler.serve(req, answer=[50])
    told = report(req)
    assert (told.exact, told.relocated, told.recomputed, told.fused_hit, told.gap) == (
        2,
        3,
        4,
        0,
        4,
    )
    assert (told.focused, told.fallbacks) == (None, ())
    assert sources(req) == [
        (0, "gap", 0, 0, None),
        (1, "device", 1, 0, 1),
        (2, "device", 2, 1, 0.5),
    ]
    assert set(told.ms) >= {"lookup"}


def test_later_turn_stands_on_the_fused_turns_before_it() -> None:
    """A conversation's history is approximate, so what follows is too,
    and is found again with it."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    scheduler.serve(fused(B), answer=[50, 51])
    ids = [*HEAD, *B, *QUESTION, 50, 51, *A]
    req = FakeReq([*ids, *QUESTION], marked([(2, 5), (10, 14)], fusion=asks()))
    assert scheduler.serve(req, answer=[60]) == 14
    assert (report(req).exact, report(req).fused_hit, report(req).gap) == (2, 7, 1)
    scheduler.check()


@pytest.mark.parametrize("other", [{"extra_key": "x"}, {"cache_salt": "x"}])
def test_tenants_do_not_share_sources(other: dict[str, Any]) -> None:
    """Neither the tree's nor the store's."""
    scheduler = make_scheduler(100)
    scheduler.serve(rag(A, B, keep=[1]), answer=[50])
    scheduler.idle()
    stranger = fused(B, head=[], **other)
    assert scheduler.serve(stranger, answer=[50]) == 0
    assert report(stranger).fallbacks == (Fallback.NO_SOURCE,)
    assert scheduler.serve(fused(B, head=[])) == 3


def test_match_promises_again_and_again_and_takes_nothing() -> None:
    """SGLang asks again in every round until the request is admitted."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    free = scheduler.allocator.available_size()
    req = fused(B)
    assert [(scheduler.match(req), req.host_hit_length) for _ in range(7)] == [(2, 3)] * 7
    assert scheduler.allocator.available_size() == free
    assert scheduler.cache.protected_size() == 0
    assert scheduler.admit(req, 100) == 5


def test_queue_is_ordered_by_what_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """128 waiting requests a round are matched, and one or two of them admitted:
    only these are looked up and planned."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    scheduler.serve(fused(B))
    plans: list[Any] = []

    def count(*args: Any, **kwargs: Any) -> Any:
        plans.append(args)
        return make_plan(*args, **kwargs)

    monkeypatch.setattr(promise, "make_plan", count)
    waiting = [fused(B), fused(B, C), fused(A, C), rag(A, C)]
    for req in waiting * 3:
        scheduler.queue(req)
    assert [(len(req.prefix_indices), req.host_hit_length) for req in waiting] == [
        (2, 0),
        (2, 0),
        (6, 0),
        (6, 0),
    ]
    assert plans == []
    assert scheduler.match(waiting[0]) == 7
    assert len(plans) == 1


def test_a_place_in_the_queue_takes_back_what_was_matched() -> None:
    """A request that was not admitted is matched for its place again:
    from then on nothing is promised to it."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    scheduler.serve(fused(B))
    req = fused(B, A)
    assert (scheduler.match(req), req.host_hit_length) == (5, 4)
    assert state(req).fused is not None
    scheduler.queue(req)
    assert (len(req.prefix_indices), req.host_hit_length, state(req).fused) == (2, 0, None)
    assert scheduler.serve(req, answer=[50]) == 9
    scheduler.check()


def test_explain_tells_the_plan_and_changes_nothing() -> None:
    """What the request would find, by the same code."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    req = fused(D, B)
    spans = unpack(req.sampling_params.custom_params, req.origin_input_ids, secret=SECRET)
    assert spans is not None
    before = scheduler.tree_slots(), scheduler.cache.log.seq
    asked = ExplainRequest(list(req.origin_input_ids), spans, None, None)
    found = (Source(2, 6, 0, "gap"), Source(6, 9, 1, "device", 1, cfo=1))
    assert scheduler.cache.explain(asked) == Explanation(2, 0, 9, found)
    assert (scheduler.tree_slots(), scheduler.cache.log.seq) == before


def test_exact_requests_are_served_as_without_a_fuser() -> None:
    """Not opted in: nothing is moved, and the answer carries no report."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    req = rag(B)
    assert scheduler.serve(req, answer=[50]) == 2
    assert answer_of(req).report is None
    assert scheduler.serve(FakeReq([*HEAD, *B, *QUESTION])) == 0
    scheduler.check()


# Promises


def test_sources_are_locked_until_their_kv_is_copied() -> None:
    """SGLang evicts between promise and forward; what is moved must survive it."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    source = node_of(scheduler, HEAD, A, B)
    req = fused(B)
    start_of(scheduler, req)
    assert source.lock_ref == 1
    scheduler.evict(100)
    assert node_of(scheduler, HEAD, A, B) is source
    scheduler.check([req])
    scheduler.forward()
    assert source.lock_ref == 0
    scheduler.check([req])
    scheduler.evict(100)
    assert node_of(scheduler, HEAD, A, B) is None
    finish(scheduler, req)
    scheduler.check()


def test_source_that_left_since_the_match_is_computed() -> None:
    """Counted by its reason; the request prefills as any other."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    req = fused(B)
    scheduler.evicted_before_load_back = len(QUESTION) + len(B)
    assert scheduler.admit(req, 100) == 2
    scheduler.check([req])
    finish(scheduler, req)
    assert report(req).fallbacks == (Fallback.SOURCE_GONE,)
    assert scheduler.cache.stats()["fallbacks"] == {Fallback.SOURCE_GONE: 1}
    assert node_of(scheduler, HEAD, B) is not None
    scheduler.check()


def test_promise_leaves_room_for_the_batchs_extends() -> None:
    """SGLang dies where an admitted batch finds no slots, so what it may still take is kept free or
    evictable."""
    scheduler = make_scheduler(26, prefill_budget=20)
    # 10 slots, 9 of them are the source and what it stands on
    scheduler.serve(rag(A, B, tail=[30]))
    req = fused(B)
    assert scheduler.admit(req, 100) == 2
    finish(scheduler, req)
    assert report(req).fallbacks == (Fallback.NO_ROOM,)
    scheduler.check()
    roomier = make_scheduler(32, prefill_budget=20)
    roomier.serve(rag(A, B, tail=[30]))
    assert roomier.admit(fused(B), 100) == 5


def test_promise_leaves_room_for_a_prompt_beyond_the_budget() -> None:
    """Without chunked prefill SGLang admits one prompt of any length:
    its extend must find its slots all the same."""
    scheduler = make_scheduler(30, prefill_budget=6, is_chunked=False)
    scheduler.serve(rag(A, B, tail=[30]))
    req = fused(B, tail=list(range(100, 119)))
    assert scheduler.admit(req, 100) == 2
    finish(scheduler, req)
    assert report(req).fallbacks == (Fallback.NO_ROOM,)
    scheduler.check()


def test_promise_evicts_what_it_must() -> None:
    """Slots come from what nobody holds; neither prefix nor source is that."""
    scheduler = make_scheduler(30, prefill_budget=8)
    scheduler.serve(rag(A, B, tail=[30]))
    scheduler.serve(FakeReq(range(200, 219)))
    req = fused(B, D, A)
    assert scheduler.admit(req, 100) == 2 + 3 + 4 + 4
    scheduler.check([req])
    finish(scheduler, req)
    scheduler.check()


@pytest.mark.parametrize("step", ["_insert", "move_of"])
def test_error_in_the_middle_of_a_commit_takes_nothing(
    monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    """Locks, slots and nodes are as before, each slot with one owner."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    before = sorted(scheduler.tree_slots()), scheduler.allocator.available_size()
    owner = scheduler.fuser if step == "_insert" else promise
    monkeypatch.setattr(owner, step, mock.Mock(side_effect=RuntimeError("planted")))
    with pytest.raises(RuntimeError, match="planted"):
        scheduler.admit(fused(D, B, fusion=asks("query", 0.5)), 100)
    assert (sorted(scheduler.tree_slots()), scheduler.allocator.available_size()) == before
    scheduler.cache.check_integrity()


@pytest.mark.parametrize("eviction", ["lru", "reused"])
def test_cold_chunks_leave_before_hot_ones(eviction: str) -> None:
    """Moved ones, too, and what they were moved from."""
    scheduler = make_scheduler(100, eviction=eviction, window_requests=3)
    scheduler.serve(rag(A, B))
    scheduler.serve(fused(D, B))
    for token in range(100, 110):
        scheduler.serve(rag(C, tail=[token]))
    while node_of(scheduler, HEAD, A) or node_of(scheduler, HEAD, D):
        assert scheduler.evict(1)
        assert node_of(scheduler, HEAD, C) is not None
    scheduler.check()


def test_request_of_the_same_batch_shares_what_is_filled_with_it() -> None:
    """It matches nodes that are still empty: its own extend comes after they are filled."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    one, two = fused(B), fused(B, tail=[40, 41])
    assert [start_of(scheduler, req) for req in (one, two)] == [5, 5]
    scheduler.check([one, two])
    scheduler.forward()
    scheduler.check([one, two])
    finish(scheduler, one, two)
    assert report(two).fused_hit == 3
    scheduler.check()


def test_request_that_would_move_chunks_behind_empty_nodes_computes_them() -> None:
    """To choose its critical tokens it would have to look at KV that is filled with this batch.
    Its extend comes after that."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B, C))
    one, two = fused(B), fused(B, C)
    start_of(scheduler, one)
    assert start_of(scheduler, two) == 5
    scheduler.check([one, two])
    scheduler.forward()
    finish(scheduler, one, two)
    assert (report(two).fused_hit, report(two).relocated, report(two).fallbacks) == (
        3,
        3,
        (Fallback.NOT_FILLED,),
    )
    # computed after what was moved: for the recipe alone
    assert scheduler.serve(fused(B, C)) == 5 + 2 + 2
    assert scheduler.serve(rag(B, C)) == 2
    scheduler.check()


@pytest.mark.parametrize(
    "head", [OTHER_HEAD, [*OTHER_HEAD[:2], 99]], ids=["same head", "head that begins alike"]
)
def test_request_behind_an_empty_head_computes_its_chunks(head: list[int]) -> None:
    """The head that the first request has computed in the pass is no KV yet, whole or in part.
    What follows it is exact."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    one, two = fused(A, head=OTHER_HEAD), fused(B, head=head)
    start_of(scheduler, one)
    found = 3 if head == OTHER_HEAD else 2
    assert start_of(scheduler, two) == found
    scheduler.forward()
    finish(scheduler, one, two)
    assert (report(two).exact, report(two).relocated, report(two).fallbacks) == (
        found,
        0,
        (Fallback.NOT_FILLED,),
    )
    assert scheduler.serve(rag(B, head=head)) == 3 + len(B) + 2
    scheduler.check()


def with_host(*chunks: list[int], head: list[int], load: float) -> FusedScheduler:
    """These chunks are in host memory alone, and A after HEAD on the device.
    A load is worth it for more than `load` tokens."""
    scheduler = FusedScheduler(80, config(reuse="fused"), prefill_budget=40, host_slots=200)
    for _ in range(2):
        scheduler.serve(rag(*chunks, head=head))
    host = scheduler.cache.host
    while host.stats()["waiting"]:
        scheduler.forward()
    scheduler.evict(80)
    scheduler.serve(rag(A))
    host.pricing.agreed = {Phase.LOAD: Line(fixed=load), Phase.EXTEND: Line(each=1.0)}
    return scheduler


def test_load_behind_what_the_batch_fills_fills_its_own_alone() -> None:
    """The head is promised to the first request:
    who found it filled would move chunks by KV that is not there yet."""
    scheduler = with_host(E, head=OTHER_HEAD, load=5)
    one, two = fused(A, head=OTHER_HEAD), fused(E, A, head=OTHER_HEAD)
    assert [start_of(scheduler, req) for req in (one, two)] == [7, 11]
    scheduler.check([one, two])
    scheduler.forward()
    finish(scheduler, one, two)
    assert (state(one).loaded, state(two).loaded) == (0, len(E))
    assert (report(one).fallbacks, report(two).fallbacks) == ((), (Fallback.NOT_FILLED,))
    scheduler.check()


def test_what_the_batch_loads_is_moved_with_the_same_batch() -> None:
    """What host memory has is copied first: the pass reads it."""
    scheduler = with_host(E, head=HEAD, load=0)
    one, two = rag(E), fused(E, head=OTHER_HEAD)
    assert [start_of(scheduler, req) for req in (one, two)] == [len(HEAD + E), len(OTHER_HEAD + E)]
    scheduler.check([one, two])
    scheduler.forward()
    finish(scheduler, one, two)
    assert (state(one).loaded, report(two).relocated, report(two).fallbacks) == (len(E), len(E), ())
    scheduler.check()


def test_load_behind_a_gap_knows_the_copies_of_both() -> None:
    """D is computed for the first request although host memory has it.
    E has no place in the global tree without it."""
    scheduler = with_host(D, E, head=HEAD, load=7)
    one, two = fused(D, A), fused(D, E)
    assert [start_of(scheduler, req) for req in (one, two)] == [10, 14]
    assert (state(one).loaded, state(two).loaded) == (0, len(E))
    scheduler.check([one, two])
    scheduler.forward()
    finish(scheduler, one, two)
    scheduler.check()


def test_exact_request_of_the_same_batch_shares_an_empty_gap() -> None:
    """The gap is exact and filled before the batch's extends."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A))
    one, two = fused(A, head=OTHER_HEAD), rag(D, head=OTHER_HEAD)
    assert [start_of(scheduler, req) for req in (one, two)] == [7, 3]
    scheduler.forward()
    finish(scheduler, one, two)
    scheduler.check()


def test_batch_recomputes_no_more_than_its_budget() -> None:
    """The first may always go. Further ones are computed, in the same batch:
    nobody waits for a pass, plain requests included."""
    scheduler = make_scheduler(limits={"max_pass_tokens": 5})
    scheduler.serve(rag(C, A, B))
    one, two, after = (
        *(fused(A, fusion=asks("query", 1.0, recipe)) for recipe in "rs"),
        FakeReq([99]),
    )
    assert [start_of(scheduler, req) for req in (one, two, after)] == [6, 2, 0]
    scheduler.check([one, two])
    scheduler.forward()
    finish(scheduler, one, two, after)
    assert (report(two).exact, report(two).relocated, report(two).fallbacks) == (
        2,
        0,
        (Fallback.PASS_FULL,),
    )
    assert scheduler.cache.stats()["fallbacks"] == {Fallback.PASS_FULL: 1}
    scheduler.check()


def test_two_recipes_move_in_one_batch() -> None:
    """From one source, side by side."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    one, two = fused(B), fused(B, fusion=asks(recipe="s"))
    assert [start_of(scheduler, req) for req in (one, two)] == [5, 5]
    assert node_of(scheduler, HEAD, A, B).lock_ref == 2
    scheduler.check([one, two])
    scheduler.forward()
    finish(scheduler, one, two)
    scheduler.check()


def test_promise_that_no_batch_keeps_stops_the_server() -> None:
    """Its slots would hold garbage under keys that others match."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    start_of(scheduler, fused(B))
    with pytest.raises(IntegrityError, match="1 promised"):
        scheduler.fuser.before(SimpleNamespace(reqs=[rag(A)]))


def test_declined_promise_is_an_empty_tensor() -> None:
    """SGLang's contract: all or nothing; anything between kills it.
    None would end admission for all that wait."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    req = fused(B)
    scheduler.match(req)
    scheduler.evict(6)
    slots, node = scheduler.cache.init_load_back(
        InitLoadBackParams(req.best_match_node, req.host_hit_length, req=req)
    )
    assert (len(slots), slots.dtype, node) == (0, req.prefix_indices.dtype, req.best_match_node)


# Ends of a request's life


@pytest.mark.parametrize("num_tokens", [1, 2, 5])
def test_prefill_in_pieces_shorter_than_a_chunk(num_tokens: int) -> None:
    """What is left behind the promise goes in as ever, whole chunks only."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    req = fused(B, D, C, tail=QUESTION)
    assert scheduler.admit(req, num_tokens) == 5
    while not scheduler.is_prefilled(req):
        scheduler.stash(req)
        scheduler.check([req])
        assert scheduler.prefill(req, num_tokens)
    finish(scheduler, req)
    assert node_of(scheduler, HEAD, B, D, C, recipe="r") is not None
    scheduler.check()


def test_retracted_before_its_first_token_finds_its_fused_kv_again() -> None:
    """The promise was kept, the tree holds it; nothing is moved twice."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    req = fused(B, D)
    scheduler.admit(req, 1)
    scheduler.release(req, is_insert=False)
    scheduler.check()
    assert scheduler.admit(req, 100) == 5
    finish(scheduler, req)
    assert (report(req).exact, report(req).fused_hit, report(req).relocated) == (2, 3, 3)
    scheduler.check()


def test_retracted_before_its_first_token_moves_again_what_is_gone() -> None:
    """Its fused nodes were evicted meanwhile: a new promise, told once."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B, keep=[1]), answer=[50])
    scheduler.idle()
    req = fused(B, D)
    scheduler.admit(req, 1)
    scheduler.release(req, is_insert=False)
    scheduler.evict(100)
    assert scheduler.admit(req, 100) == 5
    finish(scheduler, req)
    told = report(req)
    assert (told.exact, told.fused_hit, told.relocated, told.gap) == (0, 0, 3, 2)
    assert [source.where for source in told.sources] == ["gap", "host"]
    scheduler.check()


def test_retracted_after_its_first_token_goes_on_where_it_was() -> None:
    """Its output was computed on fused KV and is found under the recipe, not under exact keys."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    req = fused(B)
    scheduler.admit(req, 100)
    scheduler.sample(req, 50)
    for token in (51, 52):
        scheduler.decode(req, token)
    told = report(req)
    scheduler.release(req, is_insert=False)
    scheduler.check()
    assert scheduler.admit(req, 100) == 8
    finish(scheduler, req)
    assert report(req) == told
    assert scheduler.serve(rag(B)) == 2
    scheduler.check()


def test_retracted_where_nothing_can_be_moved_any_more_is_exact() -> None:
    """No source is left: everything is computed, and what it leaves is for everybody."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    req = fused(B)
    scheduler.admit(req, 1)
    scheduler.release(req, is_insert=False)
    scheduler.evict(100)
    assert scheduler.admit(req, 100) == 0
    finish(scheduler, req)
    assert scheduler.serve(rag(B)) == 2 + 3 + 2
    scheduler.check()


def test_aborted_request_leaves_its_filled_nodes() -> None:
    """Promised slots are the tree's, all others are given back."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B, tail=[30]))
    req = fused(B, D)
    scheduler.admit(req, 2)
    scheduler.release(req, is_insert=False)
    scheduler.check()
    assert scheduler.cache.protected_size() == 0
    assert scheduler.allocator.available_size() == 60 - 10 - len(B)


def test_prompt_cut_to_a_stub_is_survived() -> None:
    """SGLang aborts a queued request by replacing its prompt with one token,
    after we have planned for it."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    req = fused(B)
    scheduler.match(req)
    req.origin_input_ids = req.origin_input_ids[:1]
    scheduler.serve(req, answer=[50])
    scheduler.check()


def test_forced_miss_computes_everything() -> None:
    """SGLANG_RADIX_FORCE_MISS takes the promise away too."""
    scheduler = make_scheduler(100)
    scheduler.serve(rag(A, B))
    scheduler.serve(fused(B))
    scheduler.force_miss = True
    for _ in range(2):
        assert scheduler.serve(fused(B, C), answer=[50]) == 0
        scheduler.check()


def test_chunks_fused_for_one_question_have_no_place_in_the_global_tree() -> None:
    """Nobody else asks for them."""
    scheduler, fused = make_scheduler(), partial(rag, fusion=asks(recipe=f"r{QUESTION_NAME}1"))
    scheduler.serve(rag(A, B), answer=[50])
    before = scheduler.cache.rank_state(0)
    scheduler.serve(fused(B, D), answer=[50])
    after = scheduler.cache.rank_state(0)
    assert after.events == before.events
    assert after.counts["chunk_tokens"] == before.counts["chunk_tokens"]
    scheduler.serve(fused(C, B), answer=[50])  # C is a gap in front of the first moved chunk
    assert scheduler.cache.rank_state(0).events.num_nodes == 3
    scheduler.check()


def test_chunks_fused_for_anybody_are_reported_by_the_name_of_their_recipe() -> None:
    """Once, below the exact chain they hang on, unpromoted and without hits;
    and that they have left."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B), answer=[50])
    told = scheduler.cache.log.seq
    for _ in range(3):
        scheduler.serve(fused(A, C, B, promoted_len=3), answer=[50])
    names = [chunk_id(A), chunk_id(C), fused_chunk("r", chunk_id(B))]
    chains = [chain_of(str(HEAD), names[:end]) for end in (1, 2, 3)]
    events = scheduler.cache.log.unread().events
    assert events[told:] == (
        Inserted(names[1], len(C), chains[0], str(HEAD), promoted=True),
        Inserted(names[2], len(B), chains[1], str(HEAD), promoted=False),
    )
    node = node_of(scheduler, HEAD, A, C, B, recipe="r")
    assert (facts(node).promoted, facts(node).hits, facts(node.parent).hits) == (False, 0, 2)
    scheduler.check()
    scheduler.evict(60)
    events = scheduler.cache.log.unread().events
    assert set(events[told + 2 :]) >= {Evicted(chains[1]), Evicted(chains[2])}
    assert scheduler.cache.rank_state(0).events.num_nodes == 0


# Flush


def test_flush_forgets_waiting_captures_and_the_store() -> None:
    """But for what was preprocessed: a measurement starts afresh."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B, keep=[0]), answer=[50])
    scheduler.idle()
    scheduler.serve(rag(A, B, C, keep=[1, 2]), answer=[50])
    scheduler.flush()
    stats = scheduler.cache.stats()
    assert (stats["store"]["num_chunks"], stats["store"]["pending"], stats["sources"]) == (0, 0, 0)
    scheduler.forward()
    req = fused(B, keep=[0])
    assert scheduler.serve(req, answer=[50]) == 0
    scheduler.idle()
    assert scheduler.store.stats().num_variants == 1
    scheduler.check()


def preprocessed(scheduler: FusedScheduler) -> None:
    """B after A, and A alone, into the store; then C as requests bring it."""
    for chunks in ([A], [A, B]):
        fusion = FusionRequest("none", 0.0, "p", fresh=frozenset({len(chunks) - 1}), plain=True)
        scheduler.serve(
            rag(*chunks, fusion=fusion, keep=[len(chunks) - 1], is_preprocessing=True), answer=[50]
        )
    scheduler.serve(rag(C, keep=[0]), answer=[50])
    scheduler.idle()
    assert scheduler.store.stats().num_variants == 3


def test_a_chunk_may_be_preprocessed_without_head_and_question() -> None:
    """Of such a prompt, less its last token, no chunk is whole: there is nothing to look for."""
    scheduler = make_scheduler()
    fusion = FusionRequest("none", 0.0, "p", fresh=frozenset({0}), plain=True)
    assert (
        scheduler.serve(rag(A, head=[], tail=[], fusion=fusion, keep=[0], is_preprocessing=True))
        == 0
    )


def test_flush_keeps_what_was_preprocessed() -> None:
    """Hours of work, and the benches flush before each cell.
    It serves as before, first of all sources."""
    scheduler = make_scheduler()
    preprocessed(scheduler)
    scheduler.flush()
    assert [each.preprocessed for _, each, _ in scheduler.store._held.values()] == [True]
    scheduler.check()
    req = fused(B)
    assert scheduler.serve(req, answer=[50]) == 5
    assert [where for _, where, *_ in sources(req)] == ["gap", "host"]
    # nothing is on the device any more, so the store's order is that of an empty tree
    scheduler.evict(100)
    scheduler.check()


def test_flush_after_an_update_of_the_weights_keeps_nothing() -> None:
    """SGLang resets the tree for both, and names no version unless the client did.
    The next flush compares with these weights."""
    scheduler = make_scheduler()
    preprocessed(scheduler)
    scheduler.weights = 1
    scheduler.flush()
    assert scheduler.store.stats().num_variants == 0
    assert scheduler.serve(fused(B)) == 0
    scheduler.flush()
    preprocessed(scheduler)
    scheduler.flush()
    assert scheduler.store.stats().num_variants == 1
    scheduler.weights = 0  # back again is a change, too
    scheduler.flush()
    assert scheduler.store.stats().num_variants == 0


def test_cleared_store_is_empty_and_the_tree_is_not() -> None:
    """What was preprocessed and what waits included.
    A promise that reads a variant is kept, and what waited can come again."""
    scheduler = make_scheduler()
    preprocessed(scheduler)
    scheduler.evict(100)
    assert scheduler.serve(rag(D, keep=[0]), answer=[50]) == 0
    assert scheduler.cache.stats()["store"]["pending"] == 1
    req = fused(B)
    assert start_of(scheduler, req) == 5
    num_bytes = scheduler.store.stats().num_bytes
    assert scheduler.cache.rank_state(0, Asked(clear_store=True)).cleared == Cleared(
        3, 3, num_bytes
    )
    stats = scheduler.cache.stats()["store"]
    assert (stats["num_variants"], stats["num_bytes"], stats["pending"]) == (0, 0, 0)
    scheduler.check([req])
    scheduler.forward()
    finish(scheduler, req)
    assert report(req).relocated == 3
    assert scheduler.serve(fused(D)) == 2 + 4 + 2
    scheduler.serve(rag(D, keep=[0]), answer=[50])
    scheduler.idle()
    assert scheduler.store.stats().num_variants == 1
    assert scheduler.cache.rank_state(0).cleared is None
    scheduler.check()


def test_flush_forgets_pending_promises() -> None:
    """SGLang flushes when nothing runs; should it ever come between,
    no lock and no empty node outlives it."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    start_of(scheduler, fused(B))
    scheduler.flush()
    scheduler.batch.clear()
    scheduler.forward()
    scheduler.check()
    scheduler.serve(rag(A, B))
    assert scheduler.serve(fused(B)) == 5
    scheduler.check()


# Books


def test_stats_tell_sources_store_and_reasons() -> None:
    """For /chunkcache/stats."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B, keep=[0]), answer=[50])
    scheduler.idle()
    scheduler.serve(fused(D), answer=[50])
    stats = scheduler.cache.stats()
    assert stats["sources"] == 3  # A, B and, just computed, D
    assert stats["store"]["num_chunks"] == 1
    assert stats["moves"] == {"captured": 1}
    assert stats["fallbacks"] == {Fallback.NO_SOURCE: 1}
    assert stats["gate"] == {}


def test_check_integrity_names_a_source_that_is_none() -> None:
    """A moved chunk booked as computed would be moved on, its errors with it."""
    scheduler = make_scheduler()
    scheduler.serve(rag(A, B))
    scheduler.serve(fused(B))
    scheduler.cache.copies.add(node_of(scheduler, HEAD, B, recipe="r"))
    with pytest.raises(IntegrityError, match="findable as a source"):
        scheduler.cache.check_integrity()
