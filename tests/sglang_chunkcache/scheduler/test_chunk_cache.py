"""`ChunkRadixCache` case by case; test_chunk_cache_model.py drives it through random lives."""

from __future__ import annotations

import dataclasses
import logging
from array import array
from typing import Any

import pytest

pytest.importorskip("sglang")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.evict_policy import LRUStrategy
from sglang.srt.mem_cache.radix_cache import RadixKey

from radix_ext import ChunkId, IntegrityError, chunk_id
from sglang_chunkcache.scheduler.chunk_cache import ChunkRadixCache
from sglang_chunkcache.scheduler.chunk_key import ChunkKey
from sglang_chunkcache.scheduler.eviction import PromotedFirst, is_promoted
from sglang_chunkcache.scheduler.node import facts
from sglang_chunkcache.wire.events import (
    NOTHING_READ,
    Acknowledgement,
    Batch,
    Evicted,
    Inserted,
    Reading,
)
from sglang_chunkcache.wire.report import ANSWER_KEY
from sglang_chunkcache.wire.spans import pack
from sglang_chunkcache.wire.state import Asked
from tests.examples import examples
from tests.reference.chains import chain_of
from tests.reference.scheduler import SECRET, FakeReq, Scheduler, answer_of, config, marked, walk

HEAD, C1, C2, C3, QUESTION = [90, 91], [1, 2, 3, 4], [1, 2, 5], [7, 8], [30, 31, 32]


def chunk_of(node: Any) -> ChunkId | None:
    """The chunk a node holds, None for a token node."""
    return facts(node).chunk


def rag(
    *chunks: list[int], head: list[int] = HEAD, tail: list[int] = QUESTION, **params: Any
) -> FakeReq:
    """A request of the front: head, chunks, question."""
    keys = {key: params.pop(key) for key in ("extra_key", "cache_salt") if key in params}
    ids, spans = list(head), []
    for chunk in chunks:
        spans.append((len(ids), len(ids) + len(chunk)))
        ids += chunk
    return FakeReq([*ids, *tail], marked(spans, **params), **keys)


def batch_of(req: FakeReq) -> Batch:
    answer = answer_of(req)
    assert answer.report is None
    return answer.events


def nodes(scheduler: Scheduler) -> list[list[int]]:
    """Token ids of every node, in no particular order."""
    return sorted(list(node.key.token_ids) for _, node in walk(scheduler.cache))


# Inserting and matching


def test_insert_makes_one_node_per_chunk() -> None:
    """Head, chunk, chunk, question, answer: a chunk that begins like another splits nothing."""
    scheduler = Scheduler(40, config())
    scheduler.serve(rag(C1, C2), answer=[50, 51])
    scheduler.serve(rag(C2, C1), answer=[60])
    assert nodes(scheduler) == sorted([HEAD, C1, C2, QUESTION, [50], C2, C1, QUESTION])
    scheduler.check()


def test_match_ends_at_the_last_whole_chunk() -> None:
    """C1 is cached, the other chunk only begins alike: nothing of it is reused."""
    scheduler = Scheduler(40, config())
    scheduler.serve(rag(C1))
    assert scheduler.serve(rag(C1, C2)) == len(HEAD) + len(C1)
    assert scheduler.serve(rag(C2)) == len(HEAD)


def test_match_goes_on_into_the_question() -> None:
    """After all chunks the question matches token by token, but never to the last token."""
    scheduler = Scheduler(40, config())
    scheduler.serve(rag(C1))
    assert scheduler.serve(rag(C1, tail=[30, 31, 99])) == len(HEAD) + len(C1) + 2
    assert scheduler.serve(rag(C1)) == len(HEAD) + len(C1) + len(QUESTION) - 1


def test_match_of_prompt_that_ends_in_a_chunk_leaves_that_chunk() -> None:
    """One token must be computed; a match inside a chunk is none, so the whole chunk is."""
    scheduler = Scheduler(40, config())
    scheduler.serve(rag(C1, C2, tail=[]))
    assert scheduler.serve(rag(C1, C2, tail=[])) == len(HEAD) + len(C1)
    scheduler.check()


