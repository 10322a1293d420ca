"""The front in SGLang's app: once per process, in the main one."""

from __future__ import annotations

from sglang.srt.entrypoints import http_server

from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.errors import ChunkCacheError
from sglang_chunkcache.front.drain import Drain
from sglang_chunkcache.front.page.routes import PageRoutes
from sglang_chunkcache.front.parts import Parts
from sglang_chunkcache.front.routes import Routes, refused

_parts: Parts | None = None


def install(config: ChunkCacheConfig) -> Parts:
    """Put our routes into SGLang's app, and what ends it in front of them."""
    global _parts
    _parts = parts = Parts(config)
    limits = {"lame_duck_s": config.lame_duck_s, "limit_s": config.drain_s}
    http_server.app.add_middleware(Drain, parts.readiness, **limits)
    for method, path, handler in (*Routes(parts).table(), *PageRoutes(parts).table()):
        # Not include_router: it hides the endpoints from SGLang's auth levels.
        http_server.app.add_api_route(path, handler, methods=[method])
    http_server.app.add_exception_handler(ChunkCacheError, refused)
    return parts


def installed() -> Parts:
    assert _parts is not None
    return _parts
