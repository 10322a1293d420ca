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
from typing import Any, NamedTuple, cast

from radix_ext import ChunkId, ConversationKey, FusionRequest, Span, Turn
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.errors import HistoryError, RequestError, TooLongError
from sglang_chunkcache.front.conversation import (
    Conversation,
    Fitted,
    OpenTurn,
    PromptContext,
    TurnFitter,
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
    joined,
    text_of,
    turn_start,
)
from sglang_chunkcache.front.request import Draft, Identity, Options, Passage
from sglang_chunkcache.front.tokenizer import RequestEncoder

MAX_CHUNK_CONTEXTS = 4
"""Chunks of one request are tokenised up to this many contexts:
some may be dropped as already seen, the rest is refused."""


class _Chunks(NamedTuple):
    """An area's chunks, each content once."""

    items: tuple[TokenizedChunk, ...]
    labels: dict[ChunkId, str]
    repeated: list[str]
    """Labels of the others."""
    empty: list[str]
    """Labels of those without a character to read."""

    @property
    def ids(self) -> tuple[ChunkId, ...]:
        return tuple(self.labels)


class Drafter:
    """Drafts for one model.

    Args:
        context_len: the model's context in tokens, prompt and answer together.
    """

    def __init__(
        self, config: ChunkCacheConfig, assembler: PromptAssembler, *, context_len: int
    ) -> None:
        self._config, self._assembler, self._context_len = config, assembler, context_len
        self._fitter = TurnFitter(
            assembler,
            context_len=context_len,
            dedup=config.dedup,
            past_reasoning=config.past_reasoning,
        )

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
        is_over: threading.Event | None = None,
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
        encode = self._encoder("messages", is_over)
        start = turn_start(messages)
        question = text_of(messages[start], start)
        if (
            isinstance(question, str)
            and encode.tokenizer.least_len(len(question)) > self._context_len
        ):
            raise TooLongError(
                f"messages: more than {self._context_len} tokens, which is the context"
            )
        is_conversation = conversation is not None
        # a text sent twice is encoded once, so it counts once
        texts = {each.text for area in (passages or (), *(earlier or {}).values()) for each in area}
        limit = self._context_len * (MAX_CHUNK_CONTEXTS if is_conversation else 1)
        if encode.tokenizer.least_len(sum(map(len, texts))) > limit:
            raise TooLongError(
                f"chunks: more than {limit} tokens in all messages, the context is"
                f" {self._context_len}"
            )
        chunks = self._tokenize(
            passages or (), encode, identity.tenant, may_be_shown=is_conversation
        )
        if passages is None and conversation and start in conversation.asked:
            items = chunks_of(conversation.asked[start])
            # labels are not kept with turns, so they are the hash's beginning
            chunks = chunks._replace(
                items=items, labels={item.chunk.id: item.chunk.id[:8] for item in items}
            )
        sent = {
            i: self._tokenize(
                each, encode, identity.tenant, f"messages.{i}.chunks", may_be_shown=is_conversation
            ).items
            for i, each in (earlier or {}).items()
        }
        is_said = passages is not None or (conversation is not None and start in conversation.asked)
        # With an answer or a tool's step behind it the question was shown chunks that nobody sends.
        is_begun = bool(prefill) or any(
            message.get("role") == "assistant" for message in messages[start:]
        )
        past = history_of(messages, conversation, sent, is_question_known=is_said or not is_begun)
        if past.unknown and options.requires_history:
            raise HistoryError(
                f"messages.{past.unknown[0]}.chunks: what this message has shown is not known here;"
                " send its chunks, [] for none"
            )
        context = PromptContext(settings, self._reserve(options), is_conversation, encode, prefill)
        fitted = self._fitter.fit(messages, past, chunks.items, context)
        kept = {item.chunk.id for item in fitted.kept}
        return Draft(
            *_laid_out(fitted),
            fitted.kept,
            ((fitted.outro, None),),
            chunks.labels,
            identity,
            options,
            retrieved=chunks.ids,
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
            turn=OpenTurn(
                conversation.key,
                conversation.claimed,
                fitted,
                len(messages),
                prefill,
                _step_before(conversation, fitted.turns),
            )
            if conversation
            else None,
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
        is_over: threading.Event | None = None,
    ) -> Draft:
        """Texts and chunk areas as they come; only the first area is ordered. Texts are the
        program's own, chunks are not.

        Raises:
            RequestError: a chunk longer than the context.
        """
        encode = self._encoder("parts", is_over)
        # An empty area has nothing to order, so a later one may be the first.
        first = next(
            (i for i, part in enumerate(parts) if part and not isinstance(part, str)), len(parts)
        )
        num_chars = sum(len(part) for part in parts if isinstance(part, str))
        if encode.tokenizer.least_len(num_chars) > self._context_len:
            raise TooLongError(f"parts: more than {self._context_len} tokens, which is the context")
        before = array("i", self._assembler.tokenizer.bos_ids)
        for part in parts[:first]:
            before.extend(encode(cast(str, part)) if part else ())
        first_area = cast(Sequence[Passage], parts[first]) if first < len(parts) else ()
        area = self._tokenize(first_area, encode, identity.tenant, "parts")
        after: list[Piece] = []
        later_labels: list[str] = []
        for part in parts[first + 1 :]:
            if isinstance(part, str):
                after.append((encode(part), None))
                continue
            later = self._tokenize(part, encode, identity.tenant, "parts")
            later_labels += later.labels.values()
            area.repeated.extend(later.repeated)
            area.empty.extend(later.empty)
            after += [(item.token_ids, item.chunk.id) for item in later.items]
        return Draft(
            before,
            (),
            area.items,
            tuple(after),
            area.labels,
            identity,
            options,
            later_labels=tuple(later_labels),
            retrieved=area.ids,
            repeated=tuple(area.repeated),
            empty=tuple(area.empty),
            outline=tuple((f"parts.{i}", part) for i, part in enumerate(parts[:first])),
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
        is_over: threading.Event | None = None,
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
        encode = self._encoder("messages", is_over)
        before = self._tokenize(neighbors, encode, identity.tenant, "neighbors")
        own = self._tokenize([chunk], encode, identity.tenant, "chunk")
        if own.ids[0] in before.labels:
            raise RequestError("neighbors: the chunk itself is among them")
        chunks = (*before.items, *own.items)
        pieces = self._assembler.turn(
            [*messages, {"role": "user", "content": ""}],
            num_agreed=0,
            has_chunks=True,
            settings=settings,
            encode=encode,
        )
        # The chunk alone is computed: what is stored is its KV after neighbours moved as they are.
        fusion = FusionRequest("none", 0.0, fresh=frozenset({len(chunks) - 1}), plain=True)
        return Draft(
            array("i", (*pieces.lead, *pieces.intro)),
            (),
            chunks,
            ((pieces.outro, None),),
            {**before.labels, **own.labels},
            identity,
            # in the caller's order: after others, or in another order, it is another KV
            Options(max_new_tokens=1, order="retriever", fusion=fusion, rank=rank),
            repeated=tuple(before.repeated),
            empty=tuple(before.empty),
            is_preprocessing=True,
        )

    # Private, in order of use

    def _encoder(self, field: str, is_over: threading.Event | None) -> RequestEncoder:
        is_over = is_over or threading.Event()
        return RequestEncoder(
            self._assembler.tokenizer, limit=self._context_len, field=field, is_over=is_over
        )

    def _tokenize(
        self,
        passages: Sequence[Passage],
        encode: RequestEncoder,
        tenant: str,
        field: str = "chunks",
        *,
        may_be_shown: bool = False,
    ) -> _Chunks:
        """Each chunk, up to as many tokens as could be sent.
        `may_be_shown`: a conversation drops what it has shown already."""
        limit = self._context_len * (MAX_CHUNK_CONTEXTS if may_be_shown else 1)
        too_many = TooLongError(
            f"{field}: more than {limit} tokens, the context is {self._context_len}"
        )
        if (
            encode.tokenizer.least_len(sum(map(len, {passage.text for passage in passages})))
            > limit
        ):
            raise too_many
        chunks: dict[ChunkId, TokenizedChunk] = {}
        found = _Chunks((), {}, [], [])
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
            limit -= item.chunk.num_tokens
            if limit < 0:
                raise too_many
            chunks[item.chunk.id] = item
            found.labels[item.chunk.id] = passage.label
        return found._replace(items=tuple(chunks.values()))

    def _reserve(self, options: Options) -> int:
        """Tokens to keep free for the answer when old turns are weighed against it."""
        if options.max_new_tokens is not None:
            return max(1, options.max_new_tokens)
        return min(self._config.answer_reserve_tokens, self._context_len // 8)


def _step_before(conversation: Conversation, turns: Sequence[Turn]) -> Turn | None:
    """What was kept last of the turn that follows these, if this request goes on from there."""
    first, hashes = turns[-1].num_messages if turns else 0, set(conversation.claimed.hashes[:-1])
    asked = (conversation.asked[i] for i in sorted(conversation.asked, reverse=True) if i >= first)
    return next((kept for kept in asked if kept.messages_hash in hashes), None)


def conversation_key(identity: Identity, conversation_id: str) -> ConversationKey:
    """Whose conversation that is."""
    return ConversationKey(identity.api_key, identity.tenant, identity.lora or "", conversation_id)


def _laid_out(fitted: Fitted) -> tuple[array[int], tuple[Span, ...]]:
    """Token ids up to the turn's first chunk, and the earlier turns' chunks in them."""
    ids, spans = array("i"), list[Span]()
    for turn in fitted.turns:
        offset = len(ids) + len(turn.lead_ids)
        ids.extend(turn.lead_ids)
        ids.extend(turn.body_ids)
        spans += [Span(s + offset, e + offset, chunk) for s, e, chunk in turn.spans]
    ids.extend(fitted.lead)
    ids, own = joined(ids, fitted.intro)
    return ids, (*spans, *own)
