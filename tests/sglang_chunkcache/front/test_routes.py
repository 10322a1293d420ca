"""Endpoints beside the chat's, without an engine:
what they send to SGLang's manager, and what they make of its answers."""

from __future__ import annotations

import asyncio
import json
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

import httpx
import openai
from fastapi import BackgroundTasks, FastAPI
from fastapi.responses import ORJSONResponse
from msgspec import structs
from sglang.srt.entrypoints import http_server
from sglang.srt.utils.auth import AuthLevel, add_api_key_middleware

from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.errors import ChunkCacheError
from sglang_chunkcache.front import preprocessing
from sglang_chunkcache.front.app import install
from sglang_chunkcache.front.engine import Engine
from sglang_chunkcache.front.guard.lethal import Limits
from sglang_chunkcache.front.guard.sampling import SamplingCheck
from sglang_chunkcache.front.parts import Parts
from sglang_chunkcache.front.routes import Routes, refused
from sglang_chunkcache.front.search import RagSearch
from sglang_chunkcache.wire.events import Batch
from sglang_chunkcache.wire.message import decode, encode
from sglang_chunkcache.wire.report import Explanation, Fallback, Report, Source
from sglang_chunkcache.wire.spans import MARK_KEY, checked, unpack
from sglang_chunkcache.wire.state import Asked, Cleared, ExplainRequest, RankState
from tests.kit.front_bench import SECRET, A, B, Bench, C, CharTokenizer, D, make_output
from tests.polling import DEADLINE_S
from tests.sglang_chunkcache.front.fake_retriever import FakeRetriever

# FastAPI would have us return plain objects, OpenAI has clients send `max_completion_tokens`:
# SGLang uses and takes both.
pytestmark = pytest.mark.filterwarnings("ignore:max_tokens is deprecated")

MESSAGES = [{"role": "user", "content": "why?"}]
CHUNKS = [{"id": "a", "text": A.text}, {"id": "b", "text": B.text}]
Endpoint = Callable[..., Awaitable[Any]]
Send = Callable[..., tuple[int, Any]]

explain, preprocess = Routes.chunkcache_explain, Routes.chunkcache_preprocess
prefetch, clear_store = Routes.chunkcache_prefetch, Routes.chunkcache_clear_store
chat, generate, retrieve = Routes.rag_chat_completions, Routes.rag_generate, Routes.rag_retrieve


class Manager:
    """SGLang's: answers every request with one token, and state requests with what each rank
    found."""

    incremental_streaming_output = False
    server_args = SimpleNamespace(load_balance_method="auto", disaggregation_mode="null")

    def __init__(self, bench: Bench) -> None:
        self.bench, self.sent = bench, list[Any]()
        self.states: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.report = Report(
            3, 1, 0, fused_hit=0, gap=0, sources=(), focused=None, fallbacks=(), ms={}
        )

    def auto_create_handle_loop(self) -> None: ...

    def create_abort_task(self, obj: Any) -> None: ...

    async def get_internal_state(self) -> list[dict[str, Any]]:
        return self.states

    async def get_internal_state_communicator(self, message: Any) -> list[Any]:
        asked = decode(message.rid, Asked)
        self.sent += asked.explain or [asked]
        ranks = [decode(state["chunkcache"], RankState) for state in self.states if state]
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


