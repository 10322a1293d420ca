"""Searches that wait for one worker: batches, failures, hang-ups and a full queue, on a retriever
without an index.

launch/test.sh tests/sglang_chunkcache/front/test_search_queue.py
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from threading import Event
from typing import Any

import pytest

pytest.importorskip("fastapi")

from retrieval.errors import CorruptIndexError, RetrievalError, UnavailableError
from sglang_chunkcache.front.metrics import Metrics
from sglang_chunkcache.front.search_queue import Found, QueueFullError, SearchQueue
from tests.sglang_chunkcache.front.fake_retriever import FakeRetriever

MakeQueue = Callable[..., tuple[SearchQueue, FakeRetriever]]


@pytest.fixture
def make_queue() -> Iterator[MakeQueue]:
    made: list[tuple[SearchQueue, FakeRetriever]] = []

    def make(**sizes: Any) -> tuple[SearchQueue, FakeRetriever]:
        retriever, metrics = FakeRetriever(), Metrics(prometheus=False)
        sizes = {"max_batch": 8, "max_waiting": 100, "refresh_s": 0, **sizes}
        queue = SearchQueue(retriever, metrics, **sizes)
        made.append((queue, retriever))
        return made[-1]

    yield make
    for _, retriever in made:
        retriever.hold.set()
        retriever.on_refresh = Event().wait  # its thread looks no more


def search(
    queue: SearchQueue, query: str, k: int = 5, mode: Any = "dense", nprobe: int = 1
) -> Coroutine[Any, Any, Found]:
    return queue.search(query, k=k, mode=mode, nprobe=nprobe)


def ids(found: Found | BaseException) -> list[str]:
    assert isinstance(found, Found), found
    return [hit.passage.id for hit in found.hits]


async def until(condition: Callable[[], bool]) -> None:
    """Wait, with the event loop running, at most a minute."""
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.001)


async def held(queue: SearchQueue, retriever: FakeRetriever, query: str = "two") -> Any:
    """A search that the worker is busy with."""
    retriever.hold.clear()
    running = asyncio.ensure_future(search(queue, query))
    await until(retriever.begun.is_set)
    return running


async def behind_a_held_search(
    queue: SearchQueue, retriever: FakeRetriever, *waiting: Awaitable[Found]
) -> list[Found | BaseException]:
    """Results of searches that gather while the worker is busy with another one."""
    first = await held(queue, retriever)
    tasks = [asyncio.ensure_future(item) for item in waiting]
    await until(lambda: queue.num_waiting == len(tasks))
    retriever.hold.set()
    await first
    return await asyncio.gather(*tasks, return_exceptions=True)


def test_what_gathers_is_searched_together(make_queue: MakeQueue) -> None:
    queue, retriever = make_queue()
    waiting = [search(queue, query, k=2) for query in ("one", "two", "nothing")]
    one, two, nothing = asyncio.run(behind_a_held_search(queue, retriever, *waiting))
    assert (ids(one), ids(two), ids(nothing)) == (["a", "b"], ["d"], [])
    assert retriever.batches[1:] == [(["one", "two", "nothing"], 2, "dense", 1)]
    assert (one.batch_size, queue.num_batches) == (3, 2)  # type: ignore[union-attr]
    assert one.ms.keys() == {"queued", "encode", "read"}  # type: ignore[union-attr]
    assert retriever.num_refreshes == 0, "0 seconds mean never"
    assert queue._metrics.totals()["searches"] == {"found": 3, "empty": 1}


def test_settings_are_not_mixed(make_queue: MakeQueue) -> None:
    """Another k, mode or nprobe is another search."""
    queue, retriever = make_queue()
    usual: tuple[int, Any, int] = (1, "dense", 1)
    settings = [usual, (1, "bm25", 1), (1, "dense", 2), (9, "dense", 1), usual]
    waiting = [search(queue, f"one {i}", *setting) for i, setting in enumerate(settings)]
    asyncio.run(behind_a_held_search(queue, retriever, *waiting))
    assert retriever.batches[1:] == [
        (["one 0", "one 4"], 1, "dense", 1),
        (["one 1"], 1, "bm25", 1),
        (["one 2"], 1, "dense", 2),
        (["one 3"], 9, "dense", 1),
    ]


def test_a_batch_is_bounded(make_queue: MakeQueue) -> None:
    queue, retriever = make_queue(max_batch=2)
    waiting = [search(queue, f"one {i}") for i in range(5)]
    asyncio.run(behind_a_held_search(queue, retriever, *waiting))
    assert [len(queries) for queries, *_ in retriever.batches] == [1, 2, 2, 1]


def test_cancelled_search_is_skipped(make_queue: MakeQueue) -> None:
    """Nobody searches for a client that has gone; its neighbours are served."""
    queue, retriever = make_queue()

    async def check() -> None:
        running = await held(queue, retriever)
        gone, stays = (asyncio.ensure_future(search(queue, each)) for each in ("gone", "one"))
        await until(lambda: queue.num_waiting == 2)
        gone.cancel()
        running.cancel()  # its search has begun: the result has no taker
        await asyncio.gather(gone, running, return_exceptions=True)
        retriever.hold.set()
        assert ids(await stays) == ["a", "b", "c"]

    asyncio.run(check())
    assert [queries for queries, *_ in retriever.batches] == [["two"], ["one"]]
    assert queue._metrics.totals()["searches"] == {"cancelled": 2, "found": 1}


def test_full_queue_refuses(make_queue: MakeQueue) -> None:
    """Rather than make everybody wait longer and longer."""
    queue, retriever = make_queue(max_waiting=2)

    async def check() -> None:
        tasks = [await held(queue, retriever)]
        tasks += [asyncio.ensure_future(search(queue, "one")) for _ in range(2)]
        await until(lambda: queue.num_waiting == 2)
        with pytest.raises(QueueFullError, match="2 searches wait"):
            await search(queue, "one")
        retriever.hold.set()
        await asyncio.gather(*tasks)
        assert ids(await search(queue, "two")) == ["d"]

    asyncio.run(check())
    assert queue._metrics.totals()["searches"] == {"full": 1, "found": 4}


def test_failure_is_its_own_requests(
    make_queue: MakeQueue, caplog: pytest.LogCaptureFixture
) -> None:
    queue, retriever = make_queue()
    retriever.fail["crash"] = ZeroDivisionError("bug")
    retriever.fail["damaged"] = CorruptIndexError("row 5 is missing")
    waiting = [search(queue, query) for query in ("one", "refuse me", "crash", "damaged", "two")]
    one, refused, crashed, damaged, two = asyncio.run(
        behind_a_held_search(queue, retriever, *waiting)
    )
    assert (ids(one), ids(two)) == (["a", "b", "c"], ["d"])
    kinds = [type(error) for error in (refused, crashed, damaged)]
    assert kinds == [RetrievalError, ZeroDivisionError, CorruptIndexError]
    assert queue._metrics.totals()["searches"] == {"found": 3, "refused": 1, "failed": 2}
    assert len([record for record in caplog.records if record.exc_info]) == 2
    assert ids(asyncio.run(search(queue, "two"))) == ["d"]


def test_index_that_does_not_answer_is_asked_once_for_a_batch(make_queue: MakeQueue) -> None:
    """Each query alone would wait for the same time-out."""
    queue, retriever = make_queue()
    retriever.fail["two one"] = UnavailableError("no answer")
    waiting = [search(queue, query) for query in ("one", "two one", "one two")]
    errors = asyncio.run(behind_a_held_search(queue, retriever, *waiting))
    assert [type(error) for error in errors] == [UnavailableError] * 3
    assert (len(retriever.batches), queue.state.name) == (2, "down")
    assert queue._metrics.totals()["searches"] == {"found": 1, "failed": 3}


def test_closed_loop_does_not_stop_the_worker(make_queue: MakeQueue) -> None:
    """A result that comes after the loop's end has no taker."""
    queue, retriever = make_queue()

    async def leave() -> None:
        (await held(queue, retriever)).cancel()

    asyncio.run(leave())
    retriever.hold.set()
    assert ids(asyncio.run(search(queue, "two"))) == ["d"]


