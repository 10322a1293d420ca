"""A logged call as a request of a trace: which chunks its prompt has, and what stands before them.

What ours would serve is `chunks` beside the messages: before the first one stand model, tools, and
the messages before the one with the passages, or all but the passages of a system prompt. In the
prompt as it was logged the text before the first passage stands there, too. Texts become digests.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import NamedTuple

from eval.errors import CommandError
from eval.logs.call import Call, Document, Message, UnreadError
from eval.logs.cut import Cuts
from eval.replay.trace import Logged, TraceRequest
from radix_ext import Chunk, ChunkId

SYSTEM = ("system", "developer")
NO_SEPARATOR = "no passages beside this call, and no --separator"
BYTES_PER_TOKEN = 4
"""Without a tokenizer: in UTF-8, about right for English, and within a factor of 2 for most."""
_VARYING = re.compile(
    r"[0-9a-f]{8}-?(?:[0-9a-f]{4}-?){3}[0-9a-f]{12}|\d+"
    r"|\b(?:mon|tues?|wednes|thurs?|fri|satur|sun)day\b|\b(?:[ap]\.?m\.?)\b"
    r"|\b(?:jan|febr?)(?:uary)?\b|\b(?:mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?)\b"
    r"|\b(?:sept?|oct|nov|dec)(?:em)?(?:ber|ober)?\b|\boctober\b",
    re.IGNORECASE,
)
"""Times, dates and ids: what a clock or a counter has written into a text."""
_LABEL = re.compile(
    r"^\W*(?:(?:document|doc|source|passage|context|chunk|result|rank)\W*)?\d+\s*[\])}.:\-|]+\s*"
    r"|[(\[]?\b(?:score|similarity|relevance|distance|rank)\w*\b\s*[:=]\s*-?\d*\.?\d+%?[)\]]?",
    re.IGNORECASE,
)
"""A rank before a passage, a score anywhere in it."""


class Region(NamedTuple):
    """Where passages are: `[start, end)` in the text of a message."""

    message: int
    start: int
    end: int


class Splitter:
    """Finds passages in the last message that has any, by what stands between them.

    Args:
        separator: a regular expression. What is before its first and after its last occurrence
            is no passage;
        between: unless two more say after and before which text all of them stand.
    Attributes:
        is_bounded: they do.
    Raises:
        CommandError: no regular expression.
    """

    def __init__(self, separator: str, between: Sequence[str] | None) -> None:
        try:
            self._separator, *self._between = map(re.compile, (separator, *(between or ())))
        except re.error as error:
            raise CommandError(f"not a regular expression: {error}") from None
        self.is_bounded = bool(self._between)

    def find(self, messages: Sequence[Message]) -> tuple[Region, list[str]]:
        """Raises UnreadError: which of the regular expressions finds nothing."""
        for index, (role, text) in reversed([*enumerate(messages)]):
            spans = [] if role == "assistant" else self._spans(text)
            spans = [span for span in spans if text[slice(*span)].strip()]
            if spans:
                return Region(index, spans[0][0], spans[-1][1]), [text[a:b] for a, b in spans]
        raise UnreadError(self._missing([text for role, text in messages if role != "assistant"]))

    def _spans(self, text: str) -> list[tuple[int, int]]:
        start, end = 0, len(text)
        if self._between:
            before, after = self._between
            if (opening := before.search(text)) is None:
                return []
            start = opening.end()
            if (closing := after.search(text, start)) is None:
                return []
            end = closing.start()
        cuts = [found.span() for found in self._separator.finditer(text, start, end)]
        cuts = [(start, start), *cuts, (end, end)]
        spans = [(a[1], b[0]) for a, b in pairwise(cuts)]
        return spans if self._between else spans[1:-1]

    def _missing(self, texts: Sequence[str]) -> str:
        if self._between:
            before, after = self._between
            opened = [(text, found.end()) for text in texts if (found := before.search(text))]
            if not opened:
                return "the first text of --between is not in this call"
            if not any(after.search(*each) for each in opened):
                return "the second text of --between is not behind the first in this call"
            return "nothing stands between the texts of --between in this call"
        if not any(map(self._separator.search, texts)):
            return "--separator matches nothing in this call"
        return "no passages between the first and the last match of --separator in this call"


class Passages:
    """Makes requests of calls. Equal chunks are one object.

    Args:
        splitter: None: only passages that a log names are found.
        num_tokens: of a text; None: estimated from its bytes.
    Attributes:
        num_histories: requests with an answer before their chunks, which then find nothing.
        cuts: of the splitter.
    """

    def __init__(
        self, splitter: Splitter | None = None, num_tokens: Callable[[str], int] | None = None
    ) -> None:
        self._splitter, self._num_tokens = splitter, num_tokens or _estimate
        self._known: dict[str, Chunk] = {}
        self.num_histories, self.cuts = 0, Cuts()

    def request(self, call: Call) -> TraceRequest:
        """Raises UnreadError: no passages."""
        region, documents = self._located(call)
        if not documents:
            raise UnreadError(NO_SEPARATOR if call.messages else "no passages in this call")
        chunks = tuple(dict.fromkeys(self._chunk(each) for each in documents))
        plain = tuple(dict.fromkeys(self._plain(each) for each in documents))
        front, question = _around(call, region)
        if call.conversation is not None:  # which has its history
            front = [each for each in front if each.role in SYSTEM]
        self.num_histories += any(each.role == "assistant" for each in front)
        varying = [call.tools, *map("\0".join, front)]
        plain_front = [_masked(text, call.user) for text in varying]
        logged = Logged(
            front=digest("\0".join([call.model, *varying])),
            plain_front=digest("\0".join([call.model, *plain_front])),
            text_front=_text_front(call, region),
            plain_chunks=chunks if plain == chunks else plain,
            model=call.model,
            question=digest(question) if question else None,
            user=call.user,
            salt=call.salt,
        )
        return TraceRequest(
            chunks,
            has_lengths=all(each.text is not None for each in documents),
            timestamp=call.timestamp,
            conversation=call.conversation,
            head=logged.head(),
            logged=logged,
        )

    def _located(self, call: Call) -> tuple[Region | None, list[Document]]:
        """The passages in the order of the prompt, if its text has them."""
        for index, (_, text) in reversed([*enumerate(call.messages)]):
            spots = sorted(
                (at, at + len(given), each)
                for each in call.documents
                if (given := (each.text or "").strip()) and (at := text.find(given)) >= 0
            )
            if spots:
                region = Region(index, spots[0][0], max(end for _, end, _ in spots))
                return region, [each for _, _, each in spots]
        if not call.documents and call.messages and self._splitter:
            region, texts = self._splitter.find(call.messages)
            lead = "" if self._splitter.is_bounded else call.messages[region.message].text
            self._note_cut(call, region, texts, lead[: region.start])
            return region, [Document("", text) for text in texts]
        return None, [*call.documents]

    def _note_cut(self, call: Call, region: Region, texts: Sequence[str], lead: str) -> None:
        text = call.messages[region.message].text
        systems = [text for role, text in call.messages[: region.message] if role in SYSTEM]
        system, lead = (digest(_masked(each, call.user)) for each in ("\0".join(systems), lead))
        self.cuts.add(
            [text[: region.start], *texts, text[region.end :]], system=system, lead=lead
        )

    def _chunk(self, document: Document) -> Chunk:
        if document.text is None:
            return self._kept(document.id, 1)
        return self._of_text(document.text.strip())

    def _plain(self, document: Document) -> Chunk:
        """Without rank and score."""
        text = (document.text or "").strip()
        plain = _LABEL.sub("", text).strip()
        return self._chunk(document) if plain in ("", text) else self._of_text(plain)

    def _of_text(self, text: str) -> Chunk:
        name = digest(text)
        return self._known.get(name) or self._kept(name, self._num_tokens(text))

    def _kept(self, name: str, num_tokens: int) -> Chunk:
        return self._known.setdefault(name, Chunk(ChunkId(name), max(1, num_tokens)))


def digest(text: str) -> str:
    """A text's name: equal texts have one."""
    encoded = text.encode("utf-8", "surrogatepass")
    return sys.intern(hashlib.blake2b(encoded, digest_size=8).hexdigest())


def _around(call: Call, region: Region | None) -> tuple[list[Message], str]:
    """What stands before the chunks as ours would have them, and the question behind them."""
    messages = [*call.messages]
    users = [index for index, message in enumerate(messages) if message.role == "user"]
    last = users[-1] if users else len(messages)
    asked = messages[last].text if users else ""
    if region is None:
        return messages[:last], asked
    (role, text), before = messages[region.message], messages[: region.message]
    rest = text[: region.start] + text[region.end :]
    if role == "user":
        return before, rest
    if role in SYSTEM:
        return [*before, Message(role, rest), *messages[region.message + 1 : last]], asked
    # a tool's answer stays where it is
    return [*before, Message(role, text[: region.start])], asked


def _text_front(call: Call, region: Region | None) -> str | None:
    if region is None:
        return None
    before = call.messages[region.message].text[: region.start]
    texts = map("\0".join, call.messages[: region.message])
    return digest("\0".join([call.model, call.tools, *texts, before]))


def _masked(text: str, user: str | None) -> str:
    text = text.replace(user, "0") if user and len(user) > 2 else text
    return _VARYING.sub("0", text)


def _estimate(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass")) // BYTES_PER_TOKEN
