"""From messages and chunks to token ids and spans: the model's own chat template, rendered around
the chunks.

    <bos><system>…<user> | You may use: | chunk 1 + separator | chunk 2 + … | question<end>…
           lead          |     intro    |        spans, one per chunk       |     outro

The pieces are tokenised apart, so that a chunk has the same ids at every place; ids go to the
engine as they are, since tokenising the text again would move the borders. Nothing here knows the
cache, an order or a conversation's past tokens.
"""

from __future__ import annotations

import re
import secrets
from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from radix_ext import Chunk, ChunkId, Span, chunk_id
from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.tokenizer import ServedTokenizer

CHUNK_CACHE_SIZE = 4096
"""Chunk texts whose token ids are remembered:
a popular chunk is tokenised once, not once a request."""

CHUNK_CACHE_CHARS = 16_384
"""Longer texts are not remembered, so that the memory is bounded: 4 bytes a token and the text."""

REASONING_PARTS = ("thinking", "reasoning")
"""Types of content parts that SGLang leaves out of the prompt; only answers have them."""

OPENING_ROLES = ("system", "developer")

DEFAULT_TEMPLATE = "{chunks}{question}"

Mark = tuple[str, int]
"""Where a rendered prompt is cut: before intro ("s") or chunks ("c") of a user message,
or at an answer ("a"); its index."""

Piece = tuple[Sequence[int], ChunkId | None]
"""Token ids, and the chunk that they are, if any."""


class TemplateSettings(NamedTuple):
    """What the chat template gets besides the messages."""

    tools: Sequence[Mapping[str, Any]] | None = None
    kwargs: Mapping[str, Any] | None = None


NO_SETTINGS = TemplateSettings()


@dataclass(frozen=True, slots=True)
class TokenizedChunk:
    """A chunk's ids, separator included, and what the trees know it by."""

    chunk: Chunk
    token_ids: array[int]


class Area(NamedTuple):
    """The texts around the chunks of one user message."""

    message: int
    """Its index."""
    intro: str
    ending: str
    """The question and what follows, up to the next area or the answer."""


class Exchange(NamedTuple):
    """The texts of messages up to an answer that a user's message follows.
    The last one is open: its answer is to be given."""

    lead: str
    """Up to its first area."""
    areas: tuple[Area, ...]
    """Of its last user message, and of those before it that have chunks."""
    answer: str
    """As the chat template shows it later on, which leaves out the reasoning of past turns."""
    num_messages: int
    """Of the request, up to and including the answer."""

    def moved(self, num_messages: int) -> Exchange:
        """The same in a request with that many messages more in front of it."""
        areas = tuple(area._replace(message=area.message + num_messages) for area in self.areas)
        return self._replace(areas=areas, num_messages=self.num_messages + num_messages)