def prompts(manager: Manager) -> list[Any]:
    """The engine requests among what was sent."""
    return [obj for obj in manager.sent if not isinstance(obj, ExplainRequest)]


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
def call() -> MakeServer:
    """(bench, manager, how to call an endpoint with a body) for a server of these settings,
    with a retriever or none."""

    async def served(*request: Any) -> ORJSONResponse:
        return ORJSONResponse({}, background=BackgroundTasks())  # as SGLang's answers have them

    def make(
        retriever: FakeRetriever | None = None, reranker: Any = None, **knobs: Any
    ) -> tuple[Bench, Manager, Send]:
        bench = Bench(**knobs, retrieve_refresh_s=0.0)
        metrics = bench.bookkeeper.metrics
        search = retriever and RagSearch(retriever, bench.config, metrics, reranker=reranker)
        manager = Manager(bench)
        serving = SimpleNamespace(
            check=lambda request: None,
            sampling_params=lambda request: {
                "max_new_tokens": request.max_completion_tokens or request.max_tokens
            },
            template_kwargs=lambda request: None,
            default_chat_template_kwargs={},
            serve=served,
        )
        parts = Parts(bench.config)
        engine = Engine(manager, bench.bookkeeper)
        sampling = SamplingCheck(CharTokenizer(), Limits(1101, None))
        made = {"bookkeeper": bench.bookkeeper, "drafter": bench.drafter, "planner": bench.planner}
        vars(parts).update(made, search=search, chat=serving, engine=engine, sampling=sampling)
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
                answer: Any
                try:
                    answer = await endpoint(routes, *([] if body is None else [raw_request]))
                except ChunkCacheError as error:
                    answer = await refused(raw_request, error)  # type: ignore[arg-type]
                if answer.background is not None:
                    await answer.background()
                for _ in range(10):  # what it has started, and not waited for
                    await asyncio.sleep(0)
                if not hasattr(answer, "body_iterator"):
                    return answer.status_code, json.loads(answer.body)
                text = b"".join([event async for event in answer.body_iterator]).decode()
                events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
                return answer.status_code, events

            return asyncio.run(answered())

        return bench, manager, send

    return make


def test_other_tenants_business_asks_for_the_admin_level() -> None:
    admins: list[Any] = [explain, preprocess, clear_store]
    assert {each._auth_level for each in admins} == {AuthLevel.ADMIN_OPTIONAL}


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


