"""`ChunkRadixCache` case by case; test_chunk_cache_model.py drives it through random lives."""

from __future__ import annotations

import dataclasses
import logging
from array import array
from typing import Any

import pytest

pytest.importorskip("sglang")

from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from radix_ext import ChunkId, IntegrityError, chunk_id
from sglang_chunkcache.compat import num_matched
from sglang_chunkcache.scheduler.chunk_tree import ChunkTree
from sglang_chunkcache.scheduler.reporting import rank_state
from sglang_chunkcache.wire.events import (
    NOTHING_READ,
    Acknowledgement,
    Batch,
    Inserted,
    Reading,
)
from sglang_chunkcache.wire.report import ANSWER_KEY
from sglang_chunkcache.wire.spans import pack
from sglang_chunkcache.wire.state import Asked
from tests.examples import examples
from tests.kit.cache_integrity import check_integrity
from tests.reference.scheduler import SECRET, FakeReq, Scheduler, answer_of, config, marked, walk

pytestmark = pytest.mark.matrix

HEAD, C1, C2, C3, QUESTION = [90, 91], [1, 2, 3, 4], [1, 2, 5], [7, 8], [30, 31, 32]


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


@pytest.fixture
def scheduler() -> Scheduler:
    return Scheduler(40, config())


# Inserting and matching


def test_match_without_req_is_plain(scheduler: Scheduler) -> None:
    """Callers that pass no request get SGLang's own matching."""
    scheduler.serve(rag(C1))
    key = RadixKey(array("q", [*HEAD, *C1]))
    assert num_matched(scheduler.cache.match_prefix(MatchPrefixParams(key=key))) == 0


def test_match_honours_the_key_limit(scheduler: Scheduler) -> None:
    """SGLang caps a key instead of slicing it; a cap inside a chunk leaves the chunk out."""
    scheduler.serve(rag(C1, C2))
    req, match = rag(C1, C2), scheduler.cache.match_prefix
    keys = [RadixKey(req.origin_input_ids, limit=limit) for limit in (1, 5, 6, 8, 9, 10)]
    found = [num_matched(match(MatchPrefixParams(key=key, req=req))) for key in keys]
    assert found == [1, 2, 6, 6, 9, 10]


# Slots


# Eviction


@pytest.mark.parametrize("is_later_turn", [False, True])
def test_only_others_requests_keep_a_chunk(scheduler: Scheduler, is_later_turn: bool) -> None:
    """A finished conversation must not stay for its own turns' sake."""
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


def test_answer_entry_comes_once_with_the_first_token(scheduler: Scheduler) -> None:
    """Not with a prefill piece, which sends nothing out. Others' entries stay."""
    req = rag(C1)
    req.customized_info = {"other": [1]}
    scheduler.admit(req, 4)
    scheduler.stash(req)
    assert req.customized_info == {"other": [1]}
    scheduler.prefill(req, 100)
    scheduler.sample(req, 50)
    assert req.customized_info.keys() == {"other", ANSWER_KEY}


@pytest.mark.parametrize("answer", [[], [50, 51, 52]], ids=len)
def test_answer_names_what_entered(scheduler: Scheduler, answer: list[int]) -> None:
    """Also that of a request which ends on its first token, and is only inserted
    at its end."""
    req = rag(C1)
    scheduler.serve(req, answer=answer)
    assert batch_of(req).events == (Inserted(chunk_id(C1), 4, None, "n", False),)


def test_events_are_acknowledged_when_a_request_arrives(scheduler: Scheduler) -> None:
    """Not when it is prefilled: the answers between would tell the same events again."""
    scheduler.serve(rag(C1))
    log = scheduler.cache.log
    waiting = rag(C2, ack=Acknowledgement(log.epoch, 1))
    assert log.unread().start == 0
    scheduler.cache.arrived(waiting)
    assert log.unread().start == 1


@pytest.mark.parametrize(("max_told", "expected"), [(1, None), (9, 1)])
def test_nodes_are_told_with_all_events_before_them_or_not_yet(
    scheduler: Scheduler, max_told: int, expected: int | None
) -> None:
    """Else the front would have them before it has what led there."""
    scheduler.serve(rag(C1))
    scheduler.evict(40)
    scheduler.serve(rag(C1))
    scheduler.cache.log.max_told = max_told
    asked = Asked(read=(Reading(1, NOTHING_READ, 0), Reading(2, NOTHING_READ)))
    part = rank_state(scheduler.cache, 1, asked).part
    assert (part and len(part.nodes)) == expected
    assert rank_state(scheduler.cache, 2, asked).part is None


