"""What a rank says of a chunk to preprocess before it is sent:
kept, or to be asked again while its storage is at work."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.model_executor.forward_batch_info import ForwardMode

from radix_ext.cfo import Scored
from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.storage import loader, storage
from sglang_chunkcache.wire.report import Explanation
from sglang_chunkcache.wire.state import Asked, ExplainRequest, RankState
from tests.reference.fused_scheduler import FusedScheduler
from tests.reference.scheduler import FakeReq
from tests.sglang_chunkcache.fusion.test_promise import (
    HEAD,
    OTHER_HEAD,
    A,
    B,
    C,
    D,
    asks,
    make_scheduler,
    rag,
)
from tests.sglang_chunkcache.fusion.test_tier import Disk, disk, held, identity, store, wheres

__all__ = ["disk"]

HERE, NOT_YET, COMING = (True, False), (False, False), (False, True)
"""Is kept, must wait."""
_numbers = count()


def ahead(*chunks: list[int], **fields: Any) -> FakeReq:
    """The last chunk after its neighbours, as the front sends it."""
    last, recipe = len(chunks) - 1, f"prompt {next(_numbers)}"
    fusion = replace(asks(recipe=recipe, fresh=[last]), plain=True)
    return rag(*chunks, fusion=fusion, keep=[last], is_preprocessing=True, **fields)


def explain(scheduler: FusedScheduler, req: FakeReq) -> Explanation:
    spans = scheduler.cache._spans_of(req)
    assert spans is not None
    asked = ExplainRequest(list(req.origin_input_ids), spans, req.extra_key, req.cache_salt)
    rank: RankState = scheduler.cache.rank_state(0, Asked((asked,)))
    (told,) = rank.explanations
    return told


def found(scheduler: FusedScheduler, *chunks: list[int], **fields: Any) -> tuple[bool, bool]:
    told = explain(scheduler, ahead(*chunks, **fields))
    return told.is_kept, told.must_wait


def preprocess(scheduler: FusedScheduler, *chunks: list[int]) -> None:
    scheduler.serve(ahead(*chunks), answer=[50])
    scheduler.idle()


def test_chunk_is_kept_as_it_became_and_nothing_else() -> None:
    """After these neighbours in this order, behind this head, of this tenant.
    The neighbours are not kept by it."""
    scheduler = make_scheduler(100)
    for chunk in (A, B):
        assert found(scheduler, chunk) == NOT_YET
        preprocess(scheduler, chunk)
        assert found(scheduler, chunk) == HERE
    assert found(scheduler, A, B, C) == NOT_YET
    preprocess(scheduler, A, B, C)
    assert found(scheduler, A, B, C) == HERE
    for other in ((B, A, C), (A, C), (C,), (A, B, D)):
        assert found(scheduler, *other) == NOT_YET
    assert found(scheduler, A, B, C, head=OTHER_HEAD) == NOT_YET
    assert found(scheduler, A, B, C, cache_salt="pepper") == NOT_YET


def test_what_requests_have_left_is_not_what_preprocessing_makes() -> None:
    """An ordinary variant stays for no request. Alone a chunk is an ordinary variant."""
    scheduler = make_scheduler(100)
    store(scheduler, A, B)
    assert found(scheduler, A, B) == NOT_YET
    assert found(scheduler, A) == HERE


def test_chunk_without_the_scores_that_are_wanted_is_not_kept() -> None:
    """A server that was started with another selector reads them."""
    scheduler = make_scheduler(100)
    preprocess(scheduler, A)
    scheduler.fuser.captures._scored = Scored.ALL
    assert scheduler.fuser.captures.at_least(Scored.NOTHING) == Scored.ALL
    assert found(scheduler, A) == NOT_YET
    preprocess(scheduler, A)
    assert found(scheduler, A) == HERE


def test_next_server_keeps_what_is_in_the_storage(disk: Disk) -> None:
    """The one before was killed: nothing was loaded at the start, and nothing is for the chunk."""
    first = disk.server(capacity=100)
    for chunks in ((A,), (B,), (A, B)):
        preprocess(first, *chunks)
    disk.stop()
    second = disk.server(capacity=100)
    assert [found(second, *chunks) for chunks in ((A,), (A, B), (B, A))] == [HERE, HERE, COMING]
    assert disk.settle()["loaded"] == 1, "B, which A is to be moved after"
    assert held(second, A) == []
    second.weights = 1
    second.flush()
    assert found(second, A) == NOT_YET


def fill(scheduler: FusedScheduler, disk: Disk, *chunks: list[int]) -> bool:
    """As the front does: neighbours that are nowhere are computed alone before.
    Whether the chunk was kept."""
    told = explain(scheduler, ahead(*chunks))
    while told.must_wait:
        disk.settle()
        told = explain(scheduler, ahead(*chunks))
    if not told.is_kept:
        there, end = {source.span for source in told.sources if source.where != "gap"}, len(HEAD)
        for number, chunk in enumerate(chunks[:-1]):
            end += len(chunk)
            if number not in there and end > told.exact:
                preprocess(scheduler, chunk)
        preprocess(scheduler, *chunks)
    disk.settle()
    return told.is_kept


def test_neighbors_are_loaded_before_the_chunk_is_sent(disk: Disk) -> None:
    """Not computed again, and none comes late.
    What is on the device, or not alone, or damaged is not waited for."""
    first = disk.server(capacity=100)
    for chunks in ((A,), (B,), (C, D)):
        preprocess(first, *chunks)
    disk.stop()
    (damaged,) = disk.tier.storage.index.find(disk.tier._chunk(identity(B)))
    disk.storage.held[damaged.blob.row.name][-1] ^= 1
    second = disk.server(capacity=100)
    disk.storage.gate.clear()
    req = ahead(D, A, C)
    assert [found(second, D, A, C) for _ in range(3)] == [COMING] * 3
    disk.storage.gate.set()
    disk.settle()
    assert found(second, D, A, C) == NOT_YET
    second.cache.arrived(req)
    second.serve(req, answer=[50])
    assert wheres(req) == ["gap", "host"], "D stood behind C alone, A was loaded"
    assert found(second, B, C) == COMING
    counts = disk.settle()
    assert (counts["loaded"], counts["late"], counts["problems"]) == (1, 0, {"damaged": 1})
    assert found(second, B, C) == NOT_YET


def test_neighbors_come_into_a_store_full_of_preprocessed_chunks(disk: Disk) -> None:
    """The storage has these, so the store lets them go; one that it could not write stays."""
    scheduler = disk.server(capacity=100, store_bytes=8 * (len(D) + 2 * len(C)))
    for chunk in (A, B):
        preprocess(scheduler, chunk)
    for fails, chunks in ((False, (B,)), (True, (A, D))):
        disk.settle()
        disk.storage.fails = fails
        preprocess(scheduler, *chunks)
    disk.settle()
    disk.storage.fails = False
    preprocess(scheduler, A, C)
    preprocess(scheduler, B, C)
    scheduler.evict(100)
    disk.settle()
    assert (len(held(scheduler, C)), len(held(scheduler, D)), held(scheduler, B)) == (2, 1, [])
    assert found(scheduler, B, D) == COMING
    disk.settle()
    assert (len(held(scheduler, C)), len(held(scheduler, D)), len(held(scheduler, B))) == (0, 1, 1)


def test_chunks_wait_while_the_storage_has_much_to_write(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its queue refuses what is computed.
    What it has refused is written as soon as that is asked for again."""
    monkeypatch.setattr(loader, "MAX_WAITING", 2)
    scheduler = disk.server(capacity=100)
    disk.storage.gate.clear()
    assert found(scheduler, D) == NOT_YET
    for chunk in (A, B, C):
        preprocess(scheduler, chunk)
    assert [found(scheduler, chunk) for chunk in (D, C)] == [COMING, (True, True)]
    disk.storage.gate.set()
    assert disk.settle()["written"] == 2
    assert [found(scheduler, chunk) for chunk in (D, C)] == [NOT_YET, HERE]
    assert disk.settle()["written"] == 3