def joined(before: Sequence[int], pieces: Iterable[Piece]) -> tuple[array[int], tuple[Span, ...]]:
    """`before` and the pieces in a row: their ids (array 'i'),
    and a span for each piece that is a chunk."""
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
        template: the user message around the chunks; holds `{chunks}`, then `{question}`, each
            once.
        separator: text after every chunk.
        chunk_tokens: as in the configuration.
        content_format: SGLang's word for what the chat template reads where a content has parts:
            `openai`, a list of them; `string`, their texts with spaces between.
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
                "the rag template must name {chunks} before {question}: nothing after the question"
                " is shared"
            )
        self._before_question, self._after_question = rest.split("{question}")
        self._tokenizer, self._separator = tokenizer, separator
        self._reads_parts = content_format == "openai"
        self.tokenizer = ServedTokenizer(tokenizer, chunk_tokens=chunk_tokens)
        has_control = chunk_tokens == "text" and self.tokenizer.holds_control(separator)
        self._is_separator_control = has_control
        # random, so that no message can hold the marks at which the rendered text is cut
        self._nonce = secrets.token_hex(8)
        self._marks = re.compile(f"\ue000([sca]\\d+)-{self._nonce}\ue001")
        self._remembered_chunk = lru_cache(CHUNK_CACHE_SIZE)(self._tokenize_chunk)

    def chunk(self, text: str, tenant: str) -> TokenizedChunk:
        """A chunk's ids, its separator included; the same at every place.

        Remembered for `tenant` alone: the time that takes must not tell that another tenant has
        sent the text.
        """
        is_long = len(text) > CHUNK_CACHE_CHARS
        return (self._tokenize_chunk if is_long else self._remembered_chunk)(text, tenant)

    def exchanges(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        num_agreed: int = 0,
        with_chunks: Collection[int] = (),
        is_split: bool = False,
        settings: TemplateSettings = NO_SETTINGS,
    ) -> list[Exchange]:
        """What the chat template makes of the messages after the first `num_agreed`, the last of
        which is an answer. The open exchange has the last user message; unless `is_split` it begins
        with the text of all others.

        `with_chunks` are the user messages that have chunks. An answer that comes last is shown as
        a user's, as by SGLang.

        Raises:
            RequestError: no message, or the chat template refuses them, or does not show each of
                them once.
        """
        place = turn_start(messages)
        if not isinstance(text_of(messages[place], place), str):
            raise RequestError(f"messages.{place}.content: must be text")
        shaped = self._shaped(messages)
        # as SGLang's `_handle_last_assistant_message`, which leaves a list of parts alone
        if shaped[-1]["role"] == "assistant" and isinstance(shaped[-1]["content"], str):
            shaped[-1] = {"role": "user", "content": shaped[-1]["content"]}
        ends = exchange_ends(messages, num_agreed) if is_split else []
        marks = _marks(shaped, num_agreed, ends, place, with_chunks)
        for kind, i in marks:
            if kind == "s":
                self._mark_area(shaped[i], i, has_chunks=i in with_chunks)
        if num_agreed:
            # its tokens are in store, so what the template leaves of it is not asked
            shaped[num_agreed - 1]["content"] = self._mark("a", num_agreed - 1)
        # Rendered twice. Marks in the place of answers tell what stands around these; then the
        # answers themselves tell what the template leaves of them.
        hidden = {end - 1: {**shaped[end - 1], "content": self._mark("a", end - 1)} for end in ends}
        blank = [hidden.get(i, message) for i, message in enumerate(shaped)]
        texts = self._cut(self._render(blank, settings), marks)
        found = _read(texts, marks, num_agreed=num_agreed, num_messages=len(messages))
        if not ends:
            return found
        told = [(kind, i) for kind, i in marks if kind != "a" or i < num_agreed]
        texts = self._cut(self._render(shaped, settings), told)
        shown = dict(zip(told, texts[1:], strict=True))
        for k, (one, after) in enumerate(pairwise(found)):
            area, end = one.areas[-1], one.num_messages - 1
            answer = _between(shown["c", area.message], area.ending, after.lead)
            # where the text around an answer depends on the answer, the client's words count
            answer = text_of(messages[end], end) if answer is None else answer
            found[k] = one._replace(answer=answer)
        return found

    def head(self, messages: Sequence[Mapping[str, Any]], settings: TemplateSettings) -> str:
        """The text in front of a conversation's first user message:
        what stays when the oldest turns leave."""
        opening = list(messages[: num_opening(messages)])
        asked = [*opening, {"role": "user", "content": ""}]
        return self.exchanges(asked, settings=settings)[0].lead

    def _mark(self, kind: str, index: int) -> str:
        return f"\ue000{kind}{index}-{self._nonce}\ue001"

    def _mark_area(self, message: dict[str, Any], index: int, *, has_chunks: bool) -> None:
        intro, before, after = self._intro, self._before_question, self._after_question
        if not has_chunks:  # words such as "You may use:" would mislead the model
            intro = before = after = ""
        ahead = self._mark("s", index) + intro + self._mark("c", index) + before
        content = message["content"]
        # a content without parts needs one, or the marks would be lost
        texts = (
            [content] if isinstance(content, str) else [part["text"] for part in content] or [""]
        )
        texts[0] = ahead + texts[0]
        texts[-1] += after
        message["content"] = texts[0] if isinstance(content, str) else _parts(texts)

    def _cut(self, text: str, marks: Sequence[Mark]) -> list[str]:
        """The texts before, between and after these marks, which the text must have in this order,
        each once."""
        pieces = self._marks.split(text)
        if pieces[1::2] != [f"{kind}{i}" for kind, i in marks]:
            counts = Counter(pieces[1::2])
            count = next((n for kind, i in marks if (n := counts[f"{kind}{i}"]) != 1), 0)
            raise RequestError(
                f"messages: the chat template shows a message {count} times instead of once"
            )
        return pieces[::2]

    def _shaped(self, messages: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """With contents as SGLang gives them to the template: a tool's is always text."""
        shaped = list[dict[str, Any]]()
        for i, message in enumerate(messages):
            content = message.get("content")
            if self._reads_parts and isinstance(content, list) and message.get("role") != "tool":
                shaped.append({**message, "content": _parts(_texts(content, i))})
            else:
                # as SGLang does: a template would print the null of a tool call as None
                shaped.append({**message, "content": text_of(message, i) or ""})
        return shaped

    # `_tenant` is there for the key of `_remembered_chunk`
    def _tokenize_chunk(self, text: str, _tenant: str) -> TokenizedChunk:
        tokenizer, separator = self.tokenizer, self._separator
        if self._is_separator_control:  # the operator's, so it may
            ids = array("i", (*tokenizer.encode_plain(text), *tokenizer.encode(separator)))
        else:
            ids = array("i", tokenizer.encode_plain(text + separator))
        return TokenizedChunk(Chunk(chunk_id(ids), len(ids)), ids)

    def _render(self, messages: Sequence[Mapping[str, Any]], settings: TemplateSettings) -> str:
        if not getattr(self._tokenizer, "chat_template", None):
            raise RequestError(
                "messages: the model has no chat template; start the server with --chat-template"
                " FILE"
            )
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages),
                tools=settings.tools,
                tokenize=False,
                add_generation_prompt=True,
                # none of the names above: `RagServingChat.check` refuses them
                **(settings.kwargs or {}),
            )
        except Exception as error:  # jinja's and the template's own, which share no base
            raise RequestError(f"messages: the chat template refuses them: {error}") from error
        return str(text)