@pytest.mark.parametrize("other", [{"extra_key": "x"}, {"cache_salt": "x"}])
def test_match_stays_in_its_namespace(other: dict[str, Any]) -> None:
    """One tenant's KV never serves another."""
    scheduler = Scheduler(40, config())
    scheduler.serve(rag(C1))
    assert scheduler.serve(rag(C1, **other)) == 0
    assert scheduler.serve(rag(C1, **other)) > 0


def test_plain_and_chunk_prompts_share_nothing() -> None:
    """Neither sees the other's nodes, in either direction."""
    scheduler = Scheduler(60, config())
    scheduler.serve(rag(C1))
    plain = FakeReq([*HEAD, *C1, *QUESTION])
    assert scheduler.serve(plain) == 0
    assert scheduler.serve(FakeReq([*HEAD, *C1, *QUESTION])) == 8
    scheduler.check()


def test_match_is_idempotent() -> None:
    """SGLang asks up to seven times a request: same answer, no slot moves, nothing logged."""
    scheduler = Scheduler(40, config())
    scheduler.serve(rag(C1, C2))
    before = nodes(scheduler), scheduler.cache.log.seq
    assert [scheduler.match(rag(C1, C3)) for _ in range(7)] == [6] * 7
    assert (nodes(scheduler), scheduler.cache.log.seq) == before


def test_match_without_req_is_plain() -> None:
    """Callers that pass no request get SGLang's own matching."""
    scheduler = Scheduler(40, config())
    scheduler.serve(rag(C1))
    key = RadixKey(array("q", [*HEAD, *C1]))
    assert len(scheduler.cache.match_prefix(MatchPrefixParams(key=key)).device_indices) == 0


def test_match_honours_the_key_limit() -> None:
    """SGLang caps a key instead of slicing it; a cap inside a chunk leaves the chunk out."""
    scheduler = Scheduler(40, config())
    scheduler.serve(rag(C1, C2))
    req = rag(C1, C2)
    lengths = []
    for limit in range(len(req.origin_input_ids) + 1):
        key = RadixKey(req.origin_input_ids, limit=limit)
        lengths.append(
            len(scheduler.cache.match_prefix(MatchPrefixParams(key=key, req=req)).device_indices)
        )
    assert lengths == [0, 1, 2, 2, 2, 2, 6, 6, 6, 9, 10, 11, 12]


def test_insert_of_chunk_key_without_slots_uses_token_ids() -> None:
    """SGLang's own fallback for simulations works for chunk keys too."""
    cache = ChunkRadixCache(CacheInitParams(False, None, None, 1), config())
    ids = array("q", [*HEAD, *C1])
    key = ChunkKey.cut(ids, rag_spans(), len(ids))
    assert cache.insert(InsertParams(key=key)).prefix_len == 0
    assert cache.insert(InsertParams(key=key)).prefix_len == 6
    assert cache.match_prefix(MatchPrefixParams(key=key)).device_indices.tolist() == [*HEAD, *C1]


def rag_spans() -> Any:
    from radix_ext import Span

    return (Span(2, 6, chunk_id(C1)),)


# Slots


@pytest.mark.parametrize("piece", [100, 3], ids=["at once", "in pieces"])
def test_audit_leaves_nothing(piece: int) -> None:
    """It matches what is exact, computes the rest into slots of its own,
    and gives them back without a word."""
    scheduler = Scheduler(40, config())
    scheduler.serve(rag(C1))
    before, free = nodes(scheduler), scheduler.allocator.available_size()
    audit = rag(C1, C2, is_audit=True)
    assert scheduler.serve(audit, piece=piece, answer=[50]) == len(HEAD) + len(C1)
    assert (nodes(scheduler), scheduler.allocator.available_size()) == (before, free)
    assert audit.customized_info is None
    scheduler.check()


