"""Endpoints beside the chat's, without an engine: what they send to SGLang's manager, and what they make of its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.utils.auth import AuthLevel

from sglang_chunkcache import endpoints
from sglang_chunkcache.endpoints import chunkcache_explain, chunkcache_preprocess, rag_generate
from sglang_chunkcache.rag_request import Identity
from tests.sglang_chunkcache.service_bench import A, B, Bench, make_output

# FastAPI would have us return plain objects, OpenAI has clients send `max_completion_tokens`: SGLang uses and takes both.
pytestmark = pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated", "ignore:max_tokens is deprecated")

MESSAGES = [{"role": "user", "content": "why?"}]
CHUNKS = [{"id": "a", "text": A.text}, {"id": "b", "text": B.text}]
Endpoint = Callable[[Any], Awaitable[Any]]


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


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Bench, Manager, Callable[..., tuple[int, Any]]]]:
    """(bench, manager, how to call an endpoint with a body) for a server of these settings."""

    def make(**knobs: Any) -> tuple[Bench, Manager, Callable[..., tuple[int, Any]]]:
        bench = Bench(**knobs)
        manager = Manager(bench)
        chat = SimpleNamespace(_validate_request=lambda request: None, default_chat_template_kwargs={})
        state = SimpleNamespace(config=bench.service.config, service=bench.service, chat=chat, manager=manager)
        monkeypatch.setattr(endpoints, "_state", state, raising=False)

        def send(endpoint: Endpoint, body: Any) -> tuple[int, Any]:
            async def read() -> bytes:
                return json.dumps(body).encode()

            raw_request = SimpleNamespace(headers={}, state=SimpleNamespace(), body=read)
            answer: Any = asyncio.run(endpoint(raw_request))  # type: ignore[arg-type]
            return answer.status_code, json.loads(answer.body)

        return bench, manager, send

    return make


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
