"""From messages and chunks to token ids and spans: the model's own chat template, rendered around the chunks.

    <bos><system>…<user> | You may use: | chunk 1 + separator | chunk 2 + separator | question<end><assistant>
           lead          |     intro    |            spans, one per chunk            |          outro

The pieces are tokenised apart, so that a chunk has the same ids at every place; ids go to the engine as they are, since
tokenising the text again would move the borders. Nothing here knows the cache, an order or a conversation's past tokens.
"""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any

from radix_ext import Chunk, ChunkId, Span, chunk_id
from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.tokenizer import Encode, ServedTokenizer

CHUNK_CACHE_SIZE = 4096
"""Chunk texts whose token ids are remembered: a popular chunk is tokenised once, not once a request."""

CHUNK_CACHE_CHARS = 16_384
"""Longer texts are not remembered, so that the memory is bounded: 4 bytes a token and the text."""

DEFAULT_TEMPLATE = "{chunks}{question}"


Piece = tuple[Sequence[int], ChunkId | None]
"""Token ids, and the chunk that they are, if any."""


@dataclass(frozen=True, slots=True)
class TokenizedChunk:
    """A chunk's ids, separator included, and what the trees know it by."""

    chunk: Chunk
    token_ids: array[int]


@dataclass(frozen=True, slots=True)
class TurnPieces:
    """Token ids of one turn around its chunks. `lead` joins it to what comes before: nothing, or an answer."""

    lead: tuple[int, ...]
    intro: tuple[int, ...]
    outro: tuple[int, ...]


def joined(before: Sequence[int], pieces: Iterable[Piece]) -> tuple[array[int], tuple[Span, ...]]:
    """`before` and the pieces in a row: their ids (array 'i'), and a span for each piece that is a chunk."""
    ids, spans = array("i", before), []
    for token_ids, chunk in pieces:
        if chunk is not None:
            spans.append(Span(len(ids), len(ids) + len(token_ids), chunk))
        ids.extend(token_ids)
    return ids, tuple(spans)