def test_prefill_piece_that_ends_inside_a_chunk_keeps_its_tail() -> None:
    """The tree takes whole chunks only, the rest stays the request's own;
    two such requests share no slot."""
    scheduler = Scheduler(40, config())
    one, two = rag(C1, C2), rag(C2, C1)
    scheduler.admit(one, 4)
    scheduler.admit(two, 4)
    for req in (one, two):
        scheduler.stash(req)
        assert req.kv.cache_protected_len == len(HEAD)
        assert len(req.prefix_indices) == 4
        scheduler.check([one, two])
    for req in (one, two):
        scheduler.release(req, is_insert=False)
    scheduler.check()
    assert len(scheduler.tree_slots()) == 2
    assert scheduler.allocator.available_size() == 38


def test_two_requests_that_compute_the_same_chunks_free_one_copy() -> None:
    """The second to finish gives its duplicates back and goes on with the tree's slots."""
    scheduler = Scheduler(40, config())
    one, two = rag(C1), rag(C1, tail=[30, 31, 40])
    scheduler.admit(one, 100)
    scheduler.admit(two, 100)
    scheduler.sample(one, 50)
    scheduler.sample(two, 50)
    assert scheduler.slots(one, 0, 8) == scheduler.slots(two, 0, 8)
    scheduler.check([one, two])
    scheduler.release(one, is_insert=True)
    scheduler.release(two, is_insert=True)
    assert scheduler.allocator.available_size() == 40 - 10
    scheduler.check()


def test_forced_miss_frees_what_it_computed_twice() -> None:
    """SGLANG_RADIX_FORCE_MISS recomputes everything: the tree's copy stays, the other is freed."""
    scheduler = Scheduler(40, config(), force_miss=True)
    scheduler.serve(rag(C1, C2), piece=3, answer=[50, 51])
    first = scheduler.tree_slots()
    assert scheduler.serve(rag(C1, C2), piece=5, answer=[50, 51]) == 0
    assert scheduler.tree_slots() == first
    scheduler.check()


def test_abort_between_pieces_frees_only_its_own() -> None:
    """An abort in mid-prefill leaks nothing and takes nothing from the tree."""
    scheduler = Scheduler(40, config())
    req = rag(C1, C2)
    scheduler.admit(req, 7)
    scheduler.stash(req)
    scheduler.prefill(req, 1)
    scheduler.release(req, is_insert=False)
    scheduler.check()
    assert scheduler.cache.protected_size() == 0
    assert nodes(scheduler) == sorted([HEAD, C1])


def test_locked_chunks_are_not_evicted() -> None:
    """A request under way keeps its chunks whatever is asked for."""
    scheduler = Scheduler(20, config())
    scheduler.serve(rag(C1))
    req = rag(C1, C3)
    scheduler.admit(req, 1)
    scheduler.evict(100)
    assert nodes(scheduler) == sorted([HEAD, C1])
    scheduler.check([req])


# Eviction


def test_eviction_takes_unpromoted_first() -> None:
    """An older promoted chunk stays, a newer one that is not promoted goes,
    its question with it."""
    scheduler = Scheduler(40, config(eviction="promoted"))
    scheduler.serve(rag(C1, promoted_len=1))
    scheduler.serve(rag(C2, promoted_len=0))
    scheduler.evict(1)
    assert nodes(scheduler) == sorted([HEAD, C1, QUESTION, C2])
    scheduler.evict(1)
    assert nodes(scheduler) == sorted([HEAD, C1, QUESTION])


def test_eviction_lru_ignores_marks() -> None:
    """`eviction=lru` is SGLang's own policy alone."""
    scheduler = Scheduler(40, config(eviction="lru"))
    scheduler.serve(rag(C1, promoted_len=1))
    scheduler.serve(rag(C2, promoted_len=0))
    scheduler.evict(4)
    assert nodes(scheduler) == sorted([HEAD, C2, QUESTION])


