"""Requests that only decode while others are measured: what moving, scoring and storing chunks costs them, token by token.

    stream      · · · · · · · · ·      ·   · · · · ·        · an arrival
    block           |begin                          end|    gaps that end inside are kept

Each is a plain request to SGLang's own `/generate`, which sends an event for every token, whether it completes a character or
not, and says how many tokens there are (`--stream-interval` is 1 unless it is given). A block begins once every stream has its
first token, so that no stream's own prefill is a gap. Streams are aborted at the block's end: the next arm gets idle cores.
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
async def bystanders(count: int, url: str, *, timeout_s: float) -> AsyncIterator[list[float]]:
    """Keep `count` streams going inside; the list holds the gaps between their tokens, in seconds, once it is left.

    Raises:
        CommandError: a stream fails, for example since the server is not SGLang.
    """
    gaps: list[float] = []
    if not count:
        yield gaps
        return
    streams = [_Stream(url, number) for number in range(count)]
    try:
        async with open_session(timeout_s=timeout_s) as session, asyncio.TaskGroup() as tasks:
            for stream in streams:
                tasks.create_task(stream.run(session))
            for stream in streams:
                await stream.begun.wait()
            begin = time.perf_counter()
            yield gaps
            end = time.perf_counter()
            for stream in streams:
                stream.is_stopped = True
    except* CommandError as errors:
        raise errors.exceptions[0] from None
    for stream in streams:
        for times in stream.arrivals:
            gaps += [late - early for early, late in pairwise(times) if begin < late <= end]


class _Stream:
    """One request after the other; `arrivals` has the times of each one's tokens."""

    def __init__(self, url: str, number: int) -> None:
        self._url, self._number = url, number
        self.is_stopped = False
        """Set from outside: the stream then ends with its next token."""
        self.begun = asyncio.Event()
        self.arrivals: list[list[float]] = []

    async def run(self, session: aiohttp.ClientSession) -> None:
        while not self.is_stopped:
            self.arrivals.append([])
            try:
                await self._read(session, self.arrivals[-1])
            except (aiohttp.ClientError, OSError, ValueError, TypeError, KeyError) as error:
                raise CommandError(f"{self._url}/generate, for --bystanders: {type(error).__name__}: {error}") from None

    async def _read(self, session: aiohttp.ClientSession, times: list[float]) -> None:
        body = {
            "rid": uuid.uuid4().hex,
            "text": f"{self._number}. Count the stars.",
            "sampling_params": {"max_new_tokens": NUM_TOKENS, "ignore_eos": True, "temperature": 0},
            "stream": True,
        }
        async with session.post(self._url + "/generate", json=body, raise_for_status=True) as response:
            async for event in events(response):
                # Tokens of one event arrive at the same time.
                times += [time.perf_counter()] * (event["meta_info"]["completion_tokens"] - len(times))
                self.begun.set()
                if self.is_stopped:  # a server notices a closed connection seconds later only
                    await session.post(self._url + "/abort_request", json={"rid": body["rid"]}, raise_for_status=True)