# Trust


@pytest.mark.parametrize("params", [[1, 2], {"chunkcache_mark": "wrong"}], ids=repr)
def test_forged_params_are_plain_traffic(scheduler: Scheduler, params: Any) -> None:
    """What is forged: tests/sglang_chunkcache/wire/test_spans.py. Nothing is counted."""
    req = FakeReq([*HEAD, *C1, *QUESTION], params)
    scheduler.serve(req, answer=[50, 51])
    assert req.customized_info is None
    assert rank_state(scheduler.cache, 0).events.num_nodes == 0
    assert scheduler.cache.stats()["fallbacks"] == {}


def test_malformed_params_are_computed_as_plain_text(
    scheduler: Scheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """A bug of ours on the way costs reuse, counted by reason and logged once."""
    params = pack(marked([(2, 6), (5, 7)]), secret=SECRET)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            scheduler.serve(FakeReq([*HEAD, *C1, *QUESTION], params), answer=[50])
    assert scheduler.cache.stats()["fallbacks"] == {"bad_spans": 2}
    assert len(caplog.records) == 1
    scheduler.check()


def test_prompt_cut_to_a_stub_is_survived(scheduler: Scheduler) -> None:
    """SGLang aborts a queued request so, maybe after we have read its spans."""
    req = rag(C1, head=[])
    scheduler.match(req)
    req.origin_input_ids = array("q", [0])
    scheduler.serve(req)
    scheduler.check()


# Books


def test_stats_count_chunks() -> None:
    """Chunks now and ever, and slots by what may become of them. They split no node."""
    scheduler = Scheduler(60, config())
    scheduler.serve(rag(C1, C2))
    scheduler.serve(FakeReq([*HEAD, *C1, 1, 2, 77]))

    def seen() -> Any:
        return nodes(scheduler), [node.last_access_time for _, node in walk(scheduler.cache)]

    before, stats = seen(), scheduler.cache.stats()
    assert (stats["chunk_tokens"], stats["inserted_chunks"]) == (7, 2)
    assert stats["free"] + stats["evictable"] + stats["protected"] == 60
    assert seen() == before
    scheduler.evict(60)
    stats = scheduler.cache.stats()
    assert (stats["chunk_tokens"], stats["evicted_chunks"]) == (0, 2)


def test_check_integrity_names_every_violation(scheduler: Scheduler) -> None:
    """Two faults and what follows of one, all named, with numbers."""
    scheduler.serve(rag(C1, C2))
    by_ids = {tuple(node.key.token_ids): node for _, node in walk(scheduler.cache)}
    by_ids[tuple(C2)].value = by_ids[tuple(C1)].value[:3]
    scheduler.cache.log.append(Inserted(ChunkId("0"), 4, None, "x", False))
    with pytest.raises(IntegrityError, match=r"two owners: \[3, 4, 5\]") as caught:
        check_integrity(scheduler.cache)
    assert str(caught.value).count("; ") == 2
    assert "evictable, protected are booked as (12, 0), the tree has (9, 0)" in str(caught.value)


def test_disabled_cache_is_stock(scheduler: Scheduler) -> None:
    scheduler.cache.disable = True
    req = rag(C1)
    assert scheduler.serve(req, answer=[50, 51]) == 0
    assert req.customized_info is None
    assert scheduler.allocator.available_size() == 40


def test_speculative_decoding_is_refused_by_name() -> None:
    params = dataclasses.replace(CacheInitParams(False, None, None, 1), is_eagle=True)
    with pytest.raises(ValueError, match="--speculative-algorithm"):
        ChunkTree(params, config())


def test_create_cache_without_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backend's name alone, without our launcher, must stop the start with a hint."""
    from sglang_chunkcache import config as config_module
    from sglang_chunkcache.plugin import create_cache

    monkeypatch.delenv(config_module.ENV_VAR, raising=False)
    with pytest.raises(RuntimeError, match="launch_server"):
        create_cache(None)