def test_eviction_treats_plain_nodes_as_promoted() -> None:
    """Traffic without spans sees plain LRU; only chunks under the threshold go before it."""
    scheduler = Scheduler(40, config(eviction="promoted"))
    scheduler.serve(FakeReq([70, 71, 72]))
    scheduler.serve(rag(C2, promoted_len=0))
    scheduler.evict(1)
    assert [70, 71, 72] in nodes(scheduler)
    scheduler.serve(rag(C1, promoted_len=1))
    scheduler.evict(len(C2))
    assert [70, 71, 72] in nodes(scheduler)
    scheduler.evict(1)
    assert [70, 71, 72] not in nodes(scheduler)


def test_mark_is_dropped_by_a_later_request() -> None:
    """The mark follows the latest request's count, so yesterday's favourite can leave."""
    scheduler = Scheduler(40, config())
    scheduler.serve(rag(C1, promoted_len=1))
    scheduler.serve(rag(C1, promoted_len=0))
    assert scheduler.cache.stats()["promoted_nodes"] == 0
    scheduler.serve(rag(C1, promoted_len=1))
    assert scheduler.cache.stats()["promoted_nodes"] == 1


def test_token_nodes_inherit_the_nearest_chunks_mark() -> None:
    """A question leaves with its chunk's rank;
    a prompt head, above all chunks, counts as promoted."""
    scheduler = Scheduler(40, config())
    scheduler.serve(rag(C1, C2, promoted_len=1), answer=[50, 51])
    promoted = {tuple(node.key.token_ids): is_promoted(node) for _, node in walk(scheduler.cache)}
    assert promoted == {
        tuple(HEAD): True,
        tuple(C1): True,
        tuple(C2): False,
        tuple(QUESTION): False,
        (50,): False,
    }


def test_eviction_keeps_the_base_policy_within_a_kind() -> None:
    """The user's --radix-eviction-policy still decides among equals."""
    scheduler = Scheduler(40, config(eviction="promoted"))
    strategy = scheduler.cache.eviction_strategy
    assert isinstance(strategy, PromotedFirst)
    assert isinstance(strategy.base, LRUStrategy)


@pytest.mark.parametrize("is_later_turn", [False, True])
def test_only_others_requests_keep_a_chunk(is_later_turn: bool) -> None:
    """A finished conversation must not stay for its own turns' sake:
    its chunk goes before one that was used after it."""
    scheduler = Scheduler(40, config())
    for _ in range(3):
        scheduler.serve(rag(C1, tail=[30], is_later_turn=is_later_turn))
    scheduler.serve(rag(C3, tail=[31]))
    while (left := [node for node in nodes(scheduler) if node in (C1, C3)]) == sorted([C1, C3]):
        scheduler.evict(1)
    assert left == ([C3] if is_later_turn else [C1])


@pytest.mark.parametrize("eviction", ["reused", "promoted", "lru"])
@settings(max_examples=examples(60))
@given(st.data())
def test_plain_traffic_equals_stock(eviction: str, data: st.DataObject) -> None:
    """Requests without spans: same matches, same slots, same evictions as SGLang's own cache."""
    pair = Scheduler(24, config(eviction=eviction)), Scheduler(24, None)
    prompts = st.lists(st.integers(1, 2), min_size=1, max_size=8)
    for _ in range(data.draw(st.integers(1, 12))):
        ids, answer = data.draw(prompts), data.draw(st.lists(st.integers(1, 2), max_size=2))
        piece, size = data.draw(st.integers(1, 9)), data.draw(st.integers(0, 6))
        matched = [s.serve(FakeReq(ids), piece=piece, answer=answer) for s in pair]
        assert matched[0] == matched[1]
        assert pair[0].evict(size) == pair[1].evict(size)
        assert pair[0].free_slots() == pair[1].free_slots()
        assert sorted(pair[0].tree_slots()) == sorted(pair[1].tree_slots())
        for scheduler in pair:
            scheduler.check()


# What the front is told


