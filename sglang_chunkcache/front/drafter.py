"""From what a client sent to a Draft: chunks tokenised, each content once, and fitted to what the
conversation has shown.

Three kinds of prompt: a chat turn, parts as they come, and a chunk to preprocess. Reads no state
and counts nothing, so a thread may do it. Each text of a request is encoded once, and none that
cannot fit.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from radix_ext import ChunkId, FusionRequest
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.errors import HistoryError, RequestError, TooLongError
from sglang_chunkcache.front.conversation import (
    ChatPrompt,
    Conversation,
    OpenTurn,
    chunks_of,
    history_of,
)
from sglang_chunkcache.front.fusion_options import check_fused
from sglang_chunkcache.front.prompt import (
    NO_SETTINGS,
    Piece,
    PromptAssembler,
    TemplateSettings,
    TokenizedChunk,
    turn_start,
)
from sglang_chunkcache.front.request import Draft, Identity, Options, Passage
from sglang_chunkcache.front.tokenizer import RequestEncoder

MAX_CHUNK_CONTEXTS = 4
"""Chunks of one request are tokenised up to this many contexts:
some may be dropped as already seen, the rest is refused."""

NEVER = threading.Event()
"""For a request whose client waits as long as it takes."""


class _Chunks(NamedTuple):
    """An area's chunks, each content once."""

    items: tuple[TokenizedChunk, ...]
    labels: dict[ChunkId, str]
    repeated: list[str]
    """Labels of the others."""
    empty: list[str]
    """Labels of those without a character to read."""