def test_refusal_has_sglangs_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """The app answers it, whichever endpoint raises it."""
    monkeypatch.setattr(http_server, "app", FastAPI())
    parts = install(ChunkCacheConfig())
    vars(parts)["manager"] = SimpleNamespace(gracefully_exit=False)

    async def post(path: str) -> Any:
        transport = httpx.ASGITransport(http_server.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await client.post(path, json={})

    answer = asyncio.run(post("/chunkcache/calibrate"))
    assert (answer.status_code, answer.json()["param"]) == (400, "calibrate")


# Explain


def test_explain_asks_the_rank_and_runs_nothing(call: Any) -> None:
    """The scheduler gets what a request would bring."""
    bench, manager, send = call(reuse="fused", num_ranks=2)
    bench.reply(bench.ask("one", A, B))  # rank 0 holds the chunks
    before = bench.bookkeeper.stats()
    found = Explanation(27, 0, 27, (Source(3, 15, 0, "device"),))
    manager.states = [state_of(1, Explanation(0, 0, 27)), state_of(0, found)]
    body = {"messages": MESSAGES, "chunks": CHUNKS[::-1], "reuse": "fused"}
    status, plan = send(explain, body)
    assert (status, plan["dp_rank"], plan["exact"], plan["order"]) == (200, 0, 27, ["a", "b"])
    assert (plan["sources"][0]["chunk"], plan["sources"][0]["end"]) == ("a", 15)
    send(explain, {**body, "extra_key": "k", "cache_salt": "s"})
    asked, salted = manager.sent
    assert len(asked.input_ids) == plan["prompt_tokens"]
    assert (asked.extra_key, asked.cache_salt) == (None, None)
    assert (salted.extra_key, salted.cache_salt) == ("k", "s")
    assert checked(asked.spans, array("q", asked.input_ids)) == asked.spans
    assert asked.spans.fusion.recipe == plan["reuse"]["recipe"]
    status, answer = send(explain, {**body, "reuse": "no such"})
    assert (status, answer["param"], len(manager.sent)) == (400, "reuse", 2)
    assert bench.bookkeeper.stats() == before


def test_explain_looks_where_sglang_keeps_an_adapters_kv(call: Any) -> None:
    _, manager, send = call()
    manager.states = [state_of(0, Explanation(0, 0, 27))]
    manager.lora_ref_cache = {"a": SimpleNamespace(lora_id="-id")}
    body = {"messages": MESSAGES, "chunks": CHUNKS}
    for more in ({"lora_path": "a"}, {"lora_path": "a", "extra_key": "k"}):
        assert send(explain, {**body, **more})[0] == 200
    assert [asked.extra_key for asked in manager.sent] == ["-id", "k-id"]
    status, answer = send(explain, {**body, "lora_path": "no such"})
    assert (status, answer["param"], len(manager.sent)) == (400, "lora_path", 2)


# Calibrate


@pytest.mark.parametrize(
    ("refusal", "status", "message"),
    [
        ((400, "ValueError: too long"), 400, "examples: ValueError: too long"),
        ((503, "too many run"), 503, "calibrate: too many run"),
        ((500, "RuntimeError: out of memory"), 500, "calibrate: RuntimeError: out of memory"),
    ],
)
def test_what_calibrating_lacks_is_told(
    call: Any, monkeypatch: pytest.MonkeyPatch, refusal: tuple[int, str], status: int, message: str
) -> None:
    """Only what is wrong with them is an error of the examples."""
    _, manager, _ = call()
    engine = Engine(manager, call()[0].bookkeeper)
    manager.states = [state_of(0), state_of(1)]
    refused_by = decode(manager.states[1]["chunkcache"], RankState)
    manager.states[1]["chunkcache"] = encode(structs.replace(refused_by, refusal=refusal))
    with pytest.raises(ChunkCacheError, match=message) as raised:
        asyncio.run(engine.calibrate([]))
    assert raised.value.status == status


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
    before = bench.bookkeeper.stats()
    assert send(prefetch, body) == (202, {})
    assert bench.bookkeeper.stats() == before
    (asked,) = manager.sent
    send(explain, {"messages": MESSAGES, "chunks": CHUNKS})
    request = manager.sent[1]
    assert (asked.prefetch.dp_rank, asked.prefetch.spans) == (0, request.spans)
    end = request.spans.spans[-1].end
    assert asked.prefetch.input_ids[:end] == request.input_ids[:end]


@pytest.mark.parametrize(
    ("knobs", "body", "param"),
    [
        ({}, {"texts": ["x"]}, "body"),
        (STORED, {"text": ["x"]}, "text"),
        (STORED, {"texts": []}, "texts"),
        (STORED, {"texts": [1]}, "texts"),
        (STORED, {"texts": ["x"], "chunks": [{"text": "y"}]}, "texts"),
        (STORED, {"texts": ["x"], "messages": 5}, "messages"),
        (STORED, {"retrieve": True, "messages": MESSAGES}, "retrieve"),
    ],
)
def test_hint_is_refused_by_name(call: Any, knobs: dict[str, Any], body: Any, param: str) -> None:
    _, manager, send = call(**knobs)
    status, answer = send(prefetch, body)
    assert (status, answer["param"], manager.sent) == (400, param, [])


# Stats


def test_stats_show_every_rank_with_its_mirror(call: Any) -> None:
    """By rank, whatever the order of the replies."""
    _, manager, send = call(num_ranks=2)
    manager.states = [state_of(1, free=7), state_of(0, free=8)]
    status, stats = send(Routes.chunkcache_stats)
    assert (status, stats["retrieval"], stats["reuse"]) == (200, None, "exact")
    counts = dict.fromkeys(("chunk_nodes", "events_behind", "restarts", "gaps", "resyncs"), 0)
    mirror = {**counts, "agrees": True}
    assert stats["ranks"] == [
        {"dp_rank": rank, "seq": 0, "chunk_nodes": 0, "free": free, "mirror": mirror}
        for rank, free in ((0, 8), (1, 7))
    ]
    manager.states = [state_of(0), {}]
    assert send(Routes.chunkcache_stats)[0] == 500, "a rank runs without the chunk cache"


# Retrieve


TALK = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "x"}, *MESSAGES]


