"""A task's requests as a trace, one conversation after the other or several at once."""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from typing import Any

from eval.errors import CommandError
from eval.replay.trace import TraceRequest
from eval.task import Source, load_task, requests_of
from radix_ext import Chunk, ChunkId

GENERATED = ("world", "recurring")
"""Tasks that have no end."""
GENERATED_REQUESTS = 1000
"""Default number of their requests; of a data set all are used."""


def task_requests(options: argparse.Namespace) -> list[TraceRequest]:
    """What `--task`, `--data`, `--max-requests`, `--k`, `--at-once` and `--seed` name.

    Raises CommandError: it has no passages."""
    num_requests = options.max_requests or (
        GENERATED_REQUESTS if options.task in GENERATED else sys.maxsize
    )
    source = Source(
        options.task, options.data, requests=num_requests, k=max(options.k) if options.k else None
    )
    traced = [
        TraceRequest(
            tuple(
                Chunk(ChunkId(name), 1)
                for name in dict.fromkeys(chunk.id for chunk in request.chunks)
            ),
            has_lengths=False,
            conversation=request.conversation,
        )
        for request in requests_of(source, load_task(source))
    ]
    if not any(request.chunks for request in traced):
        raise CommandError(f"task {options.task} has no request with passages")
    if options.at_once == 1:
        return traced
    return interleaved(traced, options.at_once, random.Random(options.seed))


def interleaved(
    requests: Sequence[TraceRequest], at_once: int, rng: random.Random
) -> list[TraceRequest]:
    """With so many conversations under way. A request of none is one by itself."""
    turns: dict[Any, list[TraceRequest]] = {}
    for number, each in enumerate(requests):
        name = number if each.conversation is None else each.conversation
        turns.setdefault(name, []).append(each)
    waiting, under_way, found = list(turns.values())[::-1], list[list[TraceRequest]](), []
    while waiting or under_way:
        while waiting and len(under_way) < at_once:
            under_way.append(waiting.pop()[::-1])
        chosen = rng.choice(under_way)
        found.append(chosen.pop())
        under_way = [each for each in under_way if each]
    return found
