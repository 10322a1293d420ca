"""After SIGTERM: what is refused, what is answered, and when the rest is aborted; on a manager that is a few fields.

launch/test.sh tests/sglang_chunkcache/front/test_drain.py
"""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

pytest.importorskip("fastapi")

from sglang_chunkcache.front import drain
from sglang_chunkcache.front.drain import Drain


class FakeManager:
    """What `Drain` asks of SGLang's tokenizer manager."""

    def __init__(self) -> None:
        self.gracefully_exit = False
        self.rid_to_state: dict[str, Any] = {}
        self.aborts: list[bool] = []

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        self.aborts.append(abort_all)


async def ok(scope: Any, receive: Any, send: Any) -> None:
    """The server behind."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"{}"})


async def ask(app: Any, method: str, path: str) -> tuple[int, dict[bytes, bytes], Any]:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    await app({"type": "http", "method": method, "path": path, "headers": []}, None, send)
    return sent[0]["status"], dict(sent[0]["headers"]), json.loads(sent[1]["body"])


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("POST", "/rag/v1/chat/completions", 503),
        ("POST", "/v1/chat/completions", 503),
        ("PUT", "/generate", 503),
        ("POST", "/abort_request", 200),
        ("GET", "/health", 200),
        ("GET", "/metrics", 200),
    ],
)
def test_only_new_work_is_refused(method: str, path: str, status: int) -> None:
    """On every endpoint, since all belong to the server that ends; before the signal nothing is."""
    manager = FakeManager()
    app = Drain(ok, manager=lambda: manager, limit_s=1)
    assert asyncio.run(ask(app, method, path))[0] == 200
    manager.gracefully_exit = True
    assert asyncio.run(ask(app, method, path))[0] == status


def test_refusal_is_an_error_that_clients_know() -> None:
    """SGLang's shape, and headers by which a client goes elsewhere."""
    manager = FakeManager()
    manager.gracefully_exit = True
    _, headers, body = asyncio.run(ask(Drain(ok, manager=lambda: manager, limit_s=1), "POST", "/generate"))
    assert (headers[b"retry-after"], headers[b"connection"]) == (b"1", b"close")
    assert (body["object"], body["code"], body["type"]) == ("error", 503, "ServiceUnavailableError")
    assert body["message"] == "the server is shutting down"


def test_request_that_runs_is_let_finish() -> None:
    """It was accepted before the signal."""
    manager = FakeManager()

    async def slow(scope: Any, receive: Any, send: Any) -> None:
        manager.gracefully_exit = True
        await asyncio.sleep(0)
        await ok(scope, receive, send)

    assert asyncio.run(ask(Drain(slow, manager=lambda: manager, limit_s=1), "POST", "/generate"))[0] == 200


@pytest.mark.parametrize("ends", [True, False], ids=["ends in time", "hangs"])
def test_limit_aborts_then_kills(monkeypatch: pytest.MonkeyPatch, ends: bool) -> None:
    """Requests at the limit, processes after it; a server that ends before is left alone."""
    manager, killed = FakeManager(), list[bool]()
    monkeypatch.setattr(drain, "POLL_S", 0)
    monkeypatch.setattr(drain, "LAST_S", 0)
    monkeypatch.setattr(drain, "_kill", lambda: killed.append(True))

    async def lifespan(scope: Any, receive: Any, send: Any) -> None:
        for _ in range(10):
            await asyncio.sleep(0)
        assert not manager.aborts
        manager.gracefully_exit = True
        while not (ends or killed):
            await asyncio.sleep(0)

    asyncio.run(Drain(lifespan, manager=lambda: manager, limit_s=0)({"type": "lifespan"}, None, None))  # type: ignore[arg-type]
    assert (manager.aborts, killed) == (([], []) if ends else ([True], [True]))
