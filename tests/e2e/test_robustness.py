"""Clients that vanish, crowds, flushes: no slot is lost,
and the front's mirror agrees with the rank's tree afterwards."""

from __future__ import annotations

import contextlib
import json
import random
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from eval.errors import CommandError
from eval.http import get, post
from eval.server import Server
from eval.task import Request
from eval.tasks.world import world_requests
from tests.polling import until

pytestmark = pytest.mark.engine

POOL_TOKENS = 2400


def body_of(request: Request, **extra: Any) -> dict[str, Any]:
    """What is posted for a request."""
    chunks = [{"id": c.id, "text": c.text} for c in request.chunks]
    return {
        "messages": [{"role": "user", "content": request.question}],
        "chunks": chunks,
        "temperature": 0,
        **extra,
    }


CLIENT = """
import sys, urllib.request
request = urllib.request.Request(sys.argv[1], sys.argv[2].encode(), {"Content-Type": "application/json"})
stream = urllib.request.urlopen(request, timeout=300)
print(stream.readline(), flush=True)
stream.read()
"""


def kill_mid_stream(server: Server, request: Request) -> None:
    """Start a client process, wait until its stream has begun, `kill -9` it."""
    body = json.dumps(body_of(request, stream=True, max_tokens=400, ignore_eos=True))
    command = [sys.executable, "-c", CLIENT, server.url + "/rag/v1/chat/completions", body]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as client:
        assert client.stdout is not None
        assert client.stdout.readline().startswith(b"b'data")
        client.kill()


def assert_clean(server: Server) -> None:
    """Idle: every slot is free or evictable, no plan or load is open, and mirror and tree agree."""

    def is_clean() -> bool:
        post(
            server.url + "/rag/v1/chat/completions",
            body_of(world_requests(1, seed=5)[0], max_tokens=1),
        )
        stats = get(server.url + "/chunkcache/stats")
        rank = stats["ranks"][0]
        found = (
            rank["protected"],
            rank["free"] + rank["evictable"],
            stats["tree"]["open_plans"],
            stats["prompt_tokens_in_flight"],
            rank["mirror"]["agrees"],
        )
        return found == (0, POOL_TOKENS, 0, [0], True)

    until(is_clean, every_s=0.2)


def test_killed_clients_leave_nothing(rag_server: Server) -> None:
    """Ten clients vanish in mid-stream; the server aborts their requests."""
    aborted = get(rag_server.url + "/chunkcache/stats")["requests"].get("aborted", 0)
    for request in world_requests(10, seed=1):
        kill_mid_stream(rag_server, request)
    assert_clean(rag_server)
    assert get(rag_server.url + "/chunkcache/stats")["requests"]["aborted"] >= aborted + 8


def test_fifty_parallel_clients(rag_server: Server) -> None:
    """More requests than fit, some of them ending on their first token:
    all answered, eviction under way."""
    requests = world_requests(50, seed=2)
    lengths = random.Random(0).choices([1, 2, 12], k=50)
    evicted = get(rag_server.url + "/chunkcache/stats")["ranks"][0]["evicted_chunks"]
    with ThreadPoolExecutor(50) as pool:
        bodies = [
            body_of(request, max_tokens=n) for request, n in zip(requests, lengths, strict=True)
        ]
        replies = list(
            pool.map(lambda body: post(rag_server.url + "/rag/v1/chat/completions", body), bodies)
        )
    assert all(
        sum(r["chunkcache"]["fates"].values()) == r["usage"]["prompt_tokens"] for r in replies
    )
    assert get(rag_server.url + "/chunkcache/stats")["ranks"][0]["evicted_chunks"] > evicted
    assert_clean(rag_server)


def test_flush_during_load(rag_server: Server) -> None:
    """SGLang refuses to flush while busy and flushes between; the mirror follows either way."""
    stop = threading.Event()
    flushed = []
    restarts = get(rag_server.url + "/chunkcache/stats")["ranks"][0]["mirror"]["restarts"]

    def flush() -> None:
        while not stop.is_set():
            with contextlib.suppress(CommandError):  # busy: SGLang says 400
                flushed.append(post(rag_server.url + "/flush_cache", None))
            time.sleep(0.05)

    thread = threading.Thread(target=flush)
    thread.start()
    for request in world_requests(30, seed=3):
        post(rag_server.url + "/rag/v1/chat/completions", body_of(request, max_tokens=2))
    until(lambda: flushed)
    stop.set()
    thread.join()
    assert_clean(rag_server)
    assert get(rag_server.url + "/chunkcache/stats")["ranks"][0]["mirror"]["restarts"] > restarts


@pytest.mark.nightly
def test_retracted_requests_are_served_in_the_end(retracting_server: Server) -> None:
    """A request taken back matches again with its answer so far after the prompt;
    slots and mirror still add up."""
    bodies = [
        body_of(request, max_tokens=60, ignore_eos=True) for request in world_requests(16, seed=6)
    ]
    with ThreadPoolExecutor(8) as pool:
        replies = list(
            pool.map(
                lambda body: post(retracting_server.url + "/rag/v1/chat/completions", body), bodies
            )
        )
    assert all(reply["usage"]["completion_tokens"] == 60 for reply in replies)
    assert "retract" in retracting_server.log.read_text().lower()
    assert_clean(retracting_server)
