"""Endpoints beside the chat's, without an engine:
what they send to SGLang's manager, and what they make of its answers."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import httpx
import openai
from fastapi import BackgroundTasks, FastAPI
from fastapi.responses import ORJSONResponse
from msgspec import structs
from sglang.srt.utils.auth import AuthLevel, add_api_key_middleware, decide_request_auth

from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.front import preprocessing
from sglang_chunkcache.front.engine import Engine
from sglang_chunkcache.front.guard.lethal import Limits
from sglang_chunkcache.front.guard.sampling import SamplingCheck
from sglang_chunkcache.front.parts import Parts
from sglang_chunkcache.front.routes import Routes
from sglang_chunkcache.front.search import RagSearch
from sglang_chunkcache.wire.events import Batch
from sglang_chunkcache.wire.message import decode, encode
from sglang_chunkcache.wire.report import Explanation, Fallback, Report, Source
from sglang_chunkcache.wire.spans import MARK_KEY, checked, unpack
from sglang_chunkcache.wire.state import Asked, Cleared, ExplainRequest, RankState
from tests.polling import DEADLINE_S
from tests.sglang_chunkcache.front.fake_retriever import FakeRetriever
from tests.sglang_chunkcache.front.front_bench import (
    SECRET,
    A,
    B,
    Bench,
    C,
    CharTokenizer,
    D,
    make_output,
)

# FastAPI would have us return plain objects, OpenAI has clients send `max_completion_tokens`:
# SGLang uses and takes both.
pytestmark = pytest.mark.filterwarnings("ignore:max_tokens is deprecated")

MESSAGES = [{"role": "user", "content": "why?"}]
CHUNKS = [{"id": "a", "text": A.text}, {"id": "b", "text": B.text}]
Endpoint = Callable[..., Awaitable[Any]]
Send = Callable[..., tuple[int, Any]]

chunkcache_explain, chunkcache_preprocess = Routes.chunkcache_explain, Routes.chunkcache_preprocess
chunkcache_prefetch = Routes.chunkcache_prefetch
chunkcache_clear_store, chunkcache_stats = Routes.chunkcache_clear_store, Routes.chunkcache_stats
rag_chat_completions, rag_generate, rag_retrieve = (
    Routes.rag_chat_completions,
    Routes.rag_generate,
    Routes.rag_retrieve,
)


class Manager:
    """SGLang's: answers every request with one token, and state requests with what each rank
    found."""

    incremental_streaming_output = False

    def __init__(self, bench: Bench) -> None:
        self.bench, self.sent = bench, list[Any]()
        self.states: list[dict[str, Any]] = []
        self.aborted: list[Any] = []
        """Requests whose answer's own task has run."""
        self.error: Exception | None = None
        self.report = Report(
            3, 1, 0, fused_hit=0, gap=0, sources=(), focused=None, fallbacks=(), ms={}
        )

    def auto_create_handle_loop(self) -> None:
        pass

    def create_abort_task(self, obj: Any) -> None:
        pass

    async def get_internal_state(self) -> list[dict[str, Any]]:
        return self.states

    async def get_internal_state_communicator(self, message: Any) -> list[Any]:
        asked = decode(message.rid, Asked)
        self.sent += asked.explain or [asked]
        ranks = [
            rank
            for state in self.states
            if state
            for rank in [decode(state["chunkcache"], RankState)]
        ]
        asked_of = Counter(each.dp_rank for each in asked.explain)
        told = [
            structs.replace(rank, explanations=asked_of[rank.dp_rank] * rank.explanations)
            for rank in ranks
        ]
        return [SimpleNamespace(internal_state={"chunkcache": encode(state)}) for state in told]

    async def generate_request(self, obj: Any, raw_request: Any) -> AsyncIterator[Any]:
        self.sent.append(obj)
        if self.error is not None:
            raise self.error
        params, rank = obj.sampling_params["custom_params"], obj.routed_dp_rank or 0
        report = self.report if told(obj).fusion else None
        entry = self.bench.ranks[rank].serve(params, obj.input_ids, report)
        yield make_output([65], 3, "stop", rank, entry)


def told(obj: Any) -> Any:
    """What the scheduler reads of an engine request."""
    return unpack(obj.sampling_params["custom_params"], array("q", obj.input_ids), secret=SECRET)


def state_of(
    rank: int, explanation: Explanation | None = None, cleared: Cleared | None = None, **counts: Any
) -> dict[str, Any]:
    """A rank's internal state."""
    told = (explanation,) if explanation else ()
    state = RankState(rank, Batch(5, 0, (), 0, 0, 0), counts, explanations=told, cleared=cleared)
    return {"chunkcache": encode(state)}


MakeServer = Callable[..., tuple[Bench, Manager, Send]]


