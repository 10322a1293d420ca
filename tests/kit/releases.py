"""What SGLang's scheduler does with a request and the cache, in this release's words: as in
compat.py, which the package asks, by features and in one place."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from sglang.srt.managers import schedule_policy
from sglang.srt.mem_cache import common
from sglang.srt.mem_cache.base_prefix_cache import MatchResult

from sglang_chunkcache.compat import KNOWS_SLOTS, num_matched

HAS_CHECKPOINT = hasattr(common, "checkpoint_kv_cache")
"""From 0.5.22 on."""

T = TypeVar("T")


def since_checkpoint(now: T, before: T) -> T:
    """What a contract expects of this release. `before`: of 0.5.21."""
    return now if HAS_CHECKPOINT else before


DROPPED = since_checkpoint("discard_output_reason", "to_finish")
"""What a request has in place of its output."""


def match_in_queue(cache: Any, req: Any) -> None:
    """As `SchedulePolicy` does for each that waits."""
    if hasattr(common, "match_kv_cache"):
        common.match_kv_cache(req, cache)
    else:
        schedule_policy.match_prefix_for_req(cache, req, include_req=True)


def found(req: Any) -> int:
    """Tokens of the request that need not be computed, since they are in the tree."""
    return len(req.prefix_indices) if KNOWS_SLOTS else req.prefix_len


def take(req: Any, result: MatchResult) -> None:
    """What was matched is the request's prefix."""
    if KNOWS_SLOTS:
        req.prefix_indices = result.device_indices
    else:
        req.prefix_len = num_matched(result)


def take_loaded(cache: Any, req: Any, loaded: tuple[Any, Any]) -> int:
    """What `init_load_back` gave is behind it. Its number of tokens."""
    more, req.last_node = loaded
    if KNOWS_SLOTS:
        req.prefix_indices = torch.cat([req.prefix_indices, more])
        more = len(more)
    else:
        req.prefix_len += more
    if KNOWS_SLOTS or cache.load_back_is_cache_owned():
        req.kv.cache_protected_len = found(req)
    return int(more)


def drop_prefix(req: Any) -> None:
    """Nothing was matched."""
    req.prefix_indices, req.prefix_len = torch.empty((0,), dtype=torch.int64), 0


def prefix_slots(cache: Any, req: Any) -> torch.Tensor:
    """The prefix's, for the request's row."""
    if KNOWS_SLOTS:
        return req.prefix_indices  # type: ignore[no-any-return]
    return cache.prefix_device_indices(req)  # type: ignore[no-any-return]


def lock(cache: Any, req: Any) -> None:
    """From the request's admission to its release."""
    if HAS_CHECKPOINT:
        req.lock = cache.lock(req.last_node)
    else:
        cache.inc_lock_ref(req.last_node)


def checkpoint(cache: Any, req: Any, *, is_middle: bool) -> None:
    """What is computed goes into the tree. `is_middle`: more of the prompt is to come."""
    if HAS_CHECKPOINT:
        common.checkpoint_kv_cache(req, cache)
    else:
        cache.cache_unfinished_req(req, chunked=is_middle)


def release(cache: Any, req: Any, *, is_insert: bool) -> None:
    """SGLang's own way out of a request."""
    how = "checkpoint" if HAS_CHECKPOINT else "is_insert"
    common.release_kv_cache(req, cache, **{how: is_insert})
