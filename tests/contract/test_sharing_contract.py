"""What shared slots rely on in SGLang: how its tree counts and frees, and in which stream rows and nodes are read."""

from __future__ import annotations

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers import scheduler
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.scheduler import Scheduler
from sglang.srt.mem_cache import allocation
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.radix_cache import RadixCache

from tests.contract.test_reuse_contract import source


def test_eviction_is_the_one_we_repeat() -> None:
    """Ours differs in what a node frees and how that is counted; whatever is new in SGLang's must come into ours."""
    eviction = source(RadixCache.evict)
    steps = [
        "leaves = list(self.evictable_leaves)",
        "(self.eviction_strategy.get_priority(node), node) for node in leaves",
        "while num_evicted < num_tokens and len(eviction_heap):",
        "self.token_to_kv_pool_allocator.free_segment(x.value, start_pos=0)",
        "num_evicted += len(x.value)",
        "self._delete_leaf(x)",
        "if len(x.parent.children) == 0 and x.parent.lock_ref == 0:",
        "heapq.heappush(eviction_heap, (new_priority, x.parent))",
        "self.kv_events.record_remove(x)",
        "self.update_eviction_metrics(num_evicted, start_time)",
        "return EvictResult(num_tokens_evicted=num_evicted)",
    ]
    places = [eviction.index(step) for step in steps]
    assert places == sorted(places)
    assert eviction.count("self.") == 8


def test_nodes_leave_by_eviction_alone() -> None:
    """A node that left otherwise would take its share of slots with it, unbooked."""
    assert source(RadixCache).count("self._delete_leaf(") == 1
    assert "self.evict(params)" in source(BasePrefixCache.evict_for_alloc)


def test_sizes_are_sums_over_nodes_by_lock() -> None:
    """Shared slots are subtracted from these."""
    assert "return self.evictable_size_" in source(RadixCache.evictable_size)
    assert "return self.protected_size_" in source(RadixCache.protected_size)
    for method, size in (
        (RadixCache.inc_lock_ref, "protected_size_ +="),
        (RadixCache.dec_lock_ref, "evictable_size_ +="),
    ):
        assert f"self.{size} len(node.key)" in source(method)
    assert "self.evictable_size_ += len(key)" in source(RadixCache._insert_helper)
    assert "self.evictable_size_ -= len(node.key)" in source(RadixCache._delete_leaf)


def test_nodes_have_slots_of_their_own_to_exchange() -> None:
    """A node's value is a copy of the row it was inserted with: exchanging some changes no other node and no row."""
    assert "new_node.value = value.clone()" in source(RadixCache._insert_helper)


def test_rows_are_written_before_the_forward() -> None:
    """A request's row holds its promised slots when we replace some of them, and SGLang does not write them again."""
    assert "req.prefix_indices" in source(ScheduleBatch.prepare_for_extend)
    assert "prefix_tensors" in source(allocation.alloc_for_extend)
    assert "alloc_for_extend(" in source(ScheduleBatch.prepare_for_extend)


def test_scheduler_has_one_stream_and_forwards_wait_for_it() -> None:
    """Promises are made in the scheduler's stream; a forward in its own stream runs after all work queued there."""
    assert (
        "StreamContext(self.schedule_stream): self.metrics_reporter.start_scheduler_time_accounting() dispatch"
        in source(scheduler)
    )
    run = source(Scheduler.run_batch)
    assert run.index("self.forward_stream.wait_stream(self.schedule_stream)") < run.index(
        "self.model_worker.forward_batch_generation("
    )


def test_allocator_frees_and_gives_in_the_current_stream() -> None:
    """Its list of free slots is a tensor: both must happen in the scheduler's stream."""
    assert "self.free_pages = torch.cat((self.free_pages, free_index))" in source(TokenToKVPoolAllocator.free)
    assert "select_index = self.free_pages[:need_size]" in source(TokenToKVPoolAllocator.alloc)


def test_a_match_is_a_tensor_of_its_own() -> None:
    """A request's `prefix_indices` are rewritten in place: were they a node's value, the tree would change with them."""
    assert "value = torch.cat(value)" in source(RadixCache.match_prefix)