@pytest.fixture
def call() -> Iterator[MakeServer]:
    """(bench, manager, how to call an endpoint with a body) for a server of these settings,
    with a retriever or none."""

    searches: list[RagSearch] = []
    aborted: list[Any] = []

    async def served(*request: Any) -> ORJSONResponse:
        aborts = BackgroundTasks()  # as SGLang's answers have them
        aborts.add_task(lambda: aborted.append(request[1]))
        return ORJSONResponse({}, background=aborts)

    def make(retriever: FakeRetriever | None = None, **knobs: Any) -> tuple[Bench, Manager, Send]:
        bench = Bench(**knobs, retrieve_refresh_s=0.0)
        search = RagSearch(retriever, bench.config, bench.books.metrics) if retriever else None  # type: ignore[arg-type]
        searches.extend([search] if search else [])
        manager = Manager(bench)
        chat = SimpleNamespace(
            check=lambda request: None,
            sampling_params=lambda request: {
                "max_new_tokens": request.max_completion_tokens or request.max_tokens
            },
            template_kwargs=lambda request: None,
            default_chat_template_kwargs={},
            serve=served,
        )
        parts = Parts(bench.config)
        vars(parts).update(
            books=bench.books,
            drafter=bench.drafter,
            planner=bench.planner,
            search=search,
            chat=chat,
        )
        sampling = SamplingCheck(CharTokenizer(), Limits(1101, None))
        vars(parts).update(engine=Engine(manager, bench.books), sampling=sampling)
        routes = Routes(parts)

        def send(endpoint: Endpoint, body: Any = None) -> tuple[int, Any]:
            async def stream() -> AsyncIterator[bytes]:
                yield json.dumps(body).encode()

            async def is_disconnected() -> bool:
                return False

            raw_request = SimpleNamespace(
                headers={}, state=SimpleNamespace(), stream=stream, is_disconnected=is_disconnected
            )

            async def answered() -> tuple[int, Any]:
                answer: Any = await endpoint(routes, *([] if body is None else [raw_request]))
                if answer.background is not None:
                    await answer.background()
                for _ in range(10):  # what it has started, and not waited for
                    await asyncio.sleep(0)
                if not hasattr(answer, "body_iterator"):
                    return answer.status_code, json.loads(answer.body)
                events = (
                    b"".join([event async for event in answer.body_iterator]).decode().split("\n\n")
                )
                return answer.status_code, [
                    event.removeprefix("data: ") for event in events if event
                ]

            return asyncio.run(answered())

        manager.aborted = aborted
        return bench, manager, send

    yield make
    for search in searches:
        search.close()


@pytest.mark.parametrize(
    "endpoint",
    [chunkcache_explain, chunkcache_preprocess, chunkcache_clear_store, Routes.chunkcache_hints],
)
def test_other_tenants_business_asks_for_the_admin_level(endpoint: Any) -> None:
    """As the tree does."""
    assert endpoint._auth_level == AuthLevel.ADMIN_OPTIONAL


@pytest.mark.parametrize(("key", "status"), [("user", 404), ("wrong", 401), ("admin", 401)])
def test_openai_client_with_a_wrong_key_is_refused(key: str, status: int) -> None:
    """As on `/v1`: the user's key opens, also what is not there; any other is told nothing."""
    app = FastAPI()
    for method, path, handler in Routes(Parts(ChunkCacheConfig())).table():
        app.add_api_route(path, handler, methods=[method])
    add_api_key_middleware(app, api_key="user", admin_api_key="admin")

    async def statuses() -> set[int]:
        found = set()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport) as http:
            client = openai.AsyncOpenAI(
                base_url="http://x/rag/v1", api_key=key, http_client=http, max_retries=0
            )
            calls: list[Any] = [lambda: client.completions.create(model="m", prompt="x")]
            if status == 401:
                calls += [lambda: client.models.list(), lambda: client.models.retrieve("m")]
                calls += [lambda: client.chat.completions.create(model="m", messages=[])]
            for call in calls:
                with pytest.raises(openai.APIStatusError) as error:
                    await call()
                found.add(error.value.status_code)
        return found

    assert asyncio.run(statuses()) == {status}


@pytest.mark.parametrize(
    ("level", "configured", "opening"),
    [
        (AuthLevel.NORMAL, "", {"", "api", "admin"}),
        (AuthLevel.NORMAL, "api", {"api"}),
        (AuthLevel.NORMAL, "admin", {"", "api", "admin"}),
        (AuthLevel.NORMAL, "api admin", {"api"}),
        (AuthLevel.ADMIN_OPTIONAL, "", {"", "api", "admin"}),
        (AuthLevel.ADMIN_OPTIONAL, "api", {"api"}),
        (AuthLevel.ADMIN_OPTIONAL, "admin", {"admin"}),
        (AuthLevel.ADMIN_OPTIONAL, "api admin", {"admin"}),
    ],
)
def test_which_key_opens_what(level: AuthLevel, configured: str, opening: set[str]) -> None:
    """The table of front/README.md, by SGLang's own decision.
    No level takes both keys, so stats cannot take the admin's."""
    opened = {
        key
        for key in ("", "api", "admin")
        if decide_request_auth(
            method="GET",
            path="/chunkcache/stats",
            authorization_header=f"Bearer {key}" if key else None,
            api_key="api" if "api" in configured else None,
            admin_api_key="admin" if "admin" in configured else None,
            auth_level=level,
        ).allowed
    }
    assert opened == opening


# Explain


