"""How a message crosses the process border: one JSON string, encoded once, with the version in
front.

A string passes every door of SGLang's (`custom_params`, `customized_info`, a state request's
`rid`), which nested lists do not.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

VERSION = 1
"""Of all messages together. Another one is refused by name."""


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a message is made of: typed, compared by value, decoded strictly."""


R = TypeVar("R", bound=Record)


def encode(message: Record) -> str:
    """The message as it travels."""
    return msgspec.json.encode((VERSION, message)).decode()


def decode(text: str, kind: type[R]) -> R:
    """The message in `text`.

    Raises:
        ValueError: another version, a field that is missing, unknown or of another type; names it.
    """
    # raw until the version is known: another one's message would fail by a field, not by version
    version, message = msgspec.json.decode(text, type=tuple[int, msgspec.Raw])
    if version != VERSION:
        raise ValueError(f"message of version {version}, this is version {VERSION}")
    return msgspec.json.decode(message, type=kind)
