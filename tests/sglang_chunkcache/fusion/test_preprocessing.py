"""Chunks computed ahead of requests on a real model, from the command's calls to the store
(FusionRAG 3.1, eq. 10).

command ──► front, without HTTP ──► scheduler, without processes ──► model, pool and store
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from radix_ext.variants import Variant
from sglang_chunkcache.front.engine import Engine
from sglang_chunkcache.front.parts import Parts
from sglang_chunkcache.front.routes import Routes
from sglang_chunkcache.fusion import moving
from sglang_chunkcache.fusion.relocate import copy_moved
from sglang_chunkcache.preprocess import preprocess
from sglang_chunkcache.scheduler.reporting import rank_state
from sglang_chunkcache.wire.message import decode, encode
from sglang_chunkcache.wire.report import ANSWER_KEY
from sglang_chunkcache.wire.state import STATE_KEY, Asked
from tests import models
from tests.kit.front_bench import Bench, make_output
from tests.kit.tensors import held_kv
from tests.reference.model_scheduler import ModelScheduler
from tests.reference.scheduler import SCORED, FakeReq

pytestmark = pytest.mark.engine

TEXTS = {
    name: f"{name} {word} " * 4
    for name, word in zip("abcdef", ("two", "owl", "lamp", "r", "sea", "hill"), strict=True)
}
NEIGHBORS = {"a": "bcd", "b": "cae", "c": "adf", "d": "fe", "e": "a", "f": "ecba"}
ORDERS = ("abcdef", "fedcba", "dafbec")
TOLERANCE = 5e-5


class Manager:
    """SGLang's tokenizer manager in front of one scheduler that serves one request at a time."""

    incremental_streaming_output = False

    def __init__(self, scheduler: ModelScheduler) -> None:
        self.scheduler = scheduler

    def auto_create_handle_loop(self) -> None:
        pass

    async def get_internal_state_communicator(self, message: Any) -> list[Any]:
        state = rank_state(self.scheduler.cache, 0, decode(message.rid, Asked))
        return [SimpleNamespace(internal_state={STATE_KEY: encode(state)})]

    async def generate_request(self, obj: Any, raw_request: Any) -> AsyncIterator[Any]:
        req = FakeReq(obj.input_ids, obj.sampling_params["custom_params"])
        self.scheduler.serve(req, answer=[65])
        assert req.customized_info is not None
        yield make_output([65], 0, "length", 0, req.customized_info[ANSWER_KEY])


