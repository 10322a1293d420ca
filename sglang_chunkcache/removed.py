"""Flags, request fields and their values that earlier versions had: each is refused by name, never ignored."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NoReturn

REMOVED: dict[str, str] = {
    "--chunkcache-tail": "chunks that the window has seen come first; the others are in `python -m eval replay --tail`",
    "--chunkcache-exclusive-slots": "a moved chunk always has slots of its own; leave the flag out",
    "--chunkcache-next-turn": "a client that knows what comes next says so with POST /chunkcache/prefetch",
    "--chunkcache-retrieve-first": "what is found is loaded when all lists are searched; leave the flag out",
    "--chunkcache-prefetch-mib": "a tenant may have 64 MiB under way ahead of its requests; who wants none sends no prefetch",
    "--first": "the record 2026-11-24T0230-recall-first has what the first lists of an index find",
    "--chunkcache-admission": "all chunks enter the cache; CRAFT's rule is in `python -m eval replay --admission`",
    "--plan": "the command tells what all chunks need before it sends the first one",
    "--planned": "`python -m sglang_chunkcache.preprocess` tells what a corpus needs before it sends the first chunk",
}
"""What to use instead, by a flag, a field's path in the request body, or either with one of its values behind a space."""


def refusal(name: str, value: object = None) -> str | None:
    """Why this flag or field, or this value of it, is refused; None where it was not removed."""
    advice = REMOVED.get(name if value is None else f"{name} {value}")
    return advice and f"was removed: {advice}"


SERVER_FLAGS = tuple(name for name in REMOVED if name.startswith("--chunkcache-"))


def add_removed_flags(parser: argparse.ArgumentParser, flags: Iterable[str] = SERVER_FLAGS) -> None:
    """Let the parser refuse those of `flags` that are flags, whether a value follows or not."""
    for flag in flags:
        if " " not in flag:
            parser.add_argument(flag, nargs="?", action=_Refuse, help=argparse.SUPPRESS)


class _Refuse(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, _namespace: Any, _values: Any, flag: str | None = None
    ) -> NoReturn:
        parser.error(f"{flag} {refusal(flag or '')}")
