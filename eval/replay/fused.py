"""`python -m eval replay --reuse fused`: the same trace where every request opts into moved KV.

What is moved from where, what the store keeps and what leaves are the server's own decisions:
`make_plan`, `ChunkSources`, `CaptureQueue` and `VariantIndex` of radix_ext, with
the server's defaults. Each request is served alone:

    order, match    the exact chain, of which host memory has the end (fused_host.py); then fused
                    nodes of the same recipe, which only a question-independent selector shares
    plan            for what follows, from copies in the tree and variants in the store; its sources
                    count a use. With prices the exact chain grows where that costs little
                    (radix_ext/exact_growth.py)
    insert, evict   from the first moved chunk on under keys that name the recipe: no exact request
                    matches them
    save, capture   exact chains that are worth it, and chunks with enough accesses whose KV was
                    computed, before the next request

A source behind another head is taken where there is none behind the request's own. Not modelled:
text between chunks, a question asked twice, the focus of `context`. Scores are those of attention
that is even over all tokens.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, takewhile
from math import inf, log
from operator import gt
from typing import NamedTuple

from eval.replay.disk import Disk, FusedDisk
from eval.replay.eviction_queue import EvictionQueue, is_device_leaf
from eval.replay.exact import ReplaySettings
from eval.replay.fused_count import FusedCount, count_of
from eval.replay.fused_host import GONE, CountedPool, FusedHost, Known
from eval.replay.ordering import order_chunks
from radix_ext import (
    AccessTable,
    ChainNode,
    Chunk,
    ChunkId,
    ChunkPrefixTree,
    FusionRequest,
    Span,
    Tier,
    fused_chunk,
    is_fused_chunk,
)
from radix_ext.capture_queue import CaptureQueue, Waiting
from radix_ext.cfo import Attention, Scored
from radix_ext.costs import Costs, Phase, Work, extend_work, seconds
from radix_ext.exact_growth import exact_gaps, grown
from radix_ext.loading import WaitPolicy, num_fitting
from radix_ext.moved_plan import (
    Candidate,
    Limits,
    NotMoved,
    ReusePlan,
    make_plan,
    seconds_saved,
)
from radix_ext.pool_slots import PoolSlots
from radix_ext.sources import NOTHING, ChunkCopies, ChunkSources, Coming, DeviceCopy
from radix_ext.variant_index import VariantIndex
from sglang_chunkcache import ChunkCacheConfig
from sglang_chunkcache.config import MAX_CAPTURED_TOKENS, MAX_COPIES, MAX_WAITING_CAPTURES

_RANK = 0


class _History(NamedTuple):
    chunks: tuple[Chunk, ...]
    keys: tuple[str, ...]
    recipe: str
    is_fused: bool
    head: str
    """Names the text before the first chunk: exact chains are behind it."""


@dataclass(frozen=True, eq=False)
class EvenAttention(Attention):
    """Every token attends alike to all before it and to itself."""

    num_tokens: int = 1
    scored: Scored = Scored.ALL

    @classmethod
    def of(cls, start: int, prefix_lens: Sequence[int], num_tokens: int) -> EvenAttention:
        """Of a chunk of `num_tokens` from position `start` on."""
        each = log((start + num_tokens + 0.5) / (start + 0.5))  # sum of 1 / (position + 1), nearly
        intra = max(0.0, num_tokens - (start + 1) * each)
        return cls(
            tuple(length * each for length in prefix_lens), tuple(prefix_lens), intra, num_tokens
        )

    @property
    def nbytes(self) -> int:
        return 4 * self.num_tokens * self.scored


class _Size(NamedTuple):
    nbytes: int


class Timing(NamedTuple):
    """What a replay's phases take, by arithmetic."""

    costs: Costs
    num_layers: int
    prefill_tokens: int
    """Of one call."""
    disk: Disk | None = None
    disk_bytes: int = 0

    def seconds(self, plan: ReusePlan, num_loaded: int, start: int, num_tokens: int) -> float:
        """From a request's admission to its first token: `num_loaded` tokens come from host memory,
        `start` are cached with them."""
        extend = extend_work(start, num_tokens, piece=self.prefill_tokens)
        works = plan.works if plan.pieces else {Phase.EXTEND: extend}
        loaded = Work(num_loaded > 0, num_loaded)
        return seconds(self.costs, {**works, Phase.LOAD: loaded})


