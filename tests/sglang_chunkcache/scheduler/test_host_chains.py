"""Exact chains in host memory: case by case, then random traffic against contents and a naive
search."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("sglang")

from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from radix_ext import ChunkPrefixTree, IntegrityError, chunk_id, costs
from radix_ext.costs import Line, Phase
from radix_ext.exact_chains import ChainPlace
from sglang_chunkcache.front.rank_mirror import RankMirror
from sglang_chunkcache.scheduler import host_metrics
from sglang_chunkcache.scheduler.node import ChunkIdentity, HostNode, facts, state
from sglang_chunkcache.scheduler.reporting import explain
from sglang_chunkcache.wire.spans import checked
from sglang_chunkcache.wire.state import ExplainRequest
from tests.examples import examples
from tests.kit.cache_integrity import check_integrity
from tests.kit.chains import (
    CAPACITY,
    HEAD,
    A,
    B,
    C,
    HostScheduler,
    chain,
    content,
    known,
    later,
    offloaded,
    rag,
)
from tests.reference.scheduler import FakeReq, answer_of, marked, walk

pytestmark = pytest.mark.matrix


def test_second_hit_is_saved_and_loaded(scheduler: HostScheduler) -> None:
    scheduler.serve(rag(A, B))
    scheduler.idle()
    assert not scheduler.on_host()
    scheduler.serve(rag(A, C))
    scheduler.idle()
    assert scheduler.on_host() == {chain(A)}
    scheduler.evict(CAPACITY)
    scheduler.check()
    req = rag(A, B)
    assert scheduler.serve(req) == len(HEAD + A)
    assert state(req).loaded == len(HEAD + A)
    scheduler.check()


def test_promoted_chunk_is_saved_at_once(scheduler: HostScheduler) -> None:
    scheduler.serve(rag(A, B, C, promoted_len=2))
    scheduler.idle()
    assert scheduler.on_host() == {chain(A), chain(A, B)}


@pytest.mark.parametrize("page", [1, 4, 16])
def test_conversation_is_saved_when_it_goes_on(page: int) -> None:
    """Its documents, those of later turns too, and the text between: nobody else asks for them.
    In pages all but the last one, which has tokens of the next turn."""
    scheduler = HostScheduler(capacity=112, page_size=page)
    first = rag(A, B)
    scheduler.serve(first)
    scheduler.idle()
    assert not scheduler.on_host()
    second = later(first, C, tail=(31,))
    third = later(second, (50, 51), (52, 53), tail=(32,))
    for turn in (second, third):
        scheduler.serve(turn)
        scheduler.idle()
    fourth = later(third, tail=(33,))
    text = len(HEAD + A + B + C + (30, 31, 50, 51, 52, 53))
    for _ in range(2):
        scheduler.evict(112)
        scheduler.check()
        assert text - scheduler.match(later(fourth, tail=(33,))) in range(page)
        scheduler.forward()
    scheduler.evict(112)
    found = scheduler.serve(later(second, (9,), tail=(34,)))
    assert len(second.all_ids) - found in range(page)
    assert len(HEAD + A + B) - scheduler.serve(rag(A, B)) in range(page)
    assert scheduler.on_host() == {chain(A), chain(A, B)}, "others come to the first documents"
    other = later(rag(A, B, tail=(35,)), C, tail=(31,))
    assert len(HEAD + A + B) - scheduler.serve(other) in range(page)


@pytest.mark.parametrize("is_conversation_first", [False, True])
def test_same_tokens_with_other_chunks_are_another_text(*, is_conversation_first: bool) -> None:
    """A chunk of a conversation's second turn, and after that history as plain text."""
    scheduler = HostScheduler(capacity=100)
    first = rag(A, B)
    turns = [first, later(first, C, tail=(31,))]
    start, ids = len(first.all_ids), turns[1].all_ids
    plain = marked([(start, start + len(C))], namespace="plain", promoted_len=1)
    prompts = turns if is_conversation_first else [FakeReq(ids, plain)]
    for prompt in prompts:
        scheduler.serve(prompt)
        scheduler.idle()
    scheduler.evict(100)
    other = FakeReq(ids, plain) if is_conversation_first else later(first, C, tail=(31,))
    assert scheduler.serve(other) == 0
    for prompt in (FakeReq(ids, plain), later(first, C, tail=(31,))):
        scheduler.idle()
        scheduler.check()
        scheduler.evict(100)
        assert scheduler.serve(prompt) == start + len(C)


