"""What of a conversation goes into a turn's prompt when not everything fits, and which chunks it has shown already.

    all that fits  ->  the newest stored turns after the head  ->  messages alone, the oldest exchanges left out

Counts tokens, tokenises what is new, and decides; `radix_ext.ConversationMap` keeps the turns.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

from radix_ext import ChunkId, ConversationKey, MessageError, Span, Turn, keep_recent, running_hashes, shown
from sglang_chunkcache.errors import RequestError, TooLongError
from sglang_chunkcache.front.prompt import PromptAssembler, TokenizedChunk, TurnPieces, text_of, turn_start
from sglang_chunkcache.front.tokenizer import RequestEncoder


@dataclass(frozen=True, slots=True)
class PromptContext:
    """What shapes a chat prompt besides its messages. `reserve` tokens stay free for the answer; `may_shorten` says whether
    old exchanges may be left out, which only a conversation has asked for; `encode` is the request's.
    `prefill` begins the answer."""

    tools: Sequence[Mapping[str, Any]] | None
    template_kwargs: Mapping[str, Any] | None
    reserve: int
    may_shorten: bool
    encode: RequestEncoder
    prefill: str


class Fitted(NamedTuple):
    """A turn that fits the context."""

    turns: tuple[Turn, ...]
    """Earlier turns that stay."""
    pieces: TurnPieces
    kept: tuple[TokenizedChunk, ...]
    """Its chunks that the conversation has not shown yet."""
    num_departed: int
    """Turns or exchanges left out."""


@dataclass(frozen=True, slots=True)
class OpenTurn:
    """A conversation's turn before its answer is complete."""

    key: ConversationKey
    history: tuple[Turn, ...]
    """The earlier turns in its prompt."""
    lead: tuple[int, ...]
    hashes: tuple[str, ...]
    """Of settings and messages."""
    seen: frozenset[ChunkId] | None
    """Chunks of all earlier turns. None where departed turns do not matter: only `--chunkcache-dedup paper` reads them."""
    prefill: str
    """The client's beginning of the answer; the client sends the whole back."""

    def closed(
        self, input_ids: Sequence[int], spans: Sequence[Span], output_ids: Sequence[int], *, content: str, tag: str
    ) -> Turn:
        """The turn with its answer, under the hash of all messages, the answer included."""
        start = sum(turn.num_tokens for turn in self.history) + len(self.lead)
        own = tuple(Span(s - start, e - start, chunk) for s, e, chunk in spans if s >= start)
        seen = frozenset[ChunkId]() if self.seen is None else self.seen | {span.chunk for span in own}
        answer = {"role": "assistant", "content": self.prefill + content}
        (whole_hash,) = running_hashes([answer], after=self.hashes[-1])
        body = array("i", [*input_ids[start:], *output_ids])
        return Turn(len(self.hashes) + 1, whole_hash, array("i", self.lead), body, own, seen, tag)


class Conversation(NamedTuple):
    """What a request continues."""

    key: ConversationKey
    hashes: tuple[str, ...]
    """As `told_hashes` gives."""
    turns: tuple[Turn, ...]
    """Those in store that the messages agree with."""


def told_hashes(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
) -> tuple[str, ...]:
    """Running hashes of all that shapes a history: its settings, then each message. Raises RequestError."""
    try:
        shown = [{**message, "content": text_of(message, i)} for i, message in enumerate(messages)]
        return running_hashes([{"role": "\0settings", "tools": tools, "kwargs": template_kwargs}, *shown])
    except MessageError as error:
        raise RequestError(f"messages: {error}") from None


