"""Sends one request as a stream and times it as an application would. Times are this process's
`time.perf_counter`.

    rag    POST /rag/v1/chat/completions   chunks in a field of their own; the server orders them
                                           and knows the conversation
    chat   POST /v1/chat/completions       each chunk's text and an empty line, then the question,
                                           in the user message

Every failure of a request, in the adapter, the connection or the answer, is stored in its
`Answer.error`.

Streams are read with aiohttp, which SGLang itself needs. With httpx and httpx-sse an event takes
twice the CPU time (0.8 against 0.4 ms on the records' machine, sending included), and a GPU under
load sends a thousand events a second to this one process.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import aiohttp

if TYPE_CHECKING:
    from eval.serve.arms import Arm
    from eval.serve.contextpilot_adapter import ContextPilotReorderer
    from eval.task import Request, TextChunk

Message = dict[str, str]
ROUTES = {"rag": "/rag/v1/chat/completions", "chat": "/v1/chat/completions"}
KEEP_ALIVE_S = 2.0
"""Below uvicorn's 5 s, so that no request uses a connection that the server is about to close."""


@dataclass(slots=True)
class Answer:
    """The result of a request. Seconds count from the call of `send`,
    so all include an adapter's reordering."""

    message: Message
    """The user message as sent, for the history of later turns."""
    text: str = ""
    ttft_s: float | None = None
    """To the first event that names a role or holds text. SGLang sends both events with the first
    token, but the text may be empty if a token ends within a character, so the role's event
    counts."""
    first_text_s: float | None = None
    """To the first event with text: for servers that send the role before there is a token."""
    last_text_s: float | None = None
    """To the last event with text."""
    e2e_s: float = 0.0
    reorder_s: float | None = None
    """Time of the client-side adapter; None without one."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    chunkcache: dict[str, Any] | None = None
    error: str | None = None

    @property
    def fates(self) -> dict[str, int] | None:
        """Prompt tokens by fate, if the server reports them."""
        fates = (self.chunkcache or {}).get("fates")
        return dict(fates) if fates else None


def open_session(*, timeout_s: float = 600.0) -> aiohttp.ClientSession:
    """A client without a limit on connections. A request fails after `timeout_s` without any data.
    Needs a running loop."""
    return aiohttp.ClientSession(
        # aiohttp's 100 connections would close an open loop whose queue is longer
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S),
        # its 300 s in all would end a long answer that still streams
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=10, sock_read=timeout_s),
        read_bufsize=1 << 22,  # an event is a line, and lines are read whole
    )


async def send(
    session: aiohttp.ClientSession,
    url: str,
    arm: Arm,
    request: Request,
    history: Sequence[Message],
    *,
    max_new_tokens: int,
    reorderer: ContextPilotReorderer | None = None,
    body: Mapping[str, Any] | None = None,
) -> Answer:
    """Send one request and read its stream to the end.

    Args:
        url: the server's root, without /v1.
        history: this arm's messages of earlier turns, without the system prompt.
        reorderer: orders the chunks before they are sent.
        body: fields that override the request's: `eval.serve.arms.request_body`, and our server's
            `conversation_id`.
    """
    start = time.perf_counter()
    chunks: Sequence[TextChunk] = request.chunks
    answer = Answer({})
    try:
        if reorderer is not None:
            chunks = reorderer.order(request)
            answer.reorder_s = time.perf_counter() - start
        answer.message = user_message(arm, request, chunks)
        sent = request_json(arm, request, chunks, history, max_new_tokens=max_new_tokens) | dict(
            body or {}
        )
        async with session.post(url + ROUTES[arm.route], json=sent) as response:
            if response.status != 200:
                answer.error = await _refusal(response)
            else:
                await _read(answer, response, start)
    # AttributeError, TypeError, KeyError: an event that is JSON and has another form
    except (aiohttp.ClientError, OSError, ValueError, TypeError, AttributeError, KeyError) as error:
        answer.error = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    answer.e2e_s = time.perf_counter() - start
    return answer


def user_message(arm: Arm, request: Request, chunks: Sequence[TextChunk]) -> Message:
    """The turn's user message; for `chat` it contains the chunks' texts."""
    context = "".join(chunk.text + "\n\n" for chunk in chunks) if arm.route == "chat" else ""
    return {"role": "user", "content": context + request.question}


def request_json(
    arm: Arm,
    request: Request,
    chunks: Sequence[TextChunk],
    history: Sequence[Message],
    *,
    max_new_tokens: int,
) -> dict[str, Any]:
    """The body of the request, without the fields of arm and cell."""
    system = [{"role": "system", "content": request.system}] if request.system else []
    body: dict[str, Any] = {
        "model": "default",
        "messages": [*system, *history, user_message(arm, request, chunks)],
        "temperature": 0,
        "max_tokens": max_new_tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if arm.route == "rag":
        body["chunks"] = [{"id": chunk.id, "text": chunk.text} for chunk in chunks]
    return body


async def events(response: aiohttp.ClientResponse) -> AsyncIterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events, as they come.
    Raises ValueError if it breaks off or tells an error."""
    async for line in response.content:
        # comments, which keep a connection open, and the empty line after an event
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip().decode()
        if data == "[DONE]":
            return
        event = json.loads(data)
        # SGLang has sent status 200 by then, so an error comes as an event
        if event.get("error"):
            raise ValueError(_reason(data))
        yield event
    raise ValueError("the stream broke off before [DONE]")


# Private, in order of use


async def _read(answer: Answer, response: aiohttp.ClientResponse, start: float) -> None:
    """Read the stream into `answer`.
    Raises ValueError if it is incomplete, empty, or does not consist of JSON events."""
    async for event in events(response):
        now = time.perf_counter() - start
        # empty in the event of the usage, which is no token
        for choice in event.get("choices") or ():
            answer.ttft_s = now if answer.ttft_s is None else answer.ttft_s
            if text := (choice.get("delta") or {}).get("content"):
                answer.text += text
                answer.first_text_s = now if answer.first_text_s is None else answer.first_text_s
                answer.last_text_s = now
        if usage := event.get("usage"):
            answer.prompt_tokens, answer.completion_tokens = (
                usage.get("prompt_tokens"),
                usage.get("completion_tokens"),
            )
            answer.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        answer.chunkcache = event.get("chunkcache") or answer.chunkcache
    if answer.ttft_s is None:
        raise ValueError("the stream ended without a token")


async def _refusal(response: aiohttp.ClientResponse) -> str:
    """Status and message, the status alone if the body cannot be read."""
    with suppress(aiohttp.ClientError, OSError):
        return f"HTTP {response.status}: {_reason(await response.text(errors='replace'))}"
    return f"HTTP {response.status}"


def _reason(text: str) -> str:
    """The message of an error's body, in one line."""
    with suppress(AttributeError, KeyError, TypeError, ValueError):
        found = json.loads(text)
        text = str((found.get("error") or found)["message"])
    return " ".join(text.split())[:300]