def test_same_tokens_with_other_chunks_before_are_another_chain() -> None:
    """Each copy has one node on the device."""
    scheduler, last = HostScheduler(capacity=100), (9, 8)
    for chunks in ((A, B), (A + B,)):
        first = rag(*chunks)
        for turn in (first, later(first, last, tail=(31,))):
            scheduler.serve(turn)
            scheduler.idle()
            scheduler.check()
    scheduler.evict(100)
    for chunks in ((A, B), (A + B,)):
        first = rag(*chunks)
        second = later(first, last, tail=(31,))
        assert scheduler.serve(second) == len(first.all_ids) + len(last)
        scheduler.check()


def test_later_document_that_others_have_among_the_first_ones_has_no_place() -> None:
    """The front would take A, B, C for cached, and the one's copy for the other's."""
    scheduler = HostScheduler(capacity=100)
    known(scheduler, A, B, C)
    first = rag(A, B)
    second = later(first, C, tail=(31,))
    for turn in (first, second):
        scheduler.serve(turn)
        scheduler.idle()
    scheduler.evict(100)
    scheduler.check()
    assert scheduler.match(later(second, tail=(32,))) == len(second.all_ids) - 1
    scheduler.check()


def test_text_is_saved_once_what_precedes_it_is() -> None:
    """Its chunk found room before: B was turned away."""
    scheduler = HostScheduler(capacity=100)
    first = rag(A, B)
    second = later(first, C, tail=(31,))
    scheduler.serve(first)
    write_back = scheduler.cache.tiers.host.write_back

    def is_not_b(place: Any, *_: Any) -> bool:
        return bool(place.identity.chunk != chunk_id(B))

    with mock.patch.object(write_back, "_may_displace", is_not_b):
        scheduler.serve(second)
        scheduler.idle()
    scheduler.serve(later(second, tail=(32,)))
    scheduler.idle()
    scheduler.check()
    scheduler.evict(100)
    assert scheduler.serve(later(second, tail=(33,))) == len(second.all_ids) - 1


@pytest.mark.parametrize("page", [1, 4])
def test_text_is_not_saved_from_slots_that_others_have(page: int) -> None:
    """Its chunks are here and wait for it, and have left the device."""
    scheduler = HostScheduler(capacity=96, page_size=page)
    first = rag(A, head=(*range(90, 98),), tail=(30,) * 9)

    def ask() -> None:
        scheduler.serve(later(first, (7, 8, 9, 10), tail=(33,) * 9))

    scheduler.serve(first)
    for _ in range(2):
        ask()
        scheduler.idle()
    nodes = scheduler.cache.tiers.host.nodes
    texts = [host for host in nodes._nodes.values() if host.is_text]
    assert len(texts) == 2
    for host in texts:  # as if their copies had failed
        nodes.drop(host)
    ask()
    assert scheduler.cache.tiers.host.stats()["waiting"] == 2
    scheduler.evict(96)
    scheduler.serve(FakeReq(range(200, 260)))
    scheduler.idle()
    assert not any(host.is_text for host in nodes._nodes.values())
    scheduler.evict(96)
    ask()
    scheduler.check()


def test_text_leaves_with_its_own_chunks() -> None:
    """Though another conversation says the same about other documents."""
    scheduler = HostScheduler(capacity=100)
    for document, chunk in ((A, (7, 8)), (B, (9, 8))):
        first = rag(document)
        for turn in (first, later(first, chunk, tail=(31,))):
            scheduler.serve(turn)
            scheduler.idle()
    nodes = scheduler.cache.tiers.host.nodes
    chunk, other = (
        each for each in nodes._nodes.values() if each.identity.chunk and len(each.prefix) == 1
    )
    text = nodes.get(chunk.before)
    assert text is not None
    assert nodes._stays(text)
    nodes.drop(chunk)
    assert not nodes._stays(text)
    other_text = nodes.get(other.before)
    assert other_text is not None
    assert nodes._stays(other_text)
    scheduler.check()


