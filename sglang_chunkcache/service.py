"""A RAG request's way through the front process: what is sent to which rank, and what its answer teaches.

    begin    drop what the conversation has shown -> order and route by table and tree -> ids and spans -> custom_params
    observe  the answer's first token: the rank's events go to its mirror, `cached_tokens` become fates
    finish   the conversation gets its turn;  release  gives plan and load back, whatever happened

Holds no KV and no HTTP. One event loop, so nothing here is locked; nothing here waits.
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
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
    keep_recent,
    leading_area,
    order_per_rank,
    running_hashes,
    shown,
)
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.event_log import Batch
from sglang_chunkcache.metrics import Metrics
from sglang_chunkcache.prompt import PromptAssembler, PromptError, TokenizedChunk, TurnPieces
from sglang_chunkcache.rag_request import Identity, Passage, RagRequest
from sglang_chunkcache.rank_mirror import RankMirror
from sglang_chunkcache.request_spans import ANSWER_KEY, namespace_of, pack

MAX_CHUNK_CONTEXTS = 4
"""Chunks of one request are tokenised up to this many contexts: some may be dropped as already seen, the rest is refused."""


@dataclass(frozen=True, slots=True)
class PromptContext:
    """What shapes a chat prompt beside its messages. `reserve` tokens stay free for the answer; `may_shorten` says whether
    old exchanges may be left out, which only a conversation has asked for."""

    tools: Sequence[Mapping[str, Any]] | None
    template_kwargs: Mapping[str, Any] | None
    reserve: int
    may_shorten: bool


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
        self.table = AccessTable(config.window_requests)
        self.tree = ChunkPrefixTree(max_nodes=config.max_tree_nodes)
        self.mirrors = [RankMirror(self.tree, rank) for rank in range(num_ranks)]
        self.router: Router = (
            KvAware(num_ranks, max_load_ratio=config.max_load_ratio)
            if config.routing == "kv_aware"
            else RoundRobin(num_ranks)
        )
        self.conversations = ConversationMap(
            max_conversations=config.max_conversations,
            max_tokens=config.max_conversation_tokens,
            idle_s=config.conversation_idle_s,
        )
        self.metrics = Metrics(prometheus=prometheus)
        self._clock = clock

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
    ) -> RagRequest:
        """Plan a chat turn.

        Raises:
            PromptError: messages or chunks that make no prompt, or one longer than the context; names the field.
        """
        chunks, labels, repeated = self._tokenize(passages)
        settings = {"role": "\0settings", "tools": tools, "kwargs": template_kwargs}
        hashes = running_hashes([settings, *messages])
        key = self._conversation_key(identity, conversation_id)
        agreed = self.conversations.agree(key, hashes, self._clock()) if key else ()
        context = PromptContext(tools, template_kwargs, self._reserve(max_new_tokens), may_shorten=key is not None)
        turns, pieces, kept, num_departed = self._fit(messages, agreed, chunks, context)
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
        request = self._begin(
            head[: spans[0].start] if spans else head,
            spans,
            kept,
            [c.chunk.id for c in chunks],
            labels,
            assemble,
            identity,
            max_new_tokens,
        )
        request.repeated = repeated
        sent = {c.chunk.id for c in kept}
        request.dropped = [labels[c.chunk.id] for c in chunks if c.chunk.id not in sent]
        request.num_turns, request.num_departed = len(turns), num_departed
        self.metrics.count("chunks", "repeated", len(repeated))
        self.metrics.count("chunks", "dropped", len(request.dropped))
        if key:
            body_start = len(history) + len(pieces.lead)
            request.remember = self._rememberer(
                key, turns, agreed, pieces.lead, request, body_start, [settings, *messages]
            )
        return request

    def begin_parts(
        self,
        parts: Sequence[str | Sequence[Passage]],
        *,
        identity: Identity,
        max_new_tokens: int | None = None,
    ) -> RagRequest:
        """Plan a prompt of texts and chunk areas as they come; only the first area is ordered.

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

        retrieved = [c.chunk.id for c in chunks]
        request = self._begin(head, [], chunks, retrieved, labels, assemble, identity, max_new_tokens)
        request.order += later_labels
        request.repeated = repeated
        return request

    def observe(self, request: RagRequest, output: dict[str, Any], *, index: int = 0, incremental: bool) -> None:
        """Take what is ours out of one output of SGLang's, and learn from it. `index`: which of the n answers it is of."""
        meta = output["meta_info"]
        entry = meta.pop(ANSWER_KEY, None)
        if request.served_by is None:
            request.served_by = meta.get("dp_rank") or 0
        if entry:
            self.mirrors[request.served_by].apply(Batch(*entry[0]))
        is_over = (meta.get("finish_reason") or {}).get("type") in ("stop", "length")
        if request.exact is None and (meta.get("completion_tokens", 0) > 0 or is_over):
            self._book_fates(request, int(meta.get("cached_tokens", 0)))
            if not entry and meta.get("completion_tokens", 0) > 0:
                # The rank could not read our spans; its log says why.
                request.fallbacks.append("plain_text")
                self.metrics.count("fallbacks", "plain_text")
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

    def _fit(
        self,
        messages: Sequence[Mapping[str, Any]],
        agreed: tuple[Turn, ...],
        chunks: Sequence[TokenizedChunk],
        context: PromptContext,
    ) -> tuple[tuple[Turn, ...], TurnPieces, list[TokenizedChunk], int]:
        """(turns to keep, the new turn's pieces, its chunks that are not seen, exchanges that had to leave).

        All that fits stays. Otherwise the oldest turns leave until half of the context is free, so that the prefix breaks
        once and not every turn; CRAFT 4.3 says why that is safe.
        """
        kept = self._unseen(chunks, agreed, agreed)
        pieces = self._pieces(messages, agreed, kept, context)
        new_len = _num_tokens(pieces, kept)
        if sum(turn.num_tokens for turn in agreed) + new_len + context.reserve <= self.context_len:
            return agreed, pieces, kept, 0
        if agreed:
            head = array(
                "i", self.assembler.head(messages, tools=context.tools, template_kwargs=context.template_kwargs)
            )
            needed = _num_tokens(pieces, chunks) + context.reserve  # what departs may have to be sent again
            budget = min(self.context_len // 2, self.context_len - needed) - len(head)
            turns = keep_recent(agreed, max(0, budget))
            if turns:
                kept = self._unseen(chunks, turns, agreed)
                turns = (replace(turns[0], lead_ids=head), *turns[1:])
                return turns, self._pieces(messages, agreed, kept, context), kept, len(agreed) - len(turns)
        if not context.may_shorten:
            return (), pieces, kept, 0
        kept = self._unseen(chunks, (), agreed)
        pieces, num_departed = self._shorten(messages, kept, context)
        return (), pieces, kept, num_departed

    def _shorten(
        self, messages: Sequence[Mapping[str, Any]], kept: Sequence[TokenizedChunk], context: PromptContext
    ) -> tuple[TurnPieces, int]:
        """The pieces of a prompt from messages alone, the oldest exchanges left out until half of the context is free."""
        opening = next((i for i, m in enumerate(messages) if m.get("role") not in ("system", "developer")), 0)
        starts = [i for i, m in enumerate(messages) if i >= opening and m.get("role") == "user"] or [opening]

        def pieces_from(number: int) -> TurnPieces:
            return self._pieces([*messages[:opening], *messages[starts[number] :]], (), kept, context)

        low, high = 0, len(starts) - 1  # the fewest exchanges to leave out; lengths fall, so search by halves
        while low < high:
            middle = (low + high) // 2
            if _num_tokens(pieces_from(middle), kept) + context.reserve <= self.context_len // 2:
                high = middle
            else:
                low = middle + 1
        return pieces_from(low), low

    def _pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        agreed: Sequence[Turn],
        kept: Sequence[TokenizedChunk],
        context: PromptContext,
    ) -> TurnPieces:
        pieces = self.assembler.turn(
            messages,
            num_agreed=agreed[-1].num_messages - 1 if agreed else 0,  # the settings come first in the hashes
            has_chunks=bool(kept),
            tools=context.tools,
            template_kwargs=context.template_kwargs,
        )
        if agreed and pieces.lead and agreed[-1].body_ids[-1] == pieces.lead[0]:
            # The answer ended with the token that the template puts behind it: once is enough.
            pieces = replace(pieces, lead=pieces.lead[1:])
        return pieces

    def _unseen(
        self, chunks: Sequence[TokenizedChunk], turns: Sequence[Turn], agreed: Sequence[Turn]
    ) -> list[TokenizedChunk]:
        """The chunks that the conversation has not shown yet, given the turns that stay."""
        if self.config.dedup == "off":
            return list(chunks)
        seen = shown(agreed, "paper") if self.config.dedup == "paper" else shown(turns, "kept")
        return [chunk for chunk in chunks if chunk.chunk.id not in seen]

    def _begin(
        self,
        head: array[int],
        history_spans: Sequence[Span],
        chunks: Sequence[TokenizedChunk],
        retrieved: Sequence[ChunkId],
        labels: Mapping[ChunkId, str],
        assemble: Callable[[Sequence[TokenizedChunk]], tuple[array[int], list[Span]]],
        identity: Identity,
        max_new_tokens: int | None,
    ) -> RagRequest:
        """Order and route, then assemble. A history with chunks is fixed: then only its rank is chosen, nothing ordered."""
        namespace = namespace_of(head, identity.extra_key, identity.cache_salt, identity.lora)
        by_id = {item.chunk.id: item for item in chunks}
        if history_spans:
            area = leading_area(history_spans)
            candidates = [Chunk(span.chunk, span.end - span.start) for span in area]
            decision = self._decide("retriever", namespace, candidates)
            ordered = list(chunks)
        else:
            decision = self._decide(cast(OrderPolicy, self.config.order), namespace, [c.chunk for c in chunks])
            ordered = [by_id[chunk.id] for chunk in decision[1].chunks]
        rank, ordering = decision
        ids, spans = assemble(ordered)
        if len(ids) + self._reserve(max_new_tokens, least=1) > self.context_len:
            raise PromptError(
                f"messages: prompt of {len(ids)} tokens and answer of {self._reserve(max_new_tokens, least=1)} "
                f"exceed the context of {self.context_len}"
            )
        if not ids:
            raise PromptError("messages: the prompt is empty")
        area = leading_area(spans)
        self.table.observe(retrieved)
        promoted_len = self.table.promoted_run((span.chunk for span in area), self.config.promotion_threshold)
        plan = self.tree.plan(namespace, [Chunk(s.chunk, s.end - s.start) for s in area], rank=rank)
        self.tree.mark_promoted(namespace, (span.chunk for span in area), promoted_len=promoted_len)
        self.router.begin(rank, len(ids))
        self.metrics.count("chunks", "retrieved", len(retrieved))
        planned_len = ordering.held_len + ordering.planned_len
        self.metrics.count("chunks", "planned", planned_len)
        return RagRequest(
            input_ids=ids.tolist(),
            custom_params=dict(
                pack(
                    spans,
                    namespace=namespace,
                    promoted_len=promoted_len,
                    ack=self.mirrors[rank].acknowledgement,
                    secret=self.config.secret,
                )
            ),
            rank=rank,
            plan=plan,
            spans=tuple(spans),
            area=area,
            order=[labels[item.chunk.id] for item in ordered],
            dropped=[],
            repeated=[],
            planned_len=planned_len,
            num_turns=0,
            num_departed=0,
            remember=None,
        )

    def _decide(self, policy: OrderPolicy, namespace: str, chunks: Sequence[Chunk]) -> tuple[int, Ordering]:
        start = time.perf_counter()
        by_turns = self.config.routing == "round_robin"
        orderings = order_per_rank(
            policy,
            cast(TailPolicy, self.config.tail),
            self.tree,
            self.table,
            namespace,
            chunks,
            ranks=[self.router.choose({})] if by_turns else range(len(self.mirrors)),
            max_visits=self.config.max_search_visits,
        )
        cached = {rank: ordering.cached_tokens for rank, ordering in orderings.items()}
        rank = next(iter(orderings)) if by_turns else self.router.choose(cached)
        self.metrics.observe_order(time.perf_counter() - start)
        return rank, orderings[rank]

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
            turn = Turn(len(history), running_hashes(history)[-1], array("i", lead), body, spans, seen)
            self.conversations.finish(key, turns, turn, self._clock())

        return remember

    def _book_fates(self, request: RagRequest, cached_tokens: int) -> None:
        if request.is_parallel:
            request.exact = 0
            request.fallbacks.append("parallel_sampling")
            self.metrics.count("fallbacks", "parallel_sampling")
            return
        request.exact = min(cached_tokens, len(request.input_ids))
        request.hit_len = sum(1 for span in request.area if span.end <= request.exact)
        self.tree.count_hits(request.plan, request.hit_len)
        self.metrics.count("chunks", "hit", request.hit_len)
        self.metrics.count("prompt_tokens", "exact", request.exact)
        self.metrics.count("prompt_tokens", "computed", len(request.input_ids) - request.exact)


def _num_tokens(pieces: TurnPieces, chunks: Sequence[TokenizedChunk]) -> int:
    chunk_len = sum(chunk.chunk.num_tokens for chunk in chunks)
    return len(pieces.lead) + len(pieces.intro) + len(pieces.outro) + chunk_len
