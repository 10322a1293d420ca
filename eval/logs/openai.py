"""OpenAI request bodies, wherever a line has them: alone, as gateways, LiteLLM and the batch API
wrap them, or as our handlers for LangChain and LlamaIndex write them.

    {"messages": [{"role": "user", "content": "..."}], ...}
    {"timestamp": ..., "request": {"body": {"messages": [...]}}, "response": ...}
    {"timestamp": ..., "messages": [...], "chunks": [{"id": "doc7#2", "text": "..."}]}

A body has `messages`, `prompt`, or `input` (the Responses API); it may be a string of JSON.
`chunks` or `documents` beside the messages, or in one, are its passages.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from eval.logs.call import Call, Document, Message, UnreadError, seconds_of, text_of

Row = Mapping[str, Any]
MAX_DEPTH = 4
BODIES = ("messages", "prompt", "input")
TIMES = (
    *("timestamp", "startTime", "start_time", "created_at", "created", "requestedAt"),
    *("time", "ts", "@timestamp"),
)
CONVERSATIONS = ("conversation_id", "conversation", "session_id", "sessionId", "thread_id")
USERS = ("user", "end_user", "user_id", "userId", "safety_identifier")


def call_of(row: Row) -> Call:
    """Raises UnreadError: no body, or none that can be read."""
    path = _path_to_body([row])
    if path is None:
        raise UnreadError("no messages, prompt or span on this line")
    body, around = path[-1], [*reversed(path)]
    told, documents = _messages(body)
    if not told:
        raise UnreadError("a request without messages")
    beside = documents_of(body.get("chunks") or body.get("documents"))
    conversation, user, salt, model = (
        _first(around, names) for names in (CONVERSATIONS, USERS, ("cache_salt",), ("model",))
    )
    tools = next((each["tools"] for each in around if each.get("tools")), None)
    return Call(
        told,
        beside or documents,
        model=model or "",
        tools=json.dumps(tools, sort_keys=True) if tools else "",
        timestamp=next(_times(around), None),
        conversation=conversation,
        user=user,
        salt=salt,
    )


def message_of(row: Any) -> Message:
    """Raises UnreadError."""
    if not isinstance(row, dict):
        raise UnreadError("a message that is no object")
    calls = row.get("tool_calls")
    text = text_of(row.get("content")) + (json.dumps(calls) if calls else "")
    return Message(str(row.get("role") or row.get("type") or "user"), text)


def documents_of(listed: Any) -> tuple[Document, ...]:
    """Of `chunks` or `documents`: strings, or objects with a text, an id, or both."""
    found = []
    for each in listed if isinstance(listed, list) else []:
        row = each if isinstance(each, dict) else {"text": each}
        text, name = text_of(row.get("text") or row.get("content")), row.get("id")
        if text.strip() or name is not None:
            found.append(
                Document("" if name is None else str(name), text if text.strip() else None)
            )
    return tuple(found)


# Private, in order of use


def _path_to_body(path: list[Row]) -> list[Row] | None:
    """From the line's object to the nearest one that is a request."""
    paths = [path]
    for _ in range(MAX_DEPTH):
        if found := next((each for each in paths if _said(each[-1]) is not None), None):
            return found
        paths = [[*each, inner] for each in paths for inner in _objects(each[-1])]
    return None


def _said(row: Row) -> Any:
    """What a request asks; None: it is no request."""
    for name in BODIES:
        value = row.get(name)
        if _is_messages(value) or (isinstance(value, str) and (name == "prompt" or "model" in row)):
            return value
    return None


def _is_messages(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(each, dict) and ("role" in each or "type" in each) for each in value
    )


def _objects(row: Row) -> Iterator[Row]:
    for value in row.values():
        if isinstance(value, str) and value[:1] == "{":
            try:
                value = json.loads(value)
            except (ValueError, RecursionError):
                continue
        if isinstance(value, dict):
            yield value


def _messages(body: Row) -> tuple[tuple[Message, ...], tuple[Document, ...]]:
    """And the passages that the last message with any has of its own."""
    rows = _said(body)
    if isinstance(rows, str):
        rows = [{"role": "user", "content": rows}]
    before = text_of(body.get("system") or body.get("instructions"))
    lead = [Message("system", before)] if before else []
    own = [documents_of(each.get("chunks")) for each in rows]
    last = next((at for at in reversed(range(len(own))) if own[at]), None)
    rows = rows if last is None else rows[: last + 1]
    told = tuple(lead + [message_of(each) for each in rows])
    return told, () if last is None else own[last]


def _first(around: Sequence[Row], names: Sequence[str]) -> str | None:
    for row in around:
        metadata = row.get("metadata")
        for place in (row, metadata if isinstance(metadata, dict) else {}):
            for name in names:
                if type(place.get(name)) in (str, int) and place[name] != "":
                    return str(place[name])
    return None


def _times(around: Sequence[Row]) -> Iterator[float]:
    for row in reversed(around):  # a gateway's time, not one within the request
        for name in TIMES:
            # a small number is a duration
            if (seconds := seconds_of(row.get(name))) and seconds > 1e8:
                yield seconds