def test_conversation_of_many_turns_is_loaded_and_goes_on() -> None:
    """What was loaded knows no chain key, and neither does all before it."""
    scheduler = HostScheduler(capacity=5000, host_slots=5000)
    turn = rag(A)
    for number in range(100, 700):
        turn = later(turn, (number, 1), tail=(31,))
    scheduler.serve(turn)
    scheduler.idle()
    scheduler.evict(5000)
    assert scheduler.serve(later(turn, B, tail=(32,))) == len(turn.all_ids) - 1
    scheduler.idle()
    scheduler.check()
    assert scheduler.cache.tiers.host.stats()["missed"] == 0


def test_conversation_that_ended_leaves_host_memory() -> None:
    scheduler = HostScheduler(host_slots=30)
    for number in range(60, 90, 3):
        first = rag((number, 1), (number, 2))
        turns = [first, later(first, (number + 1, 3, 3, 3), tail=(31,))]
        for turn in turns:
            scheduler.serve(turn)
            scheduler.idle()
        scheduler.evict(CAPACITY)
        scheduler.check()
        assert scheduler.match(later(turns[1], tail=(32,))) == len(turns[1].all_ids) - 1
        scheduler.forward()


@pytest.mark.parametrize("other", [{"head": ()}, {"extra_key": "x"}, {"cache_salt": "s"}], ids=str)
def test_others_find_nothing(scheduler: HostScheduler, other: dict[str, Any]) -> None:
    """Nor does a plain request. No head is a head."""
    offloaded(scheduler, A, B)
    assert scheduler.serve(rag(A, B, **other)) == 0
    assert scheduler.serve(FakeReq([*HEAD, *A, *B, 30])) == 0


def test_least_reused_leaf_leaves_the_host() -> None:
    """Chains of one head: the one that was hit least, from its end."""
    scheduler = HostScheduler(host_slots=len(HEAD + A + B + C))
    known(scheduler, A, B)
    for _ in range(3):
        scheduler.serve(rag(A))
    known(scheduler, C)
    assert scheduler.on_host() == {chain(A), chain(A, B), chain(C)}
    known(scheduler, (50, 51, 52))
    assert scheduler.on_host() == {chain(A), chain(C), chain((50, 51, 52))}
    scheduler.check()
    known(scheduler, tuple(range(60, 75)))  # does not fit at all
    assert scheduler.cache.tiers.host.stats()["missed"] == 1
    scheduler.check()


def test_front_that_lost_events_hears_of_what_comes_back(scheduler: HostScheduler) -> None:
    """Also of what leads there: what is acknowledged is forgotten."""
    offloaded(scheduler, A, B)
    scheduler.check()
    scheduler.cache.log.acknowledge(scheduler.mirror.acknowledgement)
    scheduler.tree = ChunkPrefixTree(max_nodes=10_000)
    scheduler.mirror = RankMirror(scheduler.tree, 0)
    scheduler.serve(rag(A, B, promoted_len=1))
    scheduler.check()
    nodes = [scheduler.tree.nodes.find(each) for each in (chain(A), chain(A, B))]
    assert [node.promoted for node in nodes if node is not None] == [True, False]
    assert scheduler.mirror.num_gaps == 1


def test_computed_again_is_linked_again(scheduler: HostScheduler) -> None:
    """Where the device had no room for the load, the copy and the new node are one chain."""
    offloaded(scheduler, A, B)
    scheduler.price(Line(each=1.0), Line(each=0.5))
    assert scheduler.serve(rag(A, B)) == 0
    assert scheduler.cache.tiers.host.stats()["skipped"] == 1
    scheduler.check()
    scheduler.evict(CAPACITY)
    scheduler.check()
    assert scheduler.tree.nodes.find(chain(A, B)) is not None


def test_load_that_does_not_pay_is_tried_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "EXPLORATION_PERIOD", 3)
    scheduler = HostScheduler()
    known(scheduler, A)
    scheduler.price(Line(fixed=9.0), Line(fixed=9.0, each=1.0))
    found = []
    for _ in range(3):
        scheduler.evict(CAPACITY)
        found.append(scheduler.serve(rag(A)))
    assert found == [0, 0, len(HEAD + A)]


def test_decoding_says_nothing_of_prefill() -> None:
    """A decoding batch still has the lengths of its prefill, and takes a hundredth of its time."""
    tiers = HostScheduler().cache.tiers
    for mode in (ForwardMode.EXTEND, ForwardMode.DECODE, ForwardMode.MIXED):
        with tiers.watch(SimpleNamespace(forward_mode=mode, prefix_lens=[0], extend_lens=[100])):
            pass
    assert [phase for phase, _ in tiers.host.pricing.watched] == [Phase.EXTEND, Phase.EXTEND]


