"""Chunk KV that outlives its server: two servers, one after the other, on one folder.
Pools are poisoned, as in test_reuse.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from eval.http import post
from eval.server import Server
from eval.world.world import Passage, World
from tests.e2e import hostile
from tests.e2e.asking import (
    UNHURRIED,
    Reply,
    ask,
    flush,
    fused,
    logprobs_of,
    preprocess,
    rank_of,
    settled,
    sources_of,
    stats_of,
    text_of,
    user,
)
from tests.e2e.hostile import PREFETCH
from tests.polling import until
from tests.soak import mixed_load
from tests.soak.answers import STRICT

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

SALT = "pepper"
QUESTION = "Which passage comes first?"


def moved(server: Server, passages: Sequence[Passage], **fields: Any) -> Reply:
    return ask(server, passages, QUESTION, reuse=fused("query", 0.25), **fields)


def exactly(server: Server, passages: Sequence[Passage]) -> dict[str, Any]:
    """After a head of its own."""
    messages = [{"role": "system", "content": "Be brief."}, user(QUESTION)]
    return ask(server, passages[3:5], QUESTION, messages=messages)


class Twice(NamedTuple):
    """The second server, and what the first one said."""

    server: Server
    passages: Sequence[Passage]
    in_memory: Reply
    exact: Reply
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
    where = json.dumps({"directory": str(folder / "kept")})
    flags = [*mixed_load.FLAGS, *UNHURRIED, "--chunkcache-host-mib", "10"]
    flags += ["--chunkcache-storage-backend", "file"]
    flags += ["--chunkcache-storage-backend-extra-config", where]
    env = {**STRICT, "OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder)}
    env["SGLANG_CHUNKCACHE_STORAGE_SECRET"] = "s"
    passages = World(77, 20, num_kinds=1).passages[:6]
    with Server(flags, log=folder / "first.log", launcher=mixed_load.POISONED, env=env) as server:
        for passage, neighbor in pairwise(passages[:5]):
            preprocess(server, passage, [neighbor])
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
        num_known = stats_of(server)["tree"]["nodes"]
        yield Twice(server, passages, in_memory, exact, written, passages[5], log, num_known)
        assert server.is_running, f"the server died:\n{server.log_tail(40)}"
    assert mixed_load.problems_of_log(log) == []


def entries(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in (folder / "kept" / "rank0" / "entries").iterdir()}


def test_first_request_after_a_restart_moves_what_was_stored(twice: Twice) -> None:
    """The same answer to the last bit of its log probabilities."""
    assert rank_of(twice.server)["storage"]["loaded"] >= 4
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
    """The second server knows it by its names, as the start has printed. A chunk of the exact chain
    takes the place of what was preprocessed there."""
    assert 4 < twice.written["num_entries"] <= twice.written["written"]
    assert f"{twice.written['num_entries']} entries" in twice.log.read_text()
    assert rank_of(twice.server)["storage"]["problems"] == {}
    assert settled(twice.server)["num_entries"] >= twice.written["num_entries"]


def test_damaged_entry_is_refused_and_computed(twice: Twice) -> None:
    """A tenant's, asked for with its request: counted, dropped and written anew."""
    before = settled(twice.server)["written"]
    reply = moved(twice.server, [twice.damaged], cache_salt=SALT)
    assert reply["chunkcache"]["fates"]["relocated"] == 0
    assert settled(twice.server)["problems"] == {"damaged": 1}

    def is_written() -> bool:
        if settled(twice.server)["written"] > before:
            return True
        # over before the entry had been read: the next that computes the chunk writes it
        flush(twice.server)
        moved(twice.server, [twice.damaged], cache_salt=SALT)
        return False

    until(is_written)
    assert settled(twice.server)["problems"] == {"damaged": 1}
    assert "is not used: damaged" in twice.log.read_text()


def test_hint_has_a_tenants_chunk_loaded_ahead(twice: Twice) -> None:
    """The hint is not told what is there, and has nothing loaded of others."""
    chunk, other, url = twice.passages[2], twice.passages[4], twice.server.url
    ask(twice.server, [other, chunk], QUESTION, cache_salt="mint")
    settled(twice.server)
    flush(twice.server)
    hint = {"texts": [chunk.text], "reuse": fused("query", 0.25)}
    before = rank_of(twice.server)["storage"]
    assert post(url + "/chunkcache/prefetch", {**hint, "cache_salt": "thyme"}) == {}
    assert settled(twice.server)["loaded"] == before["loaded"]
    assert post(url + "/chunkcache/prefetch", {**hint, "cache_salt": "mint"}) == {}
    assert settled(twice.server)["prefetch"]["loaded"] > 0
    reply = moved(twice.server, [chunk], cache_salt="mint")
    assert reply["chunkcache"]["fates"]["relocated"] > 10
    assert rank_of(twice.server)["storage"]["prefetch"]["used"] > 0


@pytest.mark.parametrize("num_inputs", [150, pytest.param(3000, marks=pytest.mark.nightly)])
def test_server_survives_hostile_hints(twice: Twice, num_inputs: int) -> None:
    """It lives, good requests between are answered right, and nothing stays under way."""
    client = hostile.Client(twice.server)
    hostile.attack(client, num_inputs, [PREFETCH])
    print("hostile hints by status:", dict(client.statuses))
    assert min(client.statuses[202], client.statuses[400]) > num_inputs / 10
    assert mixed_load.leftovers(twice.server.url, mixed_load.POOL_TOKENS) == []


def test_clear_store_empties_the_storage(twice: Twice, tmp_path: Path) -> None:
    """Row and bytes. A flush does not."""
    settled(twice.server)
    flush(twice.server)
    assert rank_of(twice.server)["storage"]["num_entries"] > 4
    post(twice.server.url + "/chunkcache/clear_store", {})
    assert settled(twice.server)["num_entries"] == 0
    until(lambda: not entries(twice.log.parent))
