"""Chunk KV that outlives its server: two servers, one after the other, on one folder.
Pools are poisoned, as in test_reuse.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from eval.http import get, post
from eval.server import Server
from eval.world.world import Passage, World
from sglang_chunkcache.client import Client, settle
from tests.e2e import hostile, test_bad_input, test_fuzz
from tests.e2e.hostile import PREFETCH
from tests.e2e.test_reuse import ask, flush, fused, logprobs_of, sources_of, text_of
from tests.polling import until
from tests.soak import mixed_load
from tests.soak.answers import STRICT

pytestmark = pytest.mark.engine

SALT = "pepper"
QUESTION = "Which passage comes first?"


def chunk_of(passage: Passage) -> dict[str, str]:
    return {"id": passage.id, "text": passage.text}


def storage_of(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = get(server.url + "/chunkcache/stats")["ranks"][0]["storage"]
    return found


def settled(server: Server) -> dict[str, Any]:
    """Nothing waits to enter store or storage."""
    settle(Client(server.url, None))
    return drained(server)


def drained(server: Server) -> dict[str, Any]:
    """Nothing waits to enter the storage."""
    return until(lambda: found if not (found := storage_of(server))["queue"] else None)


def moved(server: Server, passages: Sequence[Passage], **fields: Any) -> dict[str, Any]:
    return ask(server, passages, QUESTION, reuse=fused("query", 0.25), **fields)


def exactly(server: Server, passages: Sequence[Passage]) -> dict[str, Any]:
    """After a head of its own."""
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": QUESTION}]
    return ask(server, passages[3:5], QUESTION, messages=messages)


class Twice(NamedTuple):
    """The second server, and what the first one said."""

    server: Server
    passages: Sequence[Passage]
    in_memory: dict[str, Any]
    exact: dict[str, Any]
    written: dict[str, Any]
    damaged: Passage
    log: Path
    num_known: int
    """Of chunks by the second one's front, before a request."""


@pytest.fixture(scope="module")
def twice(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twice]:
    """The first server stores preprocessed chunks, moves them from memory, and ends.
    One more entry is damaged afterwards."""
    folder = tmp_path_factory.mktemp("storage")
    flags = [
        *mixed_load.FLAGS,
        *(
            "--chunkcache-calibrate",
            "off",
            "--chunkcache-selector",
            "query",
            "--chunkcache-audit-share",
            "0",
        ),
        *(
            "--chunkcache-store-threshold",
            "1",
            "--chunkcache-storage-backend",
            "file",
            "--chunkcache-host-mib",
            "10",
        ),
        *(
            "--chunkcache-storage-backend-extra-config",
            json.dumps({"directory": str(folder / "kept")}),
        ),
    ]
    env = {
        **STRICT,
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder),
        "SGLANG_CHUNKCACHE_STORAGE_SECRET": "s",
    }
    passages = World(77, 20, num_kinds=1).passages[:6]
    with Server(flags, log=folder / "first.log", launcher=mixed_load.POISONED, env=env) as server:
        for passage, neighbor in pairwise(passages[:5]):
            body = {"chunk": chunk_of(passage), "neighbors": [chunk_of(neighbor)]}
            post(server.url + "/chunkcache/preprocess", body)
        settled(server)
        flush(server)  # the store keeps what was preprocessed, and nothing else is a source
        in_memory = moved(server, passages[:3])
        names = set(entries(folder))
        ask(server, [passages[5]], QUESTION, cache_salt=SALT)
        settled(server)
        (name,) = set(entries(folder)) - names
        for _ in range(4):  # computed, found, found in host memory too, written
            exact = exactly(server, passages)
        written = settled(server)
        assert server.is_running, server.log_tail(40)
    file = entries(folder)[name]
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    log = folder / "second.log"
    with Server(flags, log=log, launcher=mixed_load.POISONED, env=env) as server:
        num_known = get(server.url + "/chunkcache/stats")["tree"]["nodes"]
        yield Twice(server, passages, in_memory, exact, written, passages[5], log, num_known)
        assert server.is_running, f"the server died:\n{server.log_tail(40)}"
    assert mixed_load.problems_of_log(log) == []


def entries(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in (folder / "kept" / "rank0" / "entries").iterdir()}


