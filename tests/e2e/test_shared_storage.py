"""Two servers at once on one Redis: what the first has computed the second moves.
Pools are poisoned, as in test_reuse.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, NamedTuple

import pytest

from eval.server import Server
from eval.world.world import Passage, World
from tests.e2e.asking import (
    UNHURRIED,
    Reply,
    ask,
    flush,
    fused,
    logprobs_of,
    preprocess,
    settled,
    sources_of,
    text_of,
)
from tests.kit.storages import REDIS, Redis, needs_redis
from tests.soak import mixed_load
from tests.soak.answers import STRICT

pytestmark = [pytest.mark.engine, needs_redis]


class Two(NamedTuple):
    """Both run. The first has written what it has preprocessed, and moved it from memory."""

    first: Server
    second: Server
    passages: Sequence[Passage]
    in_memory: dict[str, Any]


def moved(server: Server, passages: Sequence[Passage]) -> Reply:
    return ask(server, passages, "Which passage comes first?", reuse=fused("query", 0.25))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Two]:
    folder, passages = tmp_path_factory.mktemp("shared"), World(77, 20, num_kinds=1).passages[:5]
    env = {**STRICT, "OMP_NUM_THREADS": "1", "SGLANG_CHUNKCACHE_STORAGE_SECRET": "s"}
    with ExitStack() as stack:
        redis = Redis(folder)
        redis.start()
        stack.callback(redis.stop)

        def start(name: str) -> Server:
            extra = json.dumps({**REDIS, "port": redis.port, "directory": str(folder / name)})
            flags = [*mixed_load.FLAGS, *UNHURRIED, "--enable-metrics"]
            flags += ["--chunkcache-storage-backend", "dynamic", "--chunkcache-storage-mib", "64"]
            flags += ["--chunkcache-storage-backend-extra-config", extra]
            own, log = {**env, "XDG_CACHE_HOME": str(folder / name)}, folder / f"{name}.log"
            server = Server(flags, log=log, launcher=mixed_load.POISONED, env=own)
            return stack.enter_context(server)

        first, second = start("first"), start("second")
        for passage, neighbor in pairwise(passages):
            preprocess(first, passage, [neighbor])
        settled(first)
        flush(first)  # the store keeps what was preprocessed, and nothing else is a source
        in_memory = moved(first, passages[:3])
        settled(first)
        yield Two(first, second, passages, in_memory)
        for server in (first, second):
            assert server.is_running, f"the server died:\n{server.log_tail(40)}"


def test_second_server_moves_what_the_first_has_computed(two: Two) -> None:
    """Its own first request is too early, on an idle server."""
    assert settled(two.second)["num_entries"] == 0
    moved(two.second, two.passages[:3])
    counts = settled(two.second)
    assert counts["found"] >= 3
    assert counts["loaded"] >= 3
    assert counts["problems"] == {}
    flush(two.second)
    reply = moved(two.second, two.passages[:3])
    assert [place for _, place, _ in sources_of(reply)].count("host") == 3
    assert sources_of(reply) == sources_of(two.in_memory)
    assert text_of(reply) == text_of(two.in_memory)
    assert logprobs_of(reply) == logprobs_of(two.in_memory)


def test_second_server_is_no_writer_of_it(two: Two) -> None:
    """It learns that the entry is there already when it would write."""
    before, passages = settled(two.second), two.passages[3:5]
    preprocess(two.second, passages[0], [passages[1]])
    after = settled(two.second)
    assert after["num_entries"] > before["num_entries"]
    assert after["num_bytes"] == before["num_bytes"]
