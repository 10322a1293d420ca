"""The commands' way to a server: what is an error, and waiting for captures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("requests")

from sglang_chunkcache import client
from sglang_chunkcache.client import Client, RefusedError, ServerError, settle
from tests.sglang_chunkcache.fake_server import FakeServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeServer]:
    monkeypatch.setattr(client, "POLL_S", 0.001)
    fake = FakeServer()
    yield fake
    fake.close()


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        ((400, b'{"message": "field: wrong"}'), RefusedError),
        ((400, b"plain"), RefusedError),
        ((500, b"{}"), ServerError),
        ((200, b"[]"), ServerError),
        ((200, b"<html>"), ServerError),
    ],
    ids=str,
)
def test_bad_answers_are_errors(
    server: FakeServer, reply: tuple[int, bytes], error: type[Exception]
) -> None:
    """400 is about one request; all else is about the server."""
    server.reply = reply
    with pytest.raises(ServerError) as caught:
        Client(server.url, None).get("/chunkcache/stats")
    assert type(caught.value) is error


def test_proxies_are_ignored(server: FakeServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
    assert Client(server.url, None).get("/chunkcache/stats")["reuse"] == "fused"


def test_waiting_captures_are_driven_on(server: FakeServer) -> None:
    """By requests until none waits, since they are done along with a forward; not for ever."""
    server.pending = 3
    for _ in range(2):
        settle(Client(server.url, None))
        assert [path for path, _ in server.posts] == ["/rag/v1/generate"] * 3
    server.pending = 10_000
    with pytest.raises(ServerError, match="still wait to enter the store"):
        settle(Client(server.url, None), timeout_s=0.05)
