"""Servers with host memory and a storage, killed at random moments of requests and of preprocessing: the next start finds what
was confirmed and nothing torn, and answers as before."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from eval.errors import CommandError
from eval.http import get, post
from eval.server import Server
from eval.world.world import World
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.storage.backend import create_backend, folder_of
from sglang_chunkcache.storage.entry import MAGIC, _Header, header_of
from sglang_chunkcache.storage.key import secret_of
from sglang_chunkcache.storage.manifest import InUseError, Manifest
from sglang_chunkcache.storage.opening import confirmed
from tests.e2e.test_reuse import ask, fused, text_of
from tests.soak import mixed_load
from tests.soak.answers import STRICT
from tests.soak.sizes import scaled

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

QUESTION = "Which passage comes first?"
PASSAGES = World(31, 20).passages[:20]
LONGEST_S = 8.0
"""Of the load before a kill."""


def flags(folder: Path) -> list[str]:
    kept = json.dumps({"directory": str(folder)})
    return [
        *(*mixed_load.TIGHT, "--chunkcache-store-threshold", "1", "--chunkcache-host-mib", "2"),
        *("--chunkcache-calibrate", "off", "--chunkcache-selector", "query", "--chunkcache-audit-share", "0"),
        *("--chunkcache-storage-backend", "file", "--chunkcache-storage-backend-extra-config", kept),
    ]


def load(url: str, seed: int) -> None:
    """Exact and moved requests, until the server is gone."""
    rng = random.Random(seed)
    with suppress(CommandError, OSError):
        while True:
            chunks = rng.sample(PASSAGES, 4) if rng.random() < 0.5 else PASSAGES[:4]
            extra = {"reuse": fused("query", 0.25)} if rng.random() < 0.5 else {}
            ask_quietly(url, chunks, extra)


def ask_quietly(url: str, chunks: Any, extra: dict[str, Any]) -> None:
    body = {
        "messages": [{"role": "user", "content": QUESTION}],
        "chunks": [{"id": each.id, "text": each.text} for each in chunks],
        "temperature": 0,
        "max_tokens": 8,
        **extra,
    }
    post(url + "/rag/v1/chat/completions", body)


def preprocess(url: str, seed: int) -> None:
    """Chunk after chunk behind another one, until the server is gone."""
    with suppress(CommandError, OSError):
        for number in range(10_000):
            chunk, neighbor = PASSAGES[number % 20], PASSAGES[(number + seed + 1) % 20]
            told = [{"id": each.id, "text": each.text} for each in (chunk, neighbor)]
            post(url + "/chunkcache/preprocess", {"chunk": told[0], "neighbors": told[1:]})


def found_by_next_start(folder: Path) -> int:
    """How many entries; each has the bytes of its row, whole."""
    config = ChunkCacheConfig(
        storage_backend="file", storage_backend_extra_config=json.dumps({"directory": str(folder)}), storage_mib=4096
    )
    rank = folder_of(config, "rank0")
    for _ in range(100):
        with suppress(InUseError):  # the kernel takes a moment to end a process
            manifest = Manifest(rank)
            break
        time.sleep(0.1)
    backend = create_backend(config, rank, model_name="")
    try:
        rows, num_gone = confirmed(manifest, backend)
        assert num_gone == 0, "a row without its bytes"
        for row in rows:
            data = backend.get(row.name, row.num_bytes)
            assert data is not None
            header, _ = header_of(data, MAGIC, _Header, secret=secret_of())
            assert (header.name, header.num_tokens) == (row.name, row.num_tokens)
        return len(rows)
    finally:
        manifest.close()


@pytest.mark.parametrize(("work", "kills"), [(load, 10), (preprocess, 5)], ids=["requests", "preprocessing"])
def test_killed_servers_tear_nothing(tmp_path: Path, work: Any, kills: int) -> None:
    rng, expected, num_before = random.Random(0), "", 0
    for kill in range(scaled(kills)):
        log = tmp_path / f"{kill}.log"
        with Server(flags(tmp_path / "kept"), log=log, launcher=mixed_load.POISONED, env=STRICT) as server:
            told = get(server.url + "/chunkcache/stats")["ranks"][0]["storage"]
            assert (told["num_entries"], told["problems"]) == (num_before, {})
            answer = text_of(ask(server, PASSAGES[:4], QUESTION))
            assert answer == (expected or answer)
            expected = answer
            clients = [threading.Thread(target=work, args=(server.url, 10 * kill + each)) for each in range(3)]
            for client in clients:
                client.start()
            time.sleep(rng.uniform(0.5, LONGEST_S))
            assert server.is_running, server.log_tail(40)
            os.killpg(server.pid, signal.SIGKILL)
            for client in clients:
                client.join()
        assert mixed_load.problems_of_log(log) == []
        num_before = found_by_next_start(tmp_path / "kept")
    assert num_before > 0, "nothing was stored"
