"""Endpoints beside the chat's, without an engine: what they send to SGLang's manager, and what they make of its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.utils.auth import AuthLevel

from sglang_chunkcache.front import routes as endpoints
from sglang_chunkcache.front.request import Identity
from sglang_chunkcache.front.routes import (
    chunkcache_explain,
    chunkcache_preprocess,
    rag_chat_completions,
    rag_generate,
    rag_retrieve,
)
from sglang_chunkcache.front.search import RagSearch
from tests.sglang_chunkcache.front.fake_retriever import FakeRetriever
from tests.sglang_chunkcache.front.service_bench import A, B, Bench, make_output

# FastAPI would have us return plain objects, OpenAI has clients send `max_completion_tokens`: SGLang uses and takes both.
pytestmark = pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated", "ignore:max_tokens is deprecated")

MESSAGES = [{"role": "user", "content": "why?"}]
CHUNKS = [{"id": "a", "text": A.text}, {"id": "b", "text": B.text}]
Endpoint = Callable[[Any], Awaitable[Any]]
Send = Callable[..., tuple[int, Any]]


class Manager:
    """SGLang's: answers every request with one token, and state requests with what each rank found."""

    def __init__(self, bench: Bench) -> None:
        self.bench, self.sent = bench, list[Any]()
        self.explained: list[dict[str, Any]] = []

    def auto_create_handle_loop(self) -> None:
        pass

    async def get_internal_state_communicator(self, message: Any) -> list[Any]:
        asked = json.loads(message.rid)["chunkcache_explain"]
        self.sent.append(asked)
        return [SimpleNamespace(internal_state={"chunkcache": found}) for found in self.explained]

    async def generate_request(self, obj: Any, raw_request: Any) -> AsyncIterator[Any]:
        self.sent.append(obj)
        rag, rank = raw_request.state.chunkcache, obj.routed_dp_rank or 0
        report = {
            "exact": 3,
            "relocated": 1,
            "recomputed": 0,
            "fused_hit": 0,
            "gap": 0,
            "sources": [],
            "fallbacks": [],
            "ms": {},
        }
        yield make_output([65], 3, "stop", rank, self.bench.ranks[rank].serve(rag, report if rag.reuse else None))


