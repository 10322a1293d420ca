"""SIGTERM under clients that go on sending: running requests finish, new ones get 503, the server ends within its limit.

launch/test.sh tests/e2e/test_drain.py -m nightly
"""

from __future__ import annotations

import json
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from eval.server import Server
from tests.e2e.test_bad_input import send

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

CLIENTS = 8
PATHS = ("/rag/v1/chat/completions", "/v1/chat/completions")


@pytest.mark.parametrize(("drain_s", "max_tokens", "reason"), [(300, 400, "length"), (1, 4000, "abort")])
def test_server_ends_under_steady_clients(tmp_path: Path, drain_s: int, max_tokens: int, reason: str) -> None:
    """In time: whole answers. Over the limit: what there is of them, marked as SGLang does."""
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": max_tokens, "ignore_eos": True}
    answers: list[tuple[float, int, Any]] = []
    ended = threading.Event()

    def ask(path: str) -> None:
        while not ended.is_set():
            began = time.monotonic()
            try:
                status, text = send(server.url + path, body)
            except OSError:  # the server has ended
                time.sleep(0.1)
                continue
            answers.append((began, status, json.loads(text)))

    with Server(["--model-path", "bundled", "--chunkcache-drain-s", str(drain_s)], log=tmp_path / "log") as server:
        # A stream of two answers, of which SGLang keeps an entry in its table, and would wait for it.
        send(server.url + PATHS[1], {**body, "max_tokens": 2, "n": 2, "stream": True})
        clients = [threading.Thread(target=ask, args=(PATHS[i % 2],)) for i in range(CLIENTS)]
        for client in clients:
            client.start()
        process = server._process
        assert process is not None
        time.sleep(3)
        process.send_signal(signal.SIGTERM)
        signalled = time.monotonic()
        try:
            assert process.wait(drain_s + 60) == 0
            assert reason == "abort" or time.monotonic() - signalled < drain_s
        finally:
            ended.set()
        for client in clients:
            client.join()
    running = [(status, reply) for began, status, reply in answers if began < signalled and status == 200]
    assert len(running) >= CLIENTS
    assert reason in {reply["choices"][0]["finish_reason"] for _, reply in running}
    late = [(status, reply) for began, status, reply in answers if began > signalled + 1]
    assert {status for status, _ in late} == {503}
    assert late[0][1]["message"] == "the server is shutting down"
