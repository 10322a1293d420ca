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
    "--chunkcache-alpha": '`"alpha"` in a request\'s `reuse`; without it `context` solves for the ratio',
    "--chunkcache-focus-window": "three layers agree, as by default",
    "--chunkcache-scoring": "chunks are scored where the selector of the request that stores them, or the server's, reads scores",
    "--chunkcache-selector random": "`--chunkcache-selectors eval.selectors` has it",
    "--chunkcache-selector h2o": "`--chunkcache-selectors eval.selectors` has it",
    "--chunkcache-selector prophet": "`--chunkcache-selectors eval.selectors` has it",
    "--chunkcache-selector set": "`exact` reuse finds chains in their order, `none` moves all chunks as they are",
    "reuse.selector random": "a server started with `--chunkcache-selectors eval.selectors` has it",
    "reuse.selector h2o": "a server started with `--chunkcache-selectors eval.selectors` has it",
    "reuse.selector prophet": "a server started with `--chunkcache-selectors eval.selectors` has it",
    "reuse.selector set": "`exact` reuse finds chains in their order, `none` moves all chunks as they are",
    "reuse.floor": "give a higher ratio",
    "reuse.without": "all parts of `context` count",
    "reuse.focus refill": "`spare` leaves the other chunks as moved, `off` has no focus",
    "--scoring": "a replay measures what its selector reads",
    "--calibrate": "`python -m eval alpha` finds alpha",
    "--f1": "`python -m eval alpha` has it",
    "--chunkcache-store-codec joint": "int4 with fewer variants of a chunk (`--chunkcache-store-variants`) takes as few bytes",
    "joint": "it freed no memory; how much fuses, and what answers lose by it, is in `python -m eval joint` and `quality joint`",
}
"""What to use instead, by a flag, a field's path in the request body, or either with one of its values behind a space."""

SERVER_FLAGS = tuple(name for name in REMOVED if name.startswith("--chunkcache-") and " " not in name)


def refusal(name: str, value: object = None) -> str | None:
    """Why this flag or field, or this value of it, is refused; None where it was not removed."""
    advice = REMOVED.get(name if value is None else f"{name} {value}" if isinstance(value, str) else "")
    return advice and f"was removed: {advice}"


def add_removed_flags(parser: argparse.ArgumentParser, flags: Iterable[str] = SERVER_FLAGS) -> None:
    """Let the parser refuse these flags, by default the server's, whether a value follows or not."""
    for flag in flags:
        parser.add_argument(flag, nargs="?", action=_Refuse, help=argparse.SUPPRESS)


class _Refuse(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, _namespace: Any, _values: Any, flag: str | None = None
    ) -> NoReturn:
        parser.error(f"{flag} {refusal(flag or '')}")
