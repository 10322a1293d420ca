"""A front without an engine, for its tests: one character is one token, `Rank` plays a scheduler
that keeps every chunk chain it is sent.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import orjson

from radix_ext import ChainId, extend_chain, root_chain
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.front.answer import answer
from sglang_chunkcache.front.bookkeeper import Bookkeeper
from sglang_chunkcache.front.conversation import claimed_history
from sglang_chunkcache.front.drafter import Drafter
from sglang_chunkcache.front.planner import Planner
from sglang_chunkcache.front.prompt import (
    PromptAssembler,
    TemplateSettings,
    begun_answer,
    turn_start,
)
from sglang_chunkcache.front.request import Identity, Options, Passage, Planned, RagRequest
from sglang_chunkcache.scheduler.event_log import EventLog
from sglang_chunkcache.wire.events import Evicted, Inserted
from sglang_chunkcache.wire.message import encode
from sglang_chunkcache.wire.report import ANSWER_KEY, Answer, Report
from sglang_chunkcache.wire.spans import RequestSpans, unpack

SECRET = "s"
END = "\x03"
A, B, C, D = (Passage(name, f"<{name * n}>") for name, n in zip("abcd", (9, 8, 7, 6), strict=True))
ME = Identity("me")


class CharTokenizer:
    """Token ids are code points; a template of three control characters."""

    bos_token_id = 2
    chat_template = "chars"
    added_tokens_decoder: Mapping[int, Any] = {}

    def get_vocab(self) -> dict[str, int]:
        return {"a": ord("a")}

    def encode(
        self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[int]:
        return ([2] if add_special_tokens else []) + [ord(char) for char in text]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: Sequence[Any], tools: Any = None, **_: Any) -> str:
        body = "".join(f"\x01{m['role'][0]}{m['content']}{END}" for m in messages)
        return "\x02" + (f"[{len(tools)}]" if tools else "") + body + "\x01a"


class Rank:
    """A scheduler's cache as its answers report it."""

    def __init__(self) -> None:
        self.log = EventLog(1000)
        self.held: set[ChainId] = set()

    def serve(
        self, params: Any, input_ids: Sequence[int], report: Report | None = None
    ) -> list[Any]:
        """Insert the request's first chunk area; the answer's entry."""
        spans = unpack(params, array("q", input_ids), secret=SECRET)
        assert spans is not None
        self.log.acknowledge(spans.ack)
        chain, parent = root_chain(spans.namespace), None
        for index, span in enumerate(spans.spans[: spans.area_len]):
            chain = extend_chain(chain, span.chunk)
            if chain not in self.held:
                self.held.add(chain)
                promoted = index < spans.promoted_len
                self.log.append(
                    Inserted(span.chunk, span.end - span.start, parent, spans.namespace, promoted)
                )
            parent = chain
        return [encode(Answer(self.log.unread(), report)), None]

    def found(self, params: Any, input_ids: Sequence[int]) -> int:
        """Prompt tokens up to the end of the leading chunks that it holds,
        of the first chunk area."""
        spans = unpack(params, array("q", input_ids), secret=SECRET)
        assert spans is not None
        chain, end = root_chain(spans.namespace), 0
        for span in spans.spans[: spans.area_len]:
            chain = extend_chain(chain, span.chunk)
            if chain not in self.held:
                break
            end = span.end
        return end

    def evict_all(self) -> None:
        for chain in self.held:
            self.log.append(Evicted(chain))
        self.held.clear()


class Asked(RagRequest):
    """A begun request, with what was planned at hand."""

    def __getattr__(self, name: str) -> Any:
        planned = self.__dict__["planned"]
        return getattr(planned if hasattr(planned, name) else planned.draft, name)

    def answer(self) -> dict[str, Any]:
        """As a client gets it."""
        shown: dict[str, Any] = orjson.loads(orjson.dumps(answer(self)))
        return shown