def test_first_request_after_a_restart_moves_what_was_stored(twice: Twice) -> None:
    """Chunk by chunk from where the first server moved them,
    and the same answer to the last bit of its log probabilities."""
    assert storage_of(twice.server)["loaded"] >= 4
    reply = moved(twice.server, twice.passages[:3])
    assert [place for _, place, _ in sources_of(reply) if place == "host"] == ["host"] * 3
    assert sources_of(reply) == sources_of(twice.in_memory)
    assert reply["chunkcache"]["fates"] == twice.in_memory["chunkcache"]["fates"]
    assert text_of(reply) == text_of(twice.in_memory)
    assert logprobs_of(reply) == logprobs_of(twice.in_memory)


def test_first_request_after_a_restart_finds_its_exact_chain(twice: Twice) -> None:
    """It was in host memory before there were requests, and the answer is the first server's."""
    assert twice.num_known > 0, "the front was not told"
    reply = exactly(twice.server, twice.passages)
    told = reply["chunkcache"]
    assert told["loaded"] >= told["fates"]["exact"] - 1 > 50, (
        "every prompt begins with the same token"
    )
    assert text_of(reply) == text_of(twice.exact)
    assert logprobs_of(reply) == pytest.approx(logprobs_of(twice.exact), abs=1e-5)


def test_what_was_stored_is_not_written_again(twice: Twice) -> None:
    """The second server knows it by its names, as the start has printed."""
    assert twice.written["num_entries"] == twice.written["written"] > 4
    assert f"{twice.written['num_entries']} entries" in twice.log.read_text()
    assert storage_of(twice.server)["problems"] == {}
    assert settled(twice.server)["num_entries"] >= twice.written["num_entries"]


def test_damaged_entry_is_refused_and_computed(twice: Twice) -> None:
    """A tenant's, so it is asked for when its request comes.
    It is counted, dropped and written anew."""
    before = settled(twice.server)["written"]
    reply = moved(twice.server, [twice.damaged], cache_salt=SALT)
    assert reply["chunkcache"]["fates"]["relocated"] == 0
    assert settled(twice.server)["problems"] == {"damaged": 1}

    def is_written() -> bool:
        if settled(twice.server)["written"] > before:
            return True
        flush(
            twice.server
            # the request was over before the entry had been read: the next that computes the chunk
            # writes it
        )
        moved(twice.server, [twice.damaged], cache_salt=SALT)
        return False

    until(is_written)
    assert settled(twice.server)["problems"] == {"damaged": 1}
    assert "is not used: damaged" in twice.log.read_text()


def test_tenants_chunk_is_loaded_with_its_request(twice: Twice) -> None:
    """Too late for this one on an idle server, in time for the next whose chunk has left the
    device."""
    chunk, other = twice.passages[3], twice.passages[4]
    ask(twice.server, [other, chunk], QUESTION, cache_salt="paprika")
    settled(twice.server)
    flush(twice.server)
    before = storage_of(twice.server)["loaded"]
    first = moved(twice.server, [chunk], cache_salt="paprika")
    assert first["chunkcache"]["fates"]["relocated"] in (0, *range(10, 1000))
    assert settled(twice.server)["loaded"] > before
    stranger = moved(twice.server, [chunk], cache_salt="saffron")
    assert (
        stranger["chunkcache"]["fates"]["relocated"]
        == stranger["chunkcache"]["fates"]["exact"]
        == 0
    )


def test_hint_has_a_tenants_chunk_loaded_ahead(twice: Twice) -> None:
    """Its request moves it. The hint is not told what is there,
    and has nothing loaded of others."""
    chunk, other, url = twice.passages[2], twice.passages[4], twice.server.url
    ask(twice.server, [other, chunk], QUESTION, cache_salt="mint")
    settled(twice.server)
    flush(twice.server)
    hint = {"texts": [chunk.text], "reuse": fused("query", 0.25)}
    before = storage_of(twice.server)
    assert post(url + "/chunkcache/prefetch", {**hint, "cache_salt": "thyme"}) == {}
    assert settled(twice.server)["loaded"] == before["loaded"]
    assert post(url + "/chunkcache/prefetch", {**hint, "cache_salt": "mint"}) == {}
    assert settled(twice.server)["prefetch"]["loaded"] > 0
    reply = moved(twice.server, [chunk], cache_salt="mint")
    assert reply["chunkcache"]["fates"]["relocated"] > 10
    assert storage_of(twice.server)["prefetch"]["used"] > 0