def test_events_name_what_entered_and_left() -> None:
    """Chunk, length, parent and mark of every new node; a known one is not told again."""
    scheduler = Scheduler(40, config())
    first, second = rag(C1, C2, promoted_len=1), rag(C1, C3)
    scheduler.serve(first)
    one = chain_of("n", [chunk_id(C1)])
    assert batch_of(first).events == (
        Inserted(chunk_id(C1), 4, None, "n", True),
        Inserted(chunk_id(C2), 3, one, "n", False),
    )
    scheduler.evict(6)  # the question, then C2
    scheduler.serve(second)
    events = batch_of(second).events[2:]
    assert events == (
        Evicted(chain_of("n", [chunk_id(C1), chunk_id(C2)])),
        Inserted(chunk_id(C3), 2, one, "n", False),
    )


def test_events_are_told_until_acknowledged() -> None:
    """A lost answer costs nothing: the next one carries its events again."""
    scheduler = Scheduler(60, config())
    first, again = rag(C1), rag(C2)
    scheduler.serve(first)
    scheduler.serve(again)
    assert (batch_of(again).start, len(batch_of(again).events)) == (0, 2)
    acknowledged = rag(C3, ack=Acknowledgement(batch_of(again).epoch, 2))
    scheduler.cache.arrived(acknowledged)
    scheduler.serve(acknowledged)
    assert (batch_of(acknowledged).start, len(batch_of(acknowledged).events)) == (2, 1)


def test_answer_entry_is_attached_once() -> None:
    """Both of SGLang's last calls pass us; a second entry would go with a token of its own."""
    scheduler = Scheduler(40, config())
    req = rag(C1)
    scheduler.serve(req, answer=[50, 51, 52])
    assert req.customized_info is not None
    assert len(req.customized_info[ANSWER_KEY]) == 1
    assert batch_of(req).events == (Inserted(chunk_id(C1), 4, None, "n", False),)


def test_answer_entry_comes_with_the_first_token() -> None:
    """Not with a prefill piece, which sends nothing out."""
    scheduler = Scheduler(40, config())
    req = rag(C1)
    scheduler.admit(req, 4)
    scheduler.stash(req)
    assert req.customized_info is None
    scheduler.prefill(req, 100)
    scheduler.sample(req, 50)
    assert req.customized_info is not None


def test_answer_entry_comes_to_a_request_that_ends_on_its_first_token() -> None:
    """Such a request never reaches cache_unfinished_req."""
    scheduler = Scheduler(40, config())
    req = rag(C1)
    scheduler.serve(req)
    assert batch_of(req).events


def test_answer_entry_leaves_others_entries_alone() -> None:
    """Another plugin's customized_info stays."""
    scheduler = Scheduler(40, config())
    req = rag(C1)
    req.customized_info = {"other": [1]}
    scheduler.serve(req)
    assert req.customized_info["other"] == [1]
    assert ANSWER_KEY in req.customized_info


def test_plain_requests_get_no_entry() -> None:
    """`/v1/*` stays SGLang's own."""
    scheduler = Scheduler(40, config())
    req = FakeReq([1, 2, 3])
    scheduler.serve(req, answer=[4, 5])
    assert req.customized_info is None


def test_later_areas_have_no_place_in_the_global_tree() -> None:
    """Chunks after a question are nodes here, but chains are only for the first area."""
    scheduler = Scheduler(40, config())
    req = FakeReq([*HEAD, *C1, 30, *C2, 31], marked([(2, 6), (7, 10)]))
    scheduler.serve(req)
    chunks = [
        (chunk_of(node), facts(node).chain is not None)
        for _, node in walk(scheduler.cache)
        if chunk_of(node)
    ]
    assert sorted(chunks) == sorted([(chunk_id(C1), True), (chunk_id(C2), False)])
    assert scheduler.cache.rank_state(0).events.num_nodes == 1


def test_events_are_acknowledged_when_a_request_arrives() -> None:
    """Not when it is prefilled: with many under way the answers between would tell the same events
    again, and fall behind."""
    scheduler = Scheduler(40, config())
    scheduler.serve(rag(C1))
    log = scheduler.cache.log
    waiting = rag(C2, ack=Acknowledgement(log.epoch, 1))
    assert log.unread().start == 0
    scheduler.cache.arrived(waiting)
    assert log.unread().start == 1


