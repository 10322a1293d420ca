"""What a match in pages lacks of its last chunk is copied from what follows it elsewhere. The kit's
scheduler checks that each slot of a prompt holds what belongs there; random traffic in
test_chunk_cache_model.py and test_host_chains.py."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.scheduler.page_rests import _copies_rows
from tests.kit.chains import HostScheduler, known, rag

PAGE = 4
A, B, C = (1, 2, 3, 4, 5, 6), (10, 11, 12), (20, 21, 22, 23, 24)


@pytest.fixture
def scheduler() -> HostScheduler:
    return HostScheduler(capacity=40, host_slots=0, page_size=PAGE)


def test_rest_is_copied_from_another_chunks_page(scheduler: HostScheduler) -> None:
    """Where a match is whole there is nothing to copy."""
    assert scheduler.serve(rag(A, B, head=())) == 0
    req = rag(A, C, head=())
    assert scheduler.admit(req, 100) == len(A)
    own = scheduler.slots(req, PAGE, len(A))
    assert not set(own) & set(scheduler.tree_slots())
    assert own[0] % PAGE == 0
    scheduler.check([req])
    scheduler.release(req, is_insert=True)
    assert scheduler.serve(rag(A, B[:2], head=(9, 9))) == 0
    scheduler.check()


def test_rest_of_a_chunk_that_is_shorter_than_a_page(scheduler: HostScheduler) -> None:
    """With the chunk before it, whose rest lies in the same page."""
    scheduler.serve(rag(A, (7,), B, head=()))
    assert scheduler.serve(rag(A, (7,), C, head=())) == len(A) + 1


def test_rest_is_found_behind_a_chunk_whose_followers_have_left(scheduler: HostScheduler) -> None:
    """It is shorter than a page, and what precedes it has another follower."""
    scheduler.serve(rag(A, C, head=()))
    scheduler.serve(rag(A, (7,), head=(), tail=()), answer=())
    assert scheduler.match(rag(A, (7,), B, head=())) == PAGE
    assert scheduler.serve(rag(A, (7,), B, head=())) == len(A)


def test_source_may_be_evicted_until_the_forward(scheduler: HostScheduler) -> None:
    scheduler.serve(rag(A, B, head=()))
    req = rag(A, C, head=())
    assert scheduler.add(req, 100) == len(A)
    scheduler.evict(40)
    scheduler.forward()
    scheduler.check([req])


def test_without_a_page_it_is_computed() -> None:
    scheduler = HostScheduler(capacity=3 * PAGE, host_slots=0, page_size=PAGE)
    scheduler.serve(rag(A, B, head=(), tail=(30, 31, 32)))
    first = rag(A, B, head=(), tail=(30, 31, 32))
    assert scheduler.admit(first, 100) == len(A + B)  # in the page of what it was copied from
    assert scheduler.match(second := rag(A, C, head=())) == PAGE
    assert scheduler.cache._rests.commit(second) is None


def test_what_follows_may_wait_for_host_memory() -> None:
    """Its page holds nothing yet: the rest comes from host memory, too."""
    scheduler = HostScheduler(capacity=40, host_slots=40, page_size=PAGE)
    known(scheduler, A, C, head=())
    scheduler.evict(40)
    first, second = rag(A, C, head=()), rag(A, B, head=())
    assert scheduler.add(first, 100) == 2 * PAGE
    assert scheduler.cache.tiers.host.load_back._loads
    assert scheduler.add(second, 100) == len(A)
    scheduler.forward()
    scheduler.check([first, second])


@pytest.mark.parametrize("is_on_device", [True, False])
def test_rest_comes_from_host_memory(*, is_on_device: bool) -> None:
    """Behind pages that are still on the device, too."""
    scheduler = HostScheduler(capacity=40, host_slots=40, page_size=PAGE)
    known(scheduler, A, C, head=())
    scheduler.evict(40)
    assert not scheduler.tree_slots()
    if is_on_device:
        scheduler.serve(rag(A, head=()))
    before = scheduler.cache.tiers.host.counts.loaded_tokens
    req = rag(A, B, head=())
    assert scheduler.admit(req, 100) == len(A)
    num_loaded = scheduler.cache.tiers.host.counts.loaded_tokens - before
    assert state(req).loaded == num_loaded == len(A) - PAGE * is_on_device
    scheduler.check([req])
    scheduler.release(req, is_insert=True)
    scheduler.check()


def test_rest_in_host_memory_may_leave_until_it_is_promised() -> None:
    scheduler = HostScheduler(capacity=40, host_slots=40, page_size=PAGE)
    known(scheduler, A, C, head=())
    scheduler.evict(40)
    scheduler.serve(rag(A, head=()), answer=())
    scheduler.match(req := rag(A, B, head=()))
    assert state(req).rest is not None
    while scheduler.cache.tiers.host.index.evict():
        pass
    assert scheduler.cache._rests.commit(req) is None
    scheduler.check()


def test_rest_that_cannot_be_loaded_is_computed() -> None:
    scheduler = HostScheduler(capacity=40, host_slots=40, page_size=PAGE)
    known(scheduler, A, C, head=())
    scheduler.evict(40)
    scheduler.serve(rag(A, head=()), answer=())
    host = scheduler.cache.tiers.host
    host.pool.prepare = None  # as one that raises
    assert scheduler.serve(rag(A, B, head=())) == PAGE
    assert host.counts.failed == 1
    host.counts.failed = 0
    scheduler.check()


def test_rest_behind_a_chunk_without_a_page_in_host_memory() -> None:
    scheduler = HostScheduler(capacity=40, host_slots=40, page_size=PAGE)
    known(scheduler, A, (7,), C, head=())
    for chunks in ((A, B), (A, (7,), B)):
        scheduler.evict(40)
        assert scheduler.serve(rag(*chunks, head=())) == sum(map(len, chunks[:-1]))


def test_sglangs_pool_copies_without_its_kernel() -> None:
    """Which it prepares for speculative decoding only."""
    pool = MHATokenToKVPool(8, PAGE, torch.float32, 1, 2, 2, "cpu", False)
    assert _copies_rows(pool)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer[4] = 1.0
    pool.move_kv_cache(torch.tensor([9]), torch.tensor([4]))
    assert all(bool(each[9].all()) for each in (*pool.k_buffer, *pool.v_buffer))


def test_copied_is_not_what_sglang_calls_loaded(scheduler: HostScheduler) -> None:
    scheduler.serve(rag(A, B, head=()))
    scheduler.admit(req := rag(A, C, head=()), 100)
    assert req.host_hit_length == 0


def test_last_token_is_computed(scheduler: HostScheduler) -> None:
    """SGLang wants one to compute, though all of the prompt is cached."""
    scheduler.serve(rag(A, B, head=()))
    assert scheduler.serve(rag(A, head=(), tail=())) == len(A) - 1