def test_explain_asks_the_rank_and_runs_nothing(call: Any) -> None:
    """The scheduler gets what a request would bring;
    of all ranks' answers the planned one's counts."""
    bench, manager, send = call(reuse="fused", num_ranks=2)
    bench.reply(bench.ask("one", A, B))  # rank 0 holds the chunks
    before = bench.books.stats()
    manager.states = [
        state_of(1, Explanation(0, 0, 27)),
        state_of(0, Explanation(27, 0, 27, (Source(3, 15, 0, "device"),))),
    ]
    body = {
        "messages": MESSAGES,
        "chunks": CHUNKS[::-1],
        "reuse": "fused",
        "extra_key": "k",
        "cache_salt": "s",
    }
    status, plan = send(chunkcache_explain, {**body, "extra_key": None, "cache_salt": None})
    assert (status, plan["dp_rank"], plan["exact"], plan["order"]) == (200, 0, 27, ["a", "b"])
    assert (plan["sources"][0]["chunk"], plan["sources"][0]["end"]) == ("a", 15)
    asked = manager.sent[0]
    assert (len(asked.input_ids), asked.extra_key, asked.cache_salt) == (
        plan["prompt_tokens"],
        None,
        None,
    )
    assert checked(asked.spans, array("q", asked.input_ids)) == asked.spans
    assert asked.spans.fusion.recipe == plan["reuse"]["recipe"]
    assert bench.books.stats() == before
    send(chunkcache_explain, body)
    assert (manager.sent[1].extra_key, manager.sent[1].cache_salt) == ("k", "s")


@pytest.mark.parametrize(
    "state", [{}, state_of(0)], ids=["without the cache", "without an explanation"]
)
def test_explain_without_an_answer_is_an_error(call: Any, state: dict[str, Any]) -> None:
    """500, and the rank that does not answer."""
    _, manager, send = call()
    manager.states = [state]
    status, answer = send(chunkcache_explain, {"messages": MESSAGES, "chunks": CHUNKS})
    assert (status, answer["message"], answer["param"]) == (500, "rank 0 does not explain", None)


def test_explain_refuses_by_name_and_counts_nothing(call: Any) -> None:
    """It is no request to serve."""
    bench, manager, send = call()
    status, answer = send(chunkcache_explain, {"messages": MESSAGES, "reuse": "fused"})
    assert (status, answer["param"]) == (400, "reuse")
    assert bench.books.metrics.totals()["requests"] == {}
    assert manager.sent == []


# Prefetch

STORED = {"storage_backend": "file", "reuse": "fused"}


@pytest.mark.parametrize(
    "body",
    [
        {"messages": MESSAGES, "chunks": CHUNKS},
        {"messages": MESSAGES[:-1], "chunks": CHUNKS},
        {"texts": [chunk["text"] for chunk in CHUNKS], "messages": MESSAGES[:-1]},
    ],
)
def test_hint_sends_its_rank_what_a_request_would(call: Any, body: Any) -> None:
    """All up to the question. It answers nothing, runs nothing and counts nothing."""
    bench, manager, send = call(num_ranks=2, **STORED)
    manager.states = [state_of(0, Explanation(0, 0, 0)), state_of(1)]
    before = bench.books.stats()
    assert send(chunkcache_prefetch, body) == (202, {})
    assert bench.books.stats() == before
    (asked,) = manager.sent
    send(chunkcache_explain, {"messages": MESSAGES, "chunks": CHUNKS})
    request = manager.sent[1]
    assert (asked.prefetch.dp_rank, asked.prefetch.spans) == (0, request.spans)
    end = request.spans.spans[-1].end
    assert asked.prefetch.input_ids[:end] == request.input_ids[:end]


@pytest.mark.parametrize(
    ("knobs", "body", "param"),
    [
        ({}, {"texts": ["x"]}, "body"),
        (STORED, {"texts": "x"}, "texts"),
        (STORED, {"text": ["x"]}, "text"),
        (STORED, {"texts": []}, "texts"),
        (STORED, {}, "texts"),
        (STORED, {"texts": ["x"], "chunks": [{"text": "y"}]}, "texts"),
        (STORED, {"texts": [1]}, "texts"),
        (STORED, {"chunks": 5}, "chunks"),
        (STORED, {"texts": ["x"], "messages": 5}, "messages"),
        (STORED, {"retrieve": True, "messages": MESSAGES}, "retrieve"),
        (STORED, {"retrieve": {}, "messages": MESSAGES}, "retrieve"),
        (STORED, {"retrieve": {}}, "messages"),
    ],
)
def test_hint_is_refused_by_name(call: Any, knobs: dict[str, Any], body: Any, param: str) -> None:
    _, manager, send = call(**knobs)
    status, answer = send(chunkcache_prefetch, body)
    assert (status, answer["param"]) == (400, param)
    assert manager.sent == []


# Stats


def test_stats_show_every_rank_with_its_mirror(call: Any) -> None:
    """By rank, whatever the order of the replies;
    the epoch and the digest are between rank and front."""
    _, manager, send = call(num_ranks=2)
    manager.states = [state_of(1, free=7), state_of(0, free=8)]
    status, stats = send(chunkcache_stats)
    assert (status, stats["retrieval"], stats["reuse"]) == (200, None, "exact")
    mirror = {
        "chunk_nodes": 0,
        "events_behind": 0,
        "agrees": True,
        "restarts": 0,
        "gaps": 0,
        "resyncs": 0,
    }
    assert stats["ranks"] == [
        {"dp_rank": rank, "seq": 0, "chunk_nodes": 0, "free": free, "mirror": mirror}
        for rank, free in ((0, 8), (1, 7))
    ]


def test_stats_without_the_cache_are_an_error(call: Any) -> None:
    """The start-up check stops such a server."""
    _, manager, send = call(num_ranks=2)
    manager.states = [state_of(0), {}]
    assert send(chunkcache_stats) == (500, {"error": "a rank runs without the chunk cache"})


# Retrieve