def test_refresh_does_not_wait_for_searches(
    make_queue: MakeQueue, caplog: pytest.LogCaptureFixture
) -> None:
    queue, retriever = make_queue(refresh_s=0.001)
    caplog.set_level(logging.INFO)

    async def check() -> None:
        task = await held(queue, retriever)
        before = retriever.num_refreshes
        retriever.on_refresh = lambda: True
        await until(lambda: retriever.num_refreshes > before + 1)
        retriever.hold.set()
        await task

    asyncio.run(check())
    assert "retrieval: now serving generation 1" in caplog.text


def raising(error: Exception) -> Callable[[], bool]:
    def refresh() -> bool:
        raise error

    return refresh


async def look(retriever: FakeRetriever, refresh: Callable[[], bool]) -> None:
    """Until the directory was looked at a few times."""
    retriever.on_refresh = refresh
    before = retriever.num_refreshes
    await until(lambda: retriever.num_refreshes > before + 3)


def test_failing_refresh_is_said_once(
    make_queue: MakeQueue, caplog: pytest.LogCaptureFixture
) -> None:
    """The old generation serves on; another reason, or the same after a success, is said again."""
    queue, retriever = make_queue(refresh_s=0.001)
    broken, worse = (raising(RetrievalError(reason)) for reason in ("broken", "worse"))
    for refresh in (broken, worse, lambda: False, worse):
        asyncio.run(look(retriever, refresh))
    assert ids(asyncio.run(search(queue, "two"))) == ["d"]
    warned = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert [record.message.rsplit(" ", 1)[1] for record in warned] == ["broken", "worse", "worse"]


def test_state_says_what_is_served_and_why(make_queue: MakeQueue) -> None:
    """Stale while something that cannot be served has replaced the index."""
    queue, retriever = make_queue(refresh_s=0.001)
    assert (queue.state.name, queue.state.reason) == ("up", None)
    asyncio.run(look(retriever, raising(CorruptIndexError("no index there"))))
    assert (queue.state.name, queue.state.reason) == ("stale", "no index there")
    since = queue.state.since
    asyncio.run(look(retriever, retriever.on_refresh))
    assert queue.state.since == since, "of the state, not of the last look"
    retriever.damage = "bm25-1: damaged"
    asyncio.run(look(retriever, raising(CorruptIndexError("bm25-1: damaged"))))
    assert (queue.state.name, queue.state.reason) == ("down", "bm25-1: damaged")
    assert queue.state.since > since
    retriever.damage = None
    asyncio.run(look(retriever, lambda: True))
    assert queue.state.name == "up"


def test_failed_search_is_down_until_one_succeeds(make_queue: MakeQueue) -> None:
    """Nobody looks at the directory here; what a client did wrong says nothing about the index."""
    queue, retriever = make_queue()
    retriever.fail["crash"] = CorruptIndexError("row 5 is missing")

    async def ask(query: str) -> str:
        await asyncio.gather(search(queue, query), return_exceptions=True)
        return queue.state.name

    states = [asyncio.run(ask(query)) for query in ("refuse me", "crash", "refuse me", "two")]
    assert states == ["up", "down", "down", "up"]
