"""The end of the server: after SIGTERM requests are served on for a while, then new ones are
refused, and a limit holds.

    SIGTERM ── served, not ready ── lame_duck_s ── new requests get 503, running ones finish
            ── drain_s ── the rest is aborted ── LAST_S ── killed
    a second SIGTERM at any time ── killed

At the end of the lame duck SGLang's tokenizer manager is told what its own handler would have told
it with the signal. It waits until no request is left, then ends the schedulers and the HTTP server.
It goes on accepting requests meanwhile, so under steady traffic it never ends. This stands in front
of all endpoints, also SGLang's.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from typing import TYPE_CHECKING

from starlette.responses import PlainTextResponse

from sglang_chunkcache.errors import BusyError
from sglang_chunkcache.front.readiness import Readiness
from sglang_chunkcache.front.routes import error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

READY = "/ready"
HEALTH = ("/health", "/health_generate", "/ping")
"""SGLang's. Balancers that watch these must see the lame duck, too."""

READING = ("GET", "HEAD", "OPTIONS")
"""Methods that start no work: `/metrics` and `/chunkcache/stats` are answered to the end."""

ABORT = "/abort_request"
"""Ends a running request, so it is served, too."""

RETRY_AFTER_S = 1
"""Behind a load balancer the next try reaches another server."""

SAME_S = 0.2
"""Signals this close are one: `timeout` sends it to the process, and then to its group."""

LAST_S = 40.0
"""For aborted requests to be answered and SGLang to end:
it looks every 5 s, and waits 15 s for the schedulers to end."""


class Drain:
    """ASGI middleware.

    Args:
        readiness: is told of the signal, and knows SGLang's tokenizer manager.
        lame_duck_s: seconds after the signal in which new requests are served.
        limit_s: seconds that running requests have after those.
    """

    def __init__(
        self, app: ASGIApp, readiness: Readiness, *, lame_duck_s: float, limit_s: float
    ) -> None:
        self._app, self._readiness = app, readiness
        self._lame_duck_s, self._limit_s = lame_duck_s, limit_s
        self._signalled = 0.0
        self._leaving: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            self._listen()
            try:
                await self._app(scope, receive, send)
            finally:
                # The server has ended by itself: nothing is left to abort or kill.
                if self._leaving is not None:
                    self._leaving.cancel()
        elif scope["type"] == "http" and (refusal := self._refusal(scope)) is not None:
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _listen(self) -> None:
        """Take SIGTERM over from uvicorn, which would end at once, and from SGLang, which would set
        its handler with the first request: it does so once, so it does it now."""
        self._readiness.manager().auto_create_handle_loop()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self._terminate)

    def _refusal(self, scope: Scope) -> ASGIApp | None:
        """The answer to what is not passed on."""
        path = scope["path"]
        if path == READY:
            objection = self._readiness.objection()
            return PlainTextResponse(objection or "ready", 503 if objection else 200)
        # SGLang's /health says 503 only once gracefully_exit is set, which is after the lame duck.
        if path in HEALTH and self._readiness.is_leaving:
            return PlainTextResponse("shutting down", 503)
        if (
            scope["method"] in READING
            or path == ABORT
            or not self._readiness.manager().gracefully_exit
        ):
            return None
        refusal = error_response(BusyError("the server is shutting down"))
        # a client that keeps its connection would send its next try here as well
        refusal.headers.update({"Retry-After": str(RETRY_AFTER_S), "Connection": "close"})
        return refusal

    def _terminate(self) -> None:
        if self._leaving is None:
            self._signalled = time.monotonic()
            self._leaving = asyncio.ensure_future(self._leave())
        elif time.monotonic() - self._signalled > SAME_S:
            logger.warning("chunk cache: a second SIGTERM: ending at once")
            _kill()

    async def _leave(self) -> None:
        # asked before is_leaving is set, which is an objection itself
        manager, is_ready = self._readiness.manager(), self._readiness.objection() is None
        self._readiness.is_leaving = True
        # No balancer sends requests to a server that is not ready, so nobody needs the time.
        if is_ready and self._lame_duck_s:
            told = "chunk cache: SIGTERM: not ready any more, requests are served for %g s"
            logger.info(told, self._lame_duck_s)
            await asyncio.sleep(self._lame_duck_s)
        # SGLang's sigterm_watchdog ends the process when no request is left, amid a sleep below.
        manager.gracefully_exit, limit_s = True, self._limit_s
        logger.info(
            "chunk cache: SIGTERM: new requests are refused, running ones have %g s", limit_s
        )
        await asyncio.sleep(limit_s)
        num_left = len(manager.rid_to_state)
        logger.warning("chunk cache: after %g s %d requests are aborted", limit_s, num_left)
        manager.abort_request(abort_all=True)
        await asyncio.sleep(LAST_S)
        logger.error("chunk cache: the server has not ended %g s after that, killing it", LAST_S)
        _kill()


def _kill() -> None:
    from sglang.srt.utils import kill_process_tree

    # With the parent it calls sys.exit(0): a killed server would pass for one that has ended.
    kill_process_tree(os.getpid(), include_parent=False)
    os._exit(128 + signal.SIGTERM)