class Bench:
    """A front without engine and HTTP, its ranks and a clock."""

    def __init__(
        self,
        *,
        context_len: int = 2000,
        num_ranks: int = 1,
        template: str | None = None,
        tokenizer: Any = None,
        end: str = END,
        tells_adapter: bool | None = None,
        **knobs: Any,
    ) -> None:
        self.now, self.tokenizer, self.end_text = 0.0, tokenizer or CharTokenizer(), end
        options = {} if template is None else {"template": template}
        self.config = ChunkCacheConfig(secret=SECRET, **knobs)
        self.assembler = PromptAssembler(self.tokenizer, separator=";", **options)
        self.bookkeeper = Bookkeeper(
            self.config,
            num_ranks=num_ranks,
            prometheus=False,
            tells_adapter=tells_adapter,
            clock=lambda: self.now,
        )
        self.observe = partial(self.bookkeeper.observe, incremental=False)
        self.drafter = Drafter(self.config, self.assembler, context_len=context_len)
        self.planner = Planner(self.config, self.bookkeeper, context_len=context_len)
        self.ranks = [Rank() for _ in range(num_ranks)]
        self._open: dict[int, AbstractContextManager[Any]] = {}

    def plan(
        self,
        messages: Any,
        *passages: Passage,
        to: str | None = None,
        who: Identity = ME,
        tools: Any = None,
        template_kwargs: Any = None,
        continues: bool = False,
        **options: Any,
    ) -> Planned:
        """Plan a chat turn of conversation `to`.
        A user message may bring `chunks`; without any the passages are not said."""
        if isinstance(messages, str):
            messages = [user(messages)]
        messages, prefill = begun_answer(messages) if continues else (messages, "")
        messages = [dict(message) for message in messages]
        settings = TemplateSettings(tools, template_kwargs)
        brought = {i: message.pop("chunks", None) for i, message in enumerate(messages)}
        earlier = {i: chunks for i, chunks in brought.items() if chunks is not None}
        own = earlier.pop(turn_start(messages), passages or None)
        conversation = None
        if to:
            key, told = who.conversation(to), claimed_history(messages, settings)
            conversation = self.bookkeeper.conversations.of(key, told, start=turn_start(messages))
        draft = self.drafter.chat(
            messages,
            own,
            identity=who,
            options=Options(**options),
            earlier=earlier,
            conversation=conversation,
            settings=settings,
            prefill=prefill,
        )
        return self.planner.plan(draft)

    def ask(self, messages: Any, *passages: Passage, **options: Any) -> Asked:
        """Plan a chat turn and begin it."""
        return self.begin(self.plan(messages, *passages, **options))

    def parts(self, parts: Sequence[str | Sequence[Passage]], **options: Any) -> Asked:
        """Plan a prompt of parts and begin it."""
        return self.begin(
            self.planner.plan(self.drafter.parts(parts, identity=ME, options=Options(**options)))
        )

    def begin(self, planned: Planned) -> Asked:
        request = Asked(planned)
        self._open[id(request)] = self.bookkeeper.begin(request)
        self._open[id(request)].__enter__()
        return request

    def end(self, request: RagRequest) -> None:
        self._open.pop(id(request)).__exit__(None, None, None)

    def reply(
        self,
        request: Asked,
        text: str = "ok",
        *,
        cached: int = 0,
        reason: str = "stop",
        matched: str | None = None,
        by: int | None = None,
        content: str | None = "",
        report: Report | None = None,
    ) -> Asked:
        """The engine's whole answer; `content` "" means the text itself, `report` is the rank's of
        a fused request, `matched` the stop string that has ended it."""
        rank = request.rank if by is None else by
        whole = text + self.end_text * (reason == "stop")
        ids = self.tokenizer.encode(whole, add_special_tokens=False)
        entry = self.ranks[rank].serve(request.custom_params, request.input_ids, report)
        self.observe(request, make_output(ids, cached, reason, rank, entry, matched=matched))
        self.end(request)
        closed = request.closed_turn(text if content == "" else content)
        self.bookkeeper.conversations.finish(request, closed)
        return request

    def run(self, messages: Any, *passages: Passage, **options: Any) -> Asked:
        """Ask, find what the rank holds, and answer."""
        request = self.ask(messages, *passages, **options)
        return self.reply(
            request, cached=self.ranks[request.rank].found(request.custom_params, request.input_ids)
        )

    def is_idle(self) -> bool:
        return (
            not any(self.bookkeeper.router.in_flight) and self.bookkeeper.tree.num_open_plans == 0
        )


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def make_output(
    ids: list[int],
    cached: int,
    reason: str | None,
    rank: int,
    entry: Any,
    index: int = 0,
    matched: str | None = None,
) -> dict[str, Any]:
    """One output in SGLang's shape."""
    meta = {
        "id": "r",
        "finish_reason": {"type": reason, "matched": matched} if reason else None,
        "completion_tokens": len(ids),
        "cached_tokens": cached,
        "dp_rank": rank,
    }
    if entry is not None:
        meta[ANSWER_KEY] = entry
    return {"text": "", "output_ids": ids, "index": index, "meta_info": meta}


def text_of(request: Asked | Planned) -> str:
    return "".join(map(chr, request.input_ids))


def sent(request: Asked) -> list[int]:
    """Prompt and answer as tokens."""
    return [*request.input_ids, *request.output_ids]


def told(request: Asked) -> RequestSpans:
    """What the scheduler reads of a request."""
    spans = unpack(request.custom_params, array("q", request.input_ids), secret=SECRET)
    assert spans is not None
    return spans