class Server:
    """What the command's client talks to."""

    url = "in-process"

    def __init__(self, runner: Any, *, pool: int = 1200, store_bytes: int = 1 << 25) -> None:
        bench = Bench(reuse="fused", recompute_attention="masked", **SCORED)
        room = {"store_bytes": store_bytes, "prefill_budget": 256}
        self.scheduler = ModelScheduler(runner, pool, bench.config, **room)
        parts, engine = Parts(bench.config), Engine(Manager(self.scheduler), bench.bookkeeper)
        chat = SimpleNamespace(default_chat_template_kwargs={})
        known = {name: getattr(bench, name) for name in ("bookkeeper", "drafter", "planner")}
        vars(parts).update(chat=chat, engine=engine, **known)
        self._routes = Routes(parts)
        self.put: list[tuple[Any, Variant, Any]] = []
        """All that has entered the store."""
        put = self.scheduler.store.put

        def record(identity: Any, variant: Variant) -> bool:
            is_put = put(identity, variant)
            self.put += [(identity, variant, held_kv(variant.blob))] * is_put
            return is_put

        self.scheduler.store.put = record  # type: ignore[method-assign]

    def get(self, path: str) -> dict[str, Any]:
        return {"reuse": "fused", "ranks": [self.scheduler.fuser.stats()]}

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        if path == "/rag/v1/generate":
            self.scheduler.forward()  # another request's
            return {}
        if path == "/chunkcache/explain":
            return {"spans": [{"start": 0, "end": 4}]}

        async def stream() -> AsyncIterator[bytes]:
            yield json.dumps(body).encode()

        async def is_disconnected() -> bool:
            return False

        asked = {"stream": stream, "is_disconnected": is_disconnected}
        request: Any = SimpleNamespace(headers={}, state=SimpleNamespace(), **asked)
        answer = asyncio.run(self._routes.chunkcache_preprocess(request))
        assert answer.status_code == 200, answer.body
        found: dict[str, Any] = json.loads(answer.body)
        return found

    def fill(self, order: Sequence[str] = ORDERS[0]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Preprocess the corpus in this order; what is said of chunks alone and of those behind
        their neighbours."""
        client: Any = self
        neighbors = {name: list(NEIGHBORS[name]) for name in order}
        texts = {name: TEXTS[name] for name in order}
        told = preprocess(client, texts, neighbors, top_n=10, batch=1)
        self.scheduler.check()
        return told["alone"], told["behind_neighbors"]

    def variants(self) -> dict[tuple[Any, ...], Variant]:
        """What the store has: (chunk, the chunks before it, whether preprocessed) -> variant."""
        return {
            (identity, variant.prefix, variant.preprocessed): variant
            for identity, of_chunk in self.scheduler.store._chunks.items()
            for variant in of_chunk.values()
        }


def assert_close(got: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(got, expected, rtol=0, atol=TOLERANCE)


def assert_same(got: Variant, expected: Variant, my_kv: Any, their_kv: Any) -> None:
    for mine, theirs in zip(my_kv, their_kv, strict=True):
        assert_close(mine, theirs)
    mine, theirs = got.scores, expected.scores
    assert mine is not None
    assert theirs is not None
    assert mine.prefix_lens == theirs.prefix_lens
    assert (*mine.inter, mine.intra) == pytest.approx((*theirs.inter, theirs.intra), abs=TOLERANCE)
    for name in ("context", "received"):
        assert_close(getattr(mine, name), getattr(theirs, name))


def assert_all_same(got: Server, expected: Server) -> None:
    mine, theirs = got.variants(), expected.variants()
    assert mine.keys() == theirs.keys()
    for key, variant in mine.items():
        other = theirs[key]
        assert_same(variant, other, held_kv(variant.blob), held_kv(other.blob))


@pytest.fixture
def runner() -> Iterator[Any]:
    runner = models.runner("llama")
    yield runner
    models.assert_given_back(runner)


def test_the_order_of_the_corpus_does_not_matter(runner: Any) -> None:
    """Neighbours are plain KV, each computed alone (eq. 10)."""
    first, *others = (Server(runner) for _ in ORDERS)
    for server, order in zip((first, *others), ORDERS, strict=True):
        server.fill(order)
    assert sum(ahead for _, _, ahead in first.variants()) == len(NEIGHBORS)
    for server in others:
        assert_all_same(server, first)


def test_what_is_there_is_not_computed_again(runner: Any) -> None:
    server = Server(runner)
    server.fill()
    num_put = len(server.put)
    assert [(told["chunks"], told["kept"]) for told in server.fill(ORDERS[1])] == [(0, 6)] * 2
    assert len(server.put) == num_put


def test_neighbors_are_plain_though_the_store_holds_few(runner: Any) -> None:
    """What the store has lost is computed alone again: chunks become what they do with room."""
    roomy, tight = Server(runner), Server(runner, store_bytes=40_000)
    _, told = roomy.fill()
    assert told["neighbors"] == {"moved": 16, "computed": 0, "missing": 0}
    found = tight.fill()[1]["neighbors"]
    assert tight.scheduler.store.stats().num_evicted >= 6
    assert (sum(found.values()), found["missing"]) == (16, 0)
    expected = {(identity, variant.prefix): (variant, kv) for identity, variant, kv in roomy.put}
    for identity, variant, kv in tight.put:
        other, its_kv = expected[identity, variant.prefix]
        assert_same(variant, other, kv, its_kv)


def test_failed_chunk_is_not_stored(runner: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its neighbours were computed in context. It is missing, and the next run makes it."""
    clean, server = Server(runner), Server(runner)
    clean.fill()
    moves = count()

    def failing(*args: Any, **options: Any) -> None:
        if not next(moves):
            raise RuntimeError("once")
        copy_moved(*args, **options)

    monkeypatch.setattr(moving, "copy_moved", failing)
    assert server.fill()[1]["neighbors"]["missing"] > 0
    assert server.fill()[1]["chunks"] == 1
    assert_all_same(server, clean)


def test_neighbors_that_nothing_can_hold_are_missing(runner: Any) -> None:
    """Neither store nor pool. The first is computed in its place as it is alone."""
    server = Server(runner, pool=200, store_bytes=1)
    found = server.fill()[1]["neighbors"]
    assert sum(found.values()) == 16
    assert found["missing"] > 0
    assert server.put == []
