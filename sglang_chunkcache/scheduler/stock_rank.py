"""What the front asks of a rank whose tree is SGLang's own. Nothing is added to that tree, and
nothing is told of it but counts: SGLang's KV events tell what is in it (front/event_mirror.py)."""

from __future__ import annotations

from array import array
from typing import Any

from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_chunkcache import compat
from sglang_chunkcache.wire.events import Batch
from sglang_chunkcache.wire.report import Explanation
from sglang_chunkcache.wire.state import Asked, Cleared, ExplainRequest, RankState

NO_EVENTS = Batch(0, 0, (), 0, 0, 0)


def stock_state(scheduler: Any, dp_rank: int, asked: Asked, *, num_waiting: int) -> RankState:
    """As `reporting.rank_state`."""
    cache = scheduler.tree_cache
    return RankState(
        dp_rank=dp_rank,
        events=NO_EVENTS,
        counts={
            "tree": type(cache).__name__,
            "page_size": cache.page_size,
            # a match ends with a page, in a tree of pairs of tokens one earlier
            "border": cache.page_size - 1 + scheduler.spec_algorithm.is_eagle(),
            # 0: it keeps nothing
            "pool": 0 if scheduler.disable_radix_cache else scheduler.max_total_num_tokens,
        },
        num_waiting=num_waiting,
        explanations=tuple(_explain(cache, ask) for ask in asked.explain if ask.dp_rank == dp_rank),
        cleared=Cleared(0, 0, 0) if asked.clear_store else None,
    )


def _explain(cache: Any, asked: ExplainRequest) -> Explanation:
    """Counts as a use: SGLang's match has no other way."""
    ids = array("q", asked.input_ids)
    key = RadixKey(ids, asked.extra_key, limit=len(ids) - 1, cache_salt=asked.cache_salt)
    exact = compat.num_matched(cache.match_prefix(MatchPrefixParams(key=key)))
    return Explanation(exact, 0, exact)