@pytest.mark.parametrize(("max_told", "expected"), [(1, None), (9, 1)])
def test_nodes_are_told_with_all_events_before_them_or_not_yet(
    max_told: int, expected: int | None
) -> None:
    """Else the front would have them before it has what led there.
    Only the rank that is meant tells them."""
    scheduler = Scheduler(40, config())
    scheduler.serve(rag(C1))
    scheduler.evict(40)
    scheduler.serve(rag(C1))
    scheduler.cache.log.max_told = max_told
    asked = Asked(read=(Reading(1, NOTHING_READ, 0), Reading(2, NOTHING_READ)))
    part = scheduler.cache.rank_state(1, asked).part
    assert (part and len(part.nodes)) == expected
    assert scheduler.cache.rank_state(2, asked).part is None


def test_reset_empties_and_changes_the_epoch() -> None:
    """The front learns from the next answer that this rank holds nothing."""
    scheduler = Scheduler(40, config())
    scheduler.serve(rag(C1))
    epoch = scheduler.cache.log.epoch
    scheduler.cache.reset()
    scheduler.allocator.clear()
    rank = scheduler.cache.rank_state(0)
    assert rank.events.epoch != epoch
    assert (
        rank.events.seq,
        rank.events.digest,
        rank.events.num_nodes,
        rank.counts["chunk_tokens"],
    ) == (0, 0, 0, 0)
    scheduler.check()


# Trust

FORGED: list[Any] = [
    None,
    {},
    [],
    "chunkcache_mark",
    [1, 2],
    7,
    {"chunkcache_mark": None},
    {"chunkcache_mark": "wrong"},
    {"chunkcache_mark": "schlüssel"},
    {"chunkcache_mark": ["s3cret"]},
    {"chunkcache_spans": [2, 6]},
]


@pytest.mark.parametrize("params", FORGED, ids=repr)
def test_forged_params_are_plain_traffic(params: Any) -> None:
    """Any JSON a client puts into custom_params:
    served as plain text, nothing counted, the scheduler lives."""
    scheduler = Scheduler(40, config())
    req = FakeReq([*HEAD, *C1, *QUESTION], params)
    scheduler.serve(req, answer=[50, 51])
    assert req.customized_info is None
    assert scheduler.cache.rank_state(0).events.num_nodes == 0
    assert scheduler.cache.stats()["fallbacks"] == {}
    scheduler.check()


def malformed(*spans: tuple[int, int]) -> dict[str, str]:
    """The mark is right, the spans are not."""
    return pack(marked(spans), secret=SECRET)


MALFORMED = [
    malformed((2, 6)),  # names no chunk
    malformed((6, 2)),
    malformed((2, 600)),
    malformed((-3, 2)),
    malformed((2, 6), (5, 7)),
    {"chunkcache_mark": SECRET},
    {"chunkcache_mark": SECRET, "chunkcache_spans": None},
    {"chunkcache_mark": SECRET, "chunkcache_spans": [2, 6]},
    {"chunkcache_mark": SECRET, "chunkcache_spans": "{}"},
]


