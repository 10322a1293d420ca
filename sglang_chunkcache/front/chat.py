"""SGLang's own OpenAI chat serving with a RAG request on top: parsing, streaming, tools and errors stay SGLang's.

The endpoint leaves the planned request in `raw_request.state.chunkcache`. From there it is picked up where SGLang turns the
body into an engine request, where outputs pass (`TappedManager`), and where the answer is written.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import ORJSONResponse
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

from sglang_chunkcache.front.request import RagRequest
from sglang_chunkcache.front.service import RagService

DONE = "data: [DONE]\n\n"


class TappedManager:
    """SGLang's tokenizer manager, with what is ours taken out of every output on its way."""

    def __init__(self, manager: Any, service: RagService) -> None:
        self._manager, self._service = manager, service

    def __getattr__(self, name: str) -> Any:
        return getattr(self._manager, name)

    async def generate_request(self, obj: Any, request: Request | None = None) -> AsyncIterator[Any]:
        """As SGLang's."""
        rag: RagRequest | None = getattr(request.state, "chunkcache", None) if request is not None else None
        incremental = bool(obj.stream and getattr(self._manager, "incremental_streaming_output", False))
        try:
            async for output in self._manager.generate_request(obj, request):
                if rag is not None:
                    for i, one in enumerate(output if isinstance(output, list) else [output]):
                        self._service.observe(rag, one, index=one.get("index", i), incremental=incremental)
                yield output
        finally:  # also for a stream whose client was gone before its body began
            if rag is not None:
                self._service.release(rag)


class RagServingChat(OpenAIServingChat):  # type: ignore[misc]
    """Chat completions for requests that the service has planned."""

    def __init__(self, manager: Any, template_manager: Any, service: RagService) -> None:
        super().__init__(TappedManager(manager, service), template_manager)
        self._service = service

    def extract_routed_dp_rank_from_header(
        self, raw_request: Any, body_routed_dp_rank: int | None = None
    ) -> int | None:
        """The service has chosen the rank; a client's header does not overrule it."""
        return body_routed_dp_rank

    async def _handle_non_streaming_request(self, adapted_request: Any, request: Any, raw_request: Request) -> Any:
        rag: RagRequest = raw_request.state.chunkcache
        try:
            response = await super()._handle_non_streaming_request(adapted_request, request, raw_request)
            if isinstance(response, ORJSONResponse):  # an error
                rag.is_refused = response.status_code < 500
                return response
            message = response.choices[0].message
            self._service.finish(rag, message.content if not message.tool_calls else None)
            return ORJSONResponse({**response.model_dump(), "chunkcache": rag.answer()})
        finally:
            self._service.release(rag)

    async def _generate_chat_stream(
        self, adapted_request: Any, request: Any, raw_request: Request
    ) -> AsyncGenerator[str, None]:
        rag: RagRequest = raw_request.state.chunkcache
        content, plain = "", True
        try:
            async for event in super()._generate_chat_stream(adapted_request, request, raw_request):
                if event == DONE:
                    self._service.finish(rag, content if plain else None)
                    yield _sse(
                        {"object": "chat.completion.chunk", "choices": [], "chunkcache": rag.answer()}, request.model
                    )
                elif rag.remember is not None:
                    delta = _delta(event)
                    content += delta.get("content") or ""
                    plain = plain and not delta.get("tool_calls")
                yield event
        finally:
            self._service.release(rag)


def _delta(event: str) -> dict[str, Any]:
    """What the first choice of a server-sent event adds; empty for events without one."""
    if not event.startswith("data: {"):
        return {}
    choices = orjson.loads(event[len("data: ") :]).get("choices") or []
    return next((choice.get("delta") or {} for choice in choices if choice.get("index") == 0), {})


def _sse(body: dict[str, Any], model: str) -> str:
    """One server-sent event in the shape of a chat completion chunk, so that every client parses it."""
    return f"data: {orjson.dumps({'id': 'chunkcache', 'created': 0, 'model': model, **body}).decode()}\n\n"