def test_retrieved_passages_are_chunks(call: Any) -> None:
    """In the order and of the text that the index gives; the answer says what was searched for."""
    retriever = FakeRetriever()
    _, manager, send = call(retriever)
    manager.states = [state_of(0, Explanation(0, 0, 0))]
    status, plan = send(explain, {"messages": TALK, "retrieve": {"turns": 2, "k": 2}})
    assert (status, plan["order"]) == (200, ["a", "b"])
    assert (plan["retrieval"]["query"], plan["retrieval"]["k"]) == ("one\nwhy?", 2)
    assert "A\nalpha one;B\nbeta one;why?" in "".join(map(chr, manager.sent[0].input_ids))
    own = send(explain, {"messages": MESSAGES, "chunks": CHUNKS, "retrieve": False})[1]
    assert (own["retrieval"], len(retriever.batches)) == (None, 1)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"retrieve": True, "chunks": CHUNKS}, "retrieve: not together with chunks"),
        ({"retrieve": {"k": 300}}, "retrieve.k: 300 asked for, at most 256"),
        ({"retrieve": True, "reuse": "fused"}, "reuse: "),
    ],
    ids=str,
)
def test_retrieve_refuses_by_name_before_it_searches(call: Any, body: Any, message: str) -> None:
    retriever = FakeRetriever()
    bench, _, send = call(retriever)
    status, answer = send(explain, {"messages": MESSAGES, **body})
    assert (status, answer["message"][: len(message)]) == (400, message)
    assert retriever.batches == []
    assert bench.is_idle()


def test_retrieve_without_an_index_is_refused(call: Any) -> None:
    _, _, send = call()
    for endpoint, body in (
        (explain, {"messages": MESSAGES, "retrieve": {}}),
        (retrieve, {"query": "x"}),
    ):
        assert "--index" in send(endpoint, body)[1]["message"]


def test_search_alone(call: Any) -> None:
    _, manager, send = call(FakeRetriever())
    status, answer = send(retrieve, {"query": "two", "k": 3, "mode": "bm25"})
    assert (status, answer["mode"], answer["k"]) == (200, "bm25", 3)
    (passage,) = answer["passages"]
    assert (passage["id"], passage["text"]) == ("d", "D\ndelta two")
    _, answer = send(retrieve, {"messages": TALK, "turns": 2, "text": False})
    assert [passage["id"] for passage in answer["passages"]] == ["a", "b", "c"]
    assert "text" not in answer["passages"][0]
    assert manager.sent == []


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "query"),
        ({"query": "x", "messages": MESSAGES}, "query"),
        ({"query": "x", "turns": 2}, "turns"),
        ({"query": "refuse me"}, "query"),
        ({"messages": [{"role": "user", "content": {}}]}, "messages.0.content"),
        ([], "body"),
    ],
    ids=str,
)
def test_search_refuses_by_name(call: Any, body: Any, param: str) -> None:
    _, _, send = call(FakeRetriever())
    status, answer = send(retrieve, body)
    assert (status, answer["param"], answer["type"]) == (400, param, "BadRequestError")


def test_failing_search_is_no_400(call: Any) -> None:
    """Whoever sees it may try again; the request is counted as what it was."""
    retriever = FakeRetriever()
    retriever.fail["why?"] = OSError("/secret/path")
    bench, _, send = call(retriever)
    wish = {"messages": MESSAGES, "retrieve": True}
    for endpoint, body in ((explain, wish), (retrieve, {"messages": MESSAGES}), (chat, wish)):
        status, answer = send(endpoint, body)
        assert (status, answer["code"], answer["param"]) == (500, 500, None)
        assert answer["type"] == "InternalServerError"
        assert "secret" not in answer["message"]
    assert bench.bookkeeper.metrics.totals()["requests"] == {"unsearched": 1}
    assert bench.is_idle()


# Preprocess


