"""SGLang's allocator over virtual slots: rows run out first, and what is evicted frees rows."""

from __future__ import annotations

from array import array

import pytest

pytest.importorskip("sglang")

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from tests.reference.one_copy import CountingVirtual
from tests.reference.scheduler import Scheduler, config

ROWS, SLOTS = 20, 60


def make_scheduler() -> Scheduler:
    return Scheduler(ROWS, config(), allocator=CountingVirtual.of(ROWS, SLOTS))


def insert(scheduler: Scheduler, token: int, slots: torch.Tensor) -> None:
    ids = array("q", [token] * len(slots))
    scheduler.cache.insert(InsertParams(key=RadixKey(ids), value=slots))


def shared(scheduler: Scheduler, of: torch.Tensor) -> torch.Tensor:
    slots, at = scheduler.allocator.take(len(of)), torch.arange(len(of))
    assert slots is not None
    scheduler.allocator.slot_map.share(slots, of, old=at, new=at)
    return slots


def test_rows_run_out_before_slots() -> None:
    """SGLang is told none are free, and gets none."""
    allocator = make_scheduler().allocator
    slots = allocator.alloc(ROWS)
    assert (allocator.available_size(), allocator.num_free_slots) == (0, SLOTS - ROWS)
    assert allocator.alloc(1) is None
    allocator.free_group_begin()
    allocator.free(slots[:5])
    assert allocator.available_size() == 0
    allocator.free_group_end()
    assert allocator.available_size() == 5
    allocator.clear()
    assert allocator.available_size() == ROWS


def test_slots_can_run_out_first() -> None:
    scheduler = make_scheduler()
    own = scheduler.allocator.alloc(10)
    for _ in range(5):
        shared(scheduler, own)
    assert scheduler.allocator.slot_map.num_free == 10
    assert scheduler.allocator.available_size() == 0


def test_retraction_frees_rows_or_goes_on() -> None:
    """`check_decode_capacity` decides whether SGLang retracts. A request that gives back only what
    it shares makes no room; a request in use keeps the rows that the tree evicts."""
    scheduler = make_scheduler()
    allocator, cache = scheduler.allocator, scheduler.cache
    source, alone = allocator.alloc(12), allocator.alloc(4)
    running, retracted = shared(scheduler, source), shared(scheduler, source)
    insert(scheduler, 1, source)
    insert(scheduler, 2, alone)
    assert cache.evictable_size() == 4, "the source's rows are read by what runs"
    assert allocator.check_decode_capacity(num_tokens=8, tree_cache=cache)
    assert not allocator.check_decode_capacity(num_tokens=9, tree_cache=cache)
    allocator.free(retracted)
    assert not allocator.check_decode_capacity(num_tokens=9, tree_cache=cache)
    allocator.free(running)
    assert allocator.check_decode_capacity(num_tokens=ROWS, tree_cache=cache)
    assert (allocator.slot_map.num_used, allocator.slot_map.violations()) == (0, [])


def test_eviction_goes_on_until_rows_are_free() -> None:
    """Two nodes that share rows free them together."""
    scheduler = make_scheduler()
    own = scheduler.allocator.alloc(10)
    insert(scheduler, 2, shared(scheduler, own))
    insert(scheduler, 1, own)
    assert scheduler.cache.evictable_size() == 10
    assert scheduler.cache.evict(EvictParams(num_tokens=3)).num_tokens_evicted == 20
    assert scheduler.allocator.available_size() == ROWS