def test_retrieved_passages_are_chunks(call: Any) -> None:
    """In the order and of the text that the index gives; the answer says what was searched for."""
    _, manager, send = call(FakeRetriever())
    manager.states = [state_of(0, Explanation(0, 0, 0))]
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "x"},
        *MESSAGES,
    ]
    status, plan = send(
        chunkcache_explain, {"messages": messages, "retrieve": {"turns": 2, "k": 2}}
    )
    assert (status, plan["order"]) == (200, ["a", "b"])
    assert (plan["retrieval"]["query"], plan["retrieval"]["k"]) == ("one\nwhy?", 2)
    assert "A\nalpha one;B\nbeta one;why?" in "".join(map(chr, manager.sent[0].input_ids))


def test_chunks_of_the_client_are_not_searched_for(call: Any) -> None:
    """`retrieval` is null then; so it is where nothing is wished for."""
    retriever = FakeRetriever()
    _, manager, send = call(retriever)
    manager.states = [state_of(0, Explanation(0, 0, 0))]
    for wish in ({}, {"retrieve": None}, {"retrieve": False}):
        assert (
            send(chunkcache_explain, {"messages": MESSAGES, "chunks": CHUNKS, **wish})[1][
                "retrieval"
            ]
            is None
        )
    assert retriever.batches == []


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"retrieve": True, "chunks": CHUNKS}, "retrieve: not together with chunks"),
        ({"retrieve": {"k": 300}}, "retrieve.k: 300 asked for, at most 256"),
        ({"retrieve": {"query": ""}}, "retrieve.query: is empty"),
        ({"retrieve": True, "reuse": "fused"}, "reuse: "),
        ({"retrieve": True, "cache_salt": 5}, "cache_salt"),
    ],
    ids=str,
)
def test_retrieve_refuses_by_name_before_it_searches(
    call: Any, body: dict[str, Any], message: str
) -> None:
    """What is wrong anyway costs no search."""
    retriever = FakeRetriever()
    bench, _, send = call(retriever)
    status, answer = send(chunkcache_explain, {"messages": MESSAGES, **body})
    assert (status, answer["message"][: len(message)]) == (400, message)
    assert retriever.batches == []
    assert bench.is_idle()


@pytest.mark.parametrize("wish", [True, {}, {"k": 5}], ids=str)
def test_retrieve_without_an_index_is_refused(call: Any, wish: Any) -> None:
    """It says what to do instead."""
    _, _, send = call()
    message = "retrieve: this server has no index (--index); send chunks"
    assert (
        send(chunkcache_explain, {"messages": MESSAGES, "retrieve": wish})[1]["message"] == message
    )
    assert send(rag_retrieve, {"query": "x"})[1]["message"] == message


def test_search_alone(call: Any) -> None:
    """The passages of a query or of a conversation, with or without their texts."""
    _, manager, send = call(FakeRetriever())
    status, answer = send(rag_retrieve, {"query": "two", "k": 3, "mode": "bm25"})
    assert (status, answer["mode"], answer["k"]) == (200, "bm25", 3)
    assert [(passage["id"], passage["text"]) for passage in answer["passages"]] == [
        ("d", "D\ndelta two")
    ]
    messages = [
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "x"},
        *MESSAGES,
    ]
    _, answer = send(rag_retrieve, {"messages": messages, "turns": 2, "text": False})
    assert [passage["id"] for passage in answer["passages"]] == ["a", "b", "c"]
    assert "text" not in answer["passages"][0]
    assert manager.sent == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "query"),
        ({"query": "x", "messages": MESSAGES}, "query"),
        ({"query": " "}, "query"),
        ({"query": "x", "turns": 2}, "turns"),
        ({"query": "x", "k": 300}, "k"),
        ({"query": "refuse me"}, "query"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "messages"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages.0.content"),
        ({"query": "x", "index": "other"}, "index"),
        ([], "body"),
    ],
    ids=str,
)
def test_search_refuses_by_name(call: Any, body: Any, param: str) -> None:
    """400 and the field."""
    _, _, send = call(FakeRetriever())
    status, answer = send(rag_retrieve, body)
    assert (status, answer["param"], answer["type"]) == (400, param, "BadRequestError")


def test_failing_search_is_no_400(call: Any) -> None:
    """Whoever sees it may try again; the request is counted as what it was."""
    retriever = FakeRetriever()
    retriever.fail["why?"] = OSError("disk")
    bench, _, send = call(retriever)
    for endpoint in (chunkcache_explain, rag_retrieve):
        status, answer = send(
            endpoint,
            {"messages": MESSAGES, **({"retrieve": True} if endpoint is not rag_retrieve else {})},
        )
        assert (status, answer["code"], answer["type"], answer["param"]) == (
            500,
            500,
            "InternalServerError",
            None,
        )
    status, _ = send(rag_chat_completions, {"messages": MESSAGES, "retrieve": True})
    assert (status, bench.books.metrics.totals()["requests"]) == (500, {"unsearched": 1})
    assert bench.is_idle()


# Preprocess


