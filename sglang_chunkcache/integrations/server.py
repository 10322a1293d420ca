"""A running server, as the frameworks' adapters see it."""

from __future__ import annotations

import json
import re
import ssl
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import httpx

from sglang_chunkcache.errors import RefusedError, ServerError

CHAT, RETRIEVE = "/rag/v1/chat/completions", "/rag/v1/retrieve"
DEFAULT_URL = "http://127.0.0.1:30000"
MAX_ID = 256
"""Characters of a label; of a longer one the server keeps less."""


@dataclass(frozen=True)
class Endpoint:
    """
    Args:
        url: of the server; `/rag/v1` or `/v1`, which OpenAI's client needs, may follow.
        timeout_s: that the server may be silent.

    Calls raise:
        RefusedError: the server answers 400 or 422, with its message.
        ServerError: it does not answer, or with another error.
    """

    url: str = DEFAULT_URL
    api_key: str | None = field(default=None, repr=False)
    timeout_s: float = 600.0

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        with _errors(self.url), httpx.Client(**self._options()) as client:
            return _parsed(client.post(path, json=body))

    async def apost(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        with _errors(self.url):
            async with httpx.AsyncClient(**self._options()) as client:
                return _parsed(await client.post(path, json=body))

    def stream(self, body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """Events of a chat completion; the last one is the usage."""
        with (
            _errors(self.url),
            httpx.Client(**self._options()) as client,
            client.stream("POST", CHAT, json=_streamed(body)) as answer,
        ):
            if answer.is_error:
                answer.read()
                _parsed(answer)
            events = _Events()
            for text in answer.iter_text():
                yield from events.of(text)
            events.end()

    async def astream(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """As `stream`."""
        with _errors(self.url):
            async with (
                httpx.AsyncClient(**self._options()) as client,
                client.stream("POST", CHAT, json=_streamed(body)) as answer,
            ):
                if answer.is_error:
                    await answer.aread()
                    _parsed(answer)
                events = _Events()
                async for text in answer.aiter_text():
                    for event in events.of(text):
                        yield event
                events.end()

    def _options(self) -> dict[str, Any]:
        headers = {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}
        timeout = httpx.Timeout(self.timeout_s, connect=10.0)
        base = re.sub(r"(/rag)?/v1$", "", self.url.rstrip("/"))
        return {"base_url": base, "headers": headers, "timeout": timeout, "verify": _tls()}


class Joined:
    """The events of a stream as one answer."""

    def __init__(self) -> None:
        self._answer: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def add(self, event: Mapping[str, Any]) -> None:
        told = {name: event.get(name) for name in ("id", "model", "usage", "chunkcache")}
        self._answer |= {name: value for name, value in told.items() if value is not None}
        for each in event["choices"]:
            empty = {
                "message": {"content": "", "reasoning_content": ""},
                "finish_reason": None,
                "calls": {},
            }
            choice = self._choices.setdefault(each["index"], {"index": each["index"], **empty})
            choice["finish_reason"] = each.get("finish_reason") or choice["finish_reason"]
            for name in ("content", "reasoning_content"):
                choice["message"][name] += each["delta"].get(name) or ""
            for call in each["delta"].get("tool_calls") or []:
                function = {"name": "", "arguments": ""}
                known = choice["calls"].setdefault(
                    call["index"], {"type": "function", "function": function}
                )
                known["id"] = call.get("id") or known.get("id")
                for name, text in call["function"].items():
                    known["function"][name] += text or ""

    def answer(self) -> dict[str, Any]:
        """As without a stream."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        for choice in choices:
            if calls := choice.pop("calls"):
                choice["message"]["tool_calls"] = [calls[index] for index in sorted(calls)]
        return {**self._answer, "choices": choices}


def chunks_of(texts: Sequence[str], ids: Sequence[Any]) -> list[dict[str, str]]:
    """The field `chunks`. Where not every text has an id of its own, or one is longer than the
    server keeps, their positions are the labels: what the answer names is then one of them."""
    labels = [str(each) for each in ids]
    if None in ids or len(set(labels)) < len(labels) or any(len(e) > MAX_ID for e in labels):
        labels = [str(index) for index in range(len(texts))]
    return [{"id": label, "text": text} for label, text in zip(labels, texts, strict=True)]


def _streamed(body: Mapping[str, Any]) -> dict[str, Any]:
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


@cache
def _tls() -> ssl.SSLContext:
    """Once: one takes longer than a small request."""
    return httpx.create_ssl_context()


class _Events:
    """Raises ServerError: the server tells of an error in the stream, or it is no such stream."""

    def __init__(self) -> None:
        self._rest, self._is_over = "", False

    def of(self, text: str) -> Iterator[dict[str, Any]]:
        # By line feeds alone: JSON may have other characters that Python takes for ends of lines.
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            data = line.removeprefix("data:").strip()
            if not line.startswith("data:"):
                continue
            if data == "[DONE]":
                self._is_over = True
                continue
            event: dict[str, Any] = json.loads(data)
            if error := event.get("error"):
                told = error.get("message") if isinstance(error, dict) else error
                raise ServerError(str(told))
            yield event

    def end(self) -> None:
        if not self._is_over:
            raise ServerError("the stream ended early")


def _parsed(answer: httpx.Response) -> dict[str, Any]:
    if not answer.is_error:
        parsed: dict[str, Any] = answer.json()
        return parsed
    try:
        found = answer.json()
        message = found["message"] if "message" in found else found["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = answer.text[:200]  # a proxy's error has no JSON
    kind = RefusedError if answer.status_code in (400, 422) else ServerError
    raise kind(f"{answer.status_code}: {message}")


@contextmanager
def _errors(url: str) -> Iterator[None]:
    try:
        yield
    except (httpx.HTTPError, json.JSONDecodeError) as error:
        raise ServerError(f"{url}: {type(error).__name__}: {error}") from error