def test_worth_is_what_a_load_saves(scheduler: HostScheduler) -> None:
    """It travels with each answer, so that the front weighs by it."""
    scheduler.price(Line(fixed=9.0, each=0.25), Line(each=1.0))
    req = rag(A)
    scheduler.serve(req, answer=[1])
    assert answer_of(req).host_worth == pytest.approx(0.75)
    scheduler.price(Line(each=2.0), Line(each=1.0))
    assert scheduler.cache.tiers.host.worth == 0
    scheduler.price(Line(), Line())
    assert scheduler.cache.tiers.host.worth == 1


def matched_only(scheduler: HostScheduler, req: FakeReq) -> int:
    """At an admission for which SGLang has no room after all."""
    matched = scheduler.match(req)
    assert scheduler.cache.tiers.host.load_back._loads
    return matched


@pytest.fixture
def scheduler() -> HostScheduler:
    return HostScheduler()


def test_slots_that_are_freed_before_the_forward_are_not_written() -> None:
    """They are another request's, which may have computed them when the late layers arrive."""
    scheduler = HostScheduler(capacity=9)
    offloaded(scheduler, A)
    assert matched_only(scheduler, rag(A)) == len(HEAD + A)
    scheduler.evict(CAPACITY)
    other = rag((50, 51, 52, 53), tail=(30, 31, 32))
    scheduler.admit(other, 100)
    slots = scheduler.slots(other, 0, len(other.all_ids))
    held = [scheduler.allocator.contents[slot] for slot in slots]
    assert held == [content(other, n) for n in range(1, len(held) + 1)]
    scheduler.check([other])


@pytest.mark.parametrize("is_evicted", [False, True])
def test_head_that_is_split_before_the_forward_is_loaded_in_both_halves(
    scheduler: HostScheduler, is_evicted: bool
) -> None:
    """By a prompt that begins alike. The half that is evicted meanwhile is not."""
    offloaded(scheduler, A)
    assert matched_only(scheduler, rag(A)) == len(HEAD + A)
    assert scheduler.match(rag(C, head=(90, 92))) == 1
    scheduler.check()
    if is_evicted:
        scheduler.evict(len(HEAD + A) - 1)
        assert sum(map(len, scheduler.cache.tiers.host.load_back._loads.values())) == 1
    scheduler.serve(rag(C, head=(90, 92)))
    assert scheduler.serve(rag(A)) == len(HEAD + A)
    scheduler.check()


def test_slots_of_the_host_are_kept_until_they_are_copied() -> None:
    """The storage's thread would write them at once."""
    scheduler = HostScheduler(host_slots=len(HEAD + A))
    offloaded(scheduler, A)
    matched_only(scheduler, rag(A))
    host = scheduler.cache.tiers.host
    identity = ChunkIdentity(chunk_id(B), None, None)
    another = ChainPlace(b"another", None, chain(), 0, identity, "", (), is_text=True)
    assert host.nodes.claim(another, 1) is None
    assert scheduler.on_host() == {chain(A)}
    scheduler.serve(rag(A))
    assert host.nodes.claim(another, 1) is not None


@pytest.mark.parametrize("is_busy", [False, True])
def test_chain_that_is_dropped_while_it_is_loaded_is_given_back_afterwards(
    scheduler: HostScheduler, is_busy: bool
) -> None:
    """By the last of those that need it: the storage's thread may read it still."""
    offloaded(scheduler, A)
    req = rag(A)
    scheduler.add(req, 100)
    host = scheduler.cache.tiers.host
    (chunk,) = (each for each in host.nodes._nodes.values() if each.chain is not None)
    if is_busy:
        chunk.blob.hold()
    host.nodes.drop(chunk)
    scheduler.check([req])
    assert host.stats()["tokens"] == len(HEAD + A)
    scheduler.forward()
    assert host.stats()["tokens"] == len(HEAD) + is_busy * len(A)
    if is_busy:
        chunk.blob.let_go()
    assert host.stats()["tokens"] == len(HEAD)
    scheduler.check([req])


def test_what_is_to_be_loaded_is_forgotten_with_the_tree(scheduler: HostScheduler) -> None:
    offloaded(scheduler, A)
    matched_only(scheduler, rag(A))
    scheduler.flush()
    assert scheduler.cache.tiers.host.stats()["tokens"] == 0
    assert scheduler.serve(rag(A)) == 0
    scheduler.check()