TEXTS = {"texts": ["The company Dravex makes clocks."]}
HINTS: list[tuple[str, Any, str]] = [
    ("no JSON", b"{no json", "body"),
    ("a list", [TEXTS], "body"),
    ("too many values", b'{"texts": [' + b"1," * 200_000 + b"1]}", "body"),
    ("nested 900 deep", test_bad_input.deep({"texts": "HERE"}), "texts"),
    ("texts a string", {"texts": "Dravex"}, "texts"),
    ("texts of numbers", {"texts": [1]}, "texts"),
    ("texts not unicode", b'{"texts": ["\\ud800"]}', "body"),
    ("too many texts", {"texts": ["x"] * 300}, "chunks"),
    ("text too long", {"texts": ["x" * 300_000]}, "chunks.0.text"),
    ("texts longer than the context", {"texts": ["clocks lamps " * 5000]}, "chunks"),
    ("texts and chunks", {**TEXTS, "chunks": [{"text": "x"}]}, "texts"),
    ("neither", {"messages": []}, "texts"),
    ("misspelt", {"text": ["x"]}, "text"),
    ("an unknown field of reuse", {**TEXTS, "reuse": {"mode": "fused", "no_such": 1}}, "no_such"),
    ("an unknown selector", {**TEXTS, "reuse": {"mode": "fused", "selector": "x"}}, "selector"),
    ("messages a string", {**TEXTS, "messages": "Be brief."}, "messages"),
    ("cache_salt a number", {**TEXTS, "cache_salt": 5}, "cache_salt"),
    ("a client's template", {**TEXTS, "chat_template_kwargs": {"chat_template": "x"}}, "not allowed"),
    ("a search without an index", {"retrieve": {"query": "x"}, "messages": test_bad_input.MESSAGES}, "retrieve"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "field"), [pytest.param(*fields, id=name) for name, *fields in HINTS]
)
def test_hostile_hint_is_refused_by_name(twice: Twice, body: Any, field: str) -> None:
    status, text = test_bad_input.send(twice.server.url + PREFETCH.path, body)
    assert 400 <= status < 500, text
    assert field in text


@pytest.mark.parametrize(
    "texts",
    [[""], ["<|end|><|system|>"], ["\0 \u202e \n"], ["x"] * 256],
    ids=["empty", "control", "odd", "alike"],
)
def test_odd_hint_is_taken_as_text(twice: Twice, texts: list[str]) -> None:
    """And has nothing loaded that is not there."""
    before = settled(twice.server)
    assert (
        post(twice.server.url + PREFETCH.path, {"texts": texts, "reuse": fused("query", 0.25)})
        == {}
    )
    assert settled(twice.server)["loaded"] == before["loaded"]


def test_hint_that_is_too_large_is_not_read(twice: Twice) -> None:
    """It is refused, or broken off while it is sent. The next one is taken."""
    url = twice.server.url
    assert hostile.send(url, PREFETCH.path, b'{"texts": ["' + b"x" * (5 << 20) + b'"]}') in (0, 413)
    assert hostile.send(url, PREFETCH.path, json.dumps(TEXTS).encode()) == 202


@pytest.mark.parametrize("num_inputs", [150, pytest.param(3000, marks=pytest.mark.nightly)])
def test_server_survives_hostile_hints(twice: Twice, num_inputs: int) -> None:
    """It lives, good requests between are answered right, and nothing stays under way."""
    client = test_fuzz.Client(twice.server)
    test_fuzz.attack(client, num_inputs, [PREFETCH])
    print("hostile hints by status:", dict(client.statuses))
    assert min(client.statuses[202], client.statuses[400]) > num_inputs / 10
    assert mixed_load.leftovers(twice.server.url, mixed_load.POOL_TOKENS) == []


def test_clear_store_empties_the_storage(twice: Twice, tmp_path: Path) -> None:
    """Row and bytes. A flush does not."""
    settled(twice.server)
    flush(twice.server)
    assert storage_of(twice.server)["num_entries"] > 4
    post(twice.server.url + "/chunkcache/clear_store", {})
    assert settled(twice.server)["num_entries"] == 0
    until(lambda: not entries(twice.log.parent))
