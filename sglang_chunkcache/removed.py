"""Flags, request fields and their values that earlier versions had: each is refused by name, never ignored."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NoReturn

REMOVED: dict[str, str] = {
    "--chunkcache-tail": "chunks that the window has seen come first; the others are in `python -m eval replay --tail`",
    "--chunkcache-admission": "all chunks enter the cache; CRAFT's rule is in `python -m eval replay --admission`",
    "--chunkcache-store-codec joint": "int4 with fewer variants of a chunk (`--chunkcache-store-variants`) takes as few bytes",
    "joint": "it freed no memory; how much fuses, and what answers lose by it, is in `python -m eval joint` and `quality joint`",
}
"""What to use instead, by a flag, a field's path in the request body, or either with one of its values behind a space."""


def refusal(name: str, value: object = None) -> str | None:
    """Why this flag or field, or this value of it, is refused; None where it was not removed."""
    advice = REMOVED.get(name if value is None else f"{name} {value}")
    return advice and f"was removed: {advice}"


def add_removed_flags(parser: argparse.ArgumentParser, flags: Iterable[str] = tuple(REMOVED)) -> None:
    """Let the parser refuse those of `flags` that are flags, whether a value follows or not."""
    for flag in flags:
        if flag.startswith("--") and " " not in flag:
            parser.add_argument(flag, nargs="?", action=_Refuse, help=argparse.SUPPRESS)


class _Refuse(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, _namespace: Any, _values: Any, flag: str | None = None
    ) -> NoReturn:
        parser.error(f"{flag} {refusal(flag or '')}")