def test_preprocess_runs_on_every_rank(call: Any) -> None:
    """One token each, behind the system message and the neighbours."""
    bench, manager, send = call(reuse="fused", num_ranks=2)
    manager.states = [state_of(rank, Explanation(20, 0, 20)) for rank in (0, 1)]
    head = [{"role": "system", "content": "sys"}]
    body = {"chunk": CHUNKS[0], "neighbors": [CHUNKS[1]], "messages": head}
    status, answer = send(preprocess, {**body, "extra_key": "k", "cache_salt": "s"})
    assert (status, answer["chunk_tokens"]) == (200, len(A.text) + 1)
    assert answer["neighbors"] == {"moved": 0, "computed": 2, "missing": 0}
    sent = prompts(manager)
    assert [obj.routed_dp_rank for obj in sent] == [0, 1]
    assert (answer["fates"]["exact"], answer["fates"]["relocated"]) == (6, 2)
    assert sum(answer["fates"].values()) == sum(len(obj.input_ids) for obj in sent)
    assert answer["seconds"] > 0
    for obj in sent:
        assert (obj.extra_key, obj.cache_salt) == ("k", "s")
        assert obj.sampling_params["max_new_tokens"] == 1
        assert told(obj).is_preprocessing
        text = "".join(map(chr, obj.input_ids))
        assert text.startswith(f"\x02\x01ssys\x03\x01u{B.text};{A.text};")
    assert bench.is_idle()
    assert bench.bookkeeper.metrics.totals()["requests"] == {"finished": 2}


def test_clear_store_asks_every_rank(call: Any) -> None:
    _, manager, send = call(reuse="fused", num_ranks=2)
    empty, full = state_of(1, cleared=Cleared(0, 0, 0)), state_of(0, cleared=Cleared(2, 3, 400))
    manager.states = [empty, full]
    status, answer = send(clear_store)
    assert manager.sent == [Asked(clear_store=True)]
    names = ("dp_rank", "chunks", "variants", "bytes")
    cleared = [dict(zip(names, row, strict=True)) for row in ((0, 2, 3, 400), (1, 0, 0, 0))]
    assert (status, answer) == (200, {"cleared": cleared})
    for state in ({}, state_of(1)):
        manager.states = [full, state]
        assert send(clear_store)[0] == 500


@pytest.mark.parametrize(
    ("exact", "sources", "failed", "expected"),
    [
        (16, ["host", "device"], False, (2, 1, 0)),
        (16, ["host", "gap"], False, (2, 0, 1)),
        (3, [], False, (0, 1, 2)),
        (16, ["host", "host"], True, (0, 1, 2)),
    ],
    ids=["found", "not even then", "no room", "computed after an error"],
)
def test_neighbors_without_plain_kv_are_computed_alone_first(
    call: Any, exact: int, sources: list[Any], failed: bool, expected: tuple[int, ...]
) -> None:
    """The last of three has none. What became of them is what the rank reports in the end."""
    bench, manager, send = call(reuse="fused")
    found = tuple(Source(0, 1, span, where) for span, where in ((1, "host"), (2, "gap")))
    manager.states = [state_of(0, Explanation(16, 0, 30, found))]
    manager.report = structs.replace(
        manager.report,
        exact=exact,
        sources=tuple(Source(0, 1, 1 + i, where) for i, where in enumerate(sources)),
        fallbacks=(Fallback.PASS_FAILED,) if failed else (),
    )
    body = {"chunk": CHUNKS[0], "neighbors": [CHUNKS[1], *({"text": each.text} for each in (C, D))]}
    became = send(preprocess, body)[1]["neighbors"]
    assert became == dict(zip(("moved", "computed", "missing"), expected, strict=True))
    texts = ["".join(map(chr, obj.input_ids))[3:-3] for obj in prompts(manager)]
    assert texts == [f"{D.text};", f"{B.text};{C.text};{D.text};{A.text};"]
    assert bench.is_idle()


def test_ranks_that_have_the_chunk_compute_nothing(call: Any) -> None:
    """One of two has it: the other one computes it."""
    bench, manager, send = call(reuse="fused", num_ranks=2)
    body = {"chunk": CHUNKS[0], "neighbors": [CHUNKS[1]]}
    manager.states = [state_of(rank, Explanation(20, 0, 20, is_kept=rank == 0)) for rank in (0, 1)]
    answer = send(preprocess, body)[1]
    assert (answer["kept"], sum(answer["neighbors"].values())) == (False, 1)
    assert [obj.routed_dp_rank for obj in prompts(manager)] == [1]
    manager.sent.clear()
    manager.states = [state_of(rank, Explanation(20, 0, 20, is_kept=True)) for rank in (0, 1)]
    answer = send(preprocess, body)[1]
    assert (answer["kept"], answer["chunk_tokens"], answer["fates"]) == (True, len(A.text) + 1, {})
    assert [obj.dp_rank for obj in manager.sent] == [0, 1]
    assert bench.is_idle()


