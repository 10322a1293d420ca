"""Nothing a client sends ends the server:
mutated requests to each of our endpoints, and good requests between them are answered right."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("sglang")

from eval.server import Server
from tests.e2e.asking import assert_clean
from tests.e2e.hostile import Client, assert_right, attack

pytestmark = pytest.mark.engine

SOAK_S = float(os.environ.get("CHUNKCACHE_SOAK_S", "1200"))
"""Seconds of the soak."""


@pytest.mark.parametrize("num_inputs", [150, pytest.param(5000, marks=pytest.mark.nightly)])
def test_server_survives_hostile_clients(rag_server: Server, num_inputs: int) -> None:
    """Good requests are answered right, the pool adds up. Some inputs are answered."""
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
    """Every answer is right while hostile inputs come in for `SOAK_S`."""
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
        print("good requests:", sum(future.result() for future in asked))
    assert_clean(rag_server)
