"""Nothing a client sends ends the server:
mutated requests to every door, and good requests between them are answered right."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle

import pytest
from hypothesis import HealthCheck, Phase, given, settings

pytest.importorskip("sglang")

from eval.http import post
from eval.server import Server
from eval.task import Request
from eval.tasks.world import world_requests
from tests.e2e.hostile import OUR_DOORS, Door, requests, send
from tests.e2e.test_robustness import assert_clean, body_of

pytestmark = pytest.mark.engine

EVERY = 25
"""Hostile inputs between two good requests."""
OURS = ("/rag/", "/chunkcache/")
SOAK_S = float(os.environ.get("CHUNKCACHE_SOAK_S", "1200"))
"""Seconds of the soak."""


class Client:
    """Sends hostile inputs and tells of the last ones if the server does not survive them;
    asks good questions between."""

    def __init__(self, server: Server) -> None:
        self.server, self.statuses = server, Counter[int | None]()
        self._last = deque[tuple[str, bytes]](maxlen=EVERY)
        self.good = right_requests(server)
        self._next_good = cycle(self.good)

    def attack(self, path: str, body: bytes) -> None:
        """One hostile input; after every 25th a good one."""
        self._last.append((path, body))
        try:
            status = send(self.server.url, path, body)
            self.statuses[status] += 1
            assert status != 500 or not path.startswith(OURS), "an error that no client can mend"
            if self.statuses.total() % EVERY == 0:
                assert_right(self.server, next(self._next_good))
        except Exception as error:
            inputs = "\n".join(
                f"{path} {body[:600].decode(errors='replace')}" for path, body in self._last
            )
            raise AssertionError(
                f"{error!r} after\n{inputs}\n{self.server.log_tail(60)}"
            ) from error


def assert_right(server: Server, request: Request) -> None:
    """The request's answer is the right one."""
    reply = post(
        server.url + "/rag/v1/chat/completions", body_of(request, max_tokens=12), timeout_s=300
    )
    content = reply["choices"][0]["message"]["content"]
    assert any(answer in content for answer in request.answers), (request, reply)


def right_requests(server: Server) -> list[Request]:
    """Questions that the bundled model answers right when nobody disturbs it."""
    found = []
    for request in world_requests(16, seed=21):
        try:
            assert_right(server, request)
        except AssertionError:
            continue
        found.append(request)
    assert len(found) >= 8
    return found


def attack(client: Client, num_inputs: int, doors: Sequence[Door] = OUR_DOORS) -> None:
    """Send so many hostile inputs."""

    @settings(
        max_examples=num_inputs,
        deadline=None,
        database=None,
        phases=[Phase.generate],  # shrinking would send its tries to a dead server
        suppress_health_check=list(HealthCheck),
    )
    @given(requests(doors))
    def run(hostile: tuple[str, bytes]) -> None:
        client.attack(*hostile)

    run()


@pytest.mark.parametrize("num_inputs", [300, pytest.param(5000, marks=pytest.mark.nightly)])
def test_server_survives_hostile_clients(rag_server: Server, num_inputs: int) -> None:
    """It lives, good requests are answered right, the pool adds up.
    Some inputs are answered and some refused."""
    client = Client(rag_server)
    attack(client, num_inputs)
    print("hostile inputs by status:", dict(client.statuses))
    assert min(client.statuses[200], client.statuses[400]) > num_inputs / 10
    assert_clean(rag_server)


@pytest.fixture
def stop() -> Iterator[threading.Event]:
    """Set at the end of a test, whatever happens."""
    event = threading.Event()
    yield event
    event.set()


@pytest.mark.nightly
def test_good_clients_beside_hostile_ones(rag_server: Server, stop: threading.Event) -> None:
    """Eight clients ask good questions for `SOAK_S`:
    every answer is right while hostile inputs come in."""
    client = Client(rag_server)

    def ask(number: int) -> int:
        num_asked = 0
        while not stop.is_set():
            assert_right(rag_server, client.good[(number + num_asked) % len(client.good)])
            num_asked += 1
        return num_asked

    end = time.monotonic() + SOAK_S
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, number) for number in range(8)]
        try:
            while time.monotonic() < end:
                attack(client, 500)
        finally:
            stop.set()
        print(
            "good requests:",
            sum(future.result() for future in asked),
            "hostile by status:",
            dict(client.statuses),
        )
    assert_clean(rag_server)