def test_all_ranks_compute_at_once(call: Any) -> None:
    _, manager, send = call(reuse="fused", num_ranks=3)
    manager.states = [state_of(rank, Explanation(20, 0, 20)) for rank in range(3)]
    answer_one, barrier = manager.generate_request, asyncio.Barrier(3)

    async def together(obj: Any, raw_request: Any) -> AsyncIterator[Any]:
        async with asyncio.timeout(DEADLINE_S):
            await barrier.wait()
        async for output in answer_one(obj, raw_request):
            yield output

    manager.generate_request = together
    status, answer = send(preprocess, {"chunk": CHUNKS[0]})
    assert (status, answer["kept"]) == (200, False)


def test_error_of_one_rank_is_the_answer(call: Any) -> None:
    """When all are done."""
    bench, manager, send = call(reuse="fused", num_ranks=2)
    manager.states = [state_of(0, Explanation(20, 0, 20)), state_of(1)]
    status, answer = send(preprocess, {"chunk": CHUNKS[0]})
    assert (status, answer["message"]) == (500, "rank 1 does not explain")
    assert bench.is_idle()


@pytest.mark.parametrize(("wait_s", "num_asked"), [(10.0, 4), (0.0, 1)])
def test_chunk_waits_for_the_rank_s_storage(
    call: Any, monkeypatch: pytest.MonkeyPatch, wait_s: float, num_asked: int
) -> None:
    """It is asked again until its neighbours have come, and for so long at most."""
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
    assert send(preprocess, {"chunk": CHUNKS[0], "neighbors": [CHUNKS[1]]})[0] == 200
    asked = prompts(manager)
    assert (manager.sent.index(asked[0]), len(asked)) == (num_asked, 1 if num_asked == 4 else 2)


@pytest.mark.parametrize(
    ("knobs", "body", "field"),
    [
        ({"reuse": "fused", "max_chunks": 1}, {"chunk": CHUNKS[0], "neighbors": CHUNKS}, "2 given"),
        ({"reuse": "fused", "max_chunk_chars": 10}, {"chunk": CHUNKS[0]}, "chunk.0.text"),
        ({"reuse": "fused"}, {"chunk": {"text": "x" * 5000}}, "5001 tokens"),
    ],
    ids=["too many", "too many characters", "too many tokens"],
)
def test_preprocess_refuses_by_name(call: Any, knobs: Any, body: Any, field: str) -> None:
    bench, manager, send = call(**knobs)
    status, answer = send(preprocess, body)
    assert (status, manager.sent) == (400, [])
    assert field in answer["message"]
    assert bench.is_idle()


# Parts


def test_generate_takes_order_and_reuse(call: Any) -> None:
    bench, _, send = call(reuse="fused")
    bench.reply(bench.parts([[A, B], "q"]))
    wish = {"order": "retriever", "reuse": {"mode": "fused", "ratio": 0.5}}
    status, answer = send(generate, {"parts": [{"chunks": CHUNKS[::-1]}, "q"], **wish})
    assert status == 200
    told, reuse = answer["chunkcache"], answer["chunkcache"]["reuse"]
    assert (told["order"], told["fates"]["relocated"]) == (["b", "a"], 1)
    assert (reuse["mode"], reuse["ratio"]) == ("fused", 0.5)


def test_clients_cannot_write_our_params(call: Any) -> None:
    """They would come with our mark and be believed."""
    _, manager, send = call(reuse="fused")
    forged = {"chunkcache_spans": "[1, {}]", "chunkcache_selector": "none", MARK_KEY: "x"}
    given = {"custom_params": {**forged, "theirs": 1}, "top_k": 3}
    body = {"parts": [{"chunks": CHUNKS}, "q"], "sampling_params": given}
    assert send(generate, body)[0] == 200
    params = manager.sent[0].sampling_params
    assert (params["top_k"], params["custom_params"]["theirs"]) == (3, 1)
    assert "chunkcache_selector" not in params["custom_params"]
    spans = told(manager.sent[0])
    assert (len(spans.spans), spans.fusion, spans.is_preprocessing) == (2, None, False)