MakeServer = Callable[..., tuple[Bench, Manager, Send]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Iterator[MakeServer]:
    """(bench, manager, how to call an endpoint with a body) for a server of these settings, with a retriever or none."""

    searches: list[RagSearch] = []

    def make(retriever: FakeRetriever | None = None, **knobs: Any) -> tuple[Bench, Manager, Send]:
        bench = Bench(**knobs, retrieve_refresh_s=0.0)
        search = RagSearch(retriever, bench.service.config, bench.service.metrics) if retriever else None  # type: ignore[arg-type]
        searches.extend([search] if search else [])
        manager = Manager(bench)
        chat = SimpleNamespace(_validate_request=lambda request: None, default_chat_template_kwargs={})
        service = bench.service
        state = SimpleNamespace(config=service.config, service=service, chat=chat, manager=manager, search=search)
        monkeypatch.setattr(endpoints, "_state", state, raising=False)

        def send(endpoint: Endpoint, body: Any) -> tuple[int, Any]:
            async def read() -> bytes:
                return json.dumps(body).encode()

            async def is_disconnected() -> bool:
                return False

            raw_request = SimpleNamespace(
                headers={}, state=SimpleNamespace(), body=read, is_disconnected=is_disconnected
            )
            answer: Any = asyncio.run(endpoint(raw_request))  # type: ignore[arg-type]
            return answer.status_code, json.loads(answer.body)

        return bench, manager, send

    yield make
    for search in searches:
        search.close()


@pytest.mark.parametrize("endpoint", [chunkcache_explain, chunkcache_preprocess])
def test_other_tenants_business_asks_for_the_admin_level(endpoint: Any) -> None:
    """As the tree does."""
    assert endpoint._auth_level == AuthLevel.ADMIN_OPTIONAL


# Explain


def test_explain_asks_the_rank_and_runs_nothing(call: Any) -> None:
    """The scheduler gets what a request would bring; of all ranks' answers the planned one's counts."""
    bench, manager, send = call(reuse="fused", num_ranks=2)
    bench.reply(bench.ask("one", A, B))  # rank 0 holds the chunks
    before = bench.service.stats()
    found = {"exact": 27, "end": 27, "sources": [], "fallbacks": []}
    manager.explained = [
        {"dp_rank": 1, "explain": {**found, "exact": 0}},
        {"dp_rank": 0, "explain": {**found, "sources": [[0, "device", 0, 0, None, 3, 15]]}},
    ]
    body = {"messages": MESSAGES, "chunks": CHUNKS[::-1], "reuse": "fused", "extra_key": "k", "cache_salt": "s"}
    status, plan = send(chunkcache_explain, {**body, "extra_key": None, "cache_salt": None})
    assert (status, plan["dp_rank"], plan["exact"], plan["order"]) == (200, 0, 27, ["a", "b"])
    assert plan["sources"][0]["chunk"] == "a"
    asked = manager.sent[0]
    assert (len(asked["input_ids"]), asked["extra_key"], asked["cache_salt"]) == (plan["prompt_tokens"], None, None)
    assert asked["custom_params"]["chunkcache_recipe"] == plan["reuse"]["recipe"]
    assert bench.service.stats() == before
    send(chunkcache_explain, body)
    assert (manager.sent[1]["extra_key"], manager.sent[1]["cache_salt"]) == ("k", "s")


def test_explain_without_an_answer_is_an_error(call: Any) -> None:
    """A rank that runs without the cache."""
    _, manager, send = call()
    manager.explained = [{}]
    status, answer = send(chunkcache_explain, {"messages": MESSAGES, "chunks": CHUNKS})
    assert (status, answer) == (500, {"error": "rank 0 does not explain"})


def test_explain_refuses_by_name_and_counts_nothing(call: Any) -> None:
    """It is nobody's request."""
    bench, manager, send = call()
    status, answer = send(chunkcache_explain, {"messages": MESSAGES, "reuse": "fused"})
    assert (status, answer["param"]) == (400, "reuse")
    assert bench.service.metrics.totals()["requests"] == {}
    assert manager.sent == []


# Retrieve


def test_retrieved_passages_are_chunks(call: Any) -> None:
    """In the order and of the text that the index gives; the answer says what was searched for."""
    _, manager, send = call(FakeRetriever())
    manager.explained = [{"dp_rank": 0, "explain": {"exact": 0, "end": 0, "sources": [], "fallbacks": []}}]
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "x"}, *MESSAGES]
    status, plan = send(chunkcache_explain, {"messages": messages, "retrieve": {"turns": 2, "k": 2}})
    assert (status, plan["order"]) == (200, ["a", "b"])
    assert (plan["retrieval"]["query"], plan["retrieval"]["k"]) == ("one\nwhy?", 2)
    assert "A\nalpha one;B\nbeta one;why?" in "".join(map(chr, manager.sent[0]["input_ids"]))


def test_chunks_of_the_client_are_not_searched_for(call: Any) -> None:
    """`retrieval` is null then; so it is where nothing is wished for."""
    retriever = FakeRetriever()
    _, manager, send = call(retriever)
    manager.explained = [{"dp_rank": 0, "explain": {"exact": 0, "end": 0, "sources": [], "fallbacks": []}}]
    for wish in ({}, {"retrieve": None}, {"retrieve": False}):
        assert send(chunkcache_explain, {"messages": MESSAGES, "chunks": CHUNKS, **wish})[1]["retrieval"] is None
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
def test_retrieve_refuses_by_name_before_it_searches(call: Any, body: dict[str, Any], message: str) -> None:
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
    assert send(chunkcache_explain, {"messages": MESSAGES, "retrieve": wish})[1]["message"] == message
    assert send(rag_retrieve, {"query": "x"})[1]["message"] == message


def test_search_alone(call: Any) -> None:
    """The passages of a query or of a conversation, with or without their texts."""
    _, manager, send = call(FakeRetriever())
    status, answer = send(rag_retrieve, {"query": "two", "k": 3, "mode": "bm25"})
    assert (status, answer["mode"], answer["k"]) == (200, "bm25", 3)
    assert [(passage["id"], passage["text"]) for passage in answer["passages"]] == [("d", "D\ndelta two")]
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "x"}, *MESSAGES]
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
            endpoint, {"messages": MESSAGES, **({"retrieve": True} if endpoint is not rag_retrieve else {})}
        )
        assert (status, answer["code"], answer["type"], answer["param"]) == (500, 500, "InternalServerError", None)
    status, _ = send(rag_chat_completions, {"messages": MESSAGES, "retrieve": True})
    assert (status, bench.service.metrics.totals()["requests"]) == (500, {"unsearched": 1})
    assert bench.is_idle()