class TurnFitter:
    """Fits turns into a context of `context_len` tokens; `dedup` as in the configuration."""

    def __init__(self, assembler: PromptAssembler, *, context_len: int, dedup: str) -> None:
        self._assembler, self._context_len, self._dedup = assembler, context_len, dedup

    def fit(
        self,
        messages: Sequence[Mapping[str, Any]],
        agreed: tuple[Turn, ...],
        chunks: Sequence[TokenizedChunk],
        context: PromptContext,
    ) -> Fitted:
        """Choose what stays. All that fits does.

        Otherwise the oldest turns leave until half of the context is free, so that the prefix breaks once and not every
        turn; CRAFT 4.3 says why that is safe.
        """
        kept = self._unseen(chunks, agreed, agreed)
        try:
            pieces = self._pieces(messages, agreed, kept, context)
        except TooLongError:
            if not context.may_shorten:
                raise
            return self._shortened(messages, self._unseen(chunks, (), agreed), context)
        new_len = _num_tokens(pieces, kept)
        if sum(turn.num_tokens for turn in agreed) + new_len + context.reserve <= self._context_len:
            return Fitted(agreed, pieces, kept, 0)
        if agreed:
            head_text = self._assembler.head(messages, tools=context.tools, template_kwargs=context.template_kwargs)
            head = array("i", context.encode(head_text))
            needed = _num_tokens(pieces, chunks) + context.reserve  # what departs may have to be sent again
            budget = min(self._context_len // 2, self._context_len - needed) - len(head)
            turns = keep_recent(agreed, max(0, budget))
            if turns:
                kept = self._unseen(chunks, turns, agreed)
                turns = (replace(turns[0], lead_ids=head), *turns[1:])
                return Fitted(turns, self._pieces(messages, agreed, kept, context), kept, len(agreed) - len(turns))
        if not context.may_shorten:
            return Fitted((), pieces, kept, 0)
        return self._shortened(messages, self._unseen(chunks, (), agreed), context)

    def _shortened(
        self, messages: Sequence[Mapping[str, Any]], kept: tuple[TokenizedChunk, ...], context: PromptContext
    ) -> Fitted:
        """A prompt from messages alone: the opening, the newest exchanges that leave half of the context free, the question."""
        opening = next((i for i, m in enumerate(messages) if m.get("role") not in ("system", "developer")), 0)
        question = turn_start(messages)
        pieces = self._pieces([*messages[:opening], *messages[question:]], (), kept, context)
        texts = self._assembler.exchanges(
            messages[: question + 1], tools=context.tools, template_kwargs=context.template_kwargs
        )
        room = self._context_len // 2 - context.reserve - _num_tokens(pieces, kept)
        earlier: list[tuple[int, ...]] = []
        for text in reversed(texts):
            if room <= 0 or context.encode.is_longer(text, room) or len(ids := context.encode(text)) > room:
                break
            room -= len(ids)
            earlier.insert(0, ids)
        pieces = replace(pieces, lead=(*pieces.lead, *chain.from_iterable(earlier)))
        return Fitted((), pieces, kept, len(texts) - len(earlier))

    def _pieces(
        self,
        messages: Sequence[Mapping[str, Any]],
        agreed: Sequence[Turn],
        kept: Sequence[TokenizedChunk],
        context: PromptContext,
    ) -> TurnPieces:
        pieces = self._assembler.turn(
            messages,
            num_agreed=agreed[-1].num_messages - 1 if agreed else 0,  # the settings come first in the hashes
            has_chunks=bool(kept),
            tools=context.tools,
            template_kwargs=context.template_kwargs,
            encode=context.encode,
            prefill=context.prefill,
        )
        if agreed and pieces.lead and agreed[-1].body_ids[-1] == pieces.lead[0]:
            # The answer ended with the token that the template puts after it: once is enough.
            pieces = replace(pieces, lead=pieces.lead[1:])
        return pieces

    def _unseen(
        self, chunks: Sequence[TokenizedChunk], turns: Sequence[Turn], agreed: Sequence[Turn]
    ) -> tuple[TokenizedChunk, ...]:
        """The chunks that the conversation has not shown yet, given the turns that stay."""
        if self._dedup == "off":
            return tuple(chunks)
        seen = shown(agreed, "paper") if self._dedup == "paper" else shown(turns, "kept")
        return tuple(chunk for chunk in chunks if chunk.chunk.id not in seen)


def _num_tokens(pieces: TurnPieces, chunks: Sequence[TokenizedChunk]) -> int:
    chunk_len = sum(chunk.chunk.num_tokens for chunk in chunks)
    return len(pieces.lead) + len(pieces.intro) + len(pieces.outro) + chunk_len