def test_generate_streams_events(call: Any) -> None:
    bench, _, send = call()
    status, events = send(generate, {"parts": [{"chunks": CHUNKS}, "q"], "stream": True})
    assert (status, events[-1]) == (200, "[DONE]")
    assert [list(json.loads(event)) for event in events[:-1]] == [
        ["text", "output_ids", "index", "meta_info", "chunkcache"]
    ]
    assert json.loads(events[-2])["chunkcache"]["order"] == ["a", "b"]
    assert bench.is_idle()


@pytest.mark.parametrize(
    ("complaint", "field"),
    [
        ("req.logprob_start_len=9 is higher than the number of input tokens", "logprob_start_len"),
        ("min_new_tokens must be in [0, max_new_tokens]", "sampling_params.min_new_tokens"),
        ("Failed to compile json grammar: regex of the schema", "sampling_params.json_schema"),
        ("Request prompt exceeds the KV memory budget: input_len=5.", "parts"),
        ("Input length (9 tokens) exceeds the maximum allowed length (5 tokens).", "parts"),
    ],
)
def test_complaint_of_sglangs_is_behind_the_field_it_is_about(
    call: Any, complaint: str, field: str
) -> None:
    bench, manager, send = call()
    manager.error = ValueError(complaint)
    params = {"min_new_tokens": 0, "max_new_tokens": 9, "json_schema": "{}"}
    wish = {"return_logprob": True, "logprob_start_len": 1}
    for stream in (True, False):
        body = {"parts": ["x"], **wish, "sampling_params": params, "stream": stream}
        status, answer = send(generate, body)
        assert (status, answer["param"]) == (400, field)
    assert bench.bookkeeper.metrics.totals()["requests"] == {"refused": 2}
    assert bench.is_idle()


@pytest.mark.parametrize("stream", [True, False])
def test_logprobs_from_beyond_the_prompt_are_refused(call: Any, stream: bool) -> None:
    """Before SGLang would, in a stream with a 200. Without logprobs the field means nothing."""
    bench, manager, send = call()
    body = {"parts": ["abc"], "stream": stream, "return_logprob": True}
    assert send(generate, {**body, "logprob_start_len": 99, "return_logprob": False})[0] == 200
    length = len(manager.sent.pop().input_ids)
    status, answer = send(generate, {**body, "logprob_start_len": length + 1})
    assert (status, answer["param"], manager.sent) == (400, "logprob_start_len", [])
    assert bench.is_idle()
    assert send(generate, {**body, "logprob_start_len": length})[0] == 200


def test_generate_refuses_parameters_by_name(call: Any) -> None:
    """Before anything is planned or sent. All of them: guard/test_sampling.py."""
    bench, manager, send = call()
    for name in ("n", "no_such"):
        status, answer = send(generate, {"parts": ["x"], "sampling_params": {name: 2}})
        assert (status, answer["param"], manager.sent) == (400, f"sampling_params.{name}", [])
    assert bench.bookkeeper.metrics.totals()["requests"] == {"refused": 2}


# Chunks of earlier messages

DOC = {"id": "a", "text": A.text}
REPLY = {"role": "assistant", "content": "so"}
ALPHA = {"role": "user", "content": "alpha"}


def question(*chunks: Any, text: str = "why?", **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, "chunks": list(chunks), **fields}


def parts(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(content)}


def many(num: int) -> dict[str, Any]:
    return question(*[{"text": str(i)} for i in range(num)])


def long(char: str, length: int) -> dict[str, Any]:
    return question({"text": char * length})


