"""Clients that vanish, crowds, flushes: no slot is lost,
and the front's mirror agrees with the rank's tree afterwards."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from eval.errors import CommandError
from eval.http import post
from eval.server import Server
from eval.task import Request
from eval.tasks.world import world_requests
from tests.e2e.asking import CHAT, assert_clean, rank_of, stats_of, task_body
from tests.polling import until

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

CLIENT = """
import sys, urllib.request
headers = {"Content-Type": "application/json"}
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), headers)
stream = urllib.request.urlopen(request, timeout=300)
print(stream.readline(), flush=True)
stream.read()
"""


def kill_mid_stream(server: Server, request: Request) -> None:
    """Start a client process, wait until its stream has begun, `kill -9` it."""
    body = json.dumps(task_body(request, stream=True, max_tokens=400, ignore_eos=True))
    command = [sys.executable, "-c", CLIENT, server.url + CHAT, body]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline().startswith(b"b'data")
        client.kill()


def at_once(server: Server, bodies: list[Any], num_clients: int) -> list[Any]:
    with ThreadPoolExecutor(num_clients) as pool:
        return list(pool.map(lambda body: post(server.url + CHAT, body), bodies))


def test_killed_clients_leave_nothing(rag_server: Server) -> None:
    """Ten clients vanish in mid-stream; the server aborts their requests."""
    aborted = stats_of(rag_server)["requests"].get("aborted", 0)
    for request in world_requests(10, seed=1):
        kill_mid_stream(rag_server, request)
    assert_clean(rag_server)
    assert stats_of(rag_server)["requests"]["aborted"] >= aborted + 8


def test_flush_during_load(rag_server: Server) -> None:
    """SGLang refuses to flush while busy and flushes between; the mirror follows either way."""
    stop = threading.Event()
    flushed = []
    restarts = rank_of(rag_server)["mirror"]["restarts"]

    def flush() -> None:
        while not stop.is_set():
            with contextlib.suppress(CommandError):  # busy: SGLang says 400
                flushed.append(post(rag_server.url + "/flush_cache", None))
            time.sleep(0.05)

    thread = threading.Thread(target=flush)
    thread.start()
    for request in world_requests(30, seed=3):
        post(rag_server.url + CHAT, task_body(request, max_tokens=2))
    until(lambda: flushed)
    stop.set()
    thread.join()
    assert_clean(rag_server)
    assert rank_of(rag_server)["mirror"]["restarts"] > restarts


@pytest.mark.nightly
def test_retracted_requests_are_served_in_the_end(retracting_server: Server) -> None:
    """A request taken back matches again with its answer so far."""
    fields = {"max_tokens": 60, "ignore_eos": True}
    bodies = [task_body(request, **fields) for request in world_requests(16, seed=6)]
    replies = at_once(retracting_server, bodies, 8)
    assert all(reply["usage"]["completion_tokens"] == 60 for reply in replies)
    assert "retract" in retracting_server.log.read_text().lower()
    assert_clean(retracting_server)