def test_preprocess_runs_on_every_rank(call: Any) -> None:
    """One token each, behind the system message and the neighbours;
    the fates of all ranks are added up."""
    bench, manager, send = call(reuse="fused", num_ranks=2)
    manager.states = [state_of(rank, Explanation(20, 0, 20)) for rank in (0, 1)]
    body = {
        "chunk": CHUNKS[0],
        "neighbors": [CHUNKS[1]],
        "messages": [{"role": "system", "content": "sys"}],
        "extra_key": "k",
        "cache_salt": "s",
    }
    status, answer = send(chunkcache_preprocess, body)
    assert (status, answer["chunk_tokens"]) == (200, len(A.text) + 1)
    assert answer["neighbors"] == {"moved": 0, "computed": 2, "missing": 0}
    manager.sent = [obj for obj in manager.sent if not isinstance(obj, ExplainRequest)]
    assert [obj.routed_dp_rank for obj in manager.sent] == [0, 1]
    assert {key: answer["fates"][key] for key in ("exact", "relocated")} == {
        "exact": 6,
        "relocated": 2,
    }
    assert sum(answer["fates"].values()) == sum(len(obj.input_ids) for obj in manager.sent)
    assert answer["seconds"] > 0
    for obj in manager.sent:
        assert (obj.sampling_params["max_new_tokens"], obj.extra_key, obj.cache_salt) == (
            1,
            "k",
            "s",
        )
        assert told(obj).is_preprocessing
        assert "".join(map(chr, obj.input_ids)).startswith(
            f"\x02\x01ssys\x03\x01u{B.text};{A.text};"
        )
    assert bench.is_idle()
    assert bench.books.metrics.totals()["requests"] == {"finished": 2}


def test_clear_store_asks_every_rank(call: Any) -> None:
    """What each had, in order of rank. One message, and nothing is explained."""
    _, manager, send = call(reuse="fused", num_ranks=2)
    manager.states = [
        state_of(1, cleared=Cleared(0, 0, 0)),
        state_of(0, cleared=Cleared(2, 3, 400)),
    ]
    status, answer = send(chunkcache_clear_store)
    assert manager.sent == [Asked(clear_store=True)]
    first, second = (
        {"dp_rank": r, "chunks": c, "variants": v, "bytes": b}
        for r, c, v, b in ((0, 2, 3, 400), (1, 0, 0, 0))
    )
    assert (status, answer) == (200, {"cleared": [first, second]})


@pytest.mark.parametrize("state", [{}, state_of(1)], ids=["without the cache", "that does not say"])
def test_rank_that_did_not_clear_its_store_is_an_error(call: Any, state: dict[str, Any]) -> None:
    """Else a user takes a store for empty that is not."""
    _, manager, send = call(reuse="fused", num_ranks=2)
    manager.states = [state_of(0, cleared=Cleared(1, 1, 1)), state]
    status, answer = send(chunkcache_clear_store)
    assert (status, answer["message"]) == (500, "a rank has not emptied its store")


@pytest.mark.parametrize(
    ("report", "expected"),
    [
        (
            {"exact": 16, "sources": [(1, "host"), (2, "device")]},
            {"moved": 2, "computed": 1, "missing": 0},
        ),
        (
            {"exact": 16, "sources": [(1, "host"), (2, "gap")]},
            {"moved": 2, "computed": 0, "missing": 1},
        ),
        ({"exact": 3, "sources": []}, {"moved": 0, "computed": 1, "missing": 2}),
        (
            {"exact": 16, "sources": [(1, "host"), (2, "host")], "failed": True},
            {"moved": 0, "computed": 1, "missing": 2},
        ),
    ],
    ids=["found", "not even then", "no room", "computed after an error"],
)
def test_neighbors_without_plain_kv_are_computed_alone_first(
    call: Any, report: Any, expected: dict[str, int]
) -> None:
    """The last of three has none. What became of them is what the rank reports in the end."""
    bench, manager, send = call(reuse="fused")
    found = Explanation(
        16, 0, 30, tuple(Source(0, 1, span, where) for span, where in ((1, "host"), (2, "gap")))
    )
    manager.states = [state_of(0, found)]
    manager.report = Report(
        report["exact"],
        1,
        0,
        fused_hit=0,
        gap=0,
        sources=tuple(Source(0, 1, span, where) for span, where in report["sources"]),
        focused=None,
        fallbacks=(Fallback.PASS_FAILED,) if report.get("failed") else (),
        ms={},
    )
    body = {"chunk": CHUNKS[0], "neighbors": [CHUNKS[1], *({"text": each.text} for each in (C, D))]}
    assert send(chunkcache_preprocess, body)[1]["neighbors"] == expected
    prompts = [
        "".join(map(chr, obj.input_ids))
        for obj in manager.sent
        if not isinstance(obj, ExplainRequest)
    ]
    assert [prompt[3:-3] for prompt in prompts] == [
        f"{D.text};",
        f"{B.text};{C.text};{D.text};{A.text};",
    ]
    assert bench.is_idle()


def test_ranks_that_have_the_chunk_compute_nothing(call: Any) -> None:
    """One of two has it: the other one computes it.
    Both: it is kept, and its tokens are told all the same."""
    bench, manager, send = call(reuse="fused", num_ranks=2)
    body = {"chunk": CHUNKS[0], "neighbors": [CHUNKS[1]]}
    manager.states = [state_of(rank, Explanation(20, 0, 20, is_kept=rank == 0)) for rank in (0, 1)]
    answer = send(chunkcache_preprocess, body)[1]
    assert (answer["kept"], sum(answer["neighbors"].values())) == (False, 1)
    assert [obj.routed_dp_rank for obj in manager.sent if not isinstance(obj, ExplainRequest)] == [
        1
    ]
    manager.sent.clear()
    manager.states = [state_of(rank, Explanation(20, 0, 20, is_kept=True)) for rank in (0, 1)]
    answer = send(chunkcache_preprocess, body)[1]
    assert (answer["kept"], answer["chunk_tokens"], answer["fates"]) == (True, len(A.text) + 1, {})
    assert [obj.dp_rank for obj in manager.sent] == [0, 1]
    assert bench.is_idle()


