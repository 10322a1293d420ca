"""A real Redis through `dynamic`: entries survive the server that wrote them,
and a Redis that is lost and comes back."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sglang")

from eval.server import free_port
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.storage.jobs import Load, Lookup
from sglang_chunkcache.storage.loader import PAUSE_AFTER
from sglang_chunkcache.storage.opening import Opened, open_storage
from tests.polling import DEADLINE_S, until
from tests.sglang_chunkcache.storage.test_entry import LAYOUT, NUM_TOKENS, make_entry, same_bits
from tests.sglang_chunkcache.storage.test_loader import keeping
from tests.sglang_chunkcache.storage.test_manifest import make_row

needs_redis = pytestmark = pytest.mark.skipif(
    shutil.which("redis-server") is None, reason="needs redis-server"
)

CLASS = {
    "backend_name": "redis",
    "module_path": "tests.reference.redis_storage",
    "class_name": "RedisStorage",
}


class Redis:
    """One server on a port of its own. What it holds is in memory."""

    def __init__(self, folder: Path) -> None:
        self.port, self._folder = free_port(), folder
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        flags = [
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--dir",
            str(self._folder),
        ]
        self._process = subprocess.Popen(["redis-server", *flags], stdout=subprocess.DEVNULL)
        until(self._answers)

    def _answers(self) -> bool:
        try:
            socket.create_connection(("127.0.0.1", self.port), 1).close()
        except OSError:
            return False
        return True

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    server = Redis(tmp_path)
    server.start()
    yield server
    server.stop()


def opened(redis: Redis, folder: Path) -> Opened:
    extra = json.dumps({**CLASS, "port": redis.port, "directory": str(folder)})
    config = ChunkCacheConfig(
        reuse="fused", storage_backend="dynamic", storage_backend_extra_config=extra, storage_mib=1
    )
    return open_storage(config, rank="rank0", model_name="m")


def test_entry_comes_back_after_a_restart(redis: Redis, tmp_path: Path) -> None:
    """The manifest is on this machine, the bytes are in Redis."""
    first = opened(redis, tmp_path)
    written = keeping(make_row(num_bytes=0, num_tokens=NUM_TOKENS), make_entry())
    first.loader.write(written)
    first.loader.close()
    assert list(first.loader.poll()) == [written]
    assert written.is_confirmed
    second = opened(redis, tmp_path)
    (row,) = second.rows
    load = Load(row.name, row.num_bytes, row.num_tokens, LAYOUT)
    second.loader.load(load)
    second.loader.drain(DEADLINE_S)
    assert load.entry is not None
    assert same_bits(load.entry.kv[0], written.entry().kv[0])
    second.loader.delete([row])
    gone = Load(row.name, row.num_bytes, row.num_tokens, LAYOUT)
    second.loader.drain(DEADLINE_S)
    second.loader.load(gone)
    second.loader.close()
    assert gone.problem == "gone"


def check_that_second_loads_what_first_writes(first: Opened, second: Opened) -> None:
    """Two servers with folders of their own:
    the second finds the entry by its chunk, and loads it bit for bit. Both end."""
    entry, row = make_entry(), make_row(num_bytes=0, num_tokens=NUM_TOKENS)
    row = row._replace(name=first.names.entry(row.place, row.scored, row.has_outward, row.heads))
    first.loader.write(keeping(row, entry))
    assert first.loader.drain(DEADLINE_S)
    assert first.loader.stats()["unshared"] == 0
    chunk = row.place.stored_chunk
    lookup = Lookup([chunk, chunk._replace(tenant="another")])
    assert second.loader.look_up(lookup)
    assert second.loader.drain(DEADLINE_S)
    (found,) = lookup.found[chunk]
    assert (found.name, found.place, found.num_tokens) == (row.name, row.place, NUM_TOKENS)
    assert lookup.found[lookup.chunks[1]] == []
    load, again = Load(found.name, found.num_bytes, found.num_tokens, LAYOUT), keeping(row, entry)
    second.loader.load(load)
    second.loader.write(again)
    assert second.loader.drain(DEADLINE_S)
    assert load.entry is not None
    assert same_bits(load.entry.kv[0], entry.kv[0])
    assert (again.is_confirmed, again.is_own, again.row.num_bytes) == (True, False, found.num_bytes)
    for each in (second, first):
        each.loader.close()
        assert each.loader.problems == {}


def test_two_servers_share_one_redis(redis: Redis, tmp_path: Path) -> None:
    """What one has written the other finds, loads, and does not write again."""
    check_that_second_loads_what_first_writes(
        opened(redis, tmp_path / "first"), opened(redis, tmp_path / "second")
    )


def test_redis_that_is_lost_and_back(redis: Redis, tmp_path: Path) -> None:
    """Failures are counted, the storage pauses, and goes on when it is tried again;
    what was in its memory is gone."""
    storage = opened(redis, tmp_path)
    storage.loader.write(keeping(make_row(num_bytes=0, num_tokens=NUM_TOKENS), make_entry()))
    storage.loader.drain(DEADLINE_S)
    redis.stop()
    for number in range(PAUSE_AFTER):
        storage.loader.write(keeping(make_row(f"n{number}", num_tokens=NUM_TOKENS), make_entry()))
    storage.loader.drain(DEADLINE_S)
    assert storage.loader.is_paused
    assert storage.loader.problems == {"failed": PAUSE_AFTER}
    redis.start()
    storage.loader._paused_until = 0.0  # the pause is over
    again = keeping(make_row("again", num_tokens=NUM_TOKENS), make_entry())
    storage.loader.write(again)
    lost = Load("n", 463, NUM_TOKENS, LAYOUT)
    storage.loader.load(lost)
    storage.loader.drain(DEADLINE_S)
    assert again.is_confirmed
    assert lost.problem == "gone"
    assert not storage.loader.is_paused
    storage.loader.close()