def num_opening(messages: Sequence[Mapping[str, Any]]) -> int:
    """Messages in front of the first that is no system message."""
    others = (i for i, each in enumerate(messages) if each.get("role") not in OPENING_ROLES)
    return next(others, len(messages))


def turn_start(messages: Sequence[Mapping[str, Any]]) -> int:
    """Index of the message that the chunks belong to: the last user message, or the last of all
    where there is none.

    Raises:
        RequestError: no messages.
    """
    if not messages:
        raise RequestError("messages: there is none to put the chunks in front of")
    users = (i for i in reversed(range(len(messages))) if messages[i].get("role") == "user")
    return next(users, len(messages) - 1)


def exchange_ends(messages: Sequence[Mapping[str, Any]], start: int) -> list[int]:
    """Where exchanges end, from message `start` to the last user message: behind each answer in
    words to a user's message that is followed by another one, or by a system message."""
    ends, has_question = [], False
    for i in range(start, turn_start(messages)):
        message = messages[i]
        # an assistant's words before any question, a greeting, end no exchange
        has_question = has_question or message.get("role") == "user"
        is_answer = message.get("role") == "assistant" and not message.get("tool_calls")
        is_followed = messages[i + 1].get("role") in ("user", *OPENING_ROLES)
        if has_question and is_answer and message.get("content") and is_followed:
            ends.append(i + 1)
            has_question = False
    return ends


def begun_answer(messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], str]:
    """Of messages that end with an answer: those before it, and its text,
    which the answer to be given begins with."""
    if not messages or messages[-1].get("role") != "assistant":
        return messages, ""
    return messages[:-1], text_of(messages[-1], len(messages) - 1) or ""


def text_of(message: Mapping[str, Any], index: int) -> Any:
    """A message's content as one text, parts with spaces between: what is searched for, counted and
    hashed, whatever the template reads. Parts that are reasoning are left out, as in SGLang.
    Content that is no text (null in tool calls) is passed on.

    Raises:
        RequestError: a part that is not text.
    """
    content = message.get("content")
    return " ".join(_texts(content, index)) if isinstance(content, list) else content


def _texts(content: list[Any], index: int) -> list[str]:
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind in REASONING_PARTS:
            continue
        if kind != "text" or not isinstance(part.get("text"), str):
            raise RequestError(f"messages.{index}.content: only text parts are supported")
        texts.append(part["text"])
    return texts


def _parts(texts: Iterable[str]) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def read_template(path: str | None) -> str:
    """The user's template file, or the default.
    Raises ValueError for a file that cannot be read."""
    if path is None:
        return DEFAULT_TEMPLATE
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--chunkcache-rag-template: {error}") from error


# Private, in order of use


def _marks(
    messages: Sequence[Mapping[str, Any]],
    num_agreed: int,
    ends: Sequence[int],
    place: int,
    with_chunks: Collection[int],
) -> list[Mark]:
    """The marks of a prompt, in the order of its text."""
    marks: list[Mark] = [("a", num_agreed - 1)] if num_agreed else []
    for start, end in zip((num_agreed, *ends), (*ends, None), strict=True):
        last = place if end is None else turn_start(messages[:end])
        areas = sorted({last, *(i for i in with_chunks if start <= i < last)})
        marks += [(kind, i) for i in areas for kind in ("s", "c")]
        if end is not None:
            marks.append(("a", end - 1))
    return marks


def _read(
    texts: Sequence[str], marks: Sequence[Mark], *, num_agreed: int, num_messages: int
) -> list[Exchange]:
    """Exchanges of the texts around the marks, their answers still empty."""
    found, lead, intro = list[Exchange](), texts[0], ""
    areas: list[Area] = []
    for (kind, i), text in zip(marks, texts[1:], strict=True):
        if kind == "s":
            intro = text
        elif kind == "c":
            areas.append(Area(i, intro, text))
        else:
            if i >= num_agreed:
                found.append(Exchange(lead, tuple(areas), "", i + 1))
            lead, areas = text, []
    return [*found, Exchange(lead, tuple(areas), "", num_messages)]


def _between(text: str, start: str, end: str) -> str | None:
    """What of the text stands between these two. None: it does not begin and end so."""
    # by the length, too: in a short text the two may overlap
    is_so = text.startswith(start) and text.endswith(end) and len(text) >= len(start) + len(end)
    return text[len(start) : len(text) - len(end)] if is_so else None