class PromptAssembler:
    """Renders and tokenises for one model.

    Args:
        tokenizer: the served model's Hugging Face tokenizer.
        template: the user message around the chunks; holds `{chunks}`, then `{question}`, each once.
        separator: text after every chunk.
        chunk_tokens: as in the configuration.
        content_format: SGLang's word for what the chat template reads where a content has parts: `openai`, a list of them;
            `string`, their texts with spaces between.
    Raises:
        ValueError: the template's placeholders, or a tokenizer that cannot be served.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        template: str = DEFAULT_TEMPLATE,
        separator: str,
        chunk_tokens: str = "text",
        content_format: str = "string",
    ) -> None:
        if template.count("{chunks}") != 1 or template.count("{question}") != 1:
            raise ValueError("the rag template must hold {chunks} and {question}, each once")
        self._intro, rest = template.split("{chunks}")
        if "{question}" not in rest:
            raise ValueError(
                "the rag template must name {chunks} before {question}: nothing after the question is shared"
            )
        self._before_question, self._after_question = rest.split("{question}")
        self._tokenizer, self._separator, self._reads_parts = tokenizer, separator, content_format == "openai"
        self.tokenizer = ServedTokenizer(tokenizer, chunk_tokens=chunk_tokens)
        self._is_separator_control = chunk_tokens == "text" and self.tokenizer.holds_control(separator)
        # Marks at the places where the rendered text is cut; random, so that no message can hold them.
        nonce = secrets.token_hex(8)
        self._start, self._chunks, self._answer = (f"\ue000{name}{nonce}\ue001" for name in ("s", "c", "a"))
        self._remembered_chunk = lru_cache(CHUNK_CACHE_SIZE)(self._tokenize_chunk)

    def chunk(self, text: str, tenant: str) -> TokenizedChunk:
        """A chunk's ids, its separator included; the same at every place.

        Remembered for `tenant` alone: the time that takes must not tell that another tenant has sent the text.
        """
        tokenize = self._remembered_chunk if len(text) <= CHUNK_CACHE_CHARS else self._tokenize_chunk
        return tokenize(text, tenant)

    def turn(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        num_agreed: int,
        has_chunks: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        encode: Encode | None = None,
        prefill: str = "",
    ) -> TurnPieces:
        """The pieces of the turn that the last user message opens: its chunks, its question, and all that follows.

        `num_agreed` messages, the last an answer, are there as tokens already: `lead` begins after that answer. An answer
        that comes last is shown as a user's message, as in SGLang. `prefill` is the beginning of the answer to be given,
        `encode` the request's own, if it has one.

        Raises:
            RequestError: no message, or the chat template refuses them.
        """
        place = turn_start(messages)
        if not isinstance(text_of(messages[place], place), str):
            raise RequestError(f"messages.{place}.content: must be text")
        shaped = self._shaped(messages)
        if shaped[-1]["role"] == "assistant" and isinstance(shaped[-1]["content"], str):
            shaped[-1] = {"role": "user", "content": shaped[-1]["content"]}
        intro, before, after = (
            (self._intro, self._before_question, self._after_question) if has_chunks else ("", "", "")
        )
        ahead = self._start + intro + self._chunks + before
        shaped[place]["content"] = _around(shaped[place]["content"], ahead, after)
        if num_agreed:
            shaped[num_agreed - 1]["content"] = self._answer
        text = self._render(shaped, tools, template_kwargs)
        if num_agreed:
            text = self._split(text, self._answer)[1]
        lead, rest = self._split(text, self._start)
        intro, outro = self._split(rest, self._chunks)
        encode = encode or self.tokenizer.encode
        return TurnPieces(encode(lead), encode(intro), (*encode(outro), *(encode(prefill) if prefill else ())))

    def head(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The text in front of a conversation's first user message: what stays when the oldest turns leave."""
        opening = takewhile(lambda message: message.get("role") in ("system", "developer"), messages)
        text = self._render([*self._shaped(opening), {"role": "user", "content": self._start}], tools, template_kwargs)
        return self._split(text, self._start)[0]

    def exchanges(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[str]:
        """The text from each user message to the next one, in order. `messages` end with the question, which is left out."""
        shaped = self._shaped(messages)
        for message in shaped:
            if message["role"] == "user":
                message["content"] = _around(message["content"], self._start, "")
        texts = self._render(shaped, tools, template_kwargs).split(self._start)[1:-1]
        if len(texts) != sum(message["role"] == "user" for message in shaped) - 1:
            raise RequestError("messages: too long, and the chat template does not show each of them once")
        return texts

    def _shaped(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """With contents as SGLang gives them to the template: a tool's is always text."""
        shaped = list[dict[str, Any]]()
        for i, message in enumerate(messages):
            content = message.get("content")
            if self._reads_parts and isinstance(content, list) and message.get("role") != "tool":
                shaped.append({**message, "content": [_part(text) for text in _texts(content, i)]})
            else:
                shaped.append({**message, "content": text_of(message, i) or ""})
        return shaped

    def _tokenize_chunk(self, text: str, _tenant: str) -> TokenizedChunk:
        if self._is_separator_control:  # the operator's, so it may
            plain, separator = self.tokenizer.encode_plain(text), self.tokenizer.encode(self._separator)
            ids = array("i", (*plain, *separator))
        else:
            ids = array("i", self.tokenizer.encode_plain(text + self._separator))
        return TokenizedChunk(Chunk(chunk_id(ids), len(ids)), ids)

    def _render(self, messages: Sequence[Mapping[str, Any]], tools: Any, kwargs: Mapping[str, Any] | None) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise RequestError("messages: the model has no chat template; start the server with --chat-template FILE")
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    list(messages), tools=tools, tokenize=False, add_generation_prompt=True, **(kwargs or {})
                )
            )
        except Exception as error:  # jinja's and the template's own, which share no base
            raise RequestError(f"messages: the chat template refuses them: {error}") from error

    def _split(self, text: str, mark: str) -> tuple[str, str]:
        parts = text.split(mark)
        if len(parts) != 2:
            raise RequestError(f"messages: the chat template shows a message {len(parts) - 1} times instead of once")
        return parts[0], parts[1]


def turn_start(messages: Sequence[Mapping[str, Any]]) -> int:
    """Index of the message that the chunks belong to: the last user message, or the last of all where there is none.

    Raises:
        RequestError: no messages.
    """
    if not messages:
        raise RequestError("messages: there is none to put the chunks in front of")
    return next((i for i in reversed(range(len(messages))) if messages[i].get("role") == "user"), len(messages) - 1)


def begun_answer(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Of messages that end with an answer: those before it, and its text, which the answer to be given begins with."""
    if not messages or messages[-1].get("role") != "assistant":
        return messages, ""
    return messages[:-1], text_of(messages[-1], len(messages) - 1) or ""


def text_of(message: Mapping[str, Any], index: int) -> Any:
    """A message's content as one text, parts with spaces between: what is searched for, counted and hashed, whatever the template
    reads. Content that is no text (null in tool calls) is passed on.

    Raises:
        RequestError: a part that is not text.
    """
    content = message.get("content")
    return " ".join(_texts(content, index)) if isinstance(content, list) else content


def _texts(content: list[Any], index: int) -> list[str]:
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"messages.{index}.content: only text parts are supported")
        texts.append(part["text"])
    return texts


def _part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _around(content: Any, before: str, after: str) -> Any:
    """Of parts the first begins with what comes before, the last ends with what comes after."""
    if isinstance(content, str):
        return before + content + after
    texts = [part["text"] for part in content] or [""]
    texts[0] = before + texts[0]
    texts[-1] += after
    return [_part(text) for text in texts]


def read_template(path: str | None) -> str:
    """The user's template file, or the default. Raises ValueError for a file that cannot be read."""
    if path is None:
        return DEFAULT_TEMPLATE
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--chunkcache-rag-template: {error}") from error
