"""A prefill and a decode server: SGLang's own trees, the same prompt made by both fronts, its KV
sent from one to the other (NIXL, which `pip install nixl` brings)."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from eval.http import post
from eval.server import Server, free_port
from eval.world.world import World
from tests.e2e.asking import CHAT, GENERATE, Reply, body_of, send, stats_of, user
from tests.e2e.conftest import STRICT
from tests.e2e.lethal import LETHAL, Lethal
from tests.soak.answers import LOGPROBS, answer_of, differences, logprob_difference, prompt_ids

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

PASSAGES = World(78, 20).passages
ON_CPU = ("-m", "tests.e2e.cpu_server")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Server, int]]:
    """Prefill, decode, and the port at which they meet."""
    pytest.importorskip("nixl")
    logs: Path = tmp_path_factory.mktemp("servers")
    port = free_port()
    # before a send of what was cached, overlapped prefills record a CUDA event
    flags = ["--model-path", "bundled", "--max-total-tokens", "8192", "--disable-overlap-schedule"]
    flags += ["--disaggregation-transfer-backend", "nixl", "--disaggregation-mode"]
    meet = ["--disaggregation-bootstrap-port", str(port)]
    how: dict[str, Any] = {"env": STRICT, "launcher": ON_CPU}
    with (
        Server([*flags, "prefill", *meet], log=logs / "prefill.log", **how) as prefill,
        Server([*flags, "decode"], log=logs / "decode.log", **how) as decode,
    ):
        yield prefill, decode, port
        for server in (prefill, decode):
            assert server.is_running, f"the server died:\n{server.log_tail(40)}"


def ask(pair: tuple[Server, Server, int], body: dict[str, Any]) -> list[Reply]:
    """What both say: a client, or a router between, sends the same to both."""
    *servers, port = pair
    room = random.getrandbits(60)
    meet = {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": room}
    with ThreadPoolExecutor() as pool:
        return [*pool.map(lambda server: post(server.url + CHAT, {**body, **meet}), servers)]


def test_answers_are_those_of_one_server(
    pair: tuple[Server, Server, int], rag_server: Server, tolerances: dict[str, float]
) -> None:
    found, decoded, reference = [], [], []
    for i in (0, 0, 2):
        chunks = PASSAGES[i : i + 4] if i == 0 else PASSAGES[:2] + PASSAGES[6:8]
        body = body_of(chunks, f"Who bought it, {i}?", **LOGPROBS, ignore_eos=True)
        first, whole = ask(pair, body)
        assert prompt_ids(first) == prompt_ids(whole)
        assert [reply["chunkcache"]["order"] for reply in (first, whole)] == [
            [each.id for each in chunks]
        ] * 2
        found.append(first["chunkcache"]["fates"]["exact"])
        decoded.append(answer_of(whole["choices"][0]["meta_info"]))
        told = post(rag_server.url + CHAT, {**body, "cache_salt": f"alone{i}"})
        assert prompt_ids(told) == prompt_ids(whole)
        reference.append(answer_of(told["choices"][0]["meta_info"]))
    assert found[0] == 0
    assert found[1] > found[2] > 40, "of the same prompt, and of one that begins as it"
    assert differences(reference, decoded) == []
    assert max(map(logprob_difference, reference, decoded)) < tolerances["float32"]


def test_the_tree_is_sglangs(pair: tuple[Server, Server, int]) -> None:
    for server in pair[:2]:
        assert stats_of(server)["tree"]["kind"] == "stock"
        assert "--chunkcache-order retriever: both servers" in server.log.read_text()


@pytest.mark.parametrize("field", ["order", "conversation_id", "retrieve"])
def test_what_only_one_server_knows_is_refused(
    pair: tuple[Server, Server, int], field: str
) -> None:
    """The decode server would read the KV of another prompt than its own."""
    value = {"order": "tree", "conversation_id": "c", "retrieve": True}[field]
    body = {"messages": [user("Who?")], field: value}
    for server in pair[:2]:
        status, text = send(server.url + CHAT, body)
        assert status == 400
        assert f"{field}: not with --disaggregation-mode" in text


def test_what_a_pair_does_not_answer_is_refused(pair: tuple[Server, Server, int]) -> None:
    """Several answers would meet in one room, and a prompt of parts names none."""
    for server in pair[:2]:
        for path, body, named in (
            (GENERATE, {"parts": ["Who?"]}, "parts: not with --disaggregation-mode"),
            (CHAT, {"messages": [user("Who?")], "n": 2}, "n: not with --disaggregation-mode"),
        ):
            status, text = send(server.url + path, body)
            assert (status, named in text) == (400, True), text


@pytest.mark.parametrize("case", [each for each in LETHAL if not each.is_alone], ids=lambda c: c.id)
def test_lethal_request_is_refused(pair: tuple[Server, Server, int], case: Lethal) -> None:
    prefill, decode, _ = pair
    server = decode if case.mode == "decode" else prefill
    path, body = case.sent(stream=False)
    status, text = send(server.url + path, body)
    assert (status, f"{case.field}: must" in text) == (400, True), text
    meet = {field: value for field, value in body.items() if field.startswith("bootstrap")}
    assert send(server.url + CHAT, {"messages": [user("Who?")], **meet})[0] == 400
    assert send(server.url + "/health", "GET")[0] == 200
