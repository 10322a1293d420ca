"""What SGLang may ask of a prefix cache, and who answers in ours. A release that adds a question
fails here until somebody has decided.

Asked for what none of its requests has, a base's answer is "nothing": sessions, sliding windows,
Mamba and SGLang's own storage are refused at the start or unknown to a `RadixCache`.
"""

from __future__ import annotations

from abc import ABC

import pytest

pytest.importorskip("sglang")

from sglang.srt.mem_cache.base_prefix_cache import BasePrefixCache
from sglang.srt.mem_cache.radix_cache import RadixCache

from sglang_chunkcache.scheduler.chunk_cache import ChunkRadixCache
from tests.kit.releases import since_checkpoint

pytestmark = pytest.mark.matrix

OURS = {
    "match_prefix": "chunk by chunk, and on through the tiers",
    "insert": "a node a chunk",
    "init_load_back": "promised slots",
    "reset": "with the tiers",
    "release_host_resources": "closes them",
    "release_aborted_request": "who waits no more holds nobody back",
    **since_checkpoint(
        {
            "checkpoint": "as far as whole chunks go, with the events for the front",
            "load_back_is_cache_owned": "no: until they are filled, promised slots are a request's",
            "prefix_device_indices": "with the promised slots",
        },
        {"cache_unfinished_req": "checkpoint", "insert_req": "checkpoint"},
    ),
}
TREE = """
evict inc_lock_ref dec_lock_ref evictable_size protected_size total_size all_values_flatten
pretty_print create_simulated
"""
"""SGLang's tree has them right for our nodes, too."""
TREE += since_checkpoint("path_device_indices supports_prefix_sharing touch_prefix", "")
# `touch_prefix` is given a plain key: of a waiting request's chunks it touches none. They are
# touched by the match that orders the queue.
ACCOUNTS = """
available_and_evictable_str free_kv_row on_release evict_for_alloc full_evictable_size
full_protected_size init_metrics_collector metrics_collector update_eviction_metrics kv_events
take_events dfs_weight_order resolve_node_handle root_node_handle supports_fast_match_prefix
finish
"""
"""The base has them right for a `RadixCache`."""
ACCOUNTS += since_checkpoint(
    "lock unlock",
    "unpin is_chunk_cache is_tree_cache",
)
NOTHING = """
buffer_pipeline cache_controller check_hicache_events claim_kv_row
discard_storage_prefetch_accounting evict_sliding_windows finish_storage_prefetch_admission
flush_pending_backups pop_prefetch_loaded_span ready_to_load_host_cache release_radix_session
release_session rotation_base_of storage_prefetch_retries supports_auxiliary_swa supports_mamba
supports_swa swa_evictable_size swa_protected_size swa_reprefill_tail_tokens swa_retain_floor
swa_transient_size
"""
"""Sessions, sliding windows, Mamba, HiCache."""
NOTHING += since_checkpoint(
    "maybe_hand_to_session session_records",
    "session_held_full_tokens session_held_mamba_slots session_held_req_count"
    " session_held_swa_tokens session_held_tokens supports_streaming_session",
)
OF_SOME = {"draft_swa_window", "swa_retain_window", "waiting_storage_span"}
"""From 0.5.23 on, and nothing for us."""


def public(cls: type) -> set[str]:
    return {name for name in dir(cls) if not name.startswith("_")} - set(dir(ABC))


def home(name: str) -> type:
    owner: type = next(cls for cls in ChunkRadixCache.__mro__ if name in vars(cls))
    return owner


def test_every_question_is_decided() -> None:
    """Not one more, and none that is gone."""
    asked = public(BasePrefixCache) | public(RadixCache)
    decided = {*OURS, *TREE.split(), *ACCOUNTS.split(), *NOTHING.split()}
    assert asked - OF_SOME - decided == set(), "new in this release: who answers?"
    assert decided - asked == set(), "gone in this release"


def test_who_answers_is_who_was_decided_on() -> None:
    """A method of ours that SGLang has renamed would be called by nobody."""
    for names, owner in ((TREE, RadixCache), (ACCOUNTS + NOTHING, BasePrefixCache)):
        assert [name for name in names.split() if home(name) is not owner] == []
    assert [name for name in OURS if home(name) in (RadixCache, BasePrefixCache)] == []
    assert not BasePrefixCache.__abstractmethods__ & {*ACCOUNTS.split(), *NOTHING.split()}
