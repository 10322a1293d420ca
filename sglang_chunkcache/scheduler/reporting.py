"""What the front asks a rank beside requests: events, counts, plans, hints (wire/state.py)."""

from __future__ import annotations

import logging
from array import array
from types import SimpleNamespace
from typing import Any

from msgspec import structs
from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
from sglang.srt.mem_cache.radix_cache import RadixKey

from sglang_chunkcache import compat
from sglang_chunkcache.errors import BusyError, ChunkCacheError, RequestError
from sglang_chunkcache.scheduler.chunk_cache import ChunkRadixCache
from sglang_chunkcache.scheduler.node import state
from sglang_chunkcache.wire.report import Explanation, Fallback
from sglang_chunkcache.wire.spans import checked
from sglang_chunkcache.wire.state import NOTHING, Asked, Cleared, ExplainRequest, RankState

logger = logging.getLogger(__name__)


def rank_state(
    cache: ChunkRadixCache, dp_rank: int, asked: Asked = NOTHING, *, num_waiting: int = 0
) -> RankState:
    """What the front asks of this rank. The counts are those after the store was cleared.
    `num_waiting`: requests whose prefill has not begun or not ended."""
    storage, fuser, cleared = cache.tiers.storage, cache.tiers.fuser, None
    if storage is not None:
        storage.poll(is_round=True)  # all ranks of a group are asked at once
    if asked.clear_store:
        of_storage = storage.clear() if storage is not None else Cleared(0, 0, 0)
        cleared = fuser.keeper.clear_store() if fuser is not None else of_storage
    if asked.prefetch is not None and asked.prefetch.dp_rank == dp_rank:
        prefetch(cache, asked.prefetch)
    refusal = None
    if asked.calibrate is not None and fuser is not None:
        try:
            fuser.calibrate(asked.calibrate)
        except BusyError as error:
            refusal = error.status, str(error)
        except Exception as error:  # the server serves without
            unexpected = not isinstance(error, ValueError)
            logger.warning("chunk cache: not calibrated: %s", error, exc_info=unexpected)
            status = ChunkCacheError.status if unexpected else RequestError.status
            refusal = status, f"{type(error).__name__}: {error}"
    reading = next((each for each in asked.read if each.dp_rank == dp_rank), None)
    if reading is not None:
        cache.log.acknowledge(reading.ack)
    events, part = cache.log.unread(), None
    is_all = events.start + len(events.events) == events.seq
    if is_all and reading is not None and reading.part is not None:
        part = cache.log.part(reading.part)
    return RankState(
        dp_rank=dp_rank,
        events=events,
        counts=cache.stats(),
        part=part,
        num_waiting=num_waiting,
        explanations=tuple(
            explain(cache, each) for each in asked.explain if each.dp_rank == dp_rank
        ),
        cleared=cleared,
        refusal=refusal,
    )


def prefetch(cache: ChunkRadixCache, asked: ExplainRequest) -> None:
    """A request is likely to come: load what it needs of the storage, as if it waited."""
    req = _made(asked)
    state(req).is_prefetch = True
    cache.arrived(req)


def explain(cache: ChunkRadixCache, asked: ExplainRequest) -> Explanation:
    """What a request would find, without running it."""
    req = _made(asked)
    ids = req.origin_input_ids
    state(req).is_asked_only = True
    key = RadixKey(ids, req.extra_key, limit=max(0, len(ids) - 1), cache_salt=req.cache_salt)
    exact = compat.num_matched(cache.match_prefix(MatchPrefixParams(key=key, req=req)))
    if (rest := state(req).rest) is not None and not state(req).loaded:
        exact += len(rest.slots)
    spans, tiers = state(req).spans, cache.tiers
    found = tiers.fuser.explain(req) if tiers.fuser is not None else None
    found = structs.replace(found or Explanation(exact, 0, exact), loaded=state(req).loaded)
    if spans is None or tiers.stored is None:
        return found
    stored, pays = tiers.stored.stored(cache.key_of(req, ids, spans, len(ids)), spans)
    slow = () if pays or Fallback.STORAGE_SLOW in found.fallbacks else (Fallback.STORAGE_SLOW,)
    return structs.replace(found, stored=stored, fallbacks=(*found.fallbacks, *slow))


def _made(asked: ExplainRequest) -> Any:
    """As much of a request as is looked at before it is admitted."""
    ids = array("q", asked.input_ids)
    req: Any = SimpleNamespace(
        origin_input_ids=ids, extra_key=asked.extra_key, cache_salt=asked.cache_salt
    )
    state(req).is_read, state(req).spans = True, checked(asked.spans, ids)
    return req