@pytest.mark.parametrize(
    ("mode", "prefix_len", "is_layered", "expected"),
    [
        (ForwardMode.EXTEND, 6, True, 3),
        (ForwardMode.MIXED, 6, True, 3),
        (ForwardMode.DECODE, 6, True, 4),
        (ForwardMode.EXTEND, 0, True, 4),
        (ForwardMode.EXTEND, 6, False, 4),
    ],
)
def test_layers_are_copied_ahead_as_far_as_the_prefill_is_too_short(
    scheduler: HostScheduler, mode: ForwardMode, prefix_len: int, is_layered: bool, expected: int
) -> None:
    """And all of them where nothing would wait: in decoding, and without a prefix."""
    offloaded(scheduler, A)
    matched_only(scheduler, rag(A))
    host = scheduler.cache.tiers.host
    host.pool.is_layered = is_layered
    # 3 s, and 1.5 s of computing
    scheduler.price(Line(each=0.5), Line(each=1.0))
    batch = SimpleNamespace(forward_mode=mode, reqs=[], prefix_lens=[prefix_len], extend_lens=[1.5])
    host.load_back.before(batch)
    assert host.pool.num_ahead == host.stats()["layers_ahead"] == expected


def test_load_does_not_evict_what_it_goes_on_behind() -> None:
    """Nobody else holds it before the request is admitted."""
    scheduler = HostScheduler(capacity=12)
    offloaded(scheduler, A, B)
    scheduler.serve(rag(A))
    other = FakeReq(range(60, 64))
    scheduler.admit(other, 100)
    assert scheduler.match(rag(A, B)) == len(HEAD + A)
    assert scheduler.cache.tiers.host.stats()["no_room"] == 1
    scheduler.check([other])


def test_explain_loads_nothing(scheduler: HostScheduler) -> None:
    offloaded(scheduler, A, B)
    req = rag(A, B)
    spans = checked(scheduler.cache._spans_of(req), req.origin_input_ids)
    told = explain(scheduler.cache, ExplainRequest(list(req.origin_input_ids), spans, None, None))
    assert (told.exact, told.loaded) == (0, len(HEAD + A + B))
    assert scheduler.cache.tiers.host.stats()["loads"] == 0


def test_what_left_before_it_was_saved_is_missed(scheduler: HostScheduler) -> None:
    scheduler.serve(rag(A))
    scheduler.serve(rag(A))
    scheduler.cache.tiers.host.write_back._waiting.clear()
    chunks = [node for _, node in walk(scheduler.cache) if facts(node).chunk]
    scheduler.cache.tiers.host.write_back.offer(chunks)
    scheduler.evict(CAPACITY)
    scheduler.idle()
    assert scheduler.cache.tiers.host.stats()["missed"] == 1
    assert not scheduler.on_host()


def failing(scheduler: HostScheduler, copy: str) -> Any:
    """Copies of one direction, after what they do."""
    does = getattr(scheduler.cache.tiers.host.pool, copy)

    def fail(*slots: Any) -> None:
        does(*slots)
        raise RuntimeError("out of memory")

    return mock.patch.object(scheduler.cache.tiers.host.pool, copy, fail)


