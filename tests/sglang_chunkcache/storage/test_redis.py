"""A real Redis through `dynamic`: entries survive the server that wrote them,
and a Redis that is lost and comes back."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("sglang")

from sglang_chunkcache.storage.breaker import PAUSE_AFTER
from sglang_chunkcache.storage.jobs import Load
from sglang_chunkcache.storage.opening import Opened
from tests.kit.storages import (
    LAYOUT,
    NUM_TOKENS,
    REDIS,
    Redis,
    check_that_second_loads_what_first_writes,
    keeping,
    make_entry,
    make_row,
    needs_redis,
    open_dynamic,
    same_bits,
)
from tests.polling import DEADLINE_S

pytestmark = needs_redis


def opened(redis: Redis, folder: Path) -> Opened:
    return open_dynamic(folder, **REDIS, port=redis.port)


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[Redis]:
    server = Redis(tmp_path)
    server.start()
    yield server
    server.stop()


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


def test_two_servers_share_one_redis(redis: Redis, tmp_path: Path) -> None:
    """What one has written the other finds, loads, and does not write again."""
    check_that_second_loads_what_first_writes(
        opened(redis, tmp_path / "first"), opened(redis, tmp_path / "second")
    )


def test_redis_that_is_lost_and_back(redis: Redis, tmp_path: Path) -> None:
    """Failures pause the storage; tried again it goes on, without what Redis had in memory."""
    storage = opened(redis, tmp_path)
    storage.loader.write(keeping(make_row(num_bytes=0, num_tokens=NUM_TOKENS), make_entry()))
    storage.loader.drain(DEADLINE_S)
    redis.stop()
    for number in range(PAUSE_AFTER):
        storage.loader.write(keeping(make_row(f"n{number}", num_tokens=NUM_TOKENS), make_entry()))
    storage.loader.drain(DEADLINE_S)
    assert storage.loader.is_paused
    assert storage.loader.worker.problems == {"failed": PAUSE_AFTER}
    redis.start()
    storage.loader.worker.breaker.paused_until = 0.0  # the pause is over
    again = keeping(make_row("again", num_tokens=NUM_TOKENS), make_entry())
    storage.loader.write(again)
    lost = Load("n", 463, NUM_TOKENS, LAYOUT)
    storage.loader.load(lost)
    storage.loader.drain(DEADLINE_S)
    assert again.is_confirmed
    assert lost.problem == "gone"
    assert not storage.loader.is_paused
    storage.loader.close()
