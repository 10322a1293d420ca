"""Servers with host memory and a storage, killed at random moments of requests and of
preprocessing: the next start finds what was confirmed and nothing torn, answers as before, and goes
on with preprocessing where it was."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
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
from tests.e2e.asking import ask, fused, text_of
from tests.polling import until
from tests.soak import mixed_load
from tests.soak.answers import STRICT
from tests.soak.sizes import scaled

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

QUESTION = "Which passage comes first?"
PASSAGES = World(31, 20).passages[:20]
LONGEST_S = 8.0
"""Of the load before a kill."""


def storage_in(folder: Path) -> list[str]:
    kept = json.dumps({"directory": str(folder)})
    flag = "--chunkcache-storage-backend"
    return ["--chunkcache-audit-share", "0", flag, "file", f"{flag}-extra-config", kept]


def load(url: str, seed: int) -> None:
    """Exact and moved requests, until the server is gone."""
    rng = random.Random(seed)
    with suppress(CommandError, OSError):
        while True:
            chunks = rng.sample(PASSAGES, 4) if rng.random() < 0.5 else PASSAGES[:4]
            extra = {"reuse": fused("query", 0.25)} if rng.random() < 0.5 else {}
            body = {
                "messages": [{"role": "user", "content": QUESTION}],
                "chunks": [{"id": each.id, "text": each.text} for each in chunks],
                "temperature": 0,
                "max_tokens": 8,
                **extra,
            }
            post(url + "/rag/v1/chat/completions", body)


def manifest_in(rank: Path) -> Manifest | None:
    """The kernel takes a moment to end the process that has it."""
    with suppress(InUseError):
        return Manifest(rank)
    return None


def found_by_next_start(folder: Path) -> int:
    """How many entries; each has the bytes of its row, whole."""
    extra = json.dumps({"directory": str(folder)})
    config = ChunkCacheConfig(
        storage_backend="file", storage_backend_extra_config=extra, storage_mib=4096
    )
    rank = folder_of(config, "rank0")
    manifest = until(lambda: manifest_in(rank))
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


def test_killed_servers_tear_nothing(tmp_path: Path) -> None:
    rng, expected, num_before = random.Random(0), "", 0
    flags = [
        *(*mixed_load.TIGHT, "--chunkcache-store-threshold", "1", "--chunkcache-host-mib", "2"),
        *("--chunkcache-calibrate", "off", "--chunkcache-selector", "query"),
        *storage_in(tmp_path / "kept"),
    ]
    for kill in range(scaled(10)):
        log = tmp_path / f"{kill}.log"
        with Server(flags, log=log, launcher=mixed_load.POISONED, env=STRICT) as server:
            told = get(server.url + "/chunkcache/stats")["ranks"][0]["storage"]
            assert (told["num_entries"], told["problems"]) == (num_before, {})
            answer = text_of(ask(server, PASSAGES[:4], QUESTION))
            assert answer == (expected or answer)
            expected = answer
            seeds = range(10 * kill, 10 * kill + 3)
            clients = [threading.Thread(target=load, args=(server.url, seed)) for seed in seeds]
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


NUM_AHEAD, TOP_N, BATCH = 200, 3, 4


class Ahead:
    """The command on a corpus of `NUM_AHEAD` passages."""

    def __init__(self, folder: Path) -> None:
        rng, passages = random.Random(1), World(31, NUM_AHEAD).passages
        ids = [each.id for each in passages]
        rows: dict[str, list[dict[str, Any]]] = {
            "corpus": [{"id": each.id, "text": each.text} for each in passages],
            "neighbors": [{"id": id, "neighbors": rng.sample(ids, TOP_N + 1)} for id in ids],
        }
        self._flags = ["--top-n", str(TOP_N), "--batch", str(BATCH)]
        for name, lines in rows.items():
            path = folder / f"{name}.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines))
            self._flags += [f"--{name}", str(path)]

    def start(self, server: Server) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "sglang_chunkcache.preprocess", "--url", server.url]
        command += self._flags
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def complete(self, server: Server) -> dict[str, Any]:
        """From where it was to the end; what the command says then."""
        running = self.start(server)
        out, err = running.communicate(timeout=600)
        assert running.returncode == 0, err
        result: dict[str, Any] = json.loads(out.splitlines()[-1])
        for name in ("alone", "behind_neighbors"):
            assert result[name]["chunks"] + result[name]["kept"] == NUM_AHEAD
        return result


def kept_by(server: Server, at_least: int, running: subprocess.Popen[str]) -> tuple[int, int]:
    """(entries in the storage, requests that were computed) at so many entries."""

    def look() -> tuple[int, int] | None:
        told = get(server.url + "/chunkcache/stats")
        num = told["ranks"][0]["storage"]["num_entries"]
        return (num, told["requests"]["finished"]) if num >= at_least else None

    found = until(look)
    assert running.poll() is None, "the command was done before it was killed"
    return found


def test_killed_preprocessing_goes_on_where_it_was(tmp_path: Path) -> None:
    """Command and server in turn, ten kills: nothing that was kept is lost, or computed again."""
    ahead, rng, kept = Ahead(tmp_path), random.Random(2), tmp_path / "kept"
    flags = [
        *(*mixed_load.FLAGS, "--chunkcache-store-mib", "1", "--chunkcache-calibrate", "off"),
        *storage_in(kept),
    ]
    lives, num_kept, num_computed, num_loaded = scaled(5), 0, 0, 0
    for life in range(lives + 1):
        log = tmp_path / f"{life}.log"
        with Server(flags, log=log, launcher=mixed_load.POISONED, env=STRICT) as server:
            found = get(server.url + "/chunkcache/stats")["ranks"][0]["storage"]
            assert (found["num_entries"], found["problems"]) == (num_kept, {})
            if life == lives:
                result = ahead.complete(server)
                again = ahead.complete(server)
                assert [again[name]["chunks"] for name in ("alone", "behind_neighbors")] == [0, 0]
                num_computed += get(server.url + "/chunkcache/stats")["requests"]["finished"]
                num_loaded = again["storages"][0]["loaded"]
                break
            for half in (0.3, 0.8):
                running = ahead.start(server)
                share = (life + half + rng.uniform(-0.1, 0.1)) / (lives + 1)
                num_kept, finished = kept_by(server, round(2 * NUM_AHEAD * share), running)
                if half < 0.5:
                    running.kill()
                else:
                    os.killpg(server.pid, signal.SIGKILL)
                _, err = running.communicate(timeout=60)
            assert running.returncode == 2, err
            num_computed += finished
        assert mixed_load.problems_of_log(log) == []
        num_found = found_by_next_start(kept)
        assert num_found >= num_kept, "what was kept is lost"
        num_kept = num_found
    assert mixed_load.problems_of_log(log) == []
    assert result["storages"][0]["num_entries"] == found_by_next_start(kept) == 2 * NUM_AHEAD
    print(f"{num_computed} requests, {num_loaded} loads in the last life, {result}")
    assert num_computed <= 2 * NUM_AHEAD + 2 * lives * (BATCH + 32)
