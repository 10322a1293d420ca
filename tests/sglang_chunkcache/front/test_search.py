"""What requests wish of the index: the query, the limits, what clients see, and which fault is
whose.

launch/test.sh tests/sglang_chunkcache/front/test_search.py
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("fastapi")

from retrieval.errors import UnavailableError
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.errors import RequestError, SearchFailedError
from sglang_chunkcache.front import search as rag_search
from sglang_chunkcache.front.bodies import RetrieveIn
from sglang_chunkcache.front.metrics import Metrics
from sglang_chunkcache.front.request import Passage
from sglang_chunkcache.front.search import RagSearch, Retrieval, query_of
from tests.sglang_chunkcache.front.fake_retriever import FakeReranker, FakeRetriever

Find = Callable[..., Retrieval]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


TALK = [user("first one"), assistant("yes"), user("second"), assistant("no"), user("last two")]


async def is_here() -> bool:
    return False


@pytest.fixture
def make_search() -> Callable[..., tuple[RagSearch, FakeRetriever, Find]]:
    """(search, its retriever, how to find) for a server of these settings."""

    def make(reranker: Any = None, **knobs: Any) -> tuple[RagSearch, FakeRetriever, Find]:
        retriever = FakeRetriever()
        config = ChunkCacheConfig(retrieve_refresh_s=0.0, **knobs)
        metrics = Metrics(prometheus=False)
        search = RagSearch(retriever, config, metrics, reranker=reranker)

        def find(messages: Any = TALK, *, is_gone: Any = is_here, **wish: Any) -> Retrieval:
            asked = RetrieveIn(**wish)
            return asyncio.run(search.find(asked, messages, field="retrieve.", is_gone=is_gone))

        return search, retriever, find

    return make


# The query


PARTS = [user([{"type": "text", "text": "alpha"}, {"type": "text", "text": "beta"}])]


@pytest.mark.parametrize(
    ("wish", "messages", "max_chars", "query"),
    [
        ({}, TALK, 100, "last two"),
        ({"turns": 2}, TALK, 100, "second\nlast two"),
        ({"turns": 9}, TALK, 25, "first one\nsecond\nlast two"),
        ({"turns": 9}, TALK, 24, "second\nlast two"),
        ({"turns": 3}, TALK, 3, "two"),
        ({}, PARTS, 100, "alpha beta"),
        ({"query": " x\0🙂 "}, [], 100, " x\0🙂 "),
    ],
)
def test_query_is_the_last_user_messages(
    wish: dict[str, Any], messages: Any, max_chars: int, query: str
) -> None:
    """The last question alone unless asked."""
    assert query_of(RetrieveIn(**wish), messages, field="", max_chars=max_chars) == query


@pytest.mark.parametrize(
    ("wish", "messages", "message"),
    [
        ({"query": " \n"}, TALK, "r.query: is empty"),
        ({"query": "x" * 101}, TALK, "r.query: 101 characters, at most 100"),
        ({"query": "x", "turns": 2}, TALK, "r.turns: not together with r.query"),
        ({}, [], "messages: no user's text to search for"),
        ({"turns": 2}, [user(" "), user("")], "messages: no user's text to search for"),
        ({}, [user(5)], "messages.0.content: must be text"),
        ({}, [assistant("x"), user([{"type": "a"}])], "messages.1.content: only text parts"),
    ],
    ids=str,
)
def test_no_query_is_refused_by_name(wish: dict[str, Any], messages: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        query_of(RetrieveIn(**wish), messages, field="r.", max_chars=100)
    assert str(caught.value).startswith(message)


# The search


def test_servers_defaults_and_requests_own_wishes(make_search: Any) -> None:
    """The index's own mode, k and nprobe by flags; wishes beat them."""
    search, retriever, find = make_search(retrieve_k=3, retrieve_nprobe=9)
    assert (find().query, find().mode, find().k) == ("last two", "fusion", 3)
    found = find(query="one", k=2, mode="dense", nprobe=4)
    assert (found.query, found.mode, found.k) == ("one", "dense", 2)
    asked = (["last two"], 3, "fusion", 9)
    assert retriever.batches == [asked] * 3 + [(["one"], 2, "dense", 4)]
    assert make_search(retrieve_mode="bm25")[2]().mode == "bm25"
    stats = search.stats()
    counts = {"passages": 4, "generation": 1, "searches": 4, "batches": 4, "waiting": 0}
    assert stats.items() >= counts.items()
    assert (stats["encoder"], stats["seconds"]["encode"]) == ("fake", 0.008)


def test_what_is_found_becomes_chunks(make_search: Any) -> None:
    _, _, find = make_search()
    expected = [Passage("a", "A\nalpha one"), Passage("b", "B\nbeta one")]
    assert find(query="one", k=2).chunks == expected
    assert (find(query="zeta").chunks, find(query="zeta").answer()["passages"]) == ([], [])


