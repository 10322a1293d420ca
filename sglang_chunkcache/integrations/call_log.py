"""A log of model calls with their passages, for `python -m eval replay --log`, which tells whether
chunk reuse is worth it before anything is changed. It has the prompts' texts: keep it as them.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

MAX_KNOWN = 1000
"""Passages retrieved last; those of a call were retrieved just before it."""


class CallLog:
    """Appends a line for each model call: its messages, and the passages retrieved before it whose
    text is in them. Threads may share one."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._lock = threading.Lock()
        self._known: dict[str, str | None] = {}

    def retrieved(self, passages: Iterable[tuple[str | None, str]]) -> None:
        """(id, text) of each, as the prompt will have it."""
        with self._lock:
            for name, text in passages:
                self._known.pop(text, None)
                self._known[text] = name
            while len(self._known) > MAX_KNOWN:
                del self._known[next(iter(self._known))]

    def asked(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> None:
        """OpenAI's messages; `fields` that are None are left out."""
        said = "\n".join(map(_text, messages))
        told = {name: value for name, value in fields.items() if value is not None}
        with self._lock:
            chunks = [{"id": name, "text": t} for t, name in self._known.items() if t and t in said]
            call = {"timestamp": time.time(), **told, "messages": messages, "chunks": chunks}
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(call, default=str) + "\n")


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    parts = [{"text": content}] if isinstance(content, str) else content
    return "\n".join(part["text"] for part in parts if isinstance(part.get("text"), str))
