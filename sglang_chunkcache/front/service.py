"""A RAG request's way through the front process: what is sent to which rank, and what its answer teaches.

    begin    drop what the conversation has shown -> order and route by table and tree -> ids and spans -> custom_params
    observe  the answer's first token: the rank's events go to its mirror, its report or `cached_tokens` become fates
    finish   the conversation gets its turn;  release  gives plan and load back, whatever happened

Holds no KV and no HTTP. One event loop, so nothing here is locked; nothing here waits.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any, cast

from radix_ext import (
    AccessTable,
    Chunk,
    ChunkId,
    ChunkPrefixTree,
    ConversationKey,
    ConversationMap,
    KvAware,
    Ordering,
    OrderPolicy,
    RoundRobin,
    Router,
    Span,
    TailPolicy,
    Turn,
    leading_area,
    order_per_rank,
    running_hashes,
)
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.front.conversation import PromptContext, TurnFitter
from sglang_chunkcache.front.fusion_options import check_fused, recipe_of, spans_to_keep
from sglang_chunkcache.front.metrics import Metrics
from sglang_chunkcache.front.prompt import PromptAssembler, PromptError, TokenizedChunk
from sglang_chunkcache.front.rank_mirror import RankMirror
from sglang_chunkcache.front.request import FATES, Identity, Passage, RagRequest
from sglang_chunkcache.wire.events import Batch
from sglang_chunkcache.wire.spans import ANSWER_KEY, ReuseRequest, namespace_of, pack

MAX_CHUNK_CONTEXTS = 4
"""Chunks of one request are tokenised up to this many contexts: some may be dropped as already seen, the rest is refused."""


class RagService:
    """The front's state: access table, global tree, mirrors, router, conversations.

    Args:
        context_len: the model's context in tokens, prompt and answer together.
        num_ranks: DP ranks.
        prometheus: whether SGLang serves metrics.
    """

    def __init__(
        self,
        config: ChunkCacheConfig,
        assembler: PromptAssembler,
        *,
        context_len: int,
        num_ranks: int,
        prometheus: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.assembler, self.context_len = config, assembler, context_len
        self.tree = ChunkPrefixTree(max_nodes=config.max_tree_nodes)
        self.mirrors = [RankMirror(self.tree, rank) for rank in range(num_ranks)]
        self.router: Router = (
            KvAware(num_ranks, max_load_ratio=config.max_load_ratio)
            if config.routing == "kv_aware"
            else RoundRobin(num_ranks)
        )
        self.metrics = Metrics(prometheus=prometheus)
        self._fitter = TurnFitter(assembler, context_len=context_len, dedup=config.dedup)
        self._clock = clock
        self.forget()

    def forget(self) -> None:
        """Forget which chunks were asked for and how conversations looked. What is cached stays, and the tree that mirrors it."""
        self.table = AccessTable(self.config.window_requests)
        self.conversations = ConversationMap(
            max_conversations=self.config.max_conversations,
            max_tokens=self.config.max_conversation_tokens,
            idle_s=self.config.conversation_idle_s,
        )

    def begin_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        passages: Sequence[Passage],
        *,
        identity: Identity,
        conversation_id: str | None = None,
        max_new_tokens: int | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        order: OrderPolicy | None = None,
        reuse: ReuseRequest | None = None,
        dry_run: bool = False,
    ) -> RagRequest:
        """Plan a chat turn.

        Args:
            order: of the chunks; None: the server's.
            reuse: what is asked for beyond exact prefixes; its recipe is filled in here.
            dry_run: plan only. Nothing is counted, taken or expected, so there is nothing to release.
        Raises:
            PromptError: messages or chunks that make no prompt, or one longer than the context; names the field.
        """
        chunks, labels, repeated = self._tokenize(passages)
        settings = {"role": "\0settings", "tools": tools, "kwargs": template_kwargs}
        hashes = running_hashes([settings, *messages])
        key = self._conversation_key(identity, conversation_id)
        agreed = self.conversations.agree(key, hashes, self._clock()) if key else ()
        context = PromptContext(tools, template_kwargs, self._reserve(max_new_tokens), may_shorten=key is not None)
        turns, pieces, kept, num_departed = self._fitter.fit(messages, agreed, chunks, context)
        history = array("i")
        spans: list[Span] = []
        for turn in turns:
            offset = len(history) + len(turn.lead_ids)
            history = history + turn.lead_ids + turn.body_ids
            spans += [Span(s + offset, e + offset, c) for s, e, c in turn.spans]

        def assemble(ordered: Sequence[TokenizedChunk]) -> tuple[array[int], list[Span]]:
            body, new_spans = pieces.body(ordered)
            offset = len(history) + len(pieces.lead)
            return history + array("i", pieces.lead) + body, [
                *spans,
                *(Span(s + offset, e + offset, c) for s, e, c in new_spans),
            ]

        head = history + array("i", pieces.lead) + array("i", pieces.intro)
        request = self._plan(
            head[: spans[0].start] if spans else head,
            spans,
            kept,
            labels,
            assemble,
            identity,
            max_new_tokens,
            order=order,
            reuse=reuse,
            earlier_recipe=next((turn.tag for turn in reversed(turns) if turn.tag), ""),
            dry_run=dry_run,
        )
        request.repeated = repeated
        sent = {c.chunk.id for c in kept}
        request.dropped = [labels[c.chunk.id] for c in chunks if c.chunk.id not in sent]
        request.num_turns, request.num_departed = len(turns), num_departed
        if key:
            body_start = len(history) + len(pieces.lead)
            request.remember = self._rememberer(
                key, turns, agreed, pieces.lead, request, body_start, [settings, *messages]
            )
        return self._book(request, [c.chunk.id for c in chunks], dry_run=dry_run)

    def begin_parts(
        self,
        parts: Sequence[str | Sequence[Passage]],
        *,
        identity: Identity,
        max_new_tokens: int | None = None,
        order: OrderPolicy | None = None,
        reuse: ReuseRequest | None = None,
    ) -> RagRequest:
        """Plan a prompt of texts and chunk areas as they come; only the first area is ordered. Arguments as in `begin_chat`.

        Raises:
            PromptError: nothing to send, or more than the context.
        """
        encode = self.assembler.encode
        areas = [index for index, part in enumerate(parts) if not isinstance(part, str) and part]
        first = areas[0] if areas else len(parts)
        head = array("i", self.assembler.bos_ids)
        for part in parts[:first]:
            head.extend(encode(cast(str, part)) if part else ())
        chunks, labels, repeated = self._tokenize(cast(Sequence[Passage], parts[first]) if areas else ())
        later: list[tuple[Sequence[int], ChunkId | None]] = []
        later_labels: list[str] = []
        for part in parts[first + 1 :]:
            if isinstance(part, str):
                later.append((encode(part), None))
                continue
            more, more_labels, more_repeated = self._tokenize(part)
            later_labels += more_labels.values()
            repeated += more_repeated
            later += [(item.token_ids, item.chunk.id) for item in more]

        def assemble(ordered: Sequence[TokenizedChunk]) -> tuple[array[int], list[Span]]:
            ids, spans = array("i", head), []
            for token_ids, chunk in [*((c.token_ids, c.chunk.id) for c in ordered), *later]:
                if chunk is not None:
                    spans.append(Span(len(ids), len(ids) + len(token_ids), chunk))
                ids.extend(token_ids)
            return ids, spans

        request = self._plan(head, [], chunks, labels, assemble, identity, max_new_tokens, order=order, reuse=reuse)
        request.order += later_labels
        request.repeated = repeated
        return self._book(request, [c.chunk.id for c in chunks])

    def begin_preprocessing(
        self,
        messages: Sequence[Mapping[str, Any]],
        neighbors: Sequence[Passage],
        chunk: Passage,
        *,
        identity: Identity,
        template_kwargs: Mapping[str, Any] | None = None,
        rank: int = 0,
    ) -> RagRequest:
        """Plan to compute `chunk` behind its neighbours, whose KV is moved there, and to store it (FusionRAG 3.1, eq. 10).

        Args:
            messages: system messages only, in front of the neighbours.
            rank: where; every rank has a store of its own.
        Raises:
            PromptError: a server without `--reuse fused`, `chunk` among its neighbours, or more than the context.
        """
        check_fused(self.config, "chunk")
        chunks, labels, repeated = self._tokenize([*neighbors, chunk])
        if chunks[-1].chunk.id in {self.assembler.chunk(neighbor.text).chunk.id for neighbor in neighbors}:
            raise PromptError("neighbors: the chunk itself is among them")
        pieces = self.assembler.turn(
            [*messages, {"role": "user", "content": ""}], num_agreed=0, has_chunks=True, template_kwargs=template_kwargs
        )

        def assemble(ordered: Sequence[TokenizedChunk]) -> tuple[array[int], list[Span]]:
            body, spans = pieces.body(ordered)
            offset = len(pieces.lead)
            return array("i", pieces.lead) + body, [Span(s + offset, e + offset, c) for s, e, c in spans]

        head = array("i", (*pieces.lead, *pieces.intro))
        reuse = ReuseRequest("none", 0.0, "", fresh=frozenset({len(chunks) - 1}))
        request = self._plan(head, [], chunks, labels, assemble, identity, 1, order="retriever", reuse=reuse, rank=rank)
        request.repeated, request.is_preprocessing = repeated, True
        return self._book(request, ())

    def observe(self, request: RagRequest, output: dict[str, Any], *, index: int = 0, incremental: bool) -> None:
        """Take what is ours out of one output of SGLang's, and learn from it. `index`: which of the n answers it is of."""
        meta = output["meta_info"]
        entry = meta.pop(ANSWER_KEY, None)
        if request.served_by is None:
            request.served_by = meta.get("dp_rank") or 0
        batch, report = entry[0] if entry else (None, None)
        if batch:
            self.mirrors[request.served_by].apply(Batch(*batch))
        is_over = (meta.get("finish_reason") or {}).get("type") in ("stop", "length")
        has_tokens = meta.get("completion_tokens", 0) > 0
        if not request.is_answered and (has_tokens or is_over):
            request.is_answered, request.report = True, report if request.reuse else None
            if has_tokens and not entry:
                self._fall_back(request, "plain_text")  # the rank could not read our spans; its log says why
            elif has_tokens and request.reuse and report is None:
                self._fall_back(request, "no_report")
            self._book_fates(request, int(meta.get("cached_tokens", 0)), is_plain=has_tokens and not entry)
        if index == 0:
            ids = output.get("output_ids") or []
            request.output_ids = [*request.output_ids, *ids] if incremental else ids
            if meta.get("finish_reason"):
                request.finish_reason = meta["finish_reason"]["type"]
                request.is_cut = isinstance(meta["finish_reason"].get("matched"), str)

    def finish(self, request: RagRequest, content: str | None) -> None:
        """The answer is complete; `content` is the message the client got, None where it is not plain text."""
        complete = request.finish_reason in ("stop", "length") and not request.is_cut
        if request.remember is not None and content is not None and complete:
            request.remember(request.output_ids, content)
        self.release(request)

    def release(self, request: RagRequest) -> None:
        """Give plan and load back. Safe to call again."""
        if request.released:
            return
        request.released = True
        if request.plan is None:
            return
        self.tree.cancel(request.plan)
        self.router.end(request.rank, len(request.input_ids))
        outcome = "finished" if request.finish_reason in ("stop", "length") else "aborted"
        self.metrics.count("requests", "refused" if request.is_refused else outcome)

    def stats(self) -> dict[str, Any]:
        """The front's part of `/chunkcache/stats`."""
        tree = self.tree.stats
        orders = self.metrics.num_orders
        return {
            "tree": {
                "nodes": tree.num_nodes,
                "promoted": tree.num_promoted,
                "namespaces": tree.num_namespaces,
                "open_plans": tree.num_open_plans,
                "trimmed": tree.num_trimmed,
                "unknown_notices": tree.num_unknown_notices,
            },
            "table": {"requests": self.table.num_requests, "chunks": len(self.table)},
            "conversations": {"count": len(self.conversations), "tokens": self.conversations.num_tokens},
            "prompt_tokens_in_flight": list(self.router.in_flight),
            "hit_rates": self._hit_rates(),
            "order_us_mean": round(1e6 * self.metrics.order_seconds / orders, 1) if orders else None,
            "reuse": self.config.reuse,
            "reuse_seconds": {phase: round(total, 6) for phase, total in self.metrics.phase_seconds.items()},
            **self.metrics.totals(),
        }

    # Private, in order of use

    def _hit_rates(self) -> dict[str, float | None]:
        """Shares since the start: prompt tokens found cached, chunks found cached of those retrieved, None before any."""
        totals = self.metrics.totals()
        tokens, chunks = totals["prompt_tokens"], totals["chunks"]
        num_tokens, num_chunks = sum(tokens.values()), chunks.get("retrieved", 0)
        return {
            "tokens": tokens.get("exact", 0) / num_tokens if num_tokens else None,
            "chunks": chunks.get("hit", 0) / num_chunks if num_chunks else None,
        }

    def _tokenize(self, passages: Sequence[Passage]) -> tuple[list[TokenizedChunk], dict[ChunkId, str], list[str]]:
        """Chunks in retriever order, each content once; labels by id; labels of repeats."""
        chunks: dict[ChunkId, TokenizedChunk] = {}
        labels: dict[ChunkId, str] = {}
        num_tokens = 0
        repeated = []
        for passage in passages:
            item = self.assembler.chunk(passage.text)
            if item.chunk.id in chunks:
                repeated.append(passage.label)
                continue
            if item.chunk.num_tokens >= self.context_len:
                raise PromptError(
                    f"chunks: {passage.label!r} has {item.chunk.num_tokens} tokens, the context is {self.context_len}"
                )
            num_tokens += item.chunk.num_tokens
            if num_tokens > MAX_CHUNK_CONTEXTS * self.context_len:
                raise PromptError(f"chunks: more than {num_tokens} tokens, the context is {self.context_len}")
            chunks[item.chunk.id] = item
            labels[item.chunk.id] = passage.label
        return list(chunks.values()), labels, repeated

    def _conversation_key(self, identity: Identity, conversation_id: str | None) -> ConversationKey | None:
        if not conversation_id:
            return None
        return ConversationKey(
            identity.api_key,
            identity.cache_salt or "",
            f"{identity.extra_key or ''}\0{identity.lora or ''}",
            conversation_id,
        )

    def _plan(
        self,
        head: array[int],
        history_spans: Sequence[Span],
        chunks: Sequence[TokenizedChunk],
        labels: Mapping[ChunkId, str],
        assemble: Callable[[Sequence[TokenizedChunk]], tuple[array[int], list[Span]]],
        identity: Identity,
        max_new_tokens: int | None,
        *,
        order: OrderPolicy | None = None,
        reuse: ReuseRequest | None = None,
        earlier_recipe: str = "",
        rank: int | None = None,
        dry_run: bool = False,
    ) -> RagRequest:
        """Order and route, then assemble. A history with chunks is fixed: then only its rank is chosen, nothing ordered."""
        namespace = namespace_of(head, identity.extra_key, identity.cache_salt, identity.lora)
        by_id = {item.chunk.id: item for item in chunks}
        if history_spans:
            area = leading_area(history_spans)
            candidates = [Chunk(span.chunk, span.end - span.start) for span in area]
            rank, ordering = self._decide("retriever", namespace, candidates, rank=rank, dry_run=dry_run)
            ordered = list(chunks)
        else:
            policy = order or cast(OrderPolicy, self.config.order)
            rank, ordering = self._decide(policy, namespace, [c.chunk for c in chunks], rank=rank, dry_run=dry_run)
            ordered = [by_id[chunk.id] for chunk in ordering.chunks]
        ids, spans = assemble(ordered)
        if len(ids) + self._reserve(max_new_tokens, least=1) > self.context_len:
            raise PromptError(
                f"messages: prompt of {len(ids)} tokens and answer of {self._reserve(max_new_tokens, least=1)} "
                f"exceed the context of {self.context_len}"
            )
        if not ids:
            raise PromptError("messages: the prompt is empty")
        area = leading_area(spans)
        if reuse is not None:
            reuse = replace(reuse, recipe=recipe_of(reuse, ids[area[-1].end :] if area else (), earlier_recipe))
        return RagRequest(
            input_ids=ids.tolist(),
            rank=rank,
            namespace=namespace,
            spans=tuple(spans),
            area=area,
            order=[labels[item.chunk.id] for item in ordered],
            planned_len=ordering.held_len + ordering.planned_len,
            reuse=reuse,
        )

    def _decide(
        self, policy: OrderPolicy, namespace: str, chunks: Sequence[Chunk], *, rank: int | None, dry_run: bool
    ) -> tuple[int, Ordering]:
        start = time.perf_counter()
        by_turns = self.config.routing == "round_robin"
        router = copy(self.router) if dry_run else self.router  # choosing moves the turn on
        ranks = [rank] if rank is not None else [router.choose({})] if by_turns else range(len(self.mirrors))
        orderings = order_per_rank(
            policy,
            cast(TailPolicy, self.config.tail),
            self.tree,
            self.table,
            namespace,
            chunks,
            ranks=ranks,
            max_visits=self.config.max_search_visits,
        )
        if rank is None:
            cached = {rank: ordering.cached_tokens for rank, ordering in orderings.items()}
            rank = next(iter(orderings)) if by_turns else router.choose(cached)
        if not dry_run:
            self.metrics.observe_order(time.perf_counter() - start)
        return rank, orderings[rank]

    def _book(self, request: RagRequest, retrieved: Sequence[ChunkId], *, dry_run: bool = False) -> RagRequest:
        """Count the request, expect its chain, take its load, and write down what the scheduler is told."""
        if not dry_run and not request.is_preprocessing:
            self.table.observe(retrieved)
        area = request.area
        promoted_len = self.table.promoted_run((span.chunk for span in area), self.config.promotion_threshold)
        request.custom_params = pack(
            request.spans,
            namespace=request.namespace,
            promoted_len=promoted_len,
            ack=self.mirrors[request.rank].acknowledgement,
            secret=self.config.secret,
            keep=request.reuse.fresh
            if request.is_preprocessing and request.reuse
            else spans_to_keep(self.config, self.table, request.spans),
            is_preprocessing=request.is_preprocessing,
            reuse=request.reuse,
            is_later_turn=request.num_turns > 0,
        )
        if dry_run:
            return request
        request.plan = self.tree.plan(
            request.namespace, [Chunk(s.chunk, s.end - s.start) for s in area], rank=request.rank
        )
        self.tree.mark_promoted(request.namespace, (span.chunk for span in area), promoted_len=promoted_len)
        self.router.begin(request.rank, len(request.input_ids))
        if not request.is_preprocessing:
            for kind, amount in (
                ("retrieved", len(retrieved)),
                ("repeated", len(request.repeated)),
                ("dropped", len(request.dropped)),
                ("planned", request.planned_len),
            ):
                self.metrics.count("chunks", kind, amount)
        return request

    def _reserve(self, max_new_tokens: int | None, *, least: int | None = None) -> int:
        """Tokens to keep free for the answer."""
        if max_new_tokens is not None:
            return max(1, max_new_tokens)
        return least if least is not None else min(self.config.answer_reserve_tokens, self.context_len // 8)

    def _rememberer(
        self,
        key: ConversationKey,
        turns: tuple[Turn, ...],
        agreed: Sequence[Turn],
        lead: Sequence[int],
        request: RagRequest,
        body_start: int,
        messages: Sequence[Mapping[str, Any]],
    ) -> Callable[[Sequence[int], str], None]:
        """What to do with the answer: store history and this turn under the hash of all messages, answer included."""
        spans = tuple(Span(s - body_start, e - body_start, c) for s, e, c in request.spans if s >= body_start)
        # Every turn says what was shown up to it, so that a branch knows too; only `paper` looks at it, so only there it is kept.
        seen: frozenset[ChunkId] = frozenset()
        if self.config.dedup == "paper":
            seen = frozenset(span.chunk for span in spans) | (agreed[-1].seen if agreed else frozenset())

        def remember(output_ids: Sequence[int], content: str) -> None:
            history = [*messages, {"role": "assistant", "content": content}]
            body = array("i", [*request.input_ids[body_start:], *output_ids])
            tag = request.reuse.recipe if request.reuse and request.spans else ""
            turn = Turn(len(history), running_hashes(history)[-1], array("i", lead), body, spans, seen, tag)
            self.conversations.finish(key, turns, turn, self._clock())

        return remember

    def _book_fates(self, request: RagRequest, cached_tokens: int, *, is_plain: bool) -> None:
        """`is_plain`: the rank took the request for plain text, so that what it found cached is exact in any case."""
        if request.is_parallel:
            self._fall_back(request, "parallel_sampling")
            return
        report = request.report
        if report is not None:
            request.known = {fate: int(report[fate]) for fate in FATES}
            self._book_reuse(request, report)
        elif request.reuse is None or is_plain:
            request.known = {"exact": min(cached_tokens, len(request.input_ids)), "relocated": 0, "recomputed": 0}
        for fate, amount in (request.fates() or {}).items():
            self.metrics.count("prompt_tokens", fate, amount)
        if request.known is not None and not request.is_preprocessing:
            assert request.plan is not None
            request.hit_len = sum(1 for span in request.area if span.end <= request.known["exact"])
            self.tree.count_hits(request.plan, request.hit_len)
            self.metrics.count("chunks", "hit", request.hit_len)

    def _book_reuse(self, request: RagRequest, report: Mapping[str, Any]) -> None:
        for reason in report["fallbacks"]:
            self._fall_back(request, reason)
        for _, source, *_ in report["sources"]:
            self.metrics.count("sources", source)
        for phase, milliseconds in report["ms"].items():
            self.metrics.observe_phase(phase, milliseconds / 1000)

    def _fall_back(self, request: RagRequest, reason: str) -> None:
        request.fallbacks.append(reason)
        self.metrics.count("fallbacks", reason)
