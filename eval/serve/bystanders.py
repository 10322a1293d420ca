"""Requests that only decode while others are measured: what moving, scoring and storing chunks
costs them, token by token.

    stream      · · · · · · · · ·      ·   · · · · ·        · an arrival
    block           |begin                          end|    gaps that end inside are kept

Each is a plain request to SGLang's own `/generate`, which sends an event for every token, whether
it completes a character or not, and says how many tokens there are (`--stream-interval` is 1 unless
it is given). A block begins once every stream has its first token, so that no stream's own prefill
is a gap. Streams are aborted at the block's end: the next arm gets idle cores.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import aiohttp

from eval.errors import CommandError
from eval.serve.client import events, open_session

NUM_TOKENS = 1024
"""Long enough to outlast a block of most loads; a stream that ends is followed by the next."""


@asynccontextmanager
async def bystanders(count: int, url: str) -> AsyncIterator[list[float]]:
    """Keep `count` streams going inside; the list holds the gaps between their tokens, in seconds,
    once it is left.

    Raises:
        CommandError: a stream fails, for example since the server is not SGLang.
    """
    gaps: list[float] = []
    arrivals: list[list[float]] = []
    error: Exception | None = None
    begun, stop = [asyncio.Event() for _ in range(count)], asyncio.Event()

    async def stream(number: int) -> None:
        while not stop.is_set():
            times: list[float] = []
            arrivals.append(times)
            sampling = {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0}
            body = {
                "rid": uuid.uuid4().hex,
                "text": f"{number}. Count the stars.",
                "sampling_params": sampling,
            }
            post = session.post(
                url + "/generate", json=body | {"stream": True}, raise_for_status=True
            )
            async with post as response:
                async for event in events(response):
                    # Tokens of one event arrive at the same time.
                    times += [time.perf_counter()] * (
                        event["meta_info"]["completion_tokens"] - len(times)
                    )
                    begun[number].set()
                    if stop.is_set():  # a server notices a closed connection seconds later only
                        await session.post(
                            url + "/abort_request", json={"rid": body["rid"]}, raise_for_status=True
                        )

    try:
        async with open_session() as session, asyncio.TaskGroup() as tasks:
            for number in range(count):
                tasks.create_task(stream(number))
            for each in begun:
                await each.wait()
            begin = time.perf_counter()
            yield gaps
            end = time.perf_counter()
            stop.set()
    except* (aiohttp.ClientError, OSError, ValueError, TypeError, KeyError) as errors:
        error = errors.exceptions[0]
    if error is not None:  # raised in `except*` it would come in a group on some Pythons
        raise CommandError(f"{url}/generate, for --bystanders: {type(error).__name__}: {error}")
    for times in arrivals:
        gaps += [late - early for early, late in pairwise(times) if begin < late <= end]
