"""A `RagService` without an engine, for its tests: one character is one token, `Rank` plays a scheduler that keeps every chunk
chain it is sent.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

from radix_ext import ChainId, extend_chain, root_chain
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.front.prompt import PromptAssembler
from sglang_chunkcache.front.request import Identity, Passage, RagRequest
from sglang_chunkcache.front.service import RagService
from sglang_chunkcache.wire.events import EventLog, Evicted, Inserted
from sglang_chunkcache.wire.spans import ANSWER_KEY, RequestSpans, unpack

SECRET = "s"
END = "\x03"
A, B, C, D = (Passage(name, f"<{name * n}>") for name, n in zip("abcd", (9, 8, 7, 6), strict=True))
ME = Identity("me")


class CharTokenizer:
    """Token ids are code points; a template of three control characters."""

    bos_token_id = 2
    chat_template = "chars"

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return ([2] if add_special_tokens else []) + [ord(char) for char in text]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(map(chr, ids))

    def apply_chat_template(self, messages: Sequence[Any], tools: Any = None, **_: Any) -> str:
        body = "".join(f"\x01{m['role'][0]}{m['content']}{END}" for m in messages)
        return "\x02" + (f"[{len(tools)}]" if tools else "") + body + "\x01a"


class Rank:
    """A scheduler's cache as the front hears of it."""

    def __init__(self) -> None:
        self.log = EventLog(1000)
        self.held: set[ChainId] = set()

    def serve(self, request: RagRequest, report: Any = None) -> list[Any]:
        """Insert the request's first chunk area; the answer's entry."""
        spans = told(request)
        chain, parent = root_chain(spans.namespace), None
        for index, span in enumerate(spans.spans[: spans.area_len]):
            chain = extend_chain(chain, span.chunk)
            if chain not in self.held:
                self.held.add(chain)
                promoted = index < spans.promoted_len
                self.log.append(Inserted(span.chunk, span.end - span.start, parent, spans.namespace, promoted))
            parent = chain
        return [(tuple(self.log.unread(spans.ack)), report), None]

    def evict_all(self) -> None:
        for chain in self.held:
            self.log.append(Evicted(chain))
        self.held.clear()


class Bench:
    """A service, its ranks and a clock."""

    def __init__(
        self, *, context_len: int = 2000, num_ranks: int = 1, template: str | None = None, **knobs: Any
    ) -> None:
        self.now = 0.0
        options = {} if template is None else {"template": template}
        self.service = RagService(
            ChunkCacheConfig(secret=SECRET, **knobs),
            PromptAssembler(CharTokenizer(), separator=";", **options),
            context_len=context_len,
            num_ranks=num_ranks,
            prometheus=False,
            clock=lambda: self.now,
        )
        self.ranks = [Rank() for _ in range(num_ranks)]

    def ask(
        self, messages: Any, *passages: Passage, to: str | None = None, who: Identity = ME, **options: Any
    ) -> RagRequest:
        if isinstance(messages, str):
            messages = [user(messages)]
        return self.service.begin_chat(messages, passages, identity=who, conversation_id=to, **options)

    def reply(
        self,
        request: RagRequest,
        text: str = "ok",
        *,
        cached: int = 0,
        reason: str = "stop",
        by: int | None = None,
        content: str | None = "",
        report: Any = None,
    ) -> RagRequest:
        """The engine's whole answer; `content` "" means the text itself, `report` is the scheduler's of a fused request."""
        rank = request.rank if by is None else by
        ids = [ord(char) for char in text] + ([ord(END)] if reason == "stop" else [])
        self.service.observe(
            request, make_output(ids, cached, reason, rank, self.ranks[rank].serve(request, report)), incremental=False
        )
        self.service.finish(request, text if content == "" else content)
        return request

    def turn(
        self, messages: list[dict[str, str]], *passages: Passage, to: str = "c", text: str = "ok", **options: Any
    ) -> RagRequest:
        """Ask and answer; `messages` grows by the answer."""
        request = self.reply(self.ask(list(messages), *passages, to=to, **options), text)
        messages.append({"role": "assistant", "content": text})
        return request

    def is_idle(self) -> bool:
        return not any(self.service.router.in_flight) and self.service.tree.stats.num_open_plans == 0


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def make_output(
    ids: list[int], cached: int, reason: str | None, rank: int, entry: Any, index: int = 0
) -> dict[str, Any]:
    """One output in SGLang's shape."""
    meta = {
        "id": "r",
        "finish_reason": {"type": reason} if reason else None,
        "completion_tokens": len(ids),
        "cached_tokens": cached,
        "dp_rank": rank,
    }
    if entry is not None:
        meta[ANSWER_KEY] = entry
    return {"text": "", "output_ids": ids, "index": index, "meta_info": meta}


def text_of(request: RagRequest) -> str:
    return "".join(map(chr, request.input_ids))


def sent(request: RagRequest) -> list[int]:
    """Prompt and answer as tokens."""
    return [*request.input_ids, *request.output_ids]


def told(request: RagRequest) -> RequestSpans:
    """What the scheduler reads of a request."""
    ids = array("q", request.input_ids)
    spans = unpack(request.custom_params, ids, prompt_len=len(ids), secret=SECRET)
    assert spans is not None
    return spans
