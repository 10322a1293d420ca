"""SGLang's own OpenAI chat serving with a RAG request on top: parsing, streaming, tools and errors
stay SGLang's.

`serve` hands the planned request over with the HTTP request. `Engine` picks it up where SGLang asks
for outputs, and the overridden methods do where SGLang writes the answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import ORJSONResponse
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.parser.hunyuan_reasoning import normalize_hunyuan_reasoning_effort

from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.answer import answer
from sglang_chunkcache.front.bookkeeper import Bookkeeper
from sglang_chunkcache.front.engine import Engine
from sglang_chunkcache.front.request import Planned, RagRequest
from sglang_chunkcache.front.request_log import log_refusal

DONE = "data: [DONE]\n\n"

PROBLEMS = {
    "tool": "tools",
    "schema_": "response_format",
    "template": "chat_template_kwargs",
    "return_sampling_mask": "return_sampling_mask",
    "max_completion_tokens": "max_completion_tokens",
}
"""Words of SGLang's complaints about a request, and the field that each is about."""

# Names of `apply_chat_template`'s own: each would replace what is rendered here, or raise
# TypeError.
UNSUPPORTED_TEMPLATE_KWARGS = (
    *("chat_template", "documents", "tokenizer_kwargs", "continue_final_message", "messages"),
    *("add_generation_prompt", "conversation", "tools", "tokenize", "return_dict"),
)


class RagServingChat(OpenAIServingChat):  # type: ignore[misc]
    """Chat completions for planned requests."""

    def __init__(self, engine: Engine, template_manager: Any, bookkeeper: Bookkeeper) -> None:
        super().__init__(engine, template_manager)
        self._bookkeeper = bookkeeper

    def check(self, request: ChatCompletionRequest) -> None:
        """What SGLang checks before it renders, before we render: a template of the client's above
        all.

        Raises:
            RequestError: names the field.
        """
        if problem := self._validate_request(request):
            words = problem.lower()
            field = next((field for word, field in PROBLEMS.items() if word in words), "messages")
            # SGLang calls the field by its newer name, the client has sent the older one.
            if field == "max_completion_tokens" and request.max_completion_tokens is None:
                field = "max_tokens"
            raise RequestError(f"{field}: {problem}")
        for name in UNSUPPORTED_TEMPLATE_KWARGS:
            if name in (request.chat_template_kwargs or {}):
                raise RequestError(f"chat_template_kwargs.{name}: not supported here")

    def sampling_params(self, request: ChatCompletionRequest) -> dict[str, Any]:
        """What SGLang will make of the request's parameters; a tool's grammar comes later.

        Raises:
            RequestError: names the field.
        """
        try:
            # SGLang makes the grammar here: a schema may be missing, or nested too deep for it.
            params = request.to_sampling_params([], self.default_sampling_params)
        except (AttributeError, TypeError, ValueError, RecursionError):
            raise RequestError("response_format: is not what its type asks for") from None
        # The stops are an argument above, for which SGLang later passes the request's own.
        return {**params, "stop": request.stop}

    def template_kwargs(self, request: ChatCompletionRequest) -> dict[str, Any] | None:
        """What the chat template gets besides the messages: the server's defaults, then the
        request's own, as in SGLang's `_process_messages` and `_apply_jinja_template`.

        Raises:
            RequestError: an effort that the model does not have.
        """
        own, config = request.chat_template_kwargs or {}, self.template_manager.reasoning_config
        kwargs = {**(self.default_chat_template_kwargs or {}), **own}
        # the request's before the server's
        name, field = "reasoning_effort", request.reasoning_effort
        efforts = [one for one in (own.get(name), field, kwargs.get(name)) if one is not None]
        asked = request.model_copy(update={"chat_template_kwargs": kwargs})
        try:
            # moves the effort from `kwargs` to the field
            normalize_hunyuan_reasoning_effort(asked, self.reasoning_parser, config)
        except ValueError as error:
            raise RequestError(f"{name}: {error}") from None
        if asked.reasoning_effort is not None:
            # a kwarg of the template's wins over the field
            kwargs.setdefault(name, asked.reasoning_effort)
        # templates with a switch in place of efforts
        if config is not None and config.effort_kwarg is not None and efforts[:1] == ["low"]:
            kwargs.setdefault(config.effort_kwarg, True)
        return kwargs or None

    async def serve(
        self, request: ChatCompletionRequest, planned: Planned, raw_request: Request
    ) -> Any:
        """SGLang's response, with the `chunkcache` object in its answer."""
        rag = RagRequest(planned)
        # SGLang's chat serving passes nothing else on to the engine
        raw_request.state.chunkcache = rag
        # with ids SGLang's `_process_messages` renders nothing; tools make the grammar alone
        request.input_ids = planned.input_ids
        response = await self.handle_request(request, raw_request)
        # Refused before it began: the bookkeeper counts all others, however they end.
        is_error = isinstance(response, ORJSONResponse) and response.status_code >= 400
        if is_error and rag.plan is None:
            outcome = "refused" if response.status_code < 500 else "aborted"
            self._bookkeeper.metrics.count("requests", outcome)
            log_refusal(outcome, response.status_code)
        return response

    def extract_routed_dp_rank_from_header(
        self, raw_request: Any, body_routed_dp_rank: int | None = None
    ) -> int | None:
        """The planner has chosen the rank; a client's header does not overrule it."""
        return body_routed_dp_rank

    async def _handle_non_streaming_request(
        self, adapted_request: Any, request: Any, raw_request: Request
    ) -> Any:
        response = await super()._handle_non_streaming_request(
            adapted_request, request, raw_request
        )
        if isinstance(response, ORJSONResponse):  # an error
            return response
        rag: RagRequest = raw_request.state.chunkcache  # `serve` has put it there
        message = response.choices[0].message
        # Calls are no text, and their results are to come: a later request closes the turn.
        await self._finish(rag, message.content if not message.tool_calls else None)
        body = response.model_dump()
        _report_cached(body, rag)
        return ORJSONResponse({**body, "chunkcache": answer(rag)})

    async def _generate_chat_stream(
        self, adapted_request: Any, request: Any, raw_request: Request
    ) -> AsyncGenerator[str, None]:
        """SGLang's events. Those from the first `finish_reason` on come without a pause: they are
        held until the last of them that has choices is known. It takes the `chunkcache` object."""
        rag: RagRequest = raw_request.state.chunkcache  # `serve` has put it there
        content, plain = "", True
        held = list[tuple[str, dict[str, Any]]]()
        # A client that leaves closes this generator: the inner one would keep plan and load till
        # it is collected.
        async with aclosing(
            super()._generate_chat_stream(adapted_request, request, raw_request)
        ) as events:
            async for event in events:
                chunk = _chunk(event)
                delta = _delta(chunk)
                content += delta.get("content") or ""
                plain = plain and not delta.get("tool_calls")
                if _report_cached(chunk, rag):
                    event = _sse(chunk)
                if event == DONE:
                    # before the last events: a client may send its next turn once it has them
                    await self._finish(rag, content if plain else None)
                    for ending in _ended(held, answer(rag)):
                        yield ending
                elif held or any(one.get("finish_reason") for one in chunk.get("choices", ())):
                    held.append((event, chunk))
                    continue
                yield event

    async def _finish(self, rag: RagRequest, content: str | None) -> None:
        closed = await asyncio.to_thread(rag.closed_turn, content)
        self._bookkeeper.conversations.finish(rag, closed)


