"""What `/ready` says, and after SIGTERM: what is answered, what is refused, and when the rest is
aborted; on a manager that is a few fields, by real signals.

launch/test.sh tests/sglang_chunkcache/front/test_drain.py
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.entrypoints import http_server
from sglang.srt.managers.tokenizer_manager import ServerStatus

from sglang_chunkcache.front import drain, readiness
from sglang_chunkcache.front.drain import Drain
from sglang_chunkcache.front.readiness import Readiness

FOREVER = 1000.0


class FakeManager:
    """What `Drain` asks of SGLang's tokenizer manager."""

    def __init__(self) -> None:
        self.gracefully_exit = self.is_pause = False
        self.server_status = ServerStatus.Up
        self.rid_to_state: dict[str, Any] = {}
        self.aborts: list[bool] = []
        self.num_asked = 0
        self.hangs = self.fails = False

    def auto_create_handle_loop(self) -> None:
        """Sets a handler, as SGLang does."""
        asyncio.get_running_loop().add_signal_handler(
            signal.SIGTERM, lambda: pytest.fail("SGLang's handler")
        )

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.aborts.append(abort_all)

    async def get_internal_state(self) -> list[Any]:
        self.num_asked += 1
        while self.hangs:
            await asyncio.sleep(0)
        if self.fails:
            raise RuntimeError("no state")
        return []


async def ok(scope: Any, receive: Any, send: Any) -> None:
    """The server behind."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


def make_drain(
    manager: FakeManager, behind: Any = ok, *, lame_duck_s: float = 0, limit_s: float = FOREVER
) -> Drain:
    """Of a server that has started."""
    ready = Readiness(lambda: manager)
    ready.is_started = True
    return Drain(behind, ready, lame_duck_s=lame_duck_s, limit_s=limit_s)


async def asked(app: Any, method: str, path: str) -> tuple[int, dict[bytes, bytes], bytes]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "http", "method": method, "path": path, "headers": []}, None, send)
    return sent[0]["status"], dict(sent[0]["headers"]), sent[1]["body"]


async def status(app: Any, method: str, path: str) -> int:
    return (await asked(app, method, path))[0]


async def until(holds: Callable[[], bool]) -> None:
    """Returns when it does; a test that waits in vain is stopped."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.001)