@pytest.mark.parametrize("params", MALFORMED, ids=range(len(MALFORMED)))
def test_malformed_params_are_computed_as_plain_text(
    params: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug of ours on the way costs reuse, counted by reason and logged once,
    never the scheduler."""
    scheduler = Scheduler(40, config())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            scheduler.serve(FakeReq([*HEAD, *C1, *QUESTION], params), answer=[50])
    assert scheduler.cache.stats()["fallbacks"] == {"bad_spans": 2}
    assert len(caplog.records) == 1
    scheduler.check()


def test_prompt_cut_to_a_stub_is_survived() -> None:
    """SGLang aborts a queued request by replacing its prompt with one token,
    maybe after we have read its spans."""
    scheduler = Scheduler(40, config())
    req = rag(C1, head=[])
    scheduler.match(req)
    req.origin_input_ids = array("q", [0])
    scheduler.serve(req)
    scheduler.check()


def test_a_chunks_id_is_computed_here() -> None:
    """No claim about a chunk is believed: the id is the hash of this prompt's tokens."""
    scheduler = Scheduler(40, config())
    scheduler.serve(rag(C1))
    scheduler.serve(rag(C2))
    chunks = {
        chunk_of(node): list(node.key.token_ids)
        for _, node in walk(scheduler.cache)
        if chunk_of(node)
    }
    assert chunks == {chunk_id(C1): C1, chunk_id(C2): C2}


# Books


def test_stats_count_chunks() -> None:
    """Chunks now and ever, and slots by what may become of them."""
    scheduler = Scheduler(60, config())
    scheduler.serve(rag(C1, C2))
    scheduler.serve(FakeReq([*HEAD, *C1, 1, 2, 77]))
    stats = scheduler.cache.stats()
    assert (stats["chunk_tokens"], stats["inserted_chunks"]) == (7, 2)
    assert stats["free"] + stats["evictable"] + stats["protected"] == 60
    scheduler.evict(60)
    stats = scheduler.cache.stats()
    assert (stats["chunk_tokens"], stats["evicted_chunks"]) == (0, 2)


def test_stats_change_nothing() -> None:
    """Asking for stats splits no node and touches no clock."""
    scheduler = Scheduler(60, config())
    scheduler.serve(rag(C1, C2))
    scheduler.serve(FakeReq([*HEAD, *C1, 1, 2, 77]))
    before = nodes(scheduler), {node.last_access_time for _, node in walk(scheduler.cache)}
    scheduler.cache.stats()
    assert (
        nodes(scheduler),
        {node.last_access_time for _, node in walk(scheduler.cache)},
    ) == before


def test_check_integrity_names_every_violation() -> None:
    """Two faults and what follows of one, all named, with numbers."""
    scheduler = Scheduler(40, config())
    scheduler.serve(rag(C1, C2))
    by_ids = {tuple(node.key.token_ids): node for _, node in walk(scheduler.cache)}
    by_ids[tuple(C2)].value = by_ids[tuple(C1)].value[:3]
    scheduler.cache.log.append(Inserted(ChunkId("0"), 4, None, "x", False))
    with pytest.raises(IntegrityError) as caught:
        scheduler.cache.check_integrity()
    assert len(caught.value.violations) == 3
    assert "two owners: [3, 4, 5]" in str(caught.value)
    assert "evictable, protected are booked as (12, 0), the tree has (9, 0)" in str(caught.value)
    assert "booked as (3" in str(caught.value)


def test_disabled_cache_is_stock(caplog: pytest.LogCaptureFixture) -> None:
    """With the cache off, nothing is kept and nothing attached."""
    scheduler = Scheduler(40, config())
    scheduler.cache.disable = True
    req = rag(C1)
    assert scheduler.serve(req, answer=[50, 51]) == 0
    assert req.customized_info is None
    assert scheduler.allocator.available_size() == 40


@pytest.mark.parametrize(
    ("change", "named"),
    [({"page_size": 16}, "--page-size"), ({"is_eagle": True}, "--speculative-algorithm")],
)
def test_unsupported_settings_are_refused_by_name(change: dict[str, Any], named: str) -> None:
    """What cannot work must stop the start."""
    params = dataclasses.replace(CacheInitParams(False, None, None, 1), **change)
    with pytest.raises(ValueError, match=named):
        ChunkRadixCache(params, config())


def test_create_cache_without_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend's name alone, without our launcher, must stop the start with a hint."""
    from sglang_chunkcache import config as config_module
    from sglang_chunkcache.plugin import create_cache

    monkeypatch.delenv(config_module.ENV_VAR, raising=False)
    with pytest.raises(RuntimeError, match="launch_server"):
        create_cache(None)


def test_values_are_copies_of_the_row() -> None:
    """A row is reused by the next request: the tree must not see through to it."""
    scheduler = Scheduler(40, config())
    scheduler.serve(rag(C1))
    before = sorted(scheduler.tree_slots())
    scheduler.rows.req_to_token.fill_(0)
    assert sorted(scheduler.tree_slots()) == before
    assert all(node.value.dtype == torch.int64 for _, node in walk(scheduler.cache))