def test_what_the_client_sees(make_search: Any) -> None:
    """In a chat the passages' ids, with `/rag/v1/retrieve` all of them, texts if wished."""
    _, _, find = make_search()
    found = find(query="two")
    brief = {"id": "d", "score": 1.0, "mode": "fusion", "title": "D"}
    answer = found.answer()
    assert answer.pop("ms").keys() == {"queued", "encode", "read"}
    assert answer == {"query": "two", "mode": "fusion", "k": 5, "passages": [brief], "batch": 1}
    whole = {**brief, "document": "doc d", "start": 0, "end": 2, "tokens": 2}
    assert found.listed(with_text=False)["passages"] == [whole]
    assert found.listed(with_text=True)["passages"] == [{**whole, "text": "D\ndelta two"}]


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"k": 257}, "retrieve.k: 257 asked for, at most 256"),
        ({"mode": "dense"}, "retrieve.mode: this index offers bm25"),
        ({"query": "refuse me"}, "retrieve.query: this query cannot be had"),
    ],
    ids=str,
)
def test_wish_that_cannot_be_had_is_refused_by_name(
    make_search: Any, wish: dict[str, Any], message: str
) -> None:
    _, retriever, find = make_search()
    retriever.modes = ("bm25",)
    with pytest.raises(RequestError) as caught:
        find(**wish)
    assert str(caught.value) == message


def while_searching(
    search: RagSearch, retriever: FakeRetriever, scene: Callable[[], Awaitable[None]]
) -> None:
    """Play `scene` while the worker is busy with a search for "one"."""

    async def play() -> None:
        retriever.hold.clear()
        running = asyncio.ensure_future(find_one(search))
        while not retriever.begun.is_set():
            await asyncio.sleep(0.001)
        await scene()
        retriever.hold.set()
        await running

    asyncio.run(play())


async def find_one(search: RagSearch, is_gone: Any = is_here) -> Retrieval:
    return await search.find(RetrieveIn(query="one"), [], field="", is_gone=is_gone)


def test_full_queue_is_503(make_search: Any) -> None:
    """A client may try again."""
    search, retriever, _ = make_search(retrieve_queue=1)

    async def scene() -> None:
        waiting = asyncio.ensure_future(find_one(search))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        with pytest.raises(SearchFailedError) as caught:
            await find_one(search)
        assert caught.value.status == 503
        retriever.hold.set()
        await waiting

    while_searching(search, retriever, scene)


def test_index_that_does_not_answer_is_503(make_search: Any) -> None:
    """Its name stays with the operator."""
    search, retriever, find = make_search()
    retriever.fail["one"] = UnavailableError("http://milvus:19530/docs: no answer")
    with pytest.raises(SearchFailedError, match=r"^the index does not answer") as caught:
        find(query="one")
    assert caught.value.status == 503
    reason = "http://milvus:19530/docs: no answer"
    assert (search.stats()["state"], search.stats()["reason"]) == ("down", reason)


def test_client_that_hangs_up_is_not_searched_for(
    make_search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The framework does not cancel an endpoint whose client has gone."""
    monkeypatch.setattr(rag_search, "GONE_POLL_S", 0.001)
    search, retriever, _ = make_search()

    async def is_gone() -> bool:
        return True

    async def scene() -> None:
        with pytest.raises(RequestError, match="has disconnected"):
            await find_one(search, is_gone)

    while_searching(search, retriever, scene)
    assert len(retriever.batches) == 1
    assert search.stats()["waiting"] == 0


# The reranker


def test_reranker_ranks_more_candidates_than_are_asked_for(make_search: Any) -> None:
    reranker = FakeReranker()
    search, retriever, find = make_search(reranker, rerank_depth=3)
    found = find(query="one", k=1)
    assert [call[1:] for call in retriever.batches] == [(3, "fusion", 128)]
    assert reranker.asked == [["a", "b", "c"]]
    (told,) = found.answer()["passages"]
    assert (told["id"], told["mode"], told["score"]) == ("c", "rerank", 9.0)
    assert found.answer()["ms"].keys() == {"queued", "encode", "read", "rerank"}
    assert search.stats()["seconds"].keys() >= {"rerank"}
    assert find(query="zeta").chunks == []
    assert len(reranker.asked) == 1, "nothing to rank"


def test_reranker_that_fails_is_500_and_down(make_search: Any) -> None:
    """As an encoder that fails, until it works again."""
    reranker = FakeReranker()
    search, _, find = make_search(reranker)
    reranker.before = {}.popitem
    with pytest.raises(SearchFailedError, match="the search failed") as caught:
        find(query="one")
    stats = search.stats()
    assert (caught.value.status, stats["state"]) == (500, "down")
    assert stats["reason"].startswith("the reranker: ")
    reranker.before = lambda: None
    find(query="one")
    assert search.stats()["state"] == "up"
    assert search._metrics.totals()["searches"] == {"failed": 1, "found": 1}
