"""The scheduler's tree: SGLang's `RadixCache` with one node per chunk. It owns KV slots and decides
no order.

    root ── head tokens ── C1 ── C2 ── question ── answer   chunk nodes: `chunk`, `chain`,
                                                            `promoted`
                            └─── C3 ── question             token nodes: as in SGLang

Requests without spans pass through untouched, so plain traffic sees stock SGLang. For the front's
requests the key that SGLang builds is replaced by a `ChunkKey`; matching, locking and eviction stay
SGLang's.

Requests that opted into moved KV (`--reuse fused`) are promised more than is cached, by a
`Promiser`: the `match_prefix` of their admission plans, `init_load_back` allocates and inserts
empty nodes under fused keys, which are filled before the batch runs.

Audits match what is exact, and none of their slots ever gets into the tree.

Exact chains that leave the device may stay in host memory (host_chains.py). The `match_prefix` of
an admission brings them back.

Invariants in addition to SGLang's own:
- A node of ours is one segment of its key: a chunk, or tokens between chunks.
- No inserted key ends inside a chunk. Otherwise two chunks that begin alike would give one slot two
  owners.
- A key is never cut shorter than what the tree already owns of the request (`cache_protected_len`).
  Otherwise the caller would free the tree's slots.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import reduce
from operator import xor
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from msgspec import structs
from sglang.srt.mem_cache.base_prefix_cache import (
    InitLoadBackParams,
    InsertParams,
    InsertResult,
    MatchPrefixParams,
    MatchResult,
)
from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey, TreeNode

from radix_ext import ChainId, ChunkId, IntegrityError, Tier, fused_chunk, text_before
from radix_ext.sources import ChunkCopies
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.scheduler.chunk_key import ChunkKey, Fused
from sglang_chunkcache.scheduler.event_log import EventLog
from sglang_chunkcache.scheduler.eviction import PromotedFirst, ReusedLonger
from sglang_chunkcache.scheduler.host_chains import HostChains
from sglang_chunkcache.scheduler.node import HostNode, RequestState, facts, identity_of, state
from sglang_chunkcache.scheduler.promiser import Promiser
from sglang_chunkcache.scheduler.stored_chains import StoredChains
from sglang_chunkcache.storage.storage import Storage
from sglang_chunkcache.wire.events import Evicted, Inserted, Moved
from sglang_chunkcache.wire.message import encode
from sglang_chunkcache.wire.report import ANSWER_KEY, Answer, Explanation, Fallback
from sglang_chunkcache.wire.spans import RequestSpans, checked, unpack
from sglang_chunkcache.wire.state import NOTHING, Asked, Cleared, ExplainRequest, RankState

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

logger = logging.getLogger(__name__)

MAX_UNREAD_EVENTS = 65_536
"""Events kept for the front; of a rank that is not asked for longer all nodes are told again.
About 150 bytes each."""


class ChunkRadixCache(RadixCache):  # type: ignore[misc]
    """Radix cache with chunk-keyed nodes for the front's requests (CRAFT 4.1's GPU-local
    chunk-prefix tree)."""

    def __init__(self, params: CacheInitParams, config: ChunkCacheConfig) -> None:
        """Build the cache of one rank.

        Raises:
            ValueError: page size above 1, or speculative decoding, named in the message.
        """
        if params.page_size != 1:
            raise ValueError(f"the chunk cache needs --page-size 1, got {params.page_size}")
        if params.is_eagle:
            raise ValueError(
                "the chunk cache does not support speculative decoding (--speculative-algorithm)"
            )
        self.config = config
        self.log = EventLog(MAX_UNREAD_EVENTS)
        self.fallbacks: Counter[Fallback] = Counter()
        self.num_inserted_chunks = self.num_evicted_chunks = 0
        self.match_seconds = self.insert_seconds = 0.0
        self.promiser: Promiser | None = None
        self.host: HostChains | None = None
        self.storage: Storage | None = None
        self.stored: StoredChains | None = None
        self.copies: ChunkCopies = ChunkCopies(identity_of, facts, self._credit)
        self.clock = 0
        self._clear_counts()
        super().__init__(params)
        self.eviction_strategy: EvictionStrategy
        if config.eviction == "promoted":
            self.eviction_strategy = PromotedFirst(self.eviction_strategy)
        elif config.eviction == "reused":
            self.eviction_strategy = ReusedLonger(self.eviction_strategy)

    # SGLang's calls, in a request's order

    def arrived(self, req: Req) -> None:
        """The request is in SGLang's queue. Called by our hook."""
        spans = self._spans_of(req)
        if spans is not None:
            # Not when it is prefilled: many that were sent later may have been answered by then.
            self.log.acknowledge(spans.ack)
        if spans is not None and self.stored is not None and not self.disable:
            ids = req.origin_input_ids
            self.stored.arrived(req, self._key(req, ids, spans, len(ids)), spans)
        if spans is not None and self.promiser is not None:
            self.promiser.arrived(req, spans)

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """As SGLang's, with the front's requests matched chunk by chunk. Idempotent; may be called
        again and again.

        SGLang matches to order its queue, up to 128 waiting requests a round, and once more to
        admit a request. Only the latter limits the key, so that a token is left to compute: only
        then is more promised than is exact.
        """
        spans, is_admission = self._spans_of(params.req), params.key.limit is not None
        start = time.perf_counter()
        if spans is not None and not self.disable:
            key = self._key(params.req, params.key.token_ids, spans, len(params.key))
            params = dataclasses.replace(params, key=key)
        result = super().match_prefix(params)
        if spans is not None and isinstance(params.key, ChunkKey):
            known = state(params.req)
            known.fused = None
            known.waits = (
                is_admission
                and not known.is_asked_only
                and self._awaits(known, len(result.device_indices))
            )
            is_admission = is_admission and not known.waits
            if is_admission and self.host is not None:
                if self.stored is not None:
                    self.stored.planned(params.req)
                result = self._with_host(params.req, params.key, spans, result)
            if is_admission and spans.fusion is not None and self.promiser is not None:
                result = self.promiser.match(params.req, params.key, spans, result)
        if params.req is None or not state(params.req).is_asked_only:
            self._touch(result.last_device_node)
        if spans is not None:
            self.match_seconds += time.perf_counter() - start
        return result

    def init_load_back(self, params: InitLoadBackParams) -> tuple[torch.Tensor, TreeNode]:
        """Keep what `match_prefix` promised: slots for all of it, or an empty tensor (declined, to
        be computed).

        Never None, by which SGLang would put off this request, and with it all that wait behind it.
        """
        assert self.promiser is not None, "only a promiser promises"
        return self.promiser.commit(params.req, params.best_match_node)

    @contextmanager
    def around_forward(self, batch: ScheduleBatch) -> Iterator[None]:
        """Around a batch's forward, on its stream: what it needs of host memory is loaded, what it
        was promised is filled first, and what is worth keeping is copied last. Called by our
        hook."""
        is_extend = batch.forward_mode.is_extend()
        is_ahead = is_extend and all(map(self._is_preprocessing, batch.reqs))
        watching = self.promiser or self.host
        if self.host is not None:
            self.host.before(batch)
        if self.promiser is not None:
            self.promiser.before(batch)
        with watching.watch(batch) if watching is not None else nullcontext():
            yield
        if self.host is not None:
            self.host.loaded()
        if self.promiser is not None:
            self.promiser.after(first_tokens_wait=is_extend and not is_ahead, is_ahead=is_ahead)
        if self.host is not None:
            self.host.after(first_tokens_wait=is_extend)
        if self.storage is not None:
            self.storage.poll(is_round=True)

    def insert(self, params: InsertParams) -> InsertResult:
        """As SGLang's; a `ChunkKey` is inserted segment by segment,
        so that one node is one chunk."""
        if self.disable or not isinstance(params.key, ChunkKey):
            result = super().insert(params)
            self._touch(result.last_device_node)
            return result
        value = (
            params.value
            if params.value is not None
            else torch.tensor(params.key.token_ids, dtype=torch.int64)
        )
        matched, path = self.insert_segments(params.key, value, "", params.priority, params.chunked)
        return InsertResult(
            prefix_len=matched, last_device_node=path[-1] if path else self.root_node
        )

    def cache_unfinished_req(self, req: Req, chunked: bool = False) -> None:
        if self._is_audit(req):  # its slots stay its own, as in SGLang's cache without a tree
            row = self.req_to_token_pool.req_to_token[
                req.kv.req_pool_idx, : len(req.get_fill_ids())
            ]
            req.prefix_indices = row.to(dtype=torch.int64, copy=True)
        else:
            super().cache_unfinished_req(req, chunked=chunked)
        if not chunked:
            self._report(req)

    def insert_req(self, req: Req, *, up_to: int) -> None:
        if not self._is_audit(req):
            super().insert_req(req, up_to=up_to)
        # a request that ends on its first token never gets to cache_unfinished_req
        self._report(req)

    def reset(self) -> None:
        """Empty tree, new epoch: the front drops this rank's mirror with the next answer."""
        super().reset()
        self.log.restart()
        self._clear_counts()
        self.copies.clear()
        if self.host is not None:
            self.host.reset()
        if self.stored is not None:
            self.stored.reset()
        if self.promiser is not None:
            self.promiser.reset()

    def release_host_resources(self) -> None:
        """The scheduler ends as it was asked to. SGLang does not wait long for it."""
        super().release_host_resources()
        if self.storage is not None:
            self.storage.close()  # it may read host memory until then
        if self.host is not None:
            self.host.pool.close()

    # What we add

    def insert_segments(
        self,
        key: ChunkKey,
        values: torch.Tensor,
        head: str,
        priority: int | None,
        chunked: bool,
        borders: tuple[int, ...] = (),
        *,
        are_filled: bool = True,
    ) -> tuple[int, list[TreeNode]]:
        """Insert `key`, one node per segment; returns (tokens already there, the last node of every
        segment).

        `head` names the tokens before the first chunk. `are_filled` False: the slots of new nodes
        are yet to be written, so they are no source for others.
        """
        node, matched, path = self.root_node, 0, []
        before: list[ChunkId] = []
        heads = iter(text_before(head, key.spans, key.token_ids))
        for start, end, chunk in key.segments(*borders):
            found, node = self._insert_helper(
                node, key[start:end], values[start:end], priority, chunked
            )
            if matched == start:
                matched += found
            known, text = facts(node), "" if chunk is None else next(heads)
            if found < end - start:  # a new node
                known.chunk, known.start, known.is_filled = chunk, start, False
                known.head, known.prefix = text, tuple(before)
            if are_filled and not known.is_filled:
                self.fill(node)
            if chunk is not None:
                before.append(chunk)
            path.append(node)
        self._touch(node)
        return matched, path

    def fill(self, node: TreeNode) -> None:
        """The node's slots hold its KV.
        A chunk's computed KV (not moved) may serve as a source from now on."""
        facts(node).is_filled = True
        if self._is_copy(node):
            self.copies.add(node)

    def path(self, key: ChunkKey) -> list[TreeNode]:
        """The nodes that the key goes through, as far as it has them whole. A look, no use."""
        node, found, start = self.root_node, list[TreeNode](), 0
        while start < len(key):
            rest = key[start:]
            node = node.children.get(rest.child_key())
            if node is None or node.key.match(rest) < len(node.key):
                break
            found.append(node)
            start += len(node.key)
        return found

    def back_on_device(
        self, node: TreeNode, host: HostNode, namespace: str, *, promoted: bool
    ) -> None:
        """The node has a place in the global tree, and is in host memory."""
        known, parent = facts(node), facts(node.parent).chain
        known.host, known.chain, known.hits, host.node = host, host.chain, host.hits, node
        known.scores, known.outward, known.promoted = host.scores, host.outward, promoted
        assert known.chunk is not None
        self._num_promoted += known.promoted
        self._num_chunk_tokens += len(node.key)
        self.log.append(Inserted(known.chunk, len(node.key), parent, namespace, known.promoted))

    def on_host(
        self, chunk: ChunkId, num_tokens: int, parent: ChainId | None, namespace: str
    ) -> ChainId:
        """The chain has come to host memory, and is not on the device."""
        inserted = Inserted(chunk, num_tokens, parent, namespace, promoted=False)
        self.log.append(inserted)
        self.log.append(Moved(inserted.chain, Tier.HOST))
        return inserted.chain

    def off_host(self, chain: ChainId) -> None:
        """The chain has left host memory, and is not on the device."""
        self.log.append(Evicted(chain))

    def doubt_weights(self) -> None:
        """The weights change: as long as the tree is not emptied, KV of two weights may be mixed,
        and none of it outlives the process. Called by our hook."""
        if self.storage is not None:
            self.storage.stop()

    def rank_state(
        self, dp_rank: int, asked: Asked = NOTHING, *, num_waiting: int = 0
    ) -> RankState:
        """What the front asks of this rank. The counts are those after the store was cleared.
        `num_waiting`: requests whose prefill has not begun or not ended."""
        if self.storage is not None:
            self.storage.poll(is_round=True)  # all ranks of a group are asked at once
        cleared = None
        if asked.clear_store:
            cleared = Cleared(0, 0, 0)
            if self.storage is not None:
                held = self.storage.index.stats()
                cleared = Cleared(held.num_chunks, held.num_variants, held.num_bytes)
                self.storage.clear()
            if self.promiser is not None:
                cleared = self.promiser.clear_store()
        if asked.prefetch is not None and asked.prefetch.dp_rank == dp_rank:
            self.prefetch(asked.prefetch)
        refusal = None
        if asked.calibrate is not None and self.promiser is not None:
            try:
                self.promiser.calibrate(asked.calibrate)
            except Exception as error:  # the server serves without
                unexpected = not isinstance(error, ValueError)
                logger.warning("chunk cache: not calibrated: %s", error, exc_info=unexpected)
                refusal = f"{type(error).__name__}: {error}"
        reading = next((each for each in asked.read if each.dp_rank == dp_rank), None)
        if reading is not None:
            self.log.acknowledge(reading.ack)
        events, part = self.log.unread(), None
        if (
            reading is not None
            and reading.part is not None
            and events.start + len(events.events) == events.seq
        ):
            part = self.log.part(reading.part)
        return RankState(
            dp_rank=dp_rank,
            events=events,
            counts=self.stats(),
            part=part,
            num_waiting=num_waiting,
            explanations=tuple(
                self.explain(each) for each in asked.explain if each.dp_rank == dp_rank
            ),
            cleared=cleared,
            refusal=refusal,
        )

    def stats(self) -> dict[str, Any]:
        """Counts for `/chunkcache/stats`, O(1): tokens unless they say chunks, nodes or seconds.
        No chunk is named."""
        allocator = self.token_to_kv_pool_allocator
        return {
            "chunk_tokens": self._num_chunk_tokens,
            "promoted_nodes": self._num_promoted,
            "inserted_chunks": self.num_inserted_chunks,
            "evicted_chunks": self.num_evicted_chunks,
            "match_seconds": round(self.match_seconds, 6),
            "insert_seconds": round(self.insert_seconds, 6),
            "free": allocator.available_size() if allocator else 0,
            "evictable": self.evictable_size(),
            "protected": self.protected_size(),
            "fallbacks": dict(self.fallbacks),
            **({"host": self.host.stats()} if self.host is not None else {}),
            **({"storage": self.storage.stats()} if self.storage is not None else {}),
            **(self.promiser.stats() if self.promiser is not None else {}),
        }

    def prefetch(self, asked: ExplainRequest) -> None:
        """A request is likely to come: load what it needs of the storage, as if it waited."""
        if self.storage is None:
            return
        req = _made(asked)
        state(req).is_prefetch = True
        self.arrived(req)

    def explain(self, asked: ExplainRequest) -> Explanation:
        """What a request would find, without running it."""
        req = _made(asked)
        ids = req.origin_input_ids
        state(req).is_asked_only = True
        key = RadixKey(ids, req.extra_key, limit=max(0, len(ids) - 1), cache_salt=req.cache_salt)
        exact = len(self.match_prefix(MatchPrefixParams(key=key, req=req)).device_indices)
        loaded, spans = state(req).loaded, state(req).spans
        found = self.promiser.explain(req) if self.promiser is not None else None
        found = structs.replace(found or Explanation(exact, 0, exact), loaded=loaded)
        if self.stored is None or spans is None:
            return found
        stored, pays = self.stored.stored(self._key(req, ids, spans, len(ids)), spans)
        slow = () if pays or Fallback.STORAGE_SLOW in found.fallbacks else (Fallback.STORAGE_SLOW,)
        return structs.replace(found, stored=stored, fallbacks=(*found.fallbacks, *slow))

    def check_integrity(self) -> None:
        """Raise IntegrityError with every violated invariant.
        Walks the whole tree: for tests and idle moments."""
        violations = self._slot_violations()
        chains = list[ChainId]()
        tokens = promoted = 0
        for node in self._nodes():
            if len(node.key) != len(node.value):
                violations.append(
                    f"node {node.id}: {len(node.key)} tokens but {len(node.value)} slots"
                )
            if isinstance(node.key, ChunkKey) and len(list(node.key.segments())) != 1:
                violations.append(
                    f"node {node.id}: more than one segment: {list(node.key.segments())}"
                )
            known = facts(node)
            if (chain := known.chain) is not None:
                chains.append(chain)
                tokens, promoted = tokens + len(node.key), promoted + known.promoted
                if facts(node.parent).chunk is not None and facts(node.parent).chain is None:
                    violations.append(
                        f"node {node.id} has a place in the global tree but the chunk above has"
                        " none"
                    )
            if known.host is not None and known.host.node is not node:
                violations.append(
                    f"node {node.id} and its copy in host memory do not know each other"
                )
            if self.copies.holds(node) != self._is_copy(node):
                violations.append(
                    f"node {node.id}: findable as a source is {self.copies.holds(node)}"
                )
        if len(self.copies) != sum(self._is_copy(node) for node in self._nodes()):
            violations.append(f"{len(self.copies)} sources are booked, the tree has another number")
        if self.host is not None:
            violations += self.host.violations()
            chains += self.host.chains_not_on_device
        counted = (len(chains), reduce(xor, {*chains}, 0), tokens, promoted)
        booked = (self.log.num_alike, self.log.digest, self._num_chunk_tokens, self._num_promoted)
        if counted != booked:
            violations.append(
                f"chunk nodes, digest, tokens, promoted are {counted} but were booked as {booked}"
            )
        if violations:
            raise IntegrityError(violations)

    # Overridden internals of SGLang's cache (pinned by tests/contract)

    def _insert_cache(
        self,
        req: Req,
        token_ids: array[int],
        *,
        chunked: bool = False,
        key_limit: int | None = None,
        split_prompt: bool = False,
    ) -> tuple[Any, torch.Tensor, int]:
        """SGLang builds a plain key of the request here;
        ours is chunk-keyed, and ends at a whole chunk."""
        spans, known = self._spans_of(req), state(req)
        is_first, known.is_inserted = (
            not known.is_inserted and not (spans and spans.is_preprocessing),
            True,
        )
        self.clock += is_first
        if spans is None:
            return super()._insert_cache(  # type: ignore[no-any-return]
                req, token_ids, chunked=chunked, key_limit=key_limit, split_prompt=split_prompt
            )
        start = time.perf_counter()
        row = self.req_to_token_pool.req_to_token[req.kv.req_pool_idx, : len(token_ids)]
        owned = req.kv.cache_protected_len
        up_to = len(token_ids) if key_limit is None else min(len(token_ids), key_limit)
        key = self._key(req, token_ids, spans, max(up_to, owned), known.fused)
        borders = (len(req.origin_input_ids),) if split_prompt else ()
        values = row[: len(key)].to(dtype=torch.int64, copy=True)
        matched, path = self.insert_segments(
            key, values, spans.namespace, req.priority or 0, chunked, borders
        )
        # A conversation's own later turns are no sign that others will ask for its chunks: counted,
        # they would keep
        # finished conversations in the pool while the running ones' histories leave.
        self._mark(path, spans, counts_hits=is_first and not spans.is_later_turn)
        if self.promiser is not None and not chunked and not known.is_kept:
            # with the prompt; once more with the answer would store again what has just left
            known.is_kept = True
            self.promiser.keep(req, path)
        self.token_to_kv_pool_allocator.free_segment(row[owned:matched], start_pos=owned)
        self.insert_seconds += time.perf_counter() - start
        return key, row, matched

    def _split_node(self, key: Any, child: TreeNode, split_len: int) -> TreeNode:
        node = super()._split_node(key, child, split_len)
        upper, lower = facts(node), facts(child)
        upper.is_filled = lower.is_filled
        # SGLang splits a node that is being used, and counts both halves as used
        upper.used = lower.used = self.clock
        if self.host is not None:
            self.host.split(node, child)
        return node

    def _delete_leaf(self, node: TreeNode) -> None:
        if isinstance(self.eviction_strategy, ReusedLonger):
            self.eviction_strategy.evicted(node, self.clock)
        super()._delete_leaf(node)
        self.copies.drop(node)
        if self.host is not None:
            self.host.left(node)
        known = facts(node)
        if known.chain is None:
            return
        self._num_chunk_tokens -= len(node.key)
        self._num_promoted -= known.promoted
        self.num_evicted_chunks += 1
        if known.host is not None and self.host is not None:
            self.host.off_device(node, known.host)
            self.log.append(Moved(known.chain, Tier.HOST))
        else:
            self.log.append(Evicted(known.chain))

    # Private, in order of use

    def _spans_of(self, req: Req | None) -> RequestSpans | None:
        """The request's spans, read once; None for plain requests."""
        if req is None:
            return None
        known = state(req)
        if not known.is_read:
            known.is_read = True
            try:
                known.spans = unpack(
                    req.sampling_params.custom_params,
                    req.origin_input_ids,
                    secret=self.config.secret,
                )
            except ValueError as error:
                self._fall_back(Fallback.BAD_SPANS, error)
        return known.spans

    def _awaits(self, known: RequestState, num_cached: int) -> bool:
        """Whether what its request needs of the storage is worth waiting for."""
        if self.storage is None or (known.chain is None and known.loads is None):
            return False
        self.storage.poll()
        is_here = (
            known.chain is not None
            and known.chain.end is not None
            and known.chain.end <= num_cached
        )
        return self.storage.awaits(None if is_here else known.chain, known.loads)

    def _with_host(
        self, req: Req, key: ChunkKey, spans: RequestSpans, result: MatchResult
    ) -> MatchResult:
        """The match with what host memory has behind it."""
        assert self.host is not None
        known, start = state(req), len(result.device_indices)
        if known.is_asked_only:
            known.loaded = self.host.num_loadable(key, spans, start)
            return result
        result = self.host.load(key, spans, result, req.priority or 0)
        known.loaded = max(known.loaded, len(result.device_indices) - start)
        return result

    def _is_audit(self, req: Req) -> bool:
        spans = self._spans_of(req)
        return spans is not None and spans.is_audit

    def _is_preprocessing(self, req: Req) -> bool:
        spans = self._spans_of(req)
        return spans is not None and spans.is_preprocessing

    def _key(
        self,
        req: Req,
        token_ids: array[int],
        spans: RequestSpans,
        up_to: int,
        fused: Fused | None = None,
    ) -> ChunkKey:
        return ChunkKey.cut(
            token_ids,
            spans.spans,
            up_to,
            extra_key=req.extra_key,
            cache_salt=req.cache_salt,
            fused=fused,
        )

    def _mark(self, path: list[TreeNode], spans: RequestSpans, *, counts_hits: bool) -> None:
        """Give the nodes of the first chunk area their place in the global tree and this request's
        promotion marks.

        What is fused for one question gets none: no other request asks for it. Other fused chunks
        have theirs below the exact chain they hang on, named by their recipe. They are not promoted
        and count no hits, or they would push exact chains out of the pool (eval/LOG.md).
        `counts_hits`: every exact chunk that was there before counts one.
        """
        mine = itertools.takewhile(
            lambda node: node.key.fused is None or not node.key.fused.serves_one, path
        )
        parent, area = (
            None,
            [node for node in mine if facts(node).chunk is not None][: spans.area_len],
        )
        is_new = any(facts(node).chain is None for node in area)
        copies = self.host.of(area) if self.host is not None and is_new else []
        for index, node in enumerate(area):
            known, fused = facts(node), node.key.fused
            promoted = fused is None and index < spans.promoted_len
            assert known.chunk is not None
            if known.chain is None and index < len(copies):
                self.back_on_device(node, copies[index], spans.namespace, promoted=promoted)
            elif known.chain is None:
                chunk = known.chunk if fused is None else fused_chunk(fused.recipe, known.chunk)
                inserted = Inserted(chunk, len(node.key), parent, spans.namespace, promoted)
                known.chain = inserted.chain
                self._num_chunk_tokens += len(node.key)
                self.num_inserted_chunks += 1
                self.log.append(inserted)
            elif counts_hits and fused is None:
                known.hits += 1
            self._num_promoted += promoted - known.promoted
            known.promoted, parent = promoted, known.chain
        if self.host is not None:
            self.host.offer(area)

    def _credit(self, node: TreeNode) -> None:
        """The node was used as a source just now.
        No hit: counted as such, sources push exact chains out (eval/LOG.md)."""
        self._touch(node)
        above, now = node, time.monotonic()
        while above is not None:
            above.last_access_time, above = now, above.parent

    def _touch(self, node: TreeNode | None) -> None:
        """This node and all above it were used by the request of this moment."""
        while node is not None:
            facts(node).used = self.clock
            node = node.parent

    def _report(self, req: Req) -> None:
        """Attach the unread events to the request's first token, once."""
        spans, known = self._spans_of(req), state(req)
        if spans is None or spans.is_audit or self.disable or known.is_reported:
            return
        known.is_reported = True
        report = (
            self.promiser.report(req)
            if self.promiser is not None and spans.fusion is not None
            else None
        )
        worth = self.host.worth if self.host else 1.0
        answer = encode(Answer(self.log.unread(), report, known.loaded, worth))
        req.customized_info = {**(req.customized_info or {}), ANSWER_KEY: [answer]}

    def _fall_back(self, reason: Fallback, error: Exception) -> None:
        if not self.fallbacks[reason]:
            logger.warning(
                "chunk cache: %s, the request is computed as plain text (further ones are"
                " counted): %s",
                reason,
                error,
            )
        self.fallbacks[reason] += 1

    def _clear_counts(self) -> None:
        self._num_chunk_tokens = self._num_promoted = 0

    @staticmethod
    def _is_copy(node: TreeNode) -> bool:
        """Whether the node is a chunk whose KV was computed for its own place."""
        known = facts(node)
        return known.chunk is not None and known.is_filled and not known.is_moved

    def _slot_violations(self) -> list[str]:
        owners, protected = Counter[int](), set[int]()
        for node in self._nodes():
            owners.update(slots := node.value.tolist())
            if node.lock_ref > 0:
                protected.update(slots)
        violations = []
        if twice := [slot for slot, num_owners in owners.items() if num_owners > 1]:
            violations.append(f"slots with two owners: {twice[:8]}")
        counted = len(owners) - len(protected), len(protected)
        booked = self.evictable_size(), self.protected_size()
        if counted != booked:
            violations.append(
                f"evictable, protected are booked as {booked}, the tree has {counted}"
            )
        return violations

    def _nodes(self) -> Iterator[TreeNode]:
        stack = list(self.root_node.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node


def _made(asked: ExplainRequest) -> Any:
    """As much of a request as is looked at before it is admitted."""
    ids = array("q", asked.input_ids)
    req: Any = SimpleNamespace(
        origin_input_ids=ids, extra_key=asked.extra_key, cache_salt=asked.cache_salt
    )
    state(req).is_read, state(req).spans = True, checked(asked.spans, ids)
    return req