class FusedReplay:
    """One rank, its cache and its store; `Replay` with moved KV.

    Args:
        kv_bytes: of one token.
        store_bytes: of the store, whatever the configuration says. With host memory its room is the
            store's.
        prefill_budget: tokens of one pass, where the configuration names none.
        chunk_tokens: length of a chunk, for the room of a cache whose capacity is in chunks.
        share: of the requests that opt into moved KV, evenly spread; a conversation does as its
            first turn. 0: none does, and nothing is captured.
        timing: None: nothing takes time, and what can be moved is.
    """

    def __init__(
        self,
        settings: ReplaySettings,
        config: ChunkCacheConfig,
        *,
        kv_bytes: int,
        store_bytes: int,
        prefill_budget: int,
        chunk_tokens: float,
        share: float = 1.0,
        timing: Timing | None = None,
    ) -> None:
        nodes, self._share = settings.capacity, share
        self._room = settings.capacity_tokens or (
            None if nodes is None else int(nodes * chunk_tokens)
        )
        self._settings, self._config, self._kv_bytes, self._budget = (
            settings,
            config,
            kv_bytes,
            prefill_budget,
        )
        self._fusion = FusionRequest(
            config.selector,
            config.recompute_ratio,
            focus="spare" if config.selector == "context" else "off",
            always=config.move == "always",
        )
        self._grows_from: float | None = None
        if not self._fusion.plain and settings.order == "tree":
            # without prices what can be moved is
            always = timing is None or self._fusion.always
            self._grows_from = inf if always else settings.threshold
        self._limits = Limits(config.max_pass_tokens or prefill_budget, config.max_gap_tokens)
        self._timing = timing
        if timing is not None:
            more = {"prefill_tokens": timing.prefill_tokens, "num_layers": timing.num_layers}
            window = {"question_window": config.question_window}
            self._limits = replace(self._limits, **more, **window)
        self._table = AccessTable(settings.window)
        self._tree = ChunkPrefixTree(max_nodes=sys.maxsize)
        self._known: dict[ChainNode, Known] = {}
        self._queue = EvictionQueue(
            self._tree,
            settings.eviction,
            serves_one=self._serves_one,
            is_leaf=self._is_leaf,
            # without host memory ties are broken as they were when its records were made
            recency=(lambda node: self._known[node].used) if settings.host else (lambda node: 0),
        )
        self._copies = ChunkCopies(
            lambda node: self._known.get(node, GONE).chunk, self._known.__getitem__, self._credit
        )
        num_slots = int(settings.host * (1 if settings.capacity is None else chunk_tokens))
        self.store = VariantIndex(
            max_bytes=num_slots * kv_bytes or store_bytes,
            max_chunks=config.store_chunks,
            max_variants=config.store_variants,
            window=settings.window,
        )
        self._sources = ChunkSources(self._copies, self.store, max_copies=MAX_COPIES)
        self._captures = CaptureQueue(
            self._copies,
            self.store,
            lambda node: node.num_tokens,
            scored=self._fusion.scored,
            max_waiting=MAX_WAITING_CAPTURES,
            part_of=lambda entry: entry.node.num_tokens / MAX_CAPTURED_TOKENS,
            token_bytes=kv_bytes,
        )
        self.host = None
        if num_slots:
            pool, admission = CountedPool(num_slots, kv_bytes), settings.host_admission
            parts = self._tree, _RANK, pool, self.store, self._known.__getitem__, admission
            self.host = FusedHost(*parts, num_on_device=settings.capacity_tokens if share else None)
        self.disk = None
        if timing is not None and timing.disk is not None:
            size = {"max_bytes": timing.disk_bytes, "window": settings.window}
            self.disk = FusedDisk(
                timing.disk,
                VariantIndex(
                    max_chunks=config.store_chunks, max_variants=config.store_variants, **size
                ),
                WaitPolicy(config.storage_wait),
                timing.costs,
                store=self.store,
                host=self.host,
                sources=self._sources,
                token_bytes=kv_bytes,
                share=1 - self._fusion.expected_ratio if self._fusion.recomputes else 1.0,
                max_gap_tokens=config.max_gap_tokens,
            )
        self.free_at = self.ttft_s = self._admitted_at = 0.0
        """Of a timed replay: when the last request was done, and what it took from its arrival."""
        self._histories: dict[str, _History] = {}
        self.num_requests = self.num_evicted = self.peak_nodes = self._num_uses = 0
        self.fallbacks: Counter[str] = Counter()

    def step(
        self,
        request: Sequence[Chunk],
        conversation: str | None = None,
        *,
        is_last_turn: bool = False,
        head: str | None = None,
        arrival: float | None = None,
        question_len: int = 0,
    ) -> FusedCount:
        """Serve one request, as `Replay.step`. A later turn's history is part of its prompt.

        Args:
            arrival: in seconds, in a timed replay. None: as the one before is done.
            question_len: tokens behind the chunks there.
        """
        self.num_requests += 1
        history = self._histories.pop(conversation or "", None)
        prompt = self._prompt(request, conversation, history, head or "")
        if conversation is not None and not is_last_turn:
            self._histories[conversation] = prompt
        self._table.observe([chunk.id for chunk in request])
        if not prompt.chunks:
            return FusedCount(*(0,) * len(FusedCount._fields))
        spans = _spans(prompt.chunks)
        arrival = self.free_at if arrival is None else arrival
        self._admit(prompt, spans, arrival, question_len)
        num_loaded = self._load(prompt, self.host) if self.host is not None else 0
        num_exact, found = self._match(prompt)
        start = spans[len(found)].start if len(found) < len(spans) else spans[-1].end
        plan = ReusePlan(())
        if prompt.is_fused:
            grows = len(found) == num_exact
            plan = self._plan(prompt, spans, start, question_len, grows=grows)
        locked = {*found, *_sources(plan)}
        if plan.pieces and not self._has_room(plan, locked, after=spans[-1].end - plan.end):
            plan, locked = ReusePlan((), (*plan.fallbacks, NotMoved.NO_ROOM)), {*found}
        self.fallbacks.update(plan.fallbacks)
        moved = {
            piece.span
            for piece in plan.pieces
            if piece.span is not None and piece.source is not None
        }
        fused_from = num_exact if len(found) > num_exact else min(moved, default=len(spans))
        self._sources.count_uses(plan)
        if self.disk is not None:
            self.disk.count_uses(plan.pieces)
        if self._timing is not None:
            seconds = self._timing.seconds(plan, num_loaded, start, spans[-1].end + question_len)
            self.free_at = self._admitted_at + seconds
            self.ttft_s = self.free_at - arrival
        promoted_len = self._table.promoted_run(
            (chunk.id for chunk in prompt.chunks), self._settings.threshold
        )
        chain = _chain(prompt, fused_from)
        if self._settings.admission == "promoted":
            chain = chain[: max(promoted_len, len(found), *(index + 1 for index in moved))]
        self._make_room(chain[len(found) :], locked)
        hit_len = 0 if history else num_exact
        leaf = self._tree.insert(
            prompt.head,
            chain,
            rank=_RANK,
            tier=Tier.DEVICE,
            promoted_len=min(promoted_len, fused_from),
            hit_len=hit_len,
        )
        nodes = self._learn(leaf, prompt, len(found), moved)
        if self.host is not None:
            shared = [*takewhile(self._is_shared, nodes)]
            self.host.offer(shared, is_later_turn=history is not None)
        self.store.ask(
            (self._known[node].chunk, prompt.head, self._known[node].prefix) for node in nodes
        )
        keep = self._table.frequent(
            (chunk.id for chunk in prompt.chunks), self._config.store_threshold
        )
        if not self._share:
            keep = frozenset()
        elif self.host is not None and not self._fusion.scored:
            # as `StoreKeeper.keep`
            keep = keep.difference(i for i, node in enumerate(nodes) if self.host.takes(node))
        self._captures.add(nodes, keep, is_preprocessing=False, scored=self._fusion.scored)
        if self.disk is not None:
            self.disk.disk.advance(self.free_at)
        self._store_what_waits()
        first = len(history.chunks) if history else 0
        count = count_of(request, spans, plan, num_exact, len(found), fused_from, first=first)
        if history is None:
            count = count._replace(exact_from_host=num_loaded)
        if not prompt.is_fused:
            return count
        return count._replace(
            opted_tokens=count.tokens, opted_exact=count.exact, opted_computed=count.computed
        )

    # Private, in order of use

    def _prompt(
        self,
        request: Sequence[Chunk],
        conversation: str | None,
        history: _History | None,
        head: str,
    ) -> _History:
        """The prompt's chunks in order, and what the tree calls them where their KV is exact."""
        if history is None:
            by, visits = self._settings, self._settings.max_visits
            parts = self._tree, self._table, head
            recipe = str(self.num_requests) if self._fusion.asks_the_question else "all"
            is_fused = int(self.num_requests * self._share) > int(
                (self.num_requests - 1) * self._share
            )
            shared = recipe if is_fused and not self._fusion.asks_the_question else None
            chunks = order_chunks(
                by.order,
                by.tail,
                *parts,
                request,
                rank=_RANK,
                max_visits=visits,
                recipe=shared,
                grows_from=self._grows_from if is_fused else None,
            ).chunks
            return _History(chunks, tuple(chunk.id for chunk in chunks), recipe, is_fused, head)
        shown = {chunk.id for chunk in history.chunks} if self._settings.dedup == "shown" else ()
        fresh = [chunk for chunk in request if chunk.id not in shown]
        # as in `Replay`: after a question and an answer
        keys = (f"{conversation}\0{chunk.id}" for chunk in fresh)
        return history._replace(
            chunks=(*history.chunks, *fresh), keys=(*history.keys, *keys), head=head
        )

    def _plan(
        self,
        prompt: _History,
        spans: Sequence[Span],
        start: int,
        question_len: int,
        *,
        grows: bool = True,
        coming: Coming = NOTHING,
    ) -> ReusePlan:
        """Of what follows `start`. `grows`: what is cached before it is exact."""

        def candidates(chunk: ChunkId, head: str = "") -> list[Candidate]:
            return self._sources.candidates(chunk, head, coming=coming.get(chunk, ()))

        make = partial(
            make_plan,
            spans,
            start=start,
            limit=spans[-1].end,
            candidates=candidates,
            fusion=self._fusion,
            limits=self._limits,
            heads=(prompt.head,) * len(spans),
            num_tokens=spans[-1].end + question_len,
            costs=self._timing and self._timing.costs,
        )
        if not grows or self._grows_from is None:
            return make()
        gaps = partial(self._exact_gaps, prompt, spans, start, candidates)
        return grown(lambda exact: make(exact=exact), gaps)

    def _admit(
        self, prompt: _History, spans: Sequence[Span], arrival: float, question_len: int
    ) -> None:
        """It asks the disk when it arrives, or the one before is admitted: a replay looks at no
        request earlier."""
        asked_at = max(arrival, self._admitted_at)
        self._admitted_at = max(arrival, self.free_at)
        if self.disk is not None:
            parts = prompt.chunks, spans, prompt.head
            self.disk.arrive(*parts, is_fused=prompt.is_fused, at=asked_at)

            def saved_s(coming: Coming) -> float | None:
                num_exact, _ = self._match(prompt)
                start = spans[num_exact].start if num_exact < len(spans) else spans[-1].end
                with_them, without = (
                    self._plan(prompt, spans, start, question_len, coming=each)
                    for each in (coming, NOTHING)
                )
                return seconds_saved(with_them, instead_of=without)

            self._admitted_at = self.disk.wait(self._admitted_at, saved_s)

    def _load(self, prompt: _History, host: FusedHost) -> int:
        """What host memory has of the exact chain is on the device from now on, as far as there is
        room. In tokens."""
        exact = self._tree.match(prompt.head, map(ChunkId, prompt.keys))
        here = [*takewhile(_is_on_device, exact)]
        there = exact[len(here) :]
        loaded = there[: num_fitting((node.num_tokens for node in there), self._idle(here))]
        host.counts.no_room += len(loaded) < len(there)
        self._make_room(loaded, here)
        for node in loaded:
            self._tree.move(node.chain, rank=_RANK, tier=Tier.DEVICE)
        self._know([*here, *loaded], prompt, len(here), ())
        host.nodes.loaded([copy for node in loaded if (copy := self._known[node].host)])
        num_tokens = sum(node.num_tokens for node in loaded)
        host.counts.loads += bool(loaded)
        host.counts.loaded_tokens += num_tokens
        return num_tokens

    def _match(self, prompt: _History) -> tuple[int, Sequence[ChainNode]]:
        """How many leading chunks are cached exactly, and their nodes with those cached fused after
        them."""
        found = self._tree.match(prompt.head, map(ChunkId, prompt.keys))
        exact = tuple(takewhile(_is_on_device, found))
        if not prompt.is_fused:
            return len(exact), exact
        return len(exact), self._tree.match(
            prompt.head, (chunk.id for chunk in _chain(prompt, len(exact)))
        )

    def _exact_gaps(
        self,
        prompt: _History,
        spans: Sequence[Span],
        start: int,
        candidates: Callable[[ChunkId], Sequence[Candidate]],
    ) -> frozenset[int]:
        """As `Fuser`: in the first chunk area, which is the first turn's."""
        ids = [chunk.id for chunk in prompt.chunks]
        area = [span for span, key in zip(spans, prompt.keys, strict=True) if span.chunk == key]
        return exact_gaps(
            area,
            start=start,
            limit=spans[-1].end,
            promoted_len=self._table.promoted_run(ids[: len(area)], self._settings.threshold),
            can_move=lambda chunk: bool(candidates(chunk)),
        )

    def _has_room(self, plan: ReusePlan, locked: Collection[ChainNode], *, after: int) -> bool:
        """Whether what is free or idle holds the promise and leaves room for an extend,
        as the server asks."""
        size = plan.end - plan.start
        return self._idle(locked) > size + min(after, self._budget)

    def _idle(self, locked: Collection[ChainNode]) -> int:
        """Tokens on the device that are free, or whose nodes may leave."""
        room = sys.maxsize if self._room is None else self._room
        return room - sum(node.num_tokens for node in locked)

    @staticmethod
    def _is_leaf(node: ChainNode) -> bool:
        return is_device_leaf(node, _RANK)

    def _is_shared(self, node: ChainNode) -> bool:
        """Whether it is exact, and no later turn's."""
        return node.chunk_id == self._known[node].chunk

    def _serves_one(self, node: ChainNode) -> bool:
        return self._fusion.asks_the_question and is_fused_chunk(node.chunk_id)

    def _credit(self, node: ChainNode) -> None:
        self._tree.touch(node)
        self._use(node.path())
        self._queue.push(node)

    def _use(self, nodes: Sequence[ChainNode]) -> None:
        """These are the most recent ones."""
        self._num_uses += 1
        for node in nodes:
            self._known[node].used = self._num_uses

    def _make_room(
        self, chunks: Sequence[Chunk | ChainNode], locked: Collection[ChainNode]
    ) -> None:
        """Evict until these fit, as the pool does before it takes them;
        all but the prompt's own nodes and its sources."""
        settings, spared = self._settings, []
        nodes = sys.maxsize if settings.capacity is None else settings.capacity - len(chunks)
        tokens = sys.maxsize if settings.capacity_tokens is None else settings.capacity_tokens
        tokens -= sum(chunk.num_tokens for chunk in chunks)
        held = self._tree.holdings.held
        while any(map(gt, held(_RANK, Tier.DEVICE), (nodes, tokens))):
            victim = self._queue.pop()
            if victim is None:
                break
            if victim in locked:
                spared.append(victim)
                continue
            parent = victim.parent
            self._queue.evicted(victim, self._tree.clock)
            self._copies.drop(victim)
            if (host := self._known.pop(victim).host) is not None:
                host.node = None
                self.num_evicted += self._tree.move(victim.chain, rank=_RANK, tier=Tier.HOST)
            elif self.host is not None:
                self.num_evicted += self.host.lost(victim.chain)
            else:
                self.num_evicted += self._tree.evict(victim.chain, rank=_RANK)
            if parent is not None and parent.parent is not None:
                self._queue.push(parent)
        for node in spared:
            self._queue.push(node)

    def _learn(
        self, leaf: ChainNode | None, prompt: _History, num_found: int, moved: Collection[int]
    ) -> Sequence[ChainNode]:
        """The prompt's nodes; the new ones are copies unless they were moved."""
        nodes = leaf.path() if leaf is not None else ()
        self._know(nodes, prompt, num_found, moved)
        self._use(nodes)
        if leaf is not None:
            self._queue.push(leaf)
        self.peak_nodes = max(self.peak_nodes, self._tree.holdings.held(_RANK, Tier.DEVICE)[0])
        return nodes

    def _know(
        self,
        nodes: Sequence[ChainNode],
        prompt: _History,
        num_known: int,
        moved: Collection[int],
    ) -> None:
        """Those from `num_known` on have come to the device."""
        before = tuple(chunk.id for chunk in prompt.chunks)
        start = 0
        for index, node in enumerate(nodes):
            if index >= num_known:
                known = self._known[node] = Known(
                    before[:index], head=prompt.head, start=start, chunk=before[index], node=node
                )
                if self.host is not None:
                    self.host.come_back(node, known)
                if index not in moved:
                    self._copies.add(node)
            start += node.num_tokens

    def _store_what_waits(self) -> None:
        """By forwards: of each a batch of chunks is captured, then some exact chains are saved."""
        while (batch := self._captures.next_batch()) or (self.host and self.host.num_waiting):
            self._capture(batch)
            if self.host is not None:
                for host, _ in self.host.save_some():
                    if self.disk is not None:
                        self.disk.saved(host)

    def _capture(self, batch: Sequence[Waiting]) -> None:
        blobs = [self._blob(entry.node.num_tokens) for entry in batch]
        for entry, blob in zip(batch, blobs, strict=True):
            node, known = entry.node, self._known[entry.node]
            if blob is None:
                self._captures.give_up([entry])
                continue
            scores = known.scores
            if entry.scored:
                lens = [above.num_tokens for above in node.path()[:-1]]
                scores = replace(
                    EvenAttention.of(known.start, lens, node.num_tokens), scored=entry.scored
                )
            if not self._captures.put(entry, blob, scores) and isinstance(blob, PoolSlots):
                blob.give_back()

    def _blob(self, num_tokens: int) -> _Size | PoolSlots | None:
        if self.host is None:
            return _Size(self._kv_bytes * num_tokens)
        return self.host.nodes.room(num_tokens)


def _chain(prompt: _History, num_exact: int) -> list[Chunk]:
    """As the tree knows it: exact, then fused by the prompt's recipe."""
    keys = [ChunkId(key) for key in prompt.keys]
    keys[num_exact:] = (fused_chunk(prompt.recipe, key) for key in keys[num_exact:])
    return [Chunk(key, chunk.num_tokens) for key, chunk in zip(keys, prompt.chunks, strict=True)]


def _spans(chunks: Sequence[Chunk]) -> list[Span]:
    ends = accumulate(chunk.num_tokens for chunk in chunks)
    return [
        Span(end - chunk.num_tokens, end, chunk.id) for chunk, end in zip(chunks, ends, strict=True)
    ]


def _is_on_device(node: ChainNode) -> bool:
    return node.tier(_RANK) is Tier.DEVICE


def _sources(plan: ReusePlan) -> Iterator[ChainNode]:
    for piece in plan.pieces:
        if isinstance(piece.source, DeviceCopy):
            yield from piece.source.node.path()