SYSTEM = {"role": "system", "content": "x", "chunks": [DOC]}
TWICE = "messages.0.chunks: chunks are at the top level, too"
BAD_HISTORIES: list[tuple[list[Any], dict[str, Any], str]] = [
    ([SYSTEM, question()], {}, "messages.0.chunks: only a user's"),
    ([question(), {**REPLY, "chunks": []}, question()], {}, "messages.1.chunks: only a user's"),
    ([question(DOC)], {"chunks": [DOC]}, TWICE),
    ([question(DOC)], {"chunks": []}, TWICE),
    ([{**question(), "chunks": DOC}], {}, "messages.0.chunks: must be a valid list"),
    ([question({"id": "a"}), REPLY, question()], {}, "messages.0.chunks.0.text: is missing"),
    ([many(150), REPLY, question()], {"max_tokens": 1}, ""),
    ([many(150), REPLY, many(150)], {}, "chunks: 300 given, those of all messages counted"),
    ([{**MESSAGES[0], "chunk": [DOC]}], {}, "messages.0.chunk: is no field here; did you mean"),
    ([long("x", 300_000), REPLY, question()], {}, "messages.0.chunks.0.text: 300000 characters"),
    ([long("x", 3000), REPLY, question()], {}, "messages.0.chunks: '0' has"),
    ([long("x", 4050), REPLY, long("y", 4050)], {}, "chunks: more than 2000 tokens in all"),
    (MESSAGES, {"chunks": [{"text": "x" * 300_000}]}, "chunks.0.text: 300000 characters"),
    (MESSAGES, {"history": "always"}, "history: "),
    ([{"role": "user"}], {}, "messages.0.content: is missing"),
    ([parts({"type": "text", "text": 5})], {}, "messages.0.content.0.text: must be a string"),
    ([question(), REPLY, parts("a")], {}, "messages.2.content.0.type: must be 'text'"),
    ([parts({"type": "image_url"})], {}, "messages.0.content.0.type: must be"),
    (MESSAGES, {"max_completion_tokens": -2}, "max_completion_tokens: must be"),
]


@pytest.mark.parametrize(("messages", "fields", "said"), BAD_HISTORIES)
def test_bad_history_is_refused_by_the_messages_index(
    call: MakeServer, messages: Any, fields: Any, said: str
) -> None:
    """Never an answer from other documents than the client means."""
    _, _, send = call()
    for endpoint in (chat, explain):
        status, answer = send(endpoint, {"messages": messages, **fields})
        if not said:
            assert status in (200, 500), "within the limit"
            continue
        assert (status, answer["message"][: len(said)]) == (400, said)
        assert answer["param"] == answer["message"].split(":")[0]


def test_messages_with_chunks_are_not_for_parts(call: MakeServer) -> None:
    _, _, send = call()
    status, answer = send(generate, {"parts": ["x"], "messages": [REPLY, question(DOC)]})
    assert (status, answer["param"]) == (400, "messages.1.chunks")


def test_null_chunks_of_a_message_are_not_said(call: MakeServer) -> None:
    bench, manager, send = call()
    messages = [{**question(), "chunks": None}, REPLY, question(DOC)]
    status, answer = send(chat, {"messages": messages, "history": "required", "stream": True})
    assert (status, answer["code"], answer["param"]) == (422, 422, "messages.0.chunks")
    assert (manager.sent, bench.bookkeeper.metrics.totals()["requests"]) == ([], {"refused": 1})


def test_search_goes_with_earlier_chunks_alone(call: MakeServer) -> None:
    """The question's chunks are those that are found; all count against the limit."""
    _, _, send = call(FakeRetriever(), max_chunks=4)
    found = {"retrieve": {"k": 2}}
    status, answer = send(chat, {"messages": [question(DOC)], **found})
    assert (status, answer["message"]) == (400, "retrieve: not together with chunks")
    status, answer = send(chat, {"messages": [many(4), REPLY, ALPHA], **found})
    assert (status, answer["param"]) == (400, "retrieve.k")


@pytest.mark.parametrize("messages", [[{"role": "system", "content": "s"}, REPLY], [REPLY]])
def test_continued_answer_without_a_question_is_no_fault_of_ours(
    call: MakeServer, messages: Any
) -> None:
    _, _, send = call()
    for fields in ({}, {"conversation_id": "c"}):
        status, _ = send(chat, {"messages": messages, "continue_final_message": True, **fields})
        assert status == (200 if len(messages) == 2 else 400)
