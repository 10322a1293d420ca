"""`/rag/v1/generate`: prompts that do not pass SGLang's chat serving."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import orjson
from fastapi import Request
from fastapi.responses import ORJSONResponse, StreamingResponse
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_chunkcache.errors import EngineRefusedError
from sglang_chunkcache.front.answer import answer
from sglang_chunkcache.front.bodies import GenerateIn
from sglang_chunkcache.front.guard.lethal import GRAMMARS
from sglang_chunkcache.front.guard.sampling import TYPES
from sglang_chunkcache.front.parse import named_in
from sglang_chunkcache.front.parts import Parts
from sglang_chunkcache.front.request import Planned, RagRequest

ENGINE_FIELDS = {
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "return_text_in_logprobs",
    "extra_key",
    "cache_salt",
}
"""Of the body, that SGLang gets as they are."""


async def generate(parts: Parts, body: GenerateIn, planned: Planned, raw_request: Request) -> Any:
    """SGLang's answer to a prompt of parts, whole or as events, with the `chunkcache` object.

    Raises:
        EngineRefusedError: SGLang refuses it; names the field.
    """
    rag = RagRequest(planned)
    obj = GenerateReqInput(
        input_ids=planned.input_ids,
        sampling_params=body.sampling_params,
        stream=body.stream,
        **body.model_dump(include=ENGINE_FIELDS),
    )
    outputs = parts.engine.run(rag, obj, raw_request)
    try:
        # SGLang checks a request when its first output is asked for; once a stream has begun, its
        # status would be 200.
        first = await anext(outputs)
    except (ValueError, TypeError) as error:  # SGLang's parameters raise both
        raise EngineRefusedError(f"{_field(str(error), body)}: {error}") from None
    if not body.stream:
        return ORJSONResponse({**first, "chunkcache": answer(rag)})
    return StreamingResponse(
        _events(first, outputs, rag),
        media_type="text/event-stream",
        # as SGLang's /generate: what outlives its stream by 2 s is aborted
        background=parts.engine.create_abort_task(obj),
    )


def _field(complaint: str, body: GenerateIn) -> str:
    """What SGLang complains of: a grammar, which it calls by another name, or what it names. Else
    the prompt, which it has measured."""
    params = {name for name, value in body.sampling_params.items() if value is not None}
    if "grammar" in complaint.lower() and (
        grammar := next((name for name in GRAMMARS if name in params), None)
    ):
        return f"sampling_params.{grammar}"
    if name := named_in(complaint, {*body.model_fields_set & ENGINE_FIELDS, *params}):
        return name if name in ENGINE_FIELDS else f"sampling_params.{name}"
    first = complaint.split(maxsplit=1)[0] if complaint else ""
    return f"sampling_params.{first}" if first in TYPES else "parts"  # a default of the server's


async def _events(first: dict[str, Any], outputs: Any, rag: RagRequest) -> AsyncIterator[bytes]:
    async with aclosing(outputs):
        try:
            yield _event(_told(first, rag))
            async for output in outputs:
                yield _event(_told(output, rag))
            yield b"data: [DONE]\n\n"
        except ValueError as error:  # the status has been sent
            yield _event({"error": {"message": str(error)}})


def _told(output: dict[str, Any], rag: RagRequest) -> dict[str, Any]:
    """The output, the last one with the `chunkcache` object."""
    return {**output, "chunkcache": answer(rag)} if output["meta_info"]["finish_reason"] else output


def _event(body: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body) + b"\n\n"
