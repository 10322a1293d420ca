"""The servers of a measurement: each is started on first use, with its own log, and all are stopped
at the end.

A server is identified by its arm and the flags that a cell adds; a stock server takes no cell's
flags and serves all cells. The server's own description of its configuration is stored as facts. An
arm of ours whose server lacks our cache is refused.
"""

from __future__ import annotations

import re
import signal
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

from eval.errors import CommandError
from eval.http import get, post
from eval.record import portable
from eval.serve import peaks
from eval.serve.arms import EVERY_SERVER, Arm
from eval.serve.plan import SERVER
from eval.server import Server

if TYPE_CHECKING:
    from eval.serve.plan import Cell, Plan

SERVER_FIELDS = (
    *(
        "attention_backend",
        "device",
        "dtype",
        "kv_cache_dtype",
        "enable_cache_report",
        "stream_interval",
        "version",
    ),
    *(
        "schedule_policy",
        "disable_radix_cache",
        "max_total_num_tokens",
        "chunked_prefill_size",
        "max_running_requests",
    ),
    *("tp_size", "dp_size"),
)
"""Of SGLang's `/server_info`."""
FLUSH_S = 60
"""Time that a flush may wait for requests in flight."""


class Key(NamedTuple):
    """Identifies a server: its arm, the flags that a cell adds,
    and its number where an arm has several."""

    arm: str
    flags: tuple[str, ...]
    number: int | None = None

    def __str__(self) -> str:
        return " ".join(
            (self.arm, *self.flags, *([] if self.number is None else [str(self.number)]))
        )


def key_of(arm: Arm, cell: Cell) -> Key:
    """The server that answers this arm's requests of this cell.
    Raises CommandError for flags of a running server."""
    if arm.url is not None and arm.route == "rag" and cell.flags:
        raise CommandError(f"{arm.name}: a running server cannot be given {' '.join(cell.flags)}")
    # stock ignores our flags, so one server of it serves the cells of all of them
    return Key(arm.name, cell.flags if arm.is_ours else (), cell.label.get(SERVER))


