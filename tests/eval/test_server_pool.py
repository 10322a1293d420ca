"""Servers are started when needed and stopped whatever happens;
processes that only answer HTTP replace them."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from eval.errors import CommandError
from eval.serve.arms import ARMS
from eval.serve.plan import Cell, Plan
from eval.serve.server_pool import Key, ServerPool, key_of
from eval.server import Server

LAUNCHER = """
import http.server, json, sys
if "--fail" in sys.argv:
    sys.exit("no such model")
ANSWERS = {"/health": {}, "/v1/models": {"data": [{"id": "m"}]}}
ANSWERS["/server_info"] = {"model_path": "/x/m", "device": "cpu"}
if "--stock" not in sys.argv:
    ANSWERS["/chunkcache/stats"] = {"ranks": [{"gate": {}}]}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        found = ANSWERS.get(self.path)
        self.send_response(200 if found is not None else 404)
        self.end_headers()
        self.wfile.write(json.dumps(found).encode())
port = int(sys.argv[sys.argv.index("--port") + 1])
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""
OURS, STOCK = ARMS["ours"], ARMS["stock-lpm"]


@pytest.fixture(autouse=True)
def _launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "launcher.py"
    script.write_text(LAUNCHER)
    monkeypatch.setattr("eval.serve.server_pool.Server", partial(Server, launcher=[str(script)]))


def pids(pool: ServerPool) -> list[int]:
    """Of the servers that run now."""
    processes = [server._process for server, _ in pool._running.values()]
    return [process.pid for process in processes if process is not None]


def is_alive(pid: int) -> bool:
    """Whether there is such a process."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_servers_are_started_once_and_all_stopped(tmp_path: Path) -> None:
    plan = Plan([OURS, STOCK], server_flags=["--model-path", "/x/m"])
    with ServerPool(plan, tmp_path / "logs") as pool:
        keys = [key_of(arm, Cell({}, ())) for arm in (OURS, STOCK)]
        urls = [pool.open(key, arm) for key, arm in zip(keys, (OURS, STOCK), strict=True)]
        assert [pool.open(keys[0], OURS), pool.open(keys[1], STOCK)] == urls
        running = pids(pool)
        assert len(set(running)) == 2
        pool.keep([keys[0]])
        assert [is_alive(pid) for pid in running] == [True, False]
    assert not any(map(is_alive, running))
    facts = plan.facts["servers"]
    assert (facts["ours"]["chunk_cache"], facts["stock-lpm"]["chunk_cache"]) == (True, False)
    assert facts["stock-lpm"]["flags"][0] == "--stock"
    assert "/x/m" not in facts["ours"]["flags"], "no path of a machine is kept"
    assert {path.name for path in (tmp_path / "logs").iterdir()} == {"ours.log", "stock-lpm.log"}


def test_restarted_server_keeps_what_it_has_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A flush would throw it away; this launcher does not know one, and would be noted."""
    for keeps_start in (True, False):
        plan = Plan([OURS], keeps_start=keeps_start)
        with ServerPool(plan, tmp_path / "logs") as pool:
            key = key_of(OURS, Cell({}, ()))
            for _ in range(2):
                pool.flush(key, pool.open(key, OURS))
        assert capsys.readouterr().err.count("its cache is not empty") == (not keeps_start)
        assert plan.facts["servers"]["ours"]["flushed"] is False


def test_cells_flags_make_another_server_of_ours_and_none_of_stock() -> None:
    cell = Cell({"window": 5}, (), flags=("--chunkcache-window-requests", "5"))
    assert key_of(OURS, cell) == Key("ours", cell.flags)
    assert key_of(STOCK, cell) == Key("stock-lpm", ())


def test_start_that_fails_is_told_with_the_logs_end(tmp_path: Path) -> None:
    with (
        pytest.raises(CommandError, match="no such model"),
        ServerPool(Plan([OURS], server_flags=["--fail"]), tmp_path) as pool,
    ):
        pool.open(Key("ours", ()), OURS)


def test_interrupted_start_leaves_no_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server takes half a minute to start: that is when people change their minds."""
    started: list[int] = []

    def interrupt(server: Server) -> bool:
        assert server._process is not None
        started.append(server._process.pid)
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "is_healthy", interrupt)
    with pytest.raises(KeyboardInterrupt), ServerPool(Plan([OURS]), tmp_path) as pool:
        pool.open(Key("ours", ()), OURS)
    assert len(started) == 1
    assert not is_alive(started[0])


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGHUP])
@pytest.mark.parametrize("on_sigint", [signal.default_int_handler, signal.SIG_IGN])
def test_signals_stop_all_servers(
    tmp_path: Path,
    sign: signal.Signals,
    on_sigint: Any,
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A closed terminal does not reach them; its shell sends a second hangup."""
    stop = Server.__exit__

    def hang_up_and_stop(server: Server, *error: Any) -> None:
        signal.raise_signal(signal.SIGHUP)
        stop(server, *error)

    monkeypatch.setattr(Server, "__exit__", hang_up_and_stop)
    # under nohup a hangup is ignored
    for each, handler in ((signal.SIGINT, on_sigint), (signal.SIGHUP, signal.SIG_DFL)):
        request.addfinalizer(partial(signal.signal, each, signal.signal(each, handler)))
    running: list[int] = []
    before = signal.getsignal(sign)
    with pytest.raises(KeyboardInterrupt), ServerPool(Plan([OURS]), tmp_path) as pool:  # noqa: PT012  all is one run
        pool.open(Key("ours", ()), OURS)
        running += pids(pool)
        signal.raise_signal(sign)
    assert len(running) == 1
    assert not is_alive(running[0])
    assert signal.getsignal(sign) == before


def test_under_nohup_a_hangup_stays_ignored(tmp_path: Path) -> None:
    """A user who starts a run with nohup closes the terminal on purpose."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with ServerPool(Plan([OURS]), tmp_path):
            signal.raise_signal(signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_dead_server_is_named_with_its_log(tmp_path: Path) -> None:
    with ServerPool(Plan([OURS]), tmp_path) as pool:
        key = Key("ours", ())
        url = pool.open(key, OURS)
        pool.check(key, url)
        os.killpg(pids(pool)[0], signal.SIGKILL)
        with pytest.raises(CommandError, match=r"ours: the server is gone; .*ours\.log"):
            pool.check(key, url)
    assert sys.exc_info() == (None, None, None)
