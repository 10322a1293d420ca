"""Two servers at once on one Redis: what the first has computed the second moves.
Pools are poisoned, as in test_reuse.py."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from itertools import pairwise
from typing import Any, NamedTuple
from urllib.request import urlopen

import pytest

from eval.http import get, post
from eval.server import Server
from eval.world.world import Passage, World
from tests.e2e.test_reuse import flush, logprobs_of, sources_of, text_of
from tests.e2e.test_storage import chunk_of, moved, settled
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
            flags = [
                *(
                    *mixed_load.FLAGS,
                    "--chunkcache-calibrate",
                    "off",
                    "--chunkcache-selector",
                    "query",
                ),
                *(
                    "--chunkcache-audit-share",
                    "0",
                    "--chunkcache-store-threshold",
                    "1",
                    "--enable-metrics",
                ),
                *("--chunkcache-storage-backend", "dynamic", "--chunkcache-storage-mib", "64"),
                *("--chunkcache-storage-backend-extra-config", extra),
            ]
            own = {**env, "XDG_CACHE_HOME": str(folder / name)}
            server = Server(
                flags, log=folder / f"{name}.log", launcher=mixed_load.POISONED, env=own
            )
            return stack.enter_context(server)

        first, second = start("first"), start("second")
        for passage, neighbor in pairwise(passages):
            body = {"chunk": chunk_of(passage), "neighbors": [chunk_of(neighbor)]}
            post(first.url + "/chunkcache/preprocess", body)
        settled(first)
        flush(first)  # the store keeps what was preprocessed, and nothing else is a source
        in_memory = moved(first, passages[:3])
        settled(first)
        yield Two(first, second, passages, in_memory)
        for server in (first, second):
            assert server.is_running, f"the server died:\n{server.log_tail(40)}"


def test_second_server_moves_what_the_first_has_computed(two: Two) -> None:
    """The same answer to the last bit of its log probabilities.
    Its own first request is too early, on an idle server."""
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
    """What it has preprocessed itself is in the storage already,
    and it learns so when it would write."""
    before, passages = settled(two.second), two.passages[3:5]
    body = {"chunk": chunk_of(passages[0]), "neighbors": [chunk_of(passages[1])]}
    post(two.second.url + "/chunkcache/preprocess", body)
    after = settled(two.second)
    assert after["num_entries"] > before["num_entries"]
    assert after["num_bytes"] == before["num_bytes"]


def test_prometheus_is_told(two: Two) -> None:
    """Under SGLang's own address, by tier; bytes by kind."""
    moved(two.second, two.passages[:3])
    counts = settled(two.second)
    store = get(two.second.url + "/chunkcache/stats")["ranks"][0]["store"]
    with urlopen(two.second.url + "/metrics") as answer:
        lines = answer.read().decode().splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("chunkcache:stor"))
    assert 0 < float(found['chunkcache:storage_loads_total{tier="network"}']) <= counts["loaded"]
    assert 'chunkcache:storage_load_ms_per_mib{tier="network"}' in found
    assert (
        float(found['chunkcache:storage_bytes{kind="variants",tier="network"}'])
        == counts["num_bytes"]
    )
    assert float(found['chunkcache:storage_saved_bytes{kind="variants",tier="network"}']) == 0
    for name in ("bytes", "saved_bytes"):
        for kind in ("captured", "preprocessed"):
            assert float(found[f'chunkcache:store_{name}{{kind="{kind}"}}']) == store[name][kind]
    assert store["bytes"]["preprocessed"] > 0