def test_all_ranks_compute_at_once(call: Any) -> None:
    """None waits for another one's prefill."""
    _, manager, send = call(reuse="fused", num_ranks=3)
    manager.states = [state_of(rank, Explanation(20, 0, 20)) for rank in range(3)]
    generate, barrier = manager.generate_request, asyncio.Barrier(3)

    async def together(obj: Any, raw_request: Any) -> AsyncIterator[Any]:
        async with asyncio.timeout(DEADLINE_S):
            await barrier.wait()
        async for output in generate(obj, raw_request):
            yield output

    manager.generate_request = together
    status, answer = send(chunkcache_preprocess, {"chunk": CHUNKS[0]})
    assert (status, answer["kept"]) == (200, False)


@pytest.mark.parametrize(("wait_s", "num_asked"), [(10.0, 4), (0.0, 1)])
def test_chunk_waits_for_the_rank_s_storage(
    call: Any, monkeypatch: pytest.MonkeyPatch, wait_s: float, num_asked: int
) -> None:
    """It is asked again until its neighbours have come, and for so long at most:
    then what has not come is computed."""
    monkeypatch.setattr(preprocessing, "WAIT_S", wait_s)
    _, manager, send = call(reuse="fused")
    loading = state_of(0, Explanation(0, 0, 0, must_wait=True))
    there = state_of(0, Explanation(20, 0, 20, (Source(3, 9, 0, "host"),)))
    told = iter([loading, loading, loading, *[there] * 9])
    ask = manager.get_internal_state_communicator

    async def communicate(message: Any) -> list[Any]:
        manager.states = [next(told)]
        return list(await ask(message))

    manager.get_internal_state_communicator = communicate
    assert send(chunkcache_preprocess, {"chunk": CHUNKS[0], "neighbors": [CHUNKS[1]]})[0] == 200
    prompts = [obj for obj in manager.sent if not isinstance(obj, ExplainRequest)]
    first = manager.sent.index(prompts[0])
    assert (first, len(prompts)) == (num_asked, 1 if num_asked == 4 else 2)


def test_error_of_one_rank_is_the_answer(call: Any) -> None:
    """When all are done."""
    bench, manager, send = call(reuse="fused", num_ranks=2)
    manager.states = [state_of(0, Explanation(20, 0, 20)), state_of(1)]
    status, answer = send(chunkcache_preprocess, {"chunk": CHUNKS[0]})
    assert (status, answer["message"]) == (500, "rank 1 does not explain")
    assert bench.is_idle()


@pytest.mark.parametrize(
    ("knobs", "body", "field"),
    [
        ({}, {"chunk": CHUNKS[0]}, "--reuse fused"),
        ({"reuse": "fused"}, {"chunk": CHUNKS[0], "neighbors": CHUNKS}, "neighbors"),
        (
            {"reuse": "fused", "max_chunks": 1},
            {"chunk": CHUNKS[0], "neighbors": CHUNKS},
            "neighbors: 2 given",
        ),
        ({"reuse": "fused", "max_chunk_chars": 10}, {"chunk": CHUNKS[0]}, "chunk.0.text"),
        ({"reuse": "fused"}, {"chunk": {"text": "x" * 5000}}, "5001 tokens"),
        ({"reuse": "fused"}, [], "body"),
    ],
    ids=["exact server", "itself", "too many", "too many characters", "too many tokens", "a list"],
)
def test_preprocess_refuses_by_name(
    call: Any, knobs: dict[str, Any], body: Any, field: str
) -> None:
    """Nothing is sent, nothing is left."""
    bench, manager, send = call(**knobs)
    status, answer = send(chunkcache_preprocess, body)
    assert (status, manager.sent) == (400, [])
    assert field in answer["message"]
    assert bench.is_idle()


# Parts


def test_generate_takes_order_and_reuse(call: Any) -> None:
    """And says in the answer what became of them."""
    bench, _, send = call(reuse="fused")
    bench.reply(bench.parts([[A, B], "q"]))
    body = {
        "parts": [{"chunks": CHUNKS[::-1]}, "q"],
        "order": "retriever",
        "reuse": {"mode": "fused", "ratio": 0.5},
    }
    status, answer = send(rag_generate, body)
    assert status == 200
    assert answer["chunkcache"]["order"] == ["b", "a"]
    assert (answer["chunkcache"]["reuse"]["mode"], answer["chunkcache"]["reuse"]["ratio"]) == (
        "fused",
        0.5,
    )
    assert answer["chunkcache"]["fates"]["relocated"] == 1


def test_clients_cannot_write_our_params(call: Any) -> None:
    """They would come with our mark and be believed:
    moved KV on an exact request, or a chunk taken for preprocessed."""
    _, manager, send = call(reuse="fused")
    forged = {
        "chunkcache_spans": "[1, {}]",
        "chunkcache_selector": "none",
        MARK_KEY: "x",
        "theirs": 1,
    }
    body = {
        "parts": [{"chunks": CHUNKS}, "q"],
        "sampling_params": {"custom_params": forged, "top_k": 3},
    }
    assert send(rag_generate, body)[0] == 200
    params = manager.sent[0].sampling_params
    assert (params["top_k"], params["custom_params"]["theirs"]) == (3, 1)
    assert "chunkcache_selector" not in params["custom_params"]
    spans = told(manager.sent[0])
    assert (len(spans.spans), spans.fusion, spans.is_preprocessing) == (2, None, False)


