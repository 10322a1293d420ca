"""Flags, request fields and their values that earlier versions had:
each is refused by name, never ignored."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NoReturn

SELECTORS = "--chunkcache-selectors eval.selectors"
MOVED_SELECTORS = ("random", "h2o", "prophet", "set")
"""To the harness."""

REMOVED_SETTINGS = {
    "tail": (
        "chunks that the window has seen come first; the others are in `python -m eval replay"
        " --tail`"
    ),
    "exclusive-slots": "a moved chunk always has slots of its own; leave the flag out",
    "next-turn": "a client that knows what comes next says so with POST /chunkcache/prefetch",
    "retrieve-first": "what is found is loaded when all lists are searched; leave the flag out",
    "prefetch-mib": (
        "a tenant may have 64 MiB under way ahead of its requests; who wants none sends no prefetch"
    ),
    "admission": (
        "all chunks enter the cache; CRAFT's rule is in `python -m eval replay --admission`"
    ),
    "max-tenants": "10,000 tenants are counted, about 1 kB each",
    "max-access-entries": "the windows of all tenants hold 1,000,000 entries, 60 to 110 bytes each",
    "max-tree-nodes": "the tree of cached chains holds 200,000 nodes, about 400 bytes each",
    "max-search-visits": "an order decision visits 64 nodes, which find what 1,000 find",
    "max-conversations": (
        "10,000 conversations; --chunkcache-max-conversation-tokens bounds their memory"
    ),
    "max-messages": "2,000 messages in a request; --chunkcache-max-body-bytes bounds all of it",
    "max-chunk-chars": "the context length bounds a chunk",
    "answer-reserve-tokens": "a request that names max_tokens reserves so many",
    "question-window": "the last 32 tokens of a question choose what is recomputed",
    "max-gap-tokens": "2,048 tokens between moved chunks",
    "store-variants": "a chunk has five variants; no number of them kept more answers",
    "retrieve-batch": "32 queries in a batch",
    "retrieve-queue": "1,000 requests may wait for a search",
    "max-query-chars": "8,000 characters in a query, four times what an encoder reads",
    "audit-pause": "a pause of the audit lasts 1,000 requests",
    "alpha": '`"alpha"` in a request\'s `reuse`; without it `context` solves for the ratio',
    "focus-window": "three layers agree, as by default",
    "scoring": (
        "chunks are scored where the selector of the request that stores them, or the server's,"
        " reads scores"
    ),
}
"""What to use instead of a flag of the server's, `--chunkcache-` and this."""

REMOVED: dict[str, str] = {
    **{f"--chunkcache-{name}": advice for name, advice in REMOVED_SETTINGS.items()},
    "--first": "the record 2026-11-24T0230-recall-first has what the first lists of an index find",
    "--plan": "the command tells what all chunks need before it sends the first one",
    "--planned": (
        "`python -m sglang_chunkcache.preprocess` tells what a corpus needs before it sends the"
        " first chunk"
    ),
    **{f"--chunkcache-selector {name}": f"`{SELECTORS}` has it" for name in MOVED_SELECTORS},
    **{
        f"reuse.selector {name}": f"a server started with `{SELECTORS}` has it"
        for name in MOVED_SELECTORS
    },
    "reuse.floor": "give a higher ratio",
    "reuse.without": "all parts of `context` count",
    "reuse.focus refill": "`spare` leaves the other chunks as moved, `off` has no focus",
    "--scoring": "a replay measures what its selector reads",
    "--calibrate": "`python -m eval alpha` finds alpha",
    "--f1": "`python -m eval alpha` has it",
    "--chunkcache-store-codec joint": "int4 keeps as many answers",
    "joint": (
        "it freed no memory; how much fuses, and what answers lose by it, is in `python -m eval"
        " joint` and `quality joint`"
    ),
}
"""What to use instead, by a flag, a field's path in the request body,
or either with one of its values behind a space."""

SERVER_FLAGS = [f"--chunkcache-{name}" for name in REMOVED_SETTINGS]


def refusal(name: str, value: object = None) -> str | None:
    """Why this flag or field, or this value of it, is refused; None where it was not removed."""
    named = name if value is None else f"{name} {value}" if isinstance(value, str) else ""
    advice = REMOVED.get(named)
    return advice and f"was removed: {advice}"


def add_removed_flags(parser: argparse.ArgumentParser, flags: Iterable[str] = SERVER_FLAGS) -> None:
    """Let the parser refuse these flags, by default the server's,
    whether a value follows or not."""
    for flag in flags:
        parser.add_argument(flag, nargs="?", action=_Refuse, help=argparse.SUPPRESS)


class _Refuse(argparse.Action):
    def __call__(
        self, parser: argparse.ArgumentParser, _: Any, _values: Any, flag: str | None = None
    ) -> NoReturn:
        parser.error(f"{flag} {refusal(flag or '')}")
