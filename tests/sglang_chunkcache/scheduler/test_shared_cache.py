"""`SharingRadixCache`: without shared slots SGLang's own tree, with them the same order of eviction."""

from __future__ import annotations

from array import array
from unittest import mock

import pytest

pytest.importorskip("sglang")

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, MatchPrefixParams
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey

from sglang_chunkcache.scheduler.shared_cache import SharingRadixCache
from tests.examples import examples
from tests.reference.scheduler import CountingAllocator

CAPACITY = 60
KEYS = st.lists(st.integers(1, 3), min_size=1, max_size=6)


def make_cache(kind: type[RadixCache]) -> RadixCache:
    allocator = CountingAllocator(CAPACITY, torch.float32, "cpu", None, False)
    return kind(CacheInitParams(False, None, allocator, 1))


def insert(cache: RadixCache, tokens: list[int]) -> None:
    """As a request does: slots for all, and what was there already is given back."""
    slots = cache.token_to_kv_pool_allocator.alloc(len(tokens))
    found = cache.insert(InsertParams(key=RadixKey(array("q", tokens)), value=slots)).prefix_len
    cache.token_to_kv_pool_allocator.free(slots[:found])


def evict(cache: RadixCache, num_tokens: int) -> tuple[int, int, list[list[int]]]:
    """Slots freed, by the answer and by the metrics; tokens of the nodes that were told to be gone."""
    with (
        mock.patch.object(cache, "update_eviction_metrics") as metrics,
        mock.patch.object(cache.kv_events, "record_remove") as gone,
    ):
        num = cache.evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted
    return num, metrics.call_args.args[0], [list(call.args[0].key.token_ids) for call in gone.call_args_list]


@settings(max_examples=examples(60))
@given(
    keys=st.lists(KEYS, min_size=1, max_size=8),
    locked=st.lists(KEYS, max_size=2),
    num_tokens=st.lists(st.integers(0, 20), min_size=1, max_size=4),
)
def test_evicts_as_sglang_does(keys: list[list[int]], locked: list[list[int]], num_tokens: list[int]) -> None:
    """Node by node, to the slot, also while somebody somewhere shares."""
    theirs, ours = make_cache(RadixCache), make_cache(SharingRadixCache)
    ours.shared.open(1, is_locked=False)  # no node's: every call takes our way
    deltas: dict[RadixCache, list[int]] = {theirs: [], ours: []}
    for cache in (theirs, ours):
        for key in keys:
            insert(cache, key)
        for key in locked:
            node = cache.match_prefix(MatchPrefixParams(key=RadixKey(array("q", key)))).last_device_node
            deltas[cache] += [cache.inc_lock_ref(node).delta, cache.inc_lock_ref(node).delta]
            deltas[cache].append(cache.dec_lock_ref(node).delta)
    assert deltas[theirs] == deltas[ours]
    for num in num_tokens:
        assert evict(theirs, num) == evict(ours, num)
        free = [sorted(cache.token_to_kv_pool_allocator.free_pages.tolist()) for cache in (theirs, ours)]
        assert free[0] == free[1]
        assert theirs.evictable_size() == ours.evictable_size()
        assert theirs.protected_size() == ours.protected_size()


@pytest.mark.parametrize("name", ["evict", "inc_lock_ref", "dec_lock_ref"])
def test_calls_are_sglangs_own_while_nothing_is_shared(name: str) -> None:
    """Plain traffic and exact mode run SGLang's code."""
    cache = make_cache(SharingRadixCache)
    with mock.patch.object(RadixCache, name, return_value="theirs") as theirs:
        assert getattr(cache, name)(cache.root_node) == "theirs"
        cache.shared.open(1, is_locked=False)
        argument = EvictParams(num_tokens=0) if name == "evict" else cache.root_node
        assert getattr(cache, name)(argument) != "theirs"
    assert theirs.call_count == (1 if name == "evict" else 2)


def test_a_tree_without_sharing_has_nothing_to_add() -> None:
    """Sizes are SGLang's sums."""
    cache = make_cache(SharingRadixCache)
    insert(cache, [1, 2, 3])
    assert (cache.evictable_size(), cache.protected_size()) == (3, 0)