def lived(manager: FakeManager, scene: Callable[[Drain], Awaitable[None]], **limits: float) -> None:
    """Play `scene` while the app runs, as uvicorn runs it."""

    async def run() -> None:
        over = asyncio.Event()

        async def behind(scope: Any, receive: Any, send: Any) -> None:
            await (over.wait() if scope["type"] == "lifespan" else ok(scope, receive, send))

        app = make_drain(manager, behind, **limits)
        life = asyncio.ensure_future(app({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        try:
            await scene(app)
        finally:
            over.set()
            await life

    asyncio.run(run())


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


@pytest.fixture
def killed(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Has an entry for each time that all processes would have been killed."""
    times = list[bool]()
    monkeypatch.setattr(drain, "_kill", lambda: times.append(True))
    return times


@pytest.mark.parametrize(
    ("method", "path", "in_lame_duck", "later"),
    [
        ("POST", "/rag/v1/chat/completions", 200, 503),
        ("PUT", "/generate", 200, 503),
        ("POST", "/abort_request", 200, 200),
        ("GET", "/metrics", 200, 200),
        ("GET", "/ready", 503, 503),
        ("GET", "/health", 503, 503),
        ("GET", "/ping", 503, 503),
    ],
)
@pytest.mark.parametrize("lame_duck_s", [FOREVER, 0])
def test_what_is_answered_after_the_signal(
    method: str, path: str, in_lame_duck: int, later: int, lame_duck_s: float
) -> None:
    """A balancer needs seconds to notice; what it sends until then is served."""
    manager = FakeManager()

    async def scene(app: Drain) -> None:
        assert await status(app, method, path) == 200
        terminate()
        await until(lambda: app._readiness.is_leaving)
        assert await status(app, method, path) == (in_lame_duck if lame_duck_s else later)
        assert manager.gracefully_exit == (not lame_duck_s)

    lived(manager, scene, lame_duck_s=lame_duck_s)


def test_lame_duck_ends() -> None:
    """Then SGLang is told, and ends the server when no request is left."""
    manager = FakeManager()

    async def scene(app: Drain) -> None:
        terminate()
        await until(lambda: manager.gracefully_exit)
        assert await status(app, "POST", "/generate") == 503

    lived(manager, scene, lame_duck_s=0.01)


@pytest.mark.parametrize("objection", ["starting", "hangs"])
def test_server_that_is_not_ready_has_no_lame_duck(objection: str) -> None:
    manager = FakeManager()

    async def scene(app: Drain) -> None:
        if objection == "starting":
            app._readiness.is_started = False
        else:
            manager.hangs, manager.server_status = True, ServerStatus.UnHealthy
        terminate()
        await until(lambda: manager.gracefully_exit)

    lived(manager, scene, lame_duck_s=FOREVER)


@pytest.mark.parametrize("same_s", [0, FOREVER], ids=["apart", "at once"])
def test_second_signal_kills(monkeypatch: pytest.MonkeyPatch, killed: Any, same_s: float) -> None:
    """Whoever stops a server by hand need not wait."""
    manager = FakeManager()
    monkeypatch.setattr(drain, "SAME_S", same_s)

    async def scene(app: Drain) -> None:
        terminate()
        await until(lambda: app._readiness.is_leaving)
        terminate()
        await until(lambda: bool(killed) or bool(same_s))
        await asyncio.sleep(0.01)
        assert killed == ([] if same_s else [True])

    lived(manager, scene, lame_duck_s=FOREVER)


def test_refusal_is_an_error_that_clients_know() -> None:
    """SGLang's shape, and headers by which a client goes elsewhere."""

    async def scene(app: Drain) -> None:
        terminate()
        await until(lambda: manager.gracefully_exit)
        _, headers, body = await asked(app, "POST", "/generate")
        assert (headers[b"retry-after"], headers[b"connection"]) == (b"1", b"close")
        told = json.loads(body)
        assert (told["object"], told["code"]) == ("error", 503)
        assert told["type"] == "ServiceUnavailableError"

    manager = FakeManager()
    lived(manager, scene)


def test_request_that_runs_is_let_finish() -> None:
    manager = FakeManager()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        manager.gracefully_exit = True
        await asyncio.sleep(0)
        await ok(scope, receive, send)

    assert asyncio.run(status(make_drain(manager, slow), "POST", "/generate")) == 200


@pytest.mark.parametrize("ends", [True, False], ids=["ends in time", "hangs"])
def test_limit_aborts_then_kills(monkeypatch: pytest.MonkeyPatch, killed: Any, ends: bool) -> None:
    """Requests at the limit, processes after it; a server that ends before is left alone."""
    manager = FakeManager()
    monkeypatch.setattr(drain, "LAST_S", 0)

    async def scene(app: Drain) -> None:
        assert not manager.aborts
        terminate()
        await until(lambda: manager.gracefully_exit)
        if not ends:
            await until(lambda: bool(killed))

    lived(manager, scene, limit_s=FOREVER if ends else 0)
    assert (manager.aborts, killed) == (([], []) if ends else ([True], [True]))


@pytest.mark.parametrize(
    ("state", "objection"),
    [
        ({}, "ready"),
        ({"is_pause": True}, "paused"),
        ({"gracefully_exit": True}, "shutting down"),
        (None, "starting"),
    ],
)
def test_ready_says_why_not(state: dict[str, Any] | None, objection: str) -> None:
    """SGLang's own says the same without the reason, and `Up` before our start-up check is done."""
    manager = FakeManager()
    vars(manager).update(state or {})
    app = make_drain(manager)
    app._readiness.is_started = state is not None
    found = asyncio.run(asked(app, "GET", "/ready"))
    assert (found[0], found[2].decode()) == (200 if state == {} else 503, objection)
    if state != {}:
        assert manager.num_asked == 0


@pytest.mark.parametrize("found_by", ["us", "/health"])
def test_scheduler_that_hangs_is_not_ready(monkeypatch: pytest.MonkeyPatch, found_by: str) -> None:
    """Noticed without anybody waiting, and over when it answers."""
    manager = FakeManager()
    monkeypatch.setattr(readiness, "ASK_S", 0)
    monkeypatch.setattr(http_server, "HEALTH_CHECK_TIMEOUT", FOREVER)

    async def is_ready(app: Drain) -> bool:
        await asyncio.sleep(0.001)  # for the answer
        return await status(app, "GET", "/ready") == 200

    async def scene(app: Drain) -> None:
        assert await is_ready(app)
        manager.hangs = True
        assert await is_ready(app), "its question is on its way"
        assert await is_ready(app), "it still has time"
        num_asked = manager.num_asked
        if found_by == "us":
            monkeypatch.setattr(http_server, "HEALTH_CHECK_TIMEOUT", 0)  # its time is over
        else:
            manager.server_status = ServerStatus.UnHealthy
        assert not await is_ready(app)
        assert not await is_ready(app)
        assert manager.num_asked == num_asked, "one question at a time"
        manager.hangs = False
        assert await is_ready(app)

    lived(manager, scene)


def test_scheduler_that_answers_with_an_error_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until it answers again. Probes, as many as anybody likes, ask the ranks now and then."""
    manager = FakeManager()
    monkeypatch.setattr(http_server, "HEALTH_CHECK_TIMEOUT", 0)

    async def is_ready(app: Drain) -> bool:
        for _ in range(3):  # one question may be on its way
            await status(app, "GET", "/ready")
            await asyncio.sleep(0.001)  # for the answer
        return await status(app, "GET", "/ready") == 200

    async def scene(app: Drain) -> None:
        assert await is_ready(app)
        assert manager.num_asked == 1
        monkeypatch.setattr(readiness, "ASK_S", 0)
        for manager.fails in (True, False):
            assert await is_ready(app) is not manager.fails

    lived(manager, scene)