class Drafter:
    """Drafts for one model.

    Args:
        context_len: the model's context in tokens, prompt and answer together.
    """

    def __init__(
        self, config: ChunkCacheConfig, assembler: PromptAssembler, *, context_len: int
    ) -> None:
        self._config, self._assembler, self._context_len = config, assembler, context_len
        self._encoder = partial(RequestEncoder, assembler.tokenizer, limit=context_len)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        passages: Sequence[Passage] | None,
        *,
        identity: Identity,
        options: Options,
        earlier: Mapping[int, Sequence[Passage]] | None = None,
        conversation: Conversation | None = None,
        settings: TemplateSettings = NO_SETTINGS,
        prefill: str = "",
        is_over: threading.Event = NEVER,
    ) -> Draft:
        """A chat turn. `prefill` begins its answer. Given up where `is_over` is set meanwhile.

        Args:
            passages: the chunks. None: those that the conversation has shown with the same
                question, if it was asked before.
            earlier: chunks of earlier user messages, by message.
        Raises:
            RequestError: messages or chunks that make no prompt; names the field.
            HistoryError: nobody can tell what an earlier turn has shown, and the request requires
                that.
        """
        encode = self._encoder(field="messages", is_over=is_over)
        start, earlier = turn_start(messages), earlier or {}
        limit = self._context_len * (1 if conversation is None else MAX_CHUNK_CONTEXTS)
        # a text sent twice is encoded once, so it counts once
        texts = {each.text for area in (passages or (), *earlier.values()) for each in area}
        if encode.tokenizer.least_len(sum(map(len, texts))) > limit:
            raise TooLongError(
                f"chunks: more than {limit} tokens in all messages, the context is"
                f" {self._context_len}"
            )
        tokenize = partial(self._tokenize, encode=encode, tenant=identity.tenant, limit=limit)
        chunks = tokenize(passages or (), field="chunks")
        shown = conversation.asked.get(start) if conversation else None
        if passages is None and shown is not None:
            items = chunks_of(shown)
            # labels are not kept with turns, so they are the hash's beginning
            labels = {item.chunk.id: item.chunk.id[:8] for item in items}
            chunks = chunks._replace(items=items, labels=labels)
        sent = {
            i: tokenize(each, field=f"messages.{i}.chunks").items for i, each in earlier.items()
        }
        # With an answer or a tool's step behind it the question was shown chunks that nobody sends.
        is_begun = bool(prefill) or any(
            message.get("role") == "assistant" for message in messages[start:]
        )
        is_known = passages is not None or shown is not None or not is_begun
        past = history_of(messages, conversation, sent, is_question_known=is_known)
        if past.unknown and options.requires_history:
            raise HistoryError(
                f"messages.{past.unknown[0]}.chunks: what this message has shown is not known here;"
                " send its chunks, [] for none"
            )
        fitted = ChatPrompt(
            self._assembler,
            self._context_len,
            self._config.dedup,
            self._config.past_reasoning,
            messages,
            past,
            chunks.items,
            settings,
            encode,
            prefill,
            reserve=min(self._config.answer_reserve_tokens, self._context_len // 8)
            if options.max_new_tokens is None
            else max(1, options.max_new_tokens),
        ).fit()
        kept = {item.chunk.id for item in fitted.kept}
        return Draft(
            *fitted.before_chunks(),
            fitted.kept,
            ((fitted.outro, None),),
            chunks.labels,
            identity,
            options,
            repeated=tuple(chunks.repeated),
            empty=tuple(chunks.empty),
            dropped=tuple(label for chunk, label in chunks.labels.items() if chunk not in kept),
            num_turns=fitted.num_reused,
            num_rendered=len(fitted.turns) - fitted.num_reused,
            num_unknown=len(past.unknown),
            is_changed=past.is_changed,
            num_departed=fitted.num_departed,
            # recipe_of keeps the last fused turn's, else its history's fused KV would not be found
            earlier_recipe=next((turn.tag for turn in reversed(fitted.turns) if turn.tag), ""),
            turn=OpenTurn(conversation, fitted) if conversation else None,
            # in this order the first part that differs is told (`other_head`)
            outline=(
                ("model", identity.lora),
                ("tools", settings.tools),
                ("chat_template_kwargs", settings.kwargs),
                *((f"messages.{i}", message) for i, message in enumerate(messages[:start])),
            ),
        )

    def parts(
        self,
        parts: Sequence[str | Sequence[Passage]],
        *,
        identity: Identity,
        options: Options,
        is_over: threading.Event = NEVER,
    ) -> Draft:
        """Texts and chunk areas as they come; only the first area is ordered. Texts are the
        program's own, chunks are not.

        Raises:
            RequestError: a chunk longer than the context.
        """
        encode = self._encoder(field="parts", is_over=is_over)
        num_chars = sum(len(part) for part in parts if isinstance(part, str))
        if encode.tokenizer.least_len(num_chars) > self._context_len:
            raise TooLongError(f"parts: more than {self._context_len} tokens, which is the context")
        before, after = array("i", self._assembler.tokenizer.bos_ids), list[Piece]()
        first, later_labels, num_before = None, list[str](), 0
        for part in parts:
            if isinstance(part, str):
                ids = encode(part)
                if first is None:
                    before.extend(ids)
                else:
                    after.append((ids, None))
            # An empty area has nothing to order, so a later one may be the first.
            elif part:
                area = self._tokenize(part, encode, identity.tenant, "parts", self._context_len)
                if first is None:
                    first = area
                else:
                    after += [(item.token_ids, item.chunk.id) for item in area.items]
                    later_labels += area.labels.values()
                    first.repeated.extend(area.repeated)
                    first.empty.extend(area.empty)
            num_before += first is None
        first = first or _Chunks((), {}, [], [])
        return Draft(
            before,
            (),
            first.items,
            tuple(after),
            first.labels,
            identity,
            options,
            later_labels=tuple(later_labels),
            repeated=tuple(first.repeated),
            empty=tuple(first.empty),
            outline=tuple((f"parts.{i}", part) for i, part in enumerate(parts[:num_before])),
        )

    def preprocessing(
        self,
        messages: Sequence[Mapping[str, Any]],
        neighbors: Sequence[Passage],
        chunk: Passage,
        *,
        identity: Identity,
        settings: TemplateSettings = NO_SETTINGS,
        rank: int = 0,
        is_over: threading.Event = NEVER,
    ) -> Draft:
        """`chunk` after its neighbours, whose plain KV is moved there, to be computed and stored
        (FusionRAG 3.1, eq. 10).

        Args:
            messages: system messages only, before the neighbours.
            rank: every rank has a store of its own.
        Raises:
            RequestError: a server without `--reuse fused`, or `chunk` among its neighbours.
        """
        check_fused(self._config, "chunk")
        if not chunk.text.strip():
            raise RequestError("chunk.text: is empty")
        encode = self._encoder(field="messages", is_over=is_over)
        tokenize = partial(
            self._tokenize, encode=encode, tenant=identity.tenant, limit=self._context_len
        )
        before, own = tokenize(neighbors, field="neighbors"), tokenize([chunk], field="chunk")
        if not before.labels.keys().isdisjoint(own.labels):
            raise RequestError("neighbors: the chunk itself is among them")
        chunks = (*before.items, *own.items)
        (exchange,) = self._assembler.exchanges(
            [*messages, {"role": "user", "content": ""}],
            with_chunks=[len(messages)],
            settings=settings,
        )
        (area,) = exchange.areas
        # The chunk alone is computed: what is stored is its KV after neighbours moved as they are.
        fusion = FusionRequest("none", 0.0, fresh=frozenset({len(chunks) - 1}), plain=True)
        return Draft(
            array("i", (*encode(exchange.lead), *encode(area.intro))),
            (),
            chunks,
            ((encode(area.ending), None),),
            {**before.labels, **own.labels},
            identity,
            # in the caller's order: after others, or in another order, it is another KV
            Options(max_new_tokens=1, order="retriever", fusion=fusion, rank=rank),
            repeated=tuple(before.repeated),
            empty=tuple(before.empty),
            is_preprocessing=True,
        )

    def _tokenize(
        self,
        passages: Sequence[Passage],
        encode: RequestEncoder,
        tenant: str,
        field: str,
        limit: int,
    ) -> _Chunks:
        """Each chunk, up to `limit` tokens in all."""
        chunks: dict[ChunkId, TokenizedChunk] = {}
        found, left = _Chunks((), {}, [], []), limit
        for passage in passages:
            if not passage.text.strip():
                found.empty.append(passage.label)
                continue
            if encode.is_longer(passage.text, self._context_len):
                raise TooLongError(
                    f"{field}: {passage.label!r} has more than {self._context_len} tokens, which is"
                    " the context"
                )
            # Only ids tell a repetition: different texts may have the same tokens.
            item = self._assembler.chunk(passage.text, tenant)
            if item.chunk.num_tokens >= self._context_len:
                raise RequestError(
                    f"{field}: {passage.label!r} has {item.chunk.num_tokens} tokens, the context is"
                    f" {self._context_len}"
                )
            if item.chunk.id in chunks:
                found.repeated.append(passage.label)
                continue
            left -= item.chunk.num_tokens
            if left < 0:
                raise TooLongError(
                    f"{field}: more than {limit} tokens, the context is {self._context_len}"
                )
            chunks[item.chunk.id] = item
            found.labels[item.chunk.id] = passage.label
        return found._replace(items=tuple(chunks.values()))