def test_generate_streams_events(call: Any) -> None:
    """SGLang's outputs, so that a loop over SGLang's /generate reads them;
    the last has what is ours, too."""
    bench, _, send = call()
    status, events = send(rag_generate, {"parts": [{"chunks": CHUNKS}, "q"], "stream": True})
    assert (status, events[-1]) == (200, "[DONE]")
    assert [list(json.loads(event)) for event in events[:-1]] == [
        ["text", "output_ids", "index", "meta_info", "chunkcache"]
    ]
    assert json.loads(events[-2])["chunkcache"]["order"] == ["a", "b"]
    assert bench.is_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_generate_that_sglang_refuses_is_a_400(call: Any, stream: bool) -> None:
    """With what SGLang says; counted once, and nothing is left."""
    bench, manager, send = call()
    manager.error = ValueError("top_p must be in (0, 1]")
    status, answer = send(rag_generate, {"parts": ["x"], "stream": stream})
    assert (status, answer["message"]) == (400, "sampling_params.top_p: top_p must be in (0, 1]")
    assert bench.books.metrics.totals()["requests"] == {"refused": 1}
    assert bench.is_idle()


@pytest.mark.parametrize(
    ("complaint", "field"),
    [
        (
            (
                "req.logprob_start_len=9 is higher than the number of input tokens"
                " len(req.origin_input_ids)=3."
            ),
            "logprob_start_len",
        ),
        ("min_new_tokens must be in [0, max_new_tokens]", "sampling_params.min_new_tokens"),
        ("Failed to compile json grammar: regex of the schema", "sampling_params.json_schema"),
        ("Request prompt exceeds the KV memory budget: input_len=5.", "parts"),
        ("Input length (9 tokens) exceeds the maximum allowed length (5 tokens).", "parts"),
    ],
)
def test_complaint_of_sglangs_is_behind_the_field_it_is_about(
    call: Any, complaint: str, field: str
) -> None:
    """In the client's words: what SGLang calls a grammar is the parameter that holds it,
    what it has measured is the prompt."""
    _, manager, send = call()
    manager.error = ValueError(complaint)
    params = {"min_new_tokens": 3, "max_new_tokens": 9, "json_schema": "{}"}
    body = {
        "parts": ["x"],
        "return_logprob": True,
        "logprob_start_len": 1,
        "sampling_params": params,
    }
    status, answer = send(rag_generate, body)
    assert (status, answer["param"]) == (400, field)


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_from_beyond_the_prompt_are_refused(call: Any, stream: bool) -> None:
    """Before SGLang would, in a stream with a 200. Without logprobs the field means nothing."""
    bench, manager, send = call()
    body = {"parts": ["abc"], "stream": stream, "return_logprob": True}
    assert send(rag_generate, {**body, "logprob_start_len": 99, "return_logprob": False})[0] == 200
    length = len(manager.sent.pop().input_ids)
    status, answer = send(rag_generate, {**body, "logprob_start_len": length + 1})
    assert (status, answer["message"]) == (
        400,
        f"logprob_start_len: must be at most {length}, the prompt's tokens, got {length + 1}",
    )
    assert manager.sent == []
    assert bench.is_idle()
    assert send(rag_generate, {**body, "logprob_start_len": length})[0] == 200


@pytest.mark.parametrize(
    ("params", "field"),
    [
        ({"max_new_tokens": -1}, "sampling_params.max_new_tokens"),
        ({"max_new_tokens": True}, "sampling_params.max_new_tokens"),
        ({"n": 2}, "sampling_params.n"),
        ({"custom_params": "x"}, "sampling_params.custom_params"),
        ({"skip_special_tokens": "x"}, "sampling_params.skip_special_tokens"),
        ({"no_such": 1}, "sampling_params.no_such"),
    ],
    ids=str,
)
def test_generate_refuses_parameters_by_name(call: Any, params: dict[str, Any], field: str) -> None:
    """Before anything is planned or sent. All of them: guard/test_sampling.py."""
    bench, manager, send = call()
    status, answer = send(rag_generate, {"parts": ["x"], "sampling_params": params})
    assert (status, answer["param"]) == (400, field)
    assert bench.books.metrics.totals()["requests"] == {"refused": 1}
    assert manager.sent == []


# Chunks of earlier messages

DOC = {"id": "a", "text": A.text}
OTHER = {"id": "a", "text": B.text}
REPLY = {"role": "assistant", "content": "so"}


def question(*chunks: Any, text: str = "why?", **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, "chunks": list(chunks), **fields}