def test_load_that_fails_is_computed(
    scheduler: HostScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """The scheduler must not die of what can be computed. It says so once."""
    known(scheduler, A, B)
    with failing(scheduler, "prepare"):
        for _ in range(2):
            scheduler.evict(CAPACITY)
            assert scheduler.serve(rag(A, B)) == 0
            scheduler.check()
    stats = scheduler.cache.tiers.host.stats()
    assert (stats["failed"], stats["loads"], stats["loaded_tokens"]) == (2, 0, 0)
    (told,) = caplog.records
    assert told.levelno == logging.WARNING
    assert "computed" in told.message
    assert "out of memory" in caplog.text
    scheduler.evict(CAPACITY)
    assert scheduler.serve(rag(A, B)) == len(HEAD + A + B)


def host_node(scheduler: HostScheduler, *chunks: tuple[int, ...]) -> HostNode:
    nodes = scheduler.cache.tiers.host.nodes._nodes.values()
    host: HostNode = next(host for host in nodes if host.chain == chain(*chunks))
    return host


def test_copy_to_the_host_that_fails_is_missed(
    scheduler: HostScheduler, caplog: pytest.LogCaptureFixture
) -> None:
    """Its slots are free again."""
    known(scheduler, A)
    with failing(scheduler, "save"):
        known(scheduler, A, B)
        known(scheduler, C, A)
    assert scheduler.on_host() == {chain(A)}
    stats = scheduler.cache.tiers.host.stats()
    assert (stats["failed"], stats["missed"], stats["tokens"]) == (3, 3, len(HEAD + A))
    assert len(caplog.records) == 1
    scheduler.check()
    known(scheduler, A, B)
    assert scheduler.on_host() == {chain(A), chain(A, B)}
    scheduler.check()


def test_node_that_is_read_does_not_leave(scheduler: HostScheduler) -> None:
    """Its slots would be free no sooner. The head's tokens stay for it, others leave in its
    place."""
    offloaded(scheduler, A)
    offloaded(scheduler, B)
    nodes = scheduler.cache.tiers.host.nodes
    host = host_node(scheduler, A)
    host.blob.hold()
    blob = nodes.room(nodes.pool.num_slots - len(HEAD + A))
    assert blob is not None
    assert scheduler.on_host() == {chain(A)}
    blob.give_back()
    host.blob.let_go()
    scheduler.check()


def test_head_stays_while_a_chain_needs_it(scheduler: HostScheduler) -> None:
    """Though it was used least."""
    known(scheduler, A)
    nodes = scheduler.cache.tiers.host.nodes
    head, host = nodes.get(host_node(scheduler, A).before), host_node(scheduler, A)
    assert head is not None
    for _ in range(3):
        nodes.index.held.use(host)
    blob = nodes.room(nodes.pool.num_free + 1)
    assert blob is not None
    assert nodes.get(head.chain_key) is head
    assert scheduler.on_host() == set()
    blob.give_back()
    scheduler.check()


def test_what_is_behind_a_gap_waits_for_it(scheduler: HostScheduler) -> None:
    """No request comes to B without A, so the front is not told of it before A is back."""
    known(scheduler, A, B)
    scheduler.evict(1)
    scheduler.cache.tiers.host.nodes.drop(host_node(scheduler, A))
    scheduler.check()
    assert scheduler.on_host() == {chain(A, B)}
    scheduler.evict(CAPACITY)
    scheduler.check()
    assert scheduler.on_host() == set()
    assert scheduler.serve(rag(A)) == len(HEAD)
    scheduler.check()
    assert scheduler.on_host() == {chain(A, B)}
    assert scheduler.serve(rag(A, B)) == len(HEAD + A + B)
    scheduler.check()


def test_what_comes_does_not_take_the_place_of_what_precedes_it() -> None:
    """Neither of the head nor of the beginning of a chain that is longer than host memory."""
    small = HostScheduler(host_slots=len(HEAD + A) - 1)
    known(small, A)
    assert small.on_host() == set()
    chunks = [(10 * n, 10 * n + 1, 10 * n + 2) for n in range(2, 8)]
    scheduler, found = HostScheduler(host_slots=14), list[int]()
    for _ in range(4):
        known(scheduler, *chunks)
        scheduler.evict(CAPACITY)
        found.append(scheduler.serve(rag(*chunks)))
        scheduler.idle()
        scheduler.check()
    assert found == [14] * 4
    assert scheduler.cache.tiers.host.counts.saved_tokens == 14


def test_failure_in_a_group_of_ranks_is_raised(
    scheduler: HostScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank that computes what the others have loaded would wait for them forever."""
    scheduler.cache.tiers.host._num_ranks = 2
    offloaded(scheduler, A)
    monkeypatch.setattr(scheduler.cache.tiers.host.pool, "prepare", lambda slots: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        scheduler.match(rag(A))


def test_a_prefill_is_not_kept_waiting_twice(scheduler: HostScheduler) -> None:
    """Saving is put off while first tokens wait, but for every second prefill."""
    host = scheduler.cache.tiers.host
    scheduler.serve(rag(A, promoted_len=0))
    known_nodes = [node for _, node in walk(scheduler.cache) if facts(node).chunk]
    facts(known_nodes[0]).hits = 1
    host.write_back.offer(known_nodes)
    list(host.after(first_tokens_wait=True))
    assert host.stats()["waiting"] == 1
    list(host.after(first_tokens_wait=True))
    assert host.stats()["waiting"] == 0


@pytest.mark.parametrize(
    ("uses", "stays"),
    [((A, A, B), B), ((B, A), A), ((A, (), A, (), A, B, B), A), ((A, (), A, B, (), B), B)],
    ids=str,
)
def test_what_host_memory_was_used_for_stays_when_it_is_full(
    uses: Sequence[tuple[int, ...]], stays: tuple[int, ...]
) -> None:
    """Here all leave the device at (). A hit on the device is no use of host memory; of chains that
    were loaded as often, the one that was hit last stays."""
    scheduler = HostScheduler(host_slots=len(HEAD + A + B) + 1, window_requests=100)
    for chunk in (A, B):
        scheduler.serve(rag(chunk, promoted_len=1))
    for used in uses:
        if used:
            scheduler.serve(rag(used))
        else:
            scheduler.evict(CAPACITY)
    assert scheduler.on_host() == {chain(A), chain(B)}
    scheduler.evict(CAPACITY)
    scheduler.serve(rag(C, promoted_len=1))
    scheduler.idle()
    assert scheduler.on_host() == {chain(stays), chain(C)}
    scheduler.check()


def test_what_comes_back_has_its_hits(scheduler: HostScheduler) -> None:
    """The pool would evict it as it evicts what nobody has found yet."""

    def hits() -> list[int]:
        return [facts(node).hits for _, node in walk(scheduler.cache) if facts(node).chunk]

    for _ in range(4):
        scheduler.serve(rag(A))
    scheduler.idle()
    assert hits() == [3]
    scheduler.evict(CAPACITY)
    scheduler.serve(rag(A))
    assert hits() == [4]


def test_integrity_names_what_is_wrong(scheduler: HostScheduler) -> None:
    known(scheduler, A, B)
    nodes, host = scheduler.cache.tiers.host.nodes, host_node(scheduler, A)
    nodes._below[host.above].clear()
    host.node = None
    with pytest.raises(IntegrityError, match="were booked") as raised:
        check_integrity(scheduler.cache)
    assert "do not know each other" in str(raised.value)


@settings(max_examples=examples(120))
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(6, 15),
    host_slots=st.sampled_from([12, 30, 1000]),
    page_size=st.sampled_from([1, 4]),
)
def test_random_traffic_finds_all_that_is_held(
    seed: int, num_pages: int, host_slots: int, page_size: int
) -> None:
    """A match is as long as what device and host hold, unless the device has no room; in pages a
    rest longer, which is copied."""
    rng, capacity = random.Random(seed), 4 * num_pages
    scheduler = HostScheduler(
        capacity, host_slots, window_requests=rng.choice([1, 5]), page_size=page_size
    )
    # in pages what a slot holds tells chunks apart that begin otherwise
    pool = [A, B, C, (1, 2, 6), (9,)] if page_size == 1 else [A, (5, 2), C, (6, 1, 2, 1, 3), (9,)]
    live, ended = list[FakeReq](), list[FakeReq]()
    parts = dict[bytes, tuple[Any, ...]]()
    for _ in range(60):
        chunks = rng.sample(pool, rng.randint(1, 3))
        head, salt = rng.choice([(), HEAD, (90, 92), (94,)]), rng.choice([None, None, "s"])
        req = rag(*chunks, head=head, cache_salt=salt, promoted_len=rng.choice([0, 0, 1]))
        if ended and rng.random() < 0.5:
            before = rng.choice(ended[-3:])
            shown = {span.chunk for span in scheduler.cache._spans_of(before).spans}
            fresh = [each for each in chunks if chunk_id(each) not in shown]
            if len(before.all_ids) < capacity // 2:
                req = later(before, *fresh, tail=(rng.choice([31, 32]),))
        step = rng.random()
        if (step < 0.2 and live) or len(live) == 8:
            scheduler.forward()
            gone = live.pop(rng.randrange(len(live)))
            if scheduler.is_prefilled(gone):
                ended.append(gone)
            scheduler.release(gone, is_insert=scheduler.is_prefilled(gone))
        elif step < 0.4:
            scheduler.evict(rng.randint(1, capacity))
        else:
            expected = longest(scheduler, req, parts)
            refused = scheduler.cache.tiers.host.counts.no_room
            is_admitted = step > 0.5
            matched = (
                scheduler.add(req, rng.choice([3, 100])) if is_admitted else scheduler.match(req)
            )
            if matched is not None:
                has_room = scheduler.cache.tiers.host.counts.no_room == refused
                assert matched - expected in range(page_size) or not has_room
            if matched is not None and is_admitted:
                live.append(req)
            if rng.random() < 0.6:
                scheduler.forward()
        scheduler.check(live)
        parts |= saved_parts(scheduler, pool)
    scheduler.forward()
    for req in live:
        scheduler.release(req, is_insert=False)
    scheduler.evict(capacity)
    scheduler.check()
    assert scheduler.allocator.available_size() == capacity


def longest(scheduler: HostScheduler, req: FakeReq, parts: dict[bytes, tuple[Any, ...]]) -> int:
    """How many of the request's tokens the device holds, or will with the next forward, and behind
    them, whole, its head, chunks and texts between that are on the host."""
    host = scheduler.cache.tiers.host
    on_device = {scheduler.allocator.contents.get(slot) for slot in scheduler.tree_slots()}
    for part in host.load_back._loads.values():
        on_device |= {host.pool.contents[slot] for slot in part.tolist()}
    spans, limit = scheduler.cache._spans_of(req).spans, len(req.all_ids) - 1
    inside = {end for span in spans for end in range(span.start + 1, span.end)}
    ends = [end for end in range(limit + 1) if end not in inside]
    length, page = 0, scheduler.page_size
    for end in sorted({end - end % page for end in ends}):
        if length < end <= limit:
            if content(req, end) not in on_device:
                break
            length = end
    on_host = set(host.pool.contents.values())
    whole = {part for key, part in parts.items() if key in host.nodes._nodes}
    borders = [0, *itertools.chain.from_iterable(span[:2] for span in spans)]
    for n, (start, end) in enumerate(itertools.pairwise(borders)):
        first, last = start - start % page, end - end % page
        if start == end or (last <= length if n % 2 == 0 else first < length):
            continue
        is_held = last == length or content(req, last) in on_host
        if last > limit or not is_held or content(req, end) not in whole:
            break
        length = last
    return length


def saved_parts(
    scheduler: HostScheduler, chunks: Sequence[tuple[int, ...]]
) -> dict[bytes, tuple[Any, ...]]:
    """All up to the end of each part of a prompt, by its key: of a chunk on the device that is on
    the host, and of the text before. In pages the last of it may have no slot of its own."""
    parts, tokens = dict[bytes, tuple[Any, ...]](), {chunk_id(each): each for each in chunks}
    for path, node in walk(scheduler.cache):
        known, tenant = facts(node), (node.key.extra_key, node.key.cache_salt)
        before = tuple(itertools.chain.from_iterable(key.token_ids for key in path))[: known.start]
        if known.head_key is not None:
            parts[known.head_key] = (*tenant, before)
        if known.host is not None and known.chunk is not None:
            parts[known.host.chain_key] = (*tenant, before + tokens[known.chunk])
    return parts


@pytest.mark.parametrize(
    ("load", "extend"), [(Line(), Line(each=1.0)), (Line(each=1.0), Line(fixed=9.0))]
)
def test_costs_that_are_not_known_are_tried(
    scheduler: HostScheduler, load: Line, extend: Line
) -> None:
    """Of prefills of one length nothing is known by the token."""
    offloaded(scheduler, A)
    scheduler.price(load, extend)
    assert scheduler.serve(rag(A)) == len(HEAD + A)
    watched = [phase for phase, _ in scheduler.cache.tiers.host.pricing.watched][-2:]
    assert watched == [Phase.LOAD, Phase.EXTEND]


def test_prometheus_is_told_when_it_is_due(scheduler: HostScheduler) -> None:
    """After a forward, and with the stats; every figure of theirs but the costs."""
    shown: Any = mock.Mock(is_due=False)
    host = scheduler.cache.tiers.host
    host._metrics = shown
    known(scheduler, A)
    shown.show.reset_mock()
    list(host.after(first_tokens_wait=False))
    shown.show.assert_not_called()
    shown.is_due = True
    list(host.after(first_tokens_wait=False))
    (told,) = shown.show.call_args.args
    assert told["saved_tokens"] == told["tokens"] == len(HEAD + A)
    assert host.stats() == told
    series = (*host_metrics.GAUGES.values(), *host_metrics.COUNTERS.values())
    assert {each[0] for each in series} == told.keys() - {"ms_per_1000_tokens"}
