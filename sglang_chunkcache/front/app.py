"""The front in SGLang's app: once per process, in the main one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sglang.srt.entrypoints import http_server

from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.drain import Drain
from sglang_chunkcache.front.guard.lethal import Guard
from sglang_chunkcache.front.misplaced import Misplaced
from sglang_chunkcache.front.parts import Parts
from sglang_chunkcache.front.routes import Routes, refused

if TYPE_CHECKING:
    from retrieval.retriever import Retriever

_parts: Parts | None = None


def install(config: ChunkCacheConfig) -> tuple[Misplaced, Guard | None]:
    """Put our routes into SGLang's app, and what ends it in front of them. Returns what looks at
    the requests of `generate_request`; the guard is None where a flag has switched it off."""
    global _parts
    _parts = parts = Parts(config)
    http_server.app.add_middleware(
        Drain,
        parts.readiness,
        manager=lambda: parts.manager,
        lame_duck_s=config.lame_duck_s,
        limit_s=config.drain_s,
    )
    for method, path, handler in Routes(_parts).table():
        # Not include_router: it hides the endpoints from SGLang's auth levels.
        http_server.app.add_api_route(path, handler, methods=[method])
    # the guard's, where an endpoint does not catch it
    http_server.app.add_exception_handler(RequestError, refused)
    return _parts.misplaced, _parts.guard if config.guard == "on" else None


def started() -> None:
    """The start-up check is done: from now on `/ready` says so."""
    assert _parts is not None
    _parts.readiness.is_started = True


def serve_as(config: ChunkCacheConfig) -> None:
    """The configuration with its tree, which was not decided yet; before the first request."""
    assert _parts is not None
    _parts.config = config


def search_with(retriever: Retriever) -> None:
    """Answer requests from this index; after `install`, before the first request."""
    assert _parts is not None
    _parts.retriever = retriever