def parts(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


BAD_HISTORIES: list[tuple[dict[str, Any], str]] = [
    (
        {"messages": [{"role": "system", "content": "x", "chunks": [DOC]}, question()]},
        "messages.0.chunks: only a user's",
    ),
    (
        {"messages": [question(), {**REPLY, "chunks": []}, question()]},
        "messages.1.chunks: only a user's",
    ),
    (
        {"messages": [question(DOC)], "chunks": [DOC]},
        "messages.0.chunks: chunks are at the top level, too",
    ),
    (
        {"messages": [question(DOC)], "chunks": []},
        "messages.0.chunks: chunks are at the top level, too",
    ),
    (
        {"messages": [{**question(), "chunks": "x"}, REPLY, question()]},
        "messages.0.chunks: must be a valid list",
    ),
    ({"messages": [{**question(), "chunks": DOC}]}, "messages.0.chunks: must be a valid list"),
    (
        {"messages": [question({"id": "a"}), REPLY, question()]},
        "messages.0.chunks.0.text: is missing",
    ),
    (
        {"messages": [question(DOC), REPLY, question(OTHER)]},
        "messages.2.chunks: the text of 'a' is another one in messages.0",
    ),
    (
        {"messages": [question(DOC), REPLY, {"role": "user", "content": "x"}], "chunks": [OTHER]},
        "messages.2.chunks: the text",
    ),
    (
        {
            "messages": [question(*[{"text": str(i)} for i in range(150)]), REPLY, question()],
            "max_tokens": 1,
        },
        "",
    ),
    (
        {
            "messages": [
                question(*[{"text": str(i)} for i in range(150)]),
                REPLY,
                question(*[{"text": "x"}] * 150),
            ]
        },
        "chunks: 300 given, those of all messages counted, at most 256",
    ),
    (
        {"messages": [{"role": "user", "content": "x", "chunk": [DOC]}]},
        "messages.0.chunk: is no field here; did you mean",
    ),
    (
        {"messages": [question({"text": "x" * 300_000}), REPLY, question()]},
        "messages.0.chunks.0.text: 300000 characters",
    ),
    (
        {"messages": [question({"text": "x" * 3000}), REPLY, question()]},
        "messages.0.chunks: '0' has",
    ),
    (
        {"messages": [question({"text": "x" * 4050}), REPLY, question({"text": "y" * 4050})]},
        "chunks: more than 2000 tokens in all",
    ),
    (
        {"messages": MESSAGES, "chunks": [{"text": "x" * 300_000}]},
        "chunks.0.text: 300000 characters",
    ),
    ({"messages": MESSAGES, "history": "always"}, "history: "),
    ({"messages": [{"role": "user"}]}, "messages.0.content: is missing"),
    ({"messages": [parts({"type": "text"})]}, "messages.0.content.0.text: is missing"),
    (
        {"messages": [parts({"type": "text", "text": 5})]},
        "messages.0.content.0.text: must be a string",
    ),
    ({"messages": [question(), REPLY, parts("a")]}, "messages.2.content.0.type: must be 'text'"),
    (
        {"messages": [parts({"type": "thinking", "thinking": "a"})]},
        "messages.0.content.0.type: must be 'text'",
    ),
    (
        {"messages": [parts({"type": "image_url", "image_url": {"url": "x"}})]},
        "messages.0.content.0.type: must be",
    ),
    (
        {"messages": MESSAGES, "max_tokens": 1, "max_completion_tokens": -2},
        "max_completion_tokens: must be",
    ),
    ({"messages": MESSAGES, "history": True}, "history: "),
]


@pytest.mark.parametrize(("body", "expected"), BAD_HISTORIES, ids=range(len(BAD_HISTORIES)))
def test_bad_history_is_refused_by_the_messages_index(
    call: MakeServer, body: Any, expected: str
) -> None:
    """Never an answer from other documents than the client means."""
    _, _, send = call()
    for endpoint in (rag_chat_completions, chunkcache_explain):
        status, answer = send(endpoint, body)
        if not expected:
            assert status in (200, 500), "within the limit"
            continue
        assert (status, answer["message"][: len(expected)]) == (400, expected)
        assert answer["param"] == answer["message"].split(":")[0]


def test_messages_with_chunks_are_not_for_parts(call: MakeServer) -> None:
    """Frontend programs have parts."""
    _, _, send = call()
    status, answer = send(rag_generate, {"parts": ["x"], "messages": [REPLY, question(DOC)]})
    assert (status, answer["message"]) == (
        400,
        "messages.1.chunks: this endpoint has parts, not messages",
    )


def test_null_chunks_of_a_message_are_not_said(call: MakeServer) -> None:
    """As at the top level: what no key says is unknown, and required history is refused before
    anything is answered."""
    bench, manager, send = call()
    body = {
        "messages": [{**question(), "chunks": None}, REPLY, question(DOC)],
        "history": "required",
        "stream": True,
    }
    status, answer = send(rag_chat_completions, body)
    assert (status, answer["code"], answer["param"]) == (422, 422, "messages.0.chunks")
    assert (manager.sent, bench.books.metrics.totals()["requests"]) == ([], {"refused": 1})


def test_search_goes_with_earlier_chunks_alone(call: MakeServer) -> None:
    """The question's chunks are those that are found; all count against the limit."""
    _, _, send = call(FakeRetriever(), max_chunks=4)
    found = {"retrieve": {"k": 2}}
    status, answer = send(rag_chat_completions, {"messages": [question(DOC)], **found})
    assert (status, answer["message"]) == (400, "retrieve: not together with chunks")
    many = [
        question(*[{"text": str(i)} for i in range(4)]),
        REPLY,
        {"role": "user", "content": "alpha"},
    ]
    status, answer = send(rag_chat_completions, {"messages": many, **found})
    assert (status, answer["param"]) == (400, "retrieve.k")


@pytest.mark.parametrize("messages", [[{"role": "system", "content": "s"}, REPLY], [REPLY]])
def test_continued_answer_without_a_question_is_no_fault_of_ours(
    call: MakeServer, messages: Any
) -> None:
    """With a conversation's id as without."""
    _, _, send = call()
    for fields in ({}, {"conversation_id": "c"}):
        status, _ = send(
            rag_chat_completions, {"messages": messages, "continue_final_message": True, **fields}
        )
        assert status == (200 if len(messages) == 2 else 400)
