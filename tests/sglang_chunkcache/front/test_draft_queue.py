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


async def queued(queue: DraftQueue, make: Callable[[threading.Event], Any], num_chars: int) -> Any:
    return await queue.run(make, num_chars=num_chars, is_gone=stays)


def test_short_ones_are_made_at_once_and_long_ones_in_a_thread() -> None:

    async def ask() -> list[str]:
        return [await queued(DraftQueue(), on_which_thread, n) for n in (SHORT_CHARS, LONG)]

    short, long = asyncio.run(ask())
    assert short == threading.current_thread().name != long


def test_draft_that_was_made_is_not_over() -> None:
    """It encodes its turn's answer as later turns show it: a long request kept the reasoning."""
    seen = [asyncio.run(queued(DraftQueue(), lambda is_over: is_over, n)) for n in (1, LONG)]
    assert [is_over.is_set() for is_over in seen] == [False, False]


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
        makes = ((held(order, n, release), LONG + n) for n in (5, 3, 1, 2))
        tasks = [asyncio.ensure_future(queued(queue, *each)) for each in makes]
        await asyncio.sleep(0.01)  # the first is being made
        assert await queued(queue, lambda is_over: 0, 1) == 0
        release.set()
        assert await asyncio.gather(*tasks) == [5, 3, 1, 2]

    asyncio.run(ask())
    assert order in ([5, 1, 2, 3], [1, 2, 3, 5])  # whichever the worker saw first


def test_too_many_are_refused() -> None:
    release = threading.Event()

    async def ask() -> None:
        queue = DraftQueue()
        waiting = [queued(queue, held([], 0, release), LONG) for _ in range(MAX_WAITING + 2)]
        tasks = [asyncio.ensure_future(one) for one in waiting]
        await asyncio.sleep(0.01)
        release.set()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        # one may have been taken already
        assert sum(isinstance(result, BusyError) for result in results) in (1, 2)

    asyncio.run(ask())


def test_error_of_a_draft_is_its_requests_and_the_worker_goes_on() -> None:
    def refuse(is_over: threading.Event) -> None:
        raise RequestError("messages: no")

    async def ask() -> Any:
        queue = DraftQueue()
        with pytest.raises(RequestError, match="messages: no"):
            await queued(queue, refuse, LONG)
        return await queued(queue, on_which_thread, LONG)

    assert asyncio.run(ask())


def test_draft_is_told_when_the_client_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
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
