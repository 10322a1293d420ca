"""Where KV events are to be had, and how they come from there: over SGLang's own publisher."""

from __future__ import annotations

import asyncio
import atexit
import json
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

pytest.importorskip("sglang")

from sglang.srt.disaggregation.kv_events import (
    BlockRemoved,
    EventPublisherFactory,
    KVEventBatch,
    KVEventsConfig,
)

from sglang_chunkcache import compat, kv_events
from sglang_chunkcache.front import event_reader
from sglang_chunkcache.kv_events import Source, flags_for, own_config, sources
from tests.kit.kv_events import HearingBench

pytestmark = pytest.mark.matrix

SILENT = "chunk cache: no KV events can be heard"


def made(config: Any = None, **settings: Any) -> Any:
    """As much of SGLang's ServerArgs as is read."""
    defaults = {"nnodes": 1, "dp_size": 1, "disable_radix_cache": False}
    raw = json.dumps(config) if isinstance(config, dict) else config
    return SimpleNamespace(kv_events_config=raw, **{**defaults, **settings})


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder whose sockets' paths are not too long, as those of `tmp_path` would be."""
    with tempfile.TemporaryDirectory() as path:
        monkeypatch.setattr("tempfile.tempdir", path)
        yield Path(path)


@pytest.fixture
def own(short: Path) -> str:
    given = own_config()
    assert given is not None
    return given


def close(publisher: Any) -> None:
    """For good: at the end of the process it would wait a second for its thread."""
    publisher.shutdown()
    atexit.unregister(publisher.shutdown)


def test_own_sockets_are_the_users_alone(own: str, short: Path) -> None:
    """And SGLang's publisher binds them, one for each rank."""
    (folder,) = short.iterdir()
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    heard = sources(made(own, dp_size=3))
    publishers = [EventPublisherFactory.create(own, rank) for rank in range(3)]
    try:
        there = sorted(f"ipc://{path}" for path in folder.iterdir())
        assert there == sorted(str(part) for each in heard for part in (each.endpoint, each.replay))
        assert len(there) == 6
        assert all(Path(each[6:]).is_socket() for each in there)
    finally:
        for each in publishers:
            close(each)


def test_own_events_tell_adapters_where_the_release_does(own: str) -> None:
    (source,) = sources(made(own))
    assert source.tells_adapter == bool(compat.EVENT_FORMAT)


