"""The cache that SGLang's scheduler calls, in a request's order.

Requests without spans pass through untouched, so plain traffic sees stock SGLang. For the front's
requests the key that SGLang builds is replaced by a `ChunkKey`; matching, locking and eviction stay
SGLang's.

    hook ADD_TO_QUEUE     arrived                 the storage begins to load
    queue, admission      match_prefix            a longer prefix: host memory, promises (tiers.py)
    admission             init_load_back          the promised slots
    hook FORWARD          around_forward          load back, move, write back
    prefill, end          checkpoint              nodes, marks, and the events that go to the front
                                                  with the request's first token

Requests that opted into moved KV (`--reuse fused`) are promised more than is cached: the
`match_prefix` of their admission plans, `init_load_back` allocates slots of their own, which are
filled before the batch runs and inserted, under fused keys, like what is computed. Audits match
what is exact, and none of their slots ever gets into the tree.

Invariant: a key is never cut shorter than what the tree already owns of the request
(`cache_protected_len`). Otherwise the caller would free the tree's slots.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from array import array
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    InitLoadBackParams,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.radix_cache import RadixKey, TreeNode

from sglang_chunkcache import compat
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.scheduler.chunk_key import ChunkKey, Fused
from sglang_chunkcache.scheduler.chunk_tree import ChunkTree, area_of
from sglang_chunkcache.scheduler.node import facts, state
from sglang_chunkcache.scheduler.tiers import Tiers
from sglang_chunkcache.scheduler.waiting import unranked
from sglang_chunkcache.wire.message import encode
from sglang_chunkcache.wire.report import ANSWER_KEY, Answer, Fallback
from sglang_chunkcache.wire.spans import RequestSpans, unpack

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.base_prefix_cache import CacheRequestHandle
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

logger = logging.getLogger(__name__)


class ChunkRadixCache(ChunkTree):
    """Of one rank. `create_tiers` makes what is behind the tree, which it is given. `rank_of`: as
    of `WaitingLine`."""

    _nothing: MatchResult | None = None
    """A match of no tokens, made once: of every request that is passed over in a round."""

    def __init__(
        self,
        params: CacheInitParams,
        config: ChunkCacheConfig,
        create_tiers: Callable[[ChunkTree], Tiers],
        rank_of: Callable[[Req], float] = unranked,
    ) -> None:
        self._secret = config.secret
        self.fallbacks: Counter[Fallback] = Counter()
        self.match_seconds = self.insert_seconds = 0.0
        super().__init__(params, config, rank_of)
        self.tiers = create_tiers(self)

    def arrived(self, req: Req) -> None:
        """The request is in SGLang's queue. Called by our hook."""
        self.line.arrived(req)
        spans = self._spans_of(req)
        if spans is None:
            return
        # Not when it is prefilled: many that were sent later may have been answered by then.
        self.log.acknowledge(spans.ack)
        if not self.disable:
            ids = req.origin_input_ids
            self.tiers.arrived(req, self.key_of(req, ids, spans, len(ids)), spans)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """As SGLang's, with the front's requests matched chunk by chunk. Idempotent.

        SGLang matches to order its queue, up to 128 waiting requests a round, and once more to
        admit a request. Only the latter limits the key, so that a token is left to compute: only
        then is more promised than is exact.
        """
        spans, is_admission = self._spans_of(params.req), params.key.limit is not None
        start, up_to = time.perf_counter(), len(params.key)
        if is_admission and params.req is not None and self.line.passes_over(params.req):
            # SGLang reads no more of it in this round
            if self._nothing is None:
                self._nothing = super().match_prefix(MatchPrefixParams(key=RadixKey(array("q"))))
            return self._nothing
        if spans is not None and not self.disable:
            key = self.key_of(params.req, params.key.token_ids, spans, up_to)
            params = dataclasses.replace(params, key=key)
        result = super().match_prefix(params)
        if spans is not None and isinstance(params.key, ChunkKey):
            known = state(params.req)
            known.fused, known.moved, known.promised = None, frozenset(), None
            if is_admission:
                result = self._admit(params.req, params.key, up_to, spans, result)
        if params.req is None or not state(params.req).is_asked_only:
            self.touch(result.last_device_node)
        if spans is not None:
            self.match_seconds += time.perf_counter() - start
        return result

    def _admit(
        self, req: Req, key: ChunkKey, up_to: int, spans: RequestSpans, result: MatchResult
    ) -> MatchResult:
        """The exact match of a request with what else it finds. `up_to`: tokens that it may."""
        return self.tiers.admit(req, key, spans, result)

    def init_load_back(self, params: InitLoadBackParams) -> tuple[Any, TreeNode] | None:
        """Keep what `match_prefix` promised: slots for all of it, or none (declined, to be
        computed). None: it is put off, which our hook keeps from those that wait behind it.
        """
        node = params.best_match_node
        slots = self.tiers.fuser.commit(params.req, node)
        state(params.req).promised = slots
        if state(params.req).is_put_off:
            return None
        return compat.loaded(self, slots, node)

    def release_aborted_request(self, handle: CacheRequestHandle) -> None:
        """It left SGLang's queue unserved."""
        super().release_aborted_request(handle)
        self.line.left(handle.rid)

    def admitting(self, req: Req) -> AbstractContextManager[None]:
        """Around SGLang's decision on a waiting request. Called by our hook."""
        return nullcontext()

    def load_back_is_cache_owned(self) -> bool:
        """No: a request inserts what it was promised with what it has computed."""
        return False

    def prefix_device_indices(self, req: Req) -> torch.Tensor:
        """The slots of its prefix, for its row."""
        path, promised = self.path_device_indices(req.last_node), state(req).promised
        slots = path if promised is None else torch.cat([path, promised])
        return slots[: req.prefix_len]

    @property
    def needs_forward(self) -> bool:
        """Whether something is done around forwards."""
        tiers = self.tiers
        return bool(tiers.fuser or tiers.storage or tiers.host.pool.num_slots)

    def around_forward(self, batch: ScheduleBatch) -> AbstractContextManager[None]:
        """Around a batch's forward, on its stream. Called by our hook."""
        is_ahead = batch.forward_mode.is_extend() and all(
            spans is not None and spans.is_preprocessing
            for spans in map(self._spans_of, batch.reqs)
        )
        return self.tiers.around_forward(batch, is_ahead=is_ahead and not self.line.is_decoding)

    def checkpoint(self, req: Req, *, up_to: int) -> None:
        spans = self._spans_of(req)
        # of these the slots stay their own, as in SGLang's cache without a tree
        if not (spans is not None and spans.is_audit) and not state(req).is_failed:
            super().checkpoint(req, up_to=up_to)
        if up_to >= len(req.origin_input_ids):
            self._report(req)

    def reset(self) -> None:
        super().reset()
        self._nothing = None
        if "tiers" in vars(self):  # SGLang's constructor resets before there are any
            self.tiers.reset()

    def release_host_resources(self) -> None:
        """The scheduler ends as it was asked to. SGLang does not wait long for it."""
        super().release_host_resources()
        self.tiers.close()

    def doubt_weights(self) -> None:
        """The weights change: as long as the tree is not emptied, KV of two weights may be mixed,
        and none of it outlives that. Called by our hook."""
        if self.tiers.storage is not None:
            self.tiers.storage.stop()
        if self.tiers.fuser is not None:
            self.tiers.fuser.doubt_weights()

    def stats(self) -> dict[str, Any]:
        """For `/chunkcache/stats`, O(1): tokens unless they say chunks, nodes or seconds."""
        allocator, tiers = self.token_to_kv_pool_allocator, self.tiers.stats()
        return {
            "border": self.page_size - 1,
            "chunk_tokens": self.num_chunk_tokens,
            "promoted_nodes": self.num_promoted,
            "inserted_chunks": self.num_inserted_chunks,
            "evicted_chunks": self.num_evicted_chunks,
            "match_seconds": round(self.match_seconds, 6),
            "insert_seconds": round(self.insert_seconds, 6),
            "free": allocator.available_size() if allocator else 0,
            "evictable": self.evictable_size(),
            "protected": self.protected_size(),
            "waiting": self.line.stats(),
            "fallbacks": {**self.fallbacks, **tiers.pop("fallbacks", {})},
            **tiers,
        }

    def key_of(
        self,
        req: Any,
        token_ids: array[int],
        spans: RequestSpans,
        up_to: int,
        fused: Fused | None = None,
    ) -> ChunkKey:
        """Of the first `up_to` tokens, cut at a whole chunk, approximate from `fused` on."""
        tenant = {"extra_key": req.extra_key, "cache_salt": req.cache_salt}
        return ChunkKey.cut(token_ids, spans.spans, up_to, fused=fused, **tenant)

    def _insert_cache(
        self,
        req: Req,
        token_ids: array[int],
        *,
        key_limit: int | None = None,
        split_prompt: bool = False,
        **stock: Any,
    ) -> tuple[Any, torch.Tensor, int]:
        """SGLang builds a plain key here; ours is chunk-keyed, and ends at a whole chunk."""
        spans, known = self._spans_of(req), state(req)
        is_first = not known.is_inserted and not (spans and spans.is_preprocessing)
        known.is_inserted = True
        self.clock += is_first
        if spans is None:
            return super()._insert_cache(  # type: ignore[no-any-return]
                req, token_ids, key_limit=key_limit, split_prompt=split_prompt, **stock
            )
        start = time.perf_counter()
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(token_ids)]
        owned = req.kv.cache_protected_len
        up_to = len(token_ids) if key_limit is None else min(len(token_ids), key_limit)
        key = self.key_of(req, token_ids, spans, max(up_to, owned), known.fused)
        matched, path = self.insert_segments(
            key,
            row[: len(key)].to(dtype=torch.int64, copy=True),
            spans.namespace,
            req.priority or 0,
            known.inserted_len,
            borders=(len(req.origin_input_ids),) if split_prompt else (),
            moved=known.moved,
        )
        known.inserted_len = max(known.inserted_len, key.num_tokens)
        # A conversation's own later turns are no sign that others will ask for its chunks: counted,
        # they would keep finished conversations while the running ones' histories leave.
        self._mark(path, spans, counts_hits=is_first and not spans.is_later_turn)
        if len(token_ids) >= len(req.origin_input_ids) and not known.is_kept:
            # with the prompt; once more with the answer would store again what has just left
            known.is_kept = True
            if self.tiers.fuser is not None:
                self.tiers.fuser.keeper.keep(req, path)
        self.token_to_kv_pool_allocator.free_segment(row[owned:matched], start_pos=owned)
        self.insert_seconds += time.perf_counter() - start
        return key, row, matched

    def _split_node(self, key: Any, child: TreeNode, split_len: int) -> TreeNode:
        node = super()._split_node(key, child, split_len)
        self.tiers.host.load_back.split(node, child)
        return node

    def _delete_leaf(self, node: TreeNode) -> None:
        self.tiers.host.nodes.leaves_device(node)
        super()._delete_leaf(node)
        self.tiers.host.load_back.cancel(node)

    def _spans_of(self, req: Req | None) -> RequestSpans | None:
        """The request's spans, read once; None for plain requests."""
        if req is None:
            return None
        known = state(req)
        if not known.is_read:
            known.is_read = True
            try:
                known.spans = unpack(
                    req.sampling_params.custom_params, req.origin_input_ids, secret=self._secret
                )
            except ValueError as error:
                if not self.fallbacks:
                    logger.warning(
                        "chunk cache: %s, the request is computed as plain text (further ones are"
                        " counted): %s",
                        Fallback.BAD_SPANS,
                        error,
                    )
                self.fallbacks[Fallback.BAD_SPANS] += 1
        return known.spans

    def _mark(self, path: list[TreeNode], spans: RequestSpans, *, counts_hits: bool) -> None:
        area, host = area_of(path, spans.area_len), self.tiers.host
        new = [node for node in area if facts(node).chain is None]
        self.mark(area, spans, host.nodes.of(area) if new else (), counts_hits=counts_hits)
        for node in new:
            host.nodes.came_to_device(node)
        if spans.is_later_turn:
            area = [node for node in path if facts(node).chunk is not None]
        host.write_back.offer(area, is_later_turn=spans.is_later_turn)

    def _report(self, req: Req) -> None:
        """Attach the unread events to the request's first token, once."""
        spans, known = self._spans_of(req), state(req)
        if spans is None or spans.is_audit or self.disable or known.is_reported:
            return
        known.is_reported = True
        fuser = self.tiers.fuser
        report = fuser.report(req) if fuser is not None and spans.fusion is not None else None
        answer = encode(Answer(self.log.unread(), report, known.loaded, self.tiers.host.worth))
        req.customized_info = {**(req.customized_info or {}), ANSWER_KEY: [answer]}
