"""One model call as a log tells it, whoever wrote the log."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from typing import Any, NamedTuple


class UnreadError(ValueError):
    """What a line of a log, or a call in it, lacks. The message quotes nothing of it."""


class Message(NamedTuple):
    """`text` has all of its text parts."""

    role: str
    text: str


class Document(NamedTuple):
    """A passage of the call: its text, or, where the log has none, its id."""

    id: str
    text: str | None


@dataclass(frozen=True, slots=True)
class Call:
    """`documents` were sent beside the messages, or retrieved for them; none: at most the messages'
    text has passages. `tools` as JSON, `timestamp` in seconds since 1970. None: not told."""

    messages: tuple[Message, ...] = ()
    documents: tuple[Document, ...] = ()
    model: str = ""
    tools: str = ""
    timestamp: float | None = None
    conversation: str | None = None
    user: str | None = None
    salt: str | None = None


def text_of(content: Any) -> str:
    """Of a message's content: a string, or parts that have one."""
    if isinstance(content, str):
        return content
    if isinstance(content, dict):
        names = ("text", "content", "response", "result")
        return text_of(next((content[name] for name in names if content.get(name)), None))
    return "\n".join(filter(None, map(text_of, content))) if isinstance(content, list) else ""


def seconds_of(value: Any) -> float | None:
    """Of a time: seconds, milli-, micro- or nanoseconds since 1970, or ISO 8601; else None."""
    if isinstance(value, str):
        try:
            return seconds_of(float(value))
        except ValueError:
            pass
        try:
            time = datetime.datetime.fromisoformat(value)
        except ValueError:
            return None
        return (time if time.tzinfo else time.replace(tzinfo=datetime.UTC)).timestamp()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1e20:
        return None
    for limit, unit in ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3)):
        if value > limit:
            return value / unit
    return float(value)
