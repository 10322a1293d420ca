"""SIGTERM: as long as the lame duck lasts new requests are served, then refused; running ones
finish; the server ends within its limit, whoever got the signal, whatever it was doing.

launch/test.sh tests/e2e/test_drain.py -m nightly
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from eval.http import get
from eval.server import Server
from tests.e2e.asking import send
from tests.polling import DEADLINE_S, until

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

CLIENTS = 8
PATHS = ("/rag/v1/chat/completions", "/v1/chat/completions")
BUNDLED = ("--model-path", "bundled")
ASKED = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}


def process_of(server: Server) -> subprocess.Popen[bytes]:
    assert server._process is not None
    return server._process


def probed(url: str, path: str = "/ready") -> int:
    """Its status; 0 where nobody answers."""
    try:
        return send(url + path, "GET")[0]
    except OSError:
        return 0


def test_lame_duck_until_a_second_signal(tmp_path: Path) -> None:
    """Sent to the whole group, as a terminal or a service manager may: what answers the requests
    does not end before they are answered. Who does not want to wait sends it again."""
    with Server([*BUNDLED, "--chunkcache-lame-duck-s", "3000"], log=tmp_path / "log") as server:
        assert probed(server.url) == 200
        os.killpg(server.pid, signal.SIGTERM)
        until(lambda: probed(server.url) == 503)
        assert probed(server.url, "/health") == 503
        for path in PATHS:
            assert send(server.url + path, ASKED)[0] == 200
        process = process_of(server)

        def is_over() -> bool:
            with contextlib.suppress(ProcessLookupError):
                # one right after the first is taken for the same
                os.killpg(server.pid, signal.SIGTERM)
            return process.poll() is not None

        until(is_over)
        assert process.returncode == 128 + signal.SIGTERM
        assert "a second SIGTERM" in server.log.read_text()


def group_of(pid: int) -> dict[int, bytes]:
    """The processes of its group, with their command lines; none of those that have ended."""
    found = dict[int, bytes]()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):  # another process, which has ended meanwhile
            if os.getpgid(int(path.parent.name)) == pid and (command := path.read_bytes()):
                found[int(path.parent.name)] = command
    return found


def test_signal_while_the_model_is_loaded_ends_all(tmp_path: Path) -> None:
    """Though the other processes ignore the signal by then."""
    server = Server(BUNDLED, log=tmp_path / "log")
    with server.log.open("wb") as out:
        process = subprocess.Popen(
            server._command, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        until(lambda: b"multiprocessing.spawn" in b" ".join(group_of(process.pid).values()))
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(DEADLINE_S) == 128 + signal.SIGTERM
        until(lambda: not group_of(process.pid))
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


class UnaskedServer(Server):
    """Nobody has asked it for anything but whether it is ready."""

    def is_healthy(self) -> bool:
        return probed(self.url) == 200


def test_idle_server_ends_after_its_lame_duck(tmp_path: Path) -> None:
    """uvicorn's handler, in place before the first request, would end at once."""
    flags = [*BUNDLED, "--skip-server-warmup", "--chunkcache-lame-duck-s", "8"]
    with UnaskedServer(flags, log=tmp_path / "log") as server:
        signalled = time.monotonic()
        process_of(server).send_signal(signal.SIGTERM)
        assert process_of(server).wait(DEADLINE_S) == 0
        assert time.monotonic() - signalled > 8


class Balancer:
    """Sends each request to the next of the replicas that were ready when it looked;
    it looks every `every_s`."""

    def __init__(self, every_s: float) -> None:
        self.replicas = list[str]()
        self.ready = list[str]()
        self.served = dict[str, int]()
        self._every_s, self._turn, self._ended = every_s, count(), threading.Event()
        self._looks = threading.Thread(target=self._look)

    def __enter__(self) -> Balancer:
        self._looks.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._looks.join()

    def send(self, path: str, body: Any) -> int:
        """The status of the replica's answer; 0 where it does not answer."""
        ready = self.ready
        url = ready[next(self._turn) % len(ready)]
        try:
            status, _ = send(url + path, body)
        except OSError:
            return 0
        self.served[url] = self.served.get(url, 0) + 1
        return status

    def _look(self) -> None:
        while not self._ended.wait(self._every_s):
            self.ready = [url for url in self.replicas if probed(url) == 200]


@contextlib.contextmanager
def steady_clients(balancer: Balancer) -> Iterator[list[int]]:
    """Send one request after the other meanwhile; the statuses."""
    statuses, ended = list[int](), threading.Event()

    def ask(path: str) -> None:
        while not ended.is_set():
            statuses.append(balancer.send(path, ASKED))

    clients = [threading.Thread(target=ask, args=(path,)) for path in PATHS]
    for client in clients:
        client.start()
    try:
        yield statuses
    finally:
        ended.set()
        for client in clients:
            client.join()


def test_rolling_update_fails_no_request(tmp_path: Path) -> None:
    """One replica is replaced behind a balancer that looks every 5 s: the new one is asked when it
    is ready, the old one serves until that has been noticed."""
    flags = [*BUNDLED, "--chunkcache-lame-duck-s", "15"]
    with (
        Server(flags, log=tmp_path / "old.log") as old,
        contextlib.ExitStack() as stack,
        Balancer(5.0) as balancer,
    ):
        new = Server(flags, log=tmp_path / "new.log")
        balancer.replicas = [old.url, new.url]
        until(lambda: balancer.ready == [old.url])
        with steady_clients(balancer) as statuses:
            stack.enter_context(new)
            until(lambda: balancer.ready == [old.url, new.url])
            process_of(old).send_signal(signal.SIGTERM)
            assert process_of(old).wait(DEADLINE_S) == 0
            served = dict(balancer.served)
            until(lambda: balancer.served[new.url] > served[new.url] + 10)
        assert {*statuses} == {200}, sorted(statuses)
        assert balancer.served[old.url] == served[old.url] > 10


@pytest.mark.parametrize(
    ("drain_s", "max_tokens", "reason"), [(300, 400, "length"), (1, 4000, "abort")]
)
def test_server_ends_under_steady_clients(
    tmp_path: Path, drain_s: int, max_tokens: int, reason: str
) -> None:
    """In time: whole answers. Over the limit: what there is of them, marked as SGLang does."""
    body = {**ASKED, "max_tokens": max_tokens, "ignore_eos": True}
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

    with Server([*BUNDLED, "--chunkcache-drain-s", str(drain_s)], log=tmp_path / "log") as server:
        # a stream of two answers, of which SGLang keeps an entry in its table
        send(server.url + PATHS[1], {**body, "max_tokens": 2, "n": 2, "stream": True})
        clients = [threading.Thread(target=ask, args=(PATHS[i % 2],)) for i in range(CLIENTS)]
        for client in clients:
            client.start()
        process = process_of(server)
        until(lambda: get(server.url + "/v1/loads")["loads"][0]["num_running_reqs"] >= CLIENTS)
        signalled = time.monotonic()
        process.send_signal(signal.SIGTERM)
        until(lambda: probed(server.url) == 503)
        noticed = time.monotonic()
        try:
            assert process.wait(drain_s + 60) == 0
            assert reason == "abort" or time.monotonic() - signalled < drain_s
        finally:
            ended.set()
        for client in clients:
            client.join()
    running = [reply for began, status, reply in answers if began < signalled and status == 200]
    assert len(running) >= CLIENTS
    assert reason in {reply["choices"][0]["finish_reason"] for reply in running}
    late = {(status, str(reply["message"])) for began, status, reply in answers if began > noticed}
    assert late == {(503, "the server is shutting down")}
