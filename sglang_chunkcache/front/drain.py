"""The end of the server: after SIGTERM running requests finish, new ones are refused, and a limit holds.

    SIGTERM ── new requests: 503 ──────────────────────────────────────────────┐
            ── running ones finish ── drain_s ── the rest is aborted ── LAST_S ── all processes are killed

SGLang's tokenizer manager notices the signal, waits until no request is left, then ends the schedulers and the HTTP server. It
goes on accepting requests meanwhile, so under steady traffic it never ends. This stands in front of all endpoints, also SGLang's.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_chunkcache.errors import BusyError
from sglang_chunkcache.front.routes import error_response

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

logger = logging.getLogger(__name__)

READING = ("GET", "HEAD", "OPTIONS")
"""Methods that start no work: `/health` (503 by SGLang), `/metrics` and `/chunkcache/stats` are answered to the end."""

ABORT = "/abort_request"
"""Ends a running request, so it is served, too."""

POLL_S = 0.2
RETRY_AFTER_S = 1
"""Behind a load balancer the next try reaches another server."""

LAST_S = 40.0
"""For aborted requests to be answered and SGLang to end: it looks every 5 s, and waits 15 s for the schedulers to end."""


class Drain:
    """ASGI middleware.

    Args:
        manager: SGLang's tokenizer manager, once the app runs.
        limit_s: seconds that running requests have after the signal.
    """

    def __init__(self, app: ASGIApp, *, manager: Callable[[], Any], limit_s: float) -> None:
        self._app, self._manager, self._limit_s = app, manager, limit_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            watch = asyncio.create_task(self._watch())
            try:
                await self._app(scope, receive, send)
            finally:
                watch.cancel()
        elif scope["type"] == "http" and _asks_for_work(scope) and self._manager().gracefully_exit:
            refusal = error_response(BusyError("the server is shutting down"))
            refusal.headers.update({"Retry-After": str(RETRY_AFTER_S), "Connection": "close"})
            await refusal(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _watch(self) -> None:
        manager = self._manager()
        while not manager.gracefully_exit:
            await asyncio.sleep(POLL_S)
        logger.info("chunk cache: SIGTERM: new requests are refused, running ones have %g s", self._limit_s)
        await asyncio.sleep(self._limit_s)
        logger.warning("chunk cache: after %g s %d requests are aborted", self._limit_s, len(manager.rid_to_state))
        manager.abort_request(abort_all=True)
        await asyncio.sleep(LAST_S)
        logger.error("chunk cache: the server has not ended %g s after that, killing it", LAST_S)
        _kill()


def _asks_for_work(scope: Scope) -> bool:
    return scope["method"] not in READING and scope["path"] != ABORT


def _kill() -> None:
    from sglang.srt.utils import kill_process_tree

    kill_process_tree(os.getpid())