def test_chunks_that_come_together_find_a_place_in_the_queue(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many are let through as it takes, until they are written or time has passed."""
    monkeypatch.setattr(loader, "MAX_WAITING", 2)
    scheduler = disk.server(capacity=100)
    every = [A, B, C, D]
    assert [found(scheduler, chunk) for chunk in every] == [NOT_YET, NOT_YET, COMING, COMING]
    assert found(scheduler, A) == NOT_YET, "its own place"
    for chunk in (A, B):
        preprocess(scheduler, chunk)
    assert disk.settle()["unwritten"] == 0
    assert [found(scheduler, chunk) for chunk in (C, D)] == [NOT_YET, NOT_YET]
    assert found(scheduler, A, B, C) == COMING
    disk.now += storage.RESERVED_S
    assert found(scheduler, A, B, C) == NOT_YET


def test_paused_storage_keeps_nobody_waiting(disk: Disk) -> None:
    """It is tried again by what comes later."""
    preprocess(disk.server(capacity=100), A)
    disk.stop()
    scheduler = disk.server(capacity=100)
    disk.storage.fails = True
    for _ in range(4):
        assert found(scheduler, A, B) == COMING
        disk.settle()
    assert found(scheduler, A, B) == NOT_YET


def test_other_ranks_leave_it_to_the_one_that_is_asked() -> None:
    scheduler = make_scheduler()
    req = ahead(A)
    asked = ExplainRequest(
        list(req.origin_input_ids), scheduler.cache._spans_of(req), None, None, dp_rank=1
    )
    assert scheduler.cache.rank_state(0, Asked((asked,))).explanations == ()
    assert len(scheduler.cache.rank_state(1, Asked((asked, asked))).explanations) == 2


@pytest.mark.parametrize(("others", "num_left"), [(0, 0), (1, 2)])
def test_forward_of_nothing_but_preprocessing_leaves_no_capture_waiting(
    others: int, num_left: int
) -> None:
    """As many chunks come with each of these forwards: 512 tokens after every second one would fill
    the queue, which drops them. Where a request waits for its first token they wait, too."""
    scheduler = make_scheduler(100)
    scheduler.fuser.captures._max_tokens = 1
    for chunk in (A, B):
        scheduler.serve(ahead(chunk), answer=[50])
    assert scheduler.fuser.stats()["store"]["pending"] == 1
    scheduler.serve(rag(C, keep=[0]), answer=[50])
    reqs = [ahead(D), *[rag(C)] * others]
    for req in reqs:
        assert state(req).spans is None
    batch: Any = SimpleNamespace(
        reqs=reqs,
        forward_mode=ForwardMode.EXTEND,
        prefix_lens=[0] * len(reqs),
        extend_lens=[1] * len(reqs),
    )
    pending = scheduler.fuser.stats()["store"]["pending"]
    with scheduler.cache.around_forward(batch):
        pass
    assert (scheduler.fuser.stats()["store"]["pending"], pending > 0) == (others and pending, True)
