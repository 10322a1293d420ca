"""Drafts of long requests: one at a time in a thread, the shortest first. Short ones are made at
once, on the event loop.

Tokenising releases the GIL, so the event loop goes on meanwhile. One thread, since the engine needs
the cores more; shortest first, so that a long text delays no ordinary one by more than the draft
that is being made.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from sglang_chunkcache.errors import BusyError
from sglang_chunkcache.front.search import unless_gone

T = TypeVar("T")
Waiting = tuple[int, int, Callable[[], Any], asyncio.Future[Any]]

SHORT_CHARS = 8192
"""Drafted in some milliseconds; a thread would cost as much."""

MAX_WAITING = 64
"""With bodies of 4 MiB, a quarter of a GiB."""


class DraftQueue:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        self._waiting: asyncio.PriorityQueue[Waiting] = asyncio.PriorityQueue(MAX_WAITING)
        self._number = itertools.count()
        self._worker: asyncio.Task[None] | None = None

    async def run(
        self,
        make: Callable[[threading.Event], T],
        *,
        num_chars: int,
        is_gone: Callable[[], Awaitable[bool]],
    ) -> T:
        """What `make` returns; its event is set when the client has gone.

        Args:
            num_chars: of all texts.
            is_gone: whether the client has disconnected.
        Raises:
            BusyError: too many wait.
            Exception: what `make` raised.
        """
        is_over = threading.Event()
        if num_chars <= SHORT_CHARS:
            return make(is_over)
        # kept, since the event loop itself holds tasks by weak references only
        self._worker = self._worker or asyncio.create_task(self._work())
        made: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        try:
            # The number decides between equal lengths: functions do not compare.
            self._waiting.put_nowait((num_chars, next(self._number), lambda: make(is_over), made))
        except asyncio.QueueFull:
            raise BusyError(f"{MAX_WAITING} long requests wait already; try again later") from None
        try:
            return await unless_gone(made, is_gone)
        except BaseException:
            # a draft that is being made ends before its next text; one that was made encodes its
            # turn's answer later
            is_over.set()
            raise

    async def _work(self) -> None:
        while True:
            _, _, make, made = await self._waiting.get()
            if made.cancelled():  # its client has gone
                continue
            try:
                result = await asyncio.to_thread(make)
            except Exception as error:
                # setting it would raise InvalidStateError, and end the worker for all others
                if not made.done():
                    made.set_exception(error)
            else:
                if not made.done():
                    made.set_result(result)
            # else the last draft's texts, up to a whole body, stay until the next one comes
            del make, made
