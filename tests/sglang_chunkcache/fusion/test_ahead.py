"""What a rank says of a chunk to preprocess before it is sent:
kept, or to be asked again while its storage is at work."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from radix_ext.cfo import Scored
from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.storage import loader, writes
from tests.kit.fused import Disk, Rank, disk, identity, wheres
from tests.kit.requests import OTHER_HEAD, A, B, C, D, ahead, rag

__all__ = ["disk"]  # the fixture

HERE, NOT_YET, COMING = (True, False), (False, False), (False, True)
"""Is kept, must wait."""


def found(rank: Rank, *chunks: list[int], **fields: Any) -> tuple[bool, bool]:
    told = rank.explain(ahead(*chunks, **fields))
    return told.is_kept, told.must_wait


def preprocess(rank: Rank, *chunks: list[int]) -> None:
    rank.serve(ahead(*chunks), answer=[50])
    rank.idle()


def test_chunk_is_kept_as_it_became_and_nothing_else() -> None:
    rank = Rank(capacity=100)
    for chunk in (A, B):
        assert found(rank, chunk) == NOT_YET
        preprocess(rank, chunk)
        assert found(rank, chunk) == HERE
    assert found(rank, A, B, C) == NOT_YET
    preprocess(rank, A, B, C)
    assert found(rank, A, B, C) == HERE
    for other in ((B, A, C), (A, C), (C,), (A, B, D)):
        assert found(rank, *other) == NOT_YET
    assert found(rank, A, B, C, head=OTHER_HEAD) == NOT_YET
    assert found(rank, A, B, C, cache_salt="pepper") == NOT_YET


def test_what_was_made_while_the_weights_were_others_is_not_kept() -> None:
    """The old ones are back before anybody flushes."""
    rank = Rank(capacity=100)
    rank.cache.doubt_weights()
    rank.weights = 1
    for chunks in ((A,), (B,), (A, B)):
        preprocess(rank, *chunks)
    rank.weights = 0
    rank.flush()
    assert found(rank, A, B) == NOT_YET


def test_what_requests_have_left_is_not_what_preprocessing_makes() -> None:
    """An ordinary variant stays for no request. Alone a chunk is an ordinary variant."""
    rank = Rank(capacity=100)
    rank.store_chunks(A, B)
    assert found(rank, A, B) == NOT_YET
    assert found(rank, A) == HERE


def test_chunk_without_the_scores_that_are_wanted_is_not_kept() -> None:
    rank = Rank(capacity=100)
    preprocess(rank, A)
    rank.fuser.keeper.captures._scored = Scored.ALL
    assert rank.fuser.keeper.captures.at_least(Scored.NOTHING) == Scored.ALL
    assert found(rank, A) == NOT_YET
    preprocess(rank, A)
    assert found(rank, A) == HERE


def test_next_server_keeps_what_is_in_the_storage(disk: Disk) -> None:
    """The one before was killed: nothing was loaded at the start, and nothing is for the chunk."""
    first = disk.server(capacity=100)
    for chunks in ((A,), (B,), (A, B)):
        preprocess(first, *chunks)
    second = disk.restarted(capacity=100)
    assert [found(second, *chunks) for chunks in ((A,), (A, B), (B, A))] == [HERE, HERE, COMING]
    assert disk.settle()["loaded"] == 1, "B, which A is to be moved after"
    assert second.held(A) == []
    second.weights = 1
    second.flush()
    assert found(second, A) == NOT_YET


def test_neighbors_are_loaded_before_the_chunk_is_sent(disk: Disk) -> None:
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
    assert wheres(second.ask(req)) == ["gap", "host"], "D stood behind C alone, A was loaded"
    assert found(second, B, C) == COMING
    counts = disk.settle()
    assert (counts["loaded"], counts["late"], counts["problems"]) == (1, 0, {"damaged": 1})
    assert found(second, B, C) == NOT_YET


def test_chunks_wait_while_the_storage_has_much_to_write(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its queue refuses what is computed."""
    monkeypatch.setattr(loader, "MAX_WAITING", 2)
    rank = disk.server(capacity=100)
    disk.storage.gate.clear()
    assert found(rank, D) == NOT_YET
    for chunk in (A, B, C):
        preprocess(rank, chunk)
    assert [found(rank, chunk) for chunk in (D, C)] == [COMING, (True, True)]
    disk.storage.gate.set()
    assert disk.settle()["written"] == 2
    assert [found(rank, chunk) for chunk in (D, C)] == [NOT_YET, HERE]
    assert disk.settle()["written"] == 3


def test_chunks_that_come_together_find_a_place_in_the_queue(
    disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many are let through as it takes, until they are written or time has passed."""
    monkeypatch.setattr(loader, "MAX_WAITING", 2)
    rank = disk.server(capacity=100)
    every = [A, B, C, D]
    assert [found(rank, chunk) for chunk in every] == [NOT_YET, NOT_YET, COMING, COMING]
    assert found(rank, A) == NOT_YET, "its own place"
    for chunk in (A, B):
        preprocess(rank, chunk)
    assert disk.settle()["unwritten"] == 0
    assert [found(rank, chunk) for chunk in (C, D)] == [NOT_YET, NOT_YET]
    assert found(rank, A, B, C) == COMING
    disk.now += writes.RESERVED_S
    assert found(rank, A, B, C) == NOT_YET


def test_paused_storage_keeps_nobody_waiting(disk: Disk) -> None:
    preprocess(disk.server(capacity=100), A)
    rank = disk.restarted(capacity=100)
    disk.storage.fails = True
    for _ in range(4):
        assert found(rank, A, B) == COMING
        disk.settle()
    assert found(rank, A, B) == NOT_YET


@pytest.mark.parametrize(("others", "num_left"), [(0, 0), (1, 1)])
def test_forward_of_nothing_but_preprocessing_leaves_no_capture_waiting(
    others: int, num_left: int
) -> None:
    """Else its many chunks would fill the queue. Where a request waits for its token they wait."""
    rank = Rank(capacity=100)
    rank.fuser.keeper.captures._part_of = lambda entry: 2.0
    for chunk in (A, B):
        rank.serve(ahead(chunk), answer=[50])
    rank.serve(rag(C, keep=[0]), answer=[50])
    assert rank.num_pending == 1
    reqs = [ahead(D), *[rag(C)] * others]
    assert all(state(req).spans is None for req in reqs), "nothing has read them yet"
    lens = {"prefix_lens": [0] * len(reqs), "extend_lens": [1] * len(reqs)}
    batch: Any = SimpleNamespace(reqs=reqs, forward_mode=ForwardMode.EXTEND, **lens)
    with rank.cache.around_forward(batch):
        """Of these requests."""
    assert rank.num_pending == num_left


def test_answers_under_way_do_not_wait_for_all_captures() -> None:
    """What was sent ahead is a batch of its own, and others decode."""
    rank = Rank(capacity=100)
    rank.fuser.keeper.captures._part_of = lambda entry: 2.0
    rank.serve(rag(A, B, C, keep=[0, 1, 2]), answer=[50])
    before = rank.num_pending
    batch: Any = SimpleNamespace(
        reqs=[ahead(D)], forward_mode=ForwardMode.EXTEND, prefix_lens=[0], extend_lens=[1]
    )
    rank.cache.line._adder = mock.Mock(running_batch=SimpleNamespace(reqs=[rag(C)]))
    for num_left in (before, before - 1):  # first tokens wait for every second one
        with rank.cache.around_forward(batch):
            """A prefill."""
        assert rank.num_pending == num_left > 0