# Preprocess


def test_preprocess_runs_on_every_rank(call: Any) -> None:
    """One token each, behind the system message and the neighbours; the fates of all ranks are added up."""
    bench, manager, send = call(reuse="fused", num_ranks=2)
    body = {
        "chunk": CHUNKS[0],
        "neighbors": [CHUNKS[1]],
        "messages": [{"role": "system", "content": "sys"}],
        "extra_key": "k",
        "cache_salt": "s",
    }
    status, answer = send(chunkcache_preprocess, body)
    assert (status, answer["chunk_tokens"]) == (200, len(A.text) + 1)
    assert [obj.routed_dp_rank for obj in manager.sent] == [0, 1]
    assert {key: answer["fates"][key] for key in ("exact", "relocated")} == {"exact": 6, "relocated": 2}
    assert sum(answer["fates"].values()) == sum(len(obj.input_ids) for obj in manager.sent)
    assert answer["seconds"] > 0
    for obj in manager.sent:
        assert (obj.sampling_params["max_new_tokens"], obj.extra_key, obj.cache_salt) == (1, "k", "s")
        assert obj.sampling_params["custom_params"]["chunkcache_preprocess"] is True
        assert "".join(map(chr, obj.input_ids)).startswith(f"\x02\x01ssys\x03\x01u{B.text};{A.text};")
    assert bench.is_idle()
    assert bench.service.metrics.totals()["requests"] == {"finished": 2}


@pytest.mark.parametrize(
    ("knobs", "body", "field"),
    [
        ({}, {"chunk": CHUNKS[0]}, "--reuse fused"),
        ({"reuse": "fused"}, {"chunk": CHUNKS[0], "neighbors": CHUNKS}, "neighbors"),
        ({"reuse": "fused", "max_chunks": 1}, {"chunk": CHUNKS[0], "neighbors": CHUNKS}, "neighbors: 2 given"),
        ({"reuse": "fused", "max_chunk_chars": 10}, {"chunk": CHUNKS[0]}, "chunk.0.text"),
        ({"reuse": "fused"}, {"chunk": {"text": "x" * 5000}}, "5001 tokens"),
        ({"reuse": "fused"}, [], "body"),
    ],
    ids=["exact server", "itself", "too many", "too many characters", "too many tokens", "a list"],
)
def test_preprocess_refuses_by_name(call: Any, knobs: dict[str, Any], body: Any, field: str) -> None:
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
    bench.reply(bench.service.begin_parts([[A, B], "q"], identity=Identity()))
    body = {"parts": [{"chunks": CHUNKS[::-1]}, "q"], "order": "retriever", "reuse": {"mode": "fused", "ratio": 0.5}}
    status, answer = send(rag_generate, body)
    assert status == 200
    assert answer["chunkcache"]["order"] == ["b", "a"]
    assert (answer["chunkcache"]["reuse"]["mode"], answer["chunkcache"]["reuse"]["ratio"]) == ("fused", 0.5)
    assert answer["chunkcache"]["fates"]["relocated"] == 1


def test_clients_cannot_write_our_params(call: Any) -> None:
    """They would stand beside our mark and be believed: moved KV on an exact request, or a chunk taken for preprocessed."""
    _, manager, send = call(reuse="fused")
    forged = {"chunkcache_preprocess": True, "chunkcache_selector": "none", "chunkcache_keep": [0], "theirs": 1}
    body = {"parts": [{"chunks": CHUNKS}, "q"], "sampling_params": {"custom_params": forged}}
    assert send(rag_generate, body)[0] == 200
    params = manager.sent[0].sampling_params["custom_params"]
    assert (params["theirs"], params["chunkcache_keep"]) == (1, [])
    assert params["chunkcache_preprocess"] is False
    assert "chunkcache_selector" not in params
