"""Long and hostile bodies: refused in time, and others do not wait for them.

python -m pytest tests/e2e/test_length.py -m nightly -s     what others feel of hostile clients
"""

from __future__ import annotations

import contextlib
import http.client
import json
import statistics
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from eval.http import get
from eval.server import Server
from tests.e2e.asking import CHAT, chat, chunks_of, user
from tests.e2e.conftest import WORLD

pytestmark = pytest.mark.engine

MIB = 2**20
PIECE = b'{"messages": "' + b" " * 65_536

ROUNDS, PHASE_S = 5, 12.0
"""Of the measurement: each round has a phase without hostile clients and one with."""
PAUSE_S = 0.2
"""Between two hostile bodies: some 20 MB a second.
One after the other they take a core, of which there may be two."""
MOST_ADDED_S = 0.1
"""By which a p95 may rise."""


def body_of(size: int, **fields: Any) -> bytes:
    """A body of that many bytes, its question as long as that takes."""
    rest = len(json.dumps({"messages": [user("")], **fields}))
    question = ("What is it? " * (size // 12 + 1))[: size - rest]
    return json.dumps({"messages": [user(question)], **fields}).encode()


def answered(server: Server, body: Any, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Status and answer; an iterator of pieces is sent chunked, until the server ends it."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=120)
    try:
        with contextlib.suppress(OSError):  # closed while sending: the answer is there
            given = {"Content-Type": "application/json", **(headers or {})}
            connection.request("POST", CHAT, body, given)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def endless() -> Iterator[bytes]:
    while True:
        yield PIECE


@pytest.mark.parametrize(
    ("make_body", "headers", "status", "param"),
    [
        (lambda: b"{", {"Content-Length": str(5 * MIB)}, 413, "body"),
        (endless, {}, 413, "body"),
        (lambda: json.dumps({"messages": [user("x")] * 10_000}).encode(), {}, 400, "messages"),
        (lambda: body_of(4 * MIB, conversation_id="c"), {}, 400, "messages"),
    ],
    ids=["told", "endless", "messages", "question"],
)
def test_long_body_is_refused(
    rag_server: Server,
    make_body: Callable[[], Any],
    headers: dict[str, str],
    status: int,
    param: str,
) -> None:
    """Unread, by what its header says. A chunked body tells no length; many messages took seconds
    of the event loop."""
    found, answer = answered(rag_server, make_body(), headers)
    assert (found, answer["param"]) == (status, param)


# The measurement


def hostile_bodies() -> list[Any]:
    """All are refused: what is accepted takes the engine's time. None is an endless one."""
    talk = [user("x"), {"role": "assistant", "content": "y"}] * 50_000 + [user("z")]
    chunks = [{"text": f"{i} clocks " * 1500} for i in range(250)]
    return [
        *(body_of(10_000_000), body_of(4 * MIB - 1), body_of(4 * MIB - 1, conversation_id="c")),
        json.dumps({"messages": [user("q")], "chunks": chunks}).encode(),
        json.dumps({"messages": talk, "conversation_id": "c"}).encode(),
        b'{"messages": [' + b"[]," * (MIB * 4 // 3 - 20) + b"1]}",
        b'{"messages": [' + b'"a",' * (MIB - 20) + b"1]}",
        None,
    ]


def rss_mib(pid: int) -> float:
    """Resident memory of a process."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


def p95(values: list[float]) -> float:
    return statistics.quantiles(values, n=20)[-1]


@pytest.mark.nightly
def test_others_do_not_wait_for_hostile_bodies(rag_server: Server) -> None:
    """Phases with a hostile client and without take turns: the p95 of what the front answers alone,
    and of good requests, rises by at most 100 ms, and memory comes back."""
    statuses: set[int] = set()
    is_hostile, is_over = threading.Event(), threading.Event()

    def attack() -> None:
        turns = cycle(hostile_bodies())
        while not is_over.is_set():
            if is_hostile.wait(0.1):
                body = next(turns)
                statuses.add(answered(rag_server, endless() if body is None else body)[0])
                time.sleep(PAUSE_S)

    def ping(number: int) -> None:
        """An answer that the front alone gives: how long its event loop was busy."""
        get(rag_server.url + "/get_model_info")

    def good(number: int) -> None:
        passages = [WORLD.passages[(number + i) % len(WORLD.passages)] for i in range(4)]
        chat(rag_server, "Who?", chunks_of(passages), max_tokens=4)

    attacker = threading.Thread(target=attack)
    attacker.start()
    took: dict[tuple[str, bool], list[float]] = defaultdict(list)
    memory = list[float]()
    try:
        for number in range(20):
            good(number)
        for _ in range(ROUNDS):
            for hostile in (False, True):
                (is_hostile.set if hostile else is_hostile.clear)()
                time.sleep(1)
                end = time.perf_counter() + PHASE_S
                while time.perf_counter() < end:
                    for ask in (good, ping):
                        start = time.perf_counter()
                        ask(len(took["good", hostile]))
                        took[ask.__name__, hostile].append(time.perf_counter() - start)
                is_hostile.clear()
                time.sleep(1)
                memory.append(rss_mib(rag_server.pid))
    finally:
        is_over.set()
        attacker.join()
    assert statuses <= {400, 413}
    assert memory[-1] - memory[1] <= 100
    for what in ("good", "ping"):
        alone, overlapped = (p95(took[what, hostile]) for hostile in (False, True))
        print(f"{what}: p95 {1000 * alone:.1f} ms alone, {1000 * overlapped:.1f} ms beside")
        assert overlapped - alone <= MOST_ADDED_S