def _chunk(event: str) -> dict[str, Any]:
    """The object of a server-sent event; empty for comments, named events and the end."""
    return dict(orjson.loads(event[len("data: ") :])) if event.startswith("data: {") else {}


def _delta(chunk: Mapping[str, Any]) -> dict[str, Any]:
    """What a chunk adds to the first answer."""
    choices = chunk.get("choices") or ()
    return next((choice.get("delta") or {} for choice in choices if choice.get("index") == 0), {})


def _ended(held: list[tuple[str, dict[str, Any]]], chunkcache: dict[str, Any]) -> list[str]:
    """The events, the last one with choices with `chunkcache`. An answer that failed has none."""
    events = [event for event, _ in held]
    last = next((i for i in reversed(range(len(held))) if held[i][1].get("choices")), None)
    if last is not None:
        events[last] = _sse({**held[last][1], "chunkcache": chunkcache})
    return events


def _report_cached(body: dict[str, Any], rag: RagRequest) -> bool:
    """Say in the `usage` of an answer or a chunk what was found cached;
    whether that was possible."""
    usage, found = body.get("usage"), {"cached_tokens": rag.num_cached}
    if not usage or rag.num_cached is None:
        return False
    usage["prompt_tokens_details"] = {**(usage.get("prompt_tokens_details") or {}), **found}
    return True


def _sse(chunk: dict[str, Any]) -> str:
    return f"data: {orjson.dumps(chunk).decode()}\n\n"