class ServerPool:
    """Started servers and running endpoints; a context manager.

    SIGTERM and SIGHUP stop the started servers like Ctrl-C.

    Args:
        plan: flags and threads of every server; its `facts["servers"]` is filled.
        logs: folder for the servers' output.
    """

    def __init__(self, plan: Plan, logs: Path) -> None:
        self._plan, self._logs = plan, logs
        self.facts: dict[str, dict[str, Any]] = plan.facts.setdefault("servers", {})
        """Each server's description of itself, by its key as text."""
        self._running: dict[Key, tuple[Server, ExitStack]] = {}
        self._served: dict[Key, str] = {}
        self._stack = ExitStack()

    def __enter__(self) -> ServerPool:
        self._stack.enter_context(_interrupted_by_signals())
        # pushed last, so run first: signals are still caught while servers stop
        self._stack.callback(self.keep, ())
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def keep(self, keys: Collection[Key]) -> None:
        """Stop all started servers but these."""
        with ExitStack() as stopping:  # stop the others even if one does not stop
            for key in [key for key in self._running if key not in keys]:
                stopping.callback(self._running.pop(key)[1].close)

    def open(self, key: Key, arm: Arm) -> str:
        """The server's root address. The first call starts the server, or queries a running one.

        Raises:
            CommandError: the server does not start, is not reachable, or lacks the cache that the
                arm needs.
        """
        counting = peaks.FLAGS if self._plan.peaks else ()
        flags = (
            [*arm.flags, *EVERY_SERVER, *counting, *self._plan.server_flags, *key.flags]
            if arm.url is None
            else []
        )
        if arm.url is None and key not in self._running:
            log = self._logs / f"{re.sub(r'[^A-Za-z0-9.+]+', '-', str(key))}.log"
            server = Server(
                flags, log=log, env={"OMP_NUM_THREADS": str(self._plan.threads)}, timeout_s=900.0
            )
            print(f"eval: starting {key}", file=sys.stderr)
            # `pop_all` only after the start: a failed one has ended its process itself
            with ExitStack() as stack:
                self._running[key] = stack.enter_context(server), stack.pop_all()
        url = arm.url or self._running[key][0].url
        if key not in self._served:
            self._served[key] = _model_of(key, url)
            self.facts[str(key)] = facts = self._describe(key, arm, url, flags)
            # the other route has fates
            if arm.route == "chat" and facts["enable_cache_report"] is False:
                told = "does not report cached tokens: start it with --enable-cache-report"
                print(f"eval: {key} {told}", file=sys.stderr)
        return url

    def model(self, key: Key) -> str:
        """The model's name in requests."""
        return self._served[key]

    def flush(self, key: Key, url: str) -> None:
        """Flush the server's cache, of a running server only with `plan.flush`.
        Records a cache that is not empty."""
        facts = self.facts[str(key)]
        if self._plan.keeps_start if key in self._running else not self._plan.flush:
            facts["flushed"] = False
            return
        try:
            if facts["chunk_cache"]:
                # otherwise a later cell would use access counts of an earlier one
                post(f"{url}/chunkcache/forget")
            post(f"{url}/flush_cache?timeout={FLUSH_S}", timeout_s=FLUSH_S + 30)
            facts.setdefault("flushed", True)
        except CommandError as error:
            # told once; False stays, since one cell that began with a filled cache taints the run
            if facts.get("flushed") is not False:
                print(f"eval: {key}: its cache is not empty: {error}", file=sys.stderr)
            facts["flushed"] = False

    def seconds(self, key: Key, url: str) -> tuple[float, float] | None:
        """Seconds since the start that our cache matched and inserted,
        and mean seconds of an order decision; None of others."""
        stats = _ask(url + "/chunkcache/stats") if self.facts[str(key)]["chunk_cache"] else {}
        ranks = [rank for rank in stats.get("ranks", []) if "match_seconds" in rank]
        tree = [rank["match_seconds"] + rank["insert_seconds"] for rank in ranks]
        return (sum(tree), 1e-6 * (stats.get("order_us_mean") or 0.0)) if tree else None

    def tiers(self, key: Key, url: str) -> list[dict[str, Any]]:
        """What each rank of ours says of its tiers below the device,
        once nothing waits to be written to the storage."""
        deadline = time.monotonic() + FLUSH_S
        while True:
            ranks = (
                _ask(url + "/chunkcache/stats").get("ranks", [])
                if self.facts[str(key)]["chunk_cache"]
                else []
            )
            told = [
                {tier: rank.get(tier) for tier in ("store", "host", "storage")} for rank in ranks
            ]
            found = [{tier: stats for tier, stats in rank.items() if stats} for rank in told]
            # a storage that hangs never empties its queue
            if time.monotonic() > deadline or not any(
                rank.get("storage", {}).get("queue") for rank in found
            ):
                return [rank for rank in found if rank]
            time.sleep(0.2)

    def check(self, key: Key, url: str) -> None:
        """Call after failed requests. Raises CommandError if the server is gone,
        or does not answer."""
        if key in self._running:
            server = self._running[key][0]
            # each try is given 5 s, which a busy machine may need
            if not any(server.is_healthy() for _ in range(3)):
                raise CommandError(
                    f"{key}: the server is gone; {server.log} ends with:\n{server.log_tail()}"
                )
        else:
            _model_of(key, url)

    # Private, in order of use

    def _describe(self, key: Key, arm: Arm, url: str, flags: Sequence[str]) -> dict[str, Any]:
        """The server's description of itself; None for missing facts."""
        info, stats = _ask(url + "/server_info"), _ask(url + "/chunkcache/stats")
        if arm.route == "rag" and not stats.get("ranks"):
            raise CommandError(
                f"{key}: {url} does not run the chunk cache: GET /chunkcache/stats gives none. For"
                f" a server without it say {arm.name}=URL,chat"
            )
        return {
            "model": Path(str(info.get("model_path") or self._served[key])).name,
            **{field: info.get(field) for field in SERVER_FIELDS},
            "chunk_cache": bool(stats.get("ranks")),
            "gate": [gate for rank in stats.get("ranks", []) if (gate := rank.get("gate"))] or None,
            **portable({"flags": flags}),
        }


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """SIGTERM and SIGHUP interrupt like Ctrl-C, once: a closing terminal sends SIGHUP again while
    servers are stopped.

    Servers run in sessions of their own, which no signal reaches; they would outlive a terminated
    parent.
    """

    def interrupt(sign: int, frame: FrameType | None) -> None:
        for each in handlers:
            signal.signal(each, signal.SIG_IGN)
        # asyncio's in a loop; a shell's background job ignores it
        on_sigint = signal.getsignal(signal.SIGINT)
        (on_sigint if callable(on_sigint) else signal.default_int_handler)(sign, frame)

    found = {sign: signal.getsignal(sign) for sign in (signal.SIGTERM, signal.SIGHUP)}
    # ignored: under nohup
    handlers = {sign: handler for sign, handler in found.items() if handler != signal.SIG_IGN}
    for sign in handlers:
        signal.signal(sign, interrupt)
    try:
        yield
    finally:
        for sign, handler in handlers.items():
            signal.signal(sign, handler)


def _model_of(key: Key, url: str) -> str:
    """The first model that the endpoint serves. Raises CommandError if it does not answer."""
    try:
        return str(get(url + "/v1/models", timeout_s=30)["data"][0]["id"])
    except CommandError as error:
        raise CommandError(f"{key}: no server answers: {error}") from None
    except (KeyError, IndexError, TypeError):
        raise CommandError(
            f"{key}: {url}/v1/models names no model: it is not an OpenAI-compatible server"
        ) from None


def _ask(url: str) -> dict[str, Any]:
    """What a GET brings; {} if it fails."""
    # stock has no `/chunkcache/stats`, other servers no `/server_info`
    with suppress(CommandError):
        return get(url, timeout_s=60)
    return {}