@pytest.mark.parametrize(
    ("config", "endpoint", "replay"),
    [
        (
            {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:6000"},
            *("tcp://127.0.0.1:5558", "tcp://127.0.0.1:6001"),
        ),
        ({"endpoint": "tcp://0.0.0.0:1"}, "tcp://127.0.0.1:2", None),
        (
            {"endpoint": "tcp://[::]:1", "replay_endpoint": "tcp://10.0.0.1:4"},
            *("tcp://127.0.0.1:2", "tcp://10.0.0.1:5"),
        ),
        ({"endpoint": "ipc:///tmp/inproc"}, "ipc:///tmp/inproc_dp1", None),
        ({"endpoint": "tcp://10.0.0.1:5557"}, None, None),
        ({"endpoint": "inproc://x"}, None, None),
        ({"publisher": "null"}, None, None),
    ],
)
def test_what_a_user_publishes_is_heard_where_it_is_bound(
    config: dict[str, Any], endpoint: str | None, replay: str | None
) -> None:
    """And left as it is."""
    args = made({"publisher": "zmq", "topic": "kv", **config}, dp_size=2)
    expected = [] if endpoint is None else [Source(endpoint, replay, "kv", False)]
    assert sources(args)[1:] == expected
    assert len(sources(args)) == 2 * len(expected)


@pytest.mark.skipif("bind" not in KVEventsConfig.model_fields, reason="from 0.5.22 on")
def test_user_says_who_binds() -> None:
    for endpoint, bind, heard in (
        ("tcp://10.0.0.1:1", True, "tcp://10.0.0.1:1"),
        ("tcp://*:1", False, None),
        ("ipc:///tmp/x", False, None),
    ):
        found = sources(made({"publisher": "zmq", "endpoint": endpoint, "bind": bind}))
        assert [each.endpoint for each in found] == ([heard] if heard else [])


@pytest.mark.parametrize(
    ("args", "adds", "says"),
    [
        (made(), True, False),
        (made(nnodes=2), False, True),
        (made(disable_radix_cache=True), False, False),
        (made({"publisher": "zmq", "endpoint": "tcp://*:1"}), True, False),
        (made({"publisher": "zmq", "endpoint": "tcp://*:1"}, nnodes=2), False, True),
        (made({"publisher": "zmq", "endpoint": "tcp://10.0.0.1:1"}), False, True),
    ],
)
def test_launcher_adds_a_publisher(
    args: Any, adds: bool, says: bool, short: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where the user has none. Where nobody can listen, it says what is assumed."""
    flags = flags_for(args)
    assert flags[:1] == ["--kv-events-config"] * adds
    assert (SILENT in capsys.readouterr().err) == says


def test_a_users_publisher_tells_again(short: Path) -> None:
    """What came before the front listened: of its own, and in its own way, or over our socket."""
    given = {"publisher": "zmq", "endpoint": "tcp://*:1", "topic": "kv", "buffer_steps": 7}
    assert flags_for(made({**given, "replay_endpoint": "tcp://*:9"})) == []
    _, kept = flags_for(made(given))
    (folder,) = short.iterdir()
    assert json.loads(kept) == {**given, "replay_endpoint": f"ipc://{folder}/replay"}
    (source,) = sources(made(kept))
    assert source == Source("tcp://127.0.0.1:1", f"ipc://{folder}/replay", "kv", False)


def test_long_path_has_no_publisher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second rank would fail to bind."""
    (deep := tmp_path / ("x" * 60)).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(deep))
    assert flags_for(made()) == []
    assert SILENT in capsys.readouterr().err


class Stage:
    """A publisher, and a mirror that is not listening yet."""

    def __init__(self, own: str) -> None:
        self.bench = HearingBench()
        (self.source,) = sources(made(own))
        self.publisher: Any = EventPublisherFactory.create(own)

    def publish(self, times: int = 1) -> None:
        """At once; nothing is left in the queue."""
        for _ in range(times):
            self.publisher.publish(KVEventBatch(1.0, [BlockRemoved([1])]))
        self.publisher._event_queue.join()

    async def listen(self, until: Callable[[], bool], source: Source | None = None) -> None:
        reader = asyncio.create_task(event_reader.follow(self.bench.mirror, source or self.source))
        try:
            async with asyncio.timeout(10):
                while not until():
                    self.publish()
                    await asyncio.sleep(0.05)
        finally:
            reader.cancel()

    @property
    def dropped(self) -> dict[str, int]:
        found: dict[str, int] = self.bench.bookkeeper.metrics.stats()["mirrors_dropped"]
        return found


@pytest.fixture
def stage(own: str) -> Iterator[Stage]:
    stage = Stage(own)
    yield stage
    close(stage.publisher)


def test_what_was_missed_is_told_again(stage: Stage) -> None:
    """The server was warmed up before anybody listened."""
    stage.publish(5)
    asyncio.run(stage.listen(lambda: stage.bench.mirror.next_seq > 8))
    assert stage.bench.mirror.is_told
    assert stage.dropped == {}


def test_what_cannot_be_told_again_is_a_gap(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, short: Path
) -> None:
    """Nobody answers, or too much was published since."""
    monkeypatch.setattr(event_reader, "REPLAY_S", 0.2)
    stage.publish(kv_events.BUFFER_STEPS + 5)
    asyncio.run(stage.listen(lambda: bool(stage.dropped)))
    assert stage.dropped == {"gap": 1}
    for replay in (None, f"ipc://{short}/nobody"):
        stage.bench = HearingBench()
        source = stage.source._replace(replay=replay)
        asyncio.run(stage.listen(lambda: bool(stage.dropped), source))
        assert stage.dropped == {"gap": 1}


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([b"", b"\0" * 8], "foreign"),
        ([b"topic", b"\0" * 8, b""], "foreign"),
        ([b"", b"\0" * 7, b""], "foreign"),
        ([b"", b"\0" * 8, b"nonsense"], "malformed"),
    ],
)
def test_foreign_messages_drop_the_mirror(
    frames: list[bytes], reason: str, stage: Stage, short: Path
) -> None:
    """Whoever sends them to this socket."""
    address = f"ipc://{short}/other"
    socket: Any = zmq.Context.instance().socket(zmq.PUB)
    socket.bind(address)
    source = stage.source._replace(endpoint=address, replay=None)

    def sent() -> bool:
        socket.send_multipart(frames)
        return bool(stage.dropped)

    asyncio.run(stage.listen(sent, source))
    socket.close(linger=0)
    assert stage.dropped == {reason: 1}
    assert stage.bench.mirror.is_lost
