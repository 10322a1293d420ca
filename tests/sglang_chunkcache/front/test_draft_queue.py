"""Long drafts leave the event loop free, the shortest goes first, and the queue has an end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest

from sglang_chunkcache.errors import BusyError, RequestError
from sglang_chunkcache.front import search
from sglang_chunkcache.front.draft_queue import MAX_WAITING, SHORT_CHARS, DraftQueue

LONG = SHORT_CHARS + 1


async def stays() -> bool:
    return False


def on_which_thread(is_over: threading.Event) -> str:
    return threading.current_thread().name


def test_short_ones_are_made_at_once_and_long_ones_in_a_thread() -> None:
    """A thread costs more than a short text."""

    async def ask() -> list[str]:
        queue = DraftQueue()
        return [
            await queue.run(on_which_thread, num_chars=n, is_gone=stays)
            for n in (SHORT_CHARS, LONG)
        ]

    short, long = asyncio.run(ask())
    assert short == threading.current_thread().name
    assert long != short


def held(
    order: list[int], number: int, release: threading.Event
) -> Callable[[threading.Event], int]:
    def make(is_over: threading.Event) -> int:
        release.wait()
        order.append(number)
        return number

    return make


def test_shortest_goes_first_and_short_ones_wait_for_nobody() -> None:
    """A text of 4 MiB delays others by no more than one draft."""
    order: list[int] = []
    release = threading.Event()

    async def ask() -> None:
        queue = DraftQueue()
        tasks = [
            asyncio.ensure_future(
                queue.run(held(order, n, release), num_chars=LONG + n, is_gone=stays)
            )
            for n in (5, 3, 1, 2)
        ]
        await asyncio.sleep(0.01)  # the first is being made
        assert await queue.run(lambda is_over: 0, num_chars=1, is_gone=stays) == 0
        release.set()
        assert await asyncio.gather(*tasks) == [5, 3, 1, 2]

    asyncio.run(ask())
    assert order in ([5, 1, 2, 3], [1, 2, 3, 5])  # whichever the worker saw first


def test_too_many_are_refused() -> None:
    """Each holds a body of megabytes."""
    release = threading.Event()

    async def ask() -> None:
        queue = DraftQueue()
        tasks = [
            asyncio.ensure_future(queue.run(held([], 0, release), num_chars=LONG, is_gone=stays))
            for _ in range(MAX_WAITING + 2)
        ]
        await asyncio.sleep(0.01)
        release.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        # one may have been taken already
        assert sum(isinstance(result, BusyError) for result in results) in (1, 2)

    asyncio.run(ask())


def test_error_of_a_draft_is_its_requests_and_the_worker_goes_on() -> None:
    """A refused text is not the next one's fault."""

    def refuse(is_over: threading.Event) -> Any:
        raise RequestError("messages: no")

    async def ask() -> str:
        queue = DraftQueue()
        with pytest.raises(RequestError, match="messages: no"):
            await queue.run(refuse, num_chars=LONG, is_gone=stays)
        return await queue.run(on_which_thread, num_chars=LONG, is_gone=stays)

    assert asyncio.run(ask())


def test_draft_is_told_when_the_client_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It must not go on for nobody."""
    monkeypatch.setattr(search, "GONE_POLL_S", 0.01)
    was_told: list[bool] = []
    done = threading.Event()

    def make(is_over: threading.Event) -> None:
        was_told.append(is_over.wait(30))
        done.set()

    async def leaves() -> bool:
        return True

    async def ask() -> None:
        with pytest.raises(RequestError, match="disconnected"):
            await DraftQueue().run(make, num_chars=LONG, is_gone=leaves)
        await asyncio.to_thread(done.wait, 30)

    asyncio.run(ask())
    assert was_told == [True]
