"""SGLang's own OpenAI chat serving with a RAG request on top: parsing, streaming, tools and errors stay SGLang's.

`serve` hands the planned request over with the HTTP request. `Engine` picks it up where SGLang asks for outputs, and the
overridden methods do where SGLang writes the answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import ORJSONResponse
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.answer import answer
from sglang_chunkcache.front.bookkeeper import Bookkeeper
from sglang_chunkcache.front.engine import Engine, hand_over, handed_over
from sglang_chunkcache.front.request import Planned, RagRequest

DONE = "data: [DONE]\n\n"

UNSUPPORTED_TEMPLATE_KWARGS = (
    "chat_template",
    "documents",
    "tokenizer_kwargs",
    "continue_final_message",
    "tokenize",
    "return_dict",
)


class RagServingChat(OpenAIServingChat):  # type: ignore[misc]
    """Chat completions for planned requests."""

    def __init__(self, engine: Engine, template_manager: Any, books: Bookkeeper) -> None:
        super().__init__(engine, template_manager)
        self._books = books

    def check(self, request: ChatCompletionRequest) -> None:
        """What SGLang checks before it renders, before we render: a template of the client's above all.

        Raises:
            RequestError: names the field.
        """
        if problem := self._validate_request(request):
            raise RequestError(f"messages: {problem}")
        for name in UNSUPPORTED_TEMPLATE_KWARGS:
            if name in (request.chat_template_kwargs or {}):
                raise RequestError(f"chat_template_kwargs.{name}: not supported here")

    def template_kwargs(self, request: ChatCompletionRequest) -> dict[str, Any] | None:
        """What the chat template gets besides the messages: the server's defaults, then the request's own, as in SGLang."""
        kwargs = {**(self.default_chat_template_kwargs or {}), **(request.chat_template_kwargs or {})}
        if request.reasoning_effort is not None:
            kwargs.setdefault("reasoning_effort", request.reasoning_effort)
        return kwargs or None

    async def serve(self, request: ChatCompletionRequest, planned: Planned, raw_request: Request) -> Any:
        """SGLang's response, with the `chunkcache` object in its answer."""
        rag = RagRequest(planned)
        hand_over(raw_request, rag)
        request.input_ids = planned.input_ids
        response = await self.handle_request(request, raw_request)
        if isinstance(response, ORJSONResponse) and response.status_code >= 400 and not rag.has_begun:
            self._books.metrics.count("requests", "refused" if response.status_code < 500 else "aborted")
        return response

    def extract_routed_dp_rank_from_header(
        self, raw_request: Any, body_routed_dp_rank: int | None = None
    ) -> int | None:
        """The planner has chosen the rank; a client's header does not overrule it."""
        return body_routed_dp_rank

    async def _handle_non_streaming_request(self, adapted_request: Any, request: Any, raw_request: Request) -> Any:
        response = await super()._handle_non_streaming_request(adapted_request, request, raw_request)
        if isinstance(response, ORJSONResponse):  # an error
            return response
        rag = _of(raw_request)
        message = response.choices[0].message
        self._books.finish(rag, message.content if not message.tool_calls else None)
        return ORJSONResponse({**response.model_dump(), "chunkcache": answer(rag)})

    async def _generate_chat_stream(
        self, adapted_request: Any, request: Any, raw_request: Request
    ) -> AsyncGenerator[str, None]:
        rag = _of(raw_request)
        content, plain = "", True
        async with aclosing(super()._generate_chat_stream(adapted_request, request, raw_request)) as events:
            async for event in events:
                if event == DONE:
                    self._books.finish(rag, content if plain else None)
                    last = {"object": "chat.completion.chunk", "choices": [], "chunkcache": answer(rag)}
                    yield _sse(last, request.model)
                elif rag.planned.draft.turn is not None:
                    delta = _delta(event)
                    content += delta.get("content") or ""
                    plain = plain and not delta.get("tool_calls")
                yield event


def _of(raw_request: Request) -> RagRequest:
    rag = handed_over(raw_request)
    assert rag is not None
    return rag


def _delta(event: str) -> dict[str, Any]:
    """What the first choice of a server-sent event adds; empty for events without one."""
    if not event.startswith("data: {"):
        return {}
    choices = orjson.loads(event[len("data: ") :]).get("choices") or []
    return next((choice.get("delta") or {} for choice in choices if choice.get("index") == 0), {})


def _sse(body: dict[str, Any], model: str) -> str:
    """One server-sent event in the shape of a chat completion chunk, so that every client parses it."""
    return f"data: {orjson.dumps({'id': 'chunkcache', 'created': 0, 'model': model, **body}).decode()}\n\n"
