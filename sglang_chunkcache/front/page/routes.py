"""The live page's endpoints."""

from __future__ import annotations

import asyncio
import time
from functools import cached_property
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import HTMLResponse, ORJSONResponse
from sglang.srt.utils.auth import AuthLevel, auth_level

from radix_ext import ChainId
from sglang_chunkcache.errors import BusyError
from sglang_chunkcache.front.page.access import DATA, PAGE, check_local
from sglang_chunkcache.front.page.explanations import explanations
from sglang_chunkcache.front.page.history import BUCKET_S
from sglang_chunkcache.front.page.levels import Levels
from sglang_chunkcache.front.page.shell import shell
from sglang_chunkcache.front.parts import Parts

STATS_S = 2.0
"""The ranks are asked at most so often, however many pages are open."""
NO_STORE = {"Cache-Control": "no-store"}


class PageRoutes:
    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._asking = asyncio.Lock()
        self._stats: dict[str, Any] | None = None
        self._asked_at: float | None = None

    def table(self) -> list[tuple[str, str, Any]]:
        """(method, path, handler)."""
        return [
            ("GET", PAGE, self.page),
            ("GET", DATA, self.live),
            ("GET", f"{DATA}/request", self.request),
            ("GET", f"{DATA}/tree", self.tree),
        ]

    @cached_property
    def _levels(self) -> Levels:
        return Levels(self._parts.bookkeeper.tree)

    async def page(self) -> Any:
        """The page, without data."""
        html, headers = shell()
        return HTMLResponse(html, headers=headers)

    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
    async def live(self, raw_request: Request) -> Any:
        """The last hour, the last requests, counts of the front and of every rank."""
        self._check(raw_request)
        async with self._asking:
            now = time.monotonic()
            if self._asked_at is None or now - self._asked_at >= STATS_S:
                if (stats := await self._parts.stats()) is None:
                    raise BusyError("a rank runs without the chunk cache")
                self._stats, self._asked_at = stats, now
        history = self._parts.bookkeeper.history
        return self._answer(
            {
                "start": history.start,
                "now": time.time(),
                "bucket_s": BUCKET_S,
                "buckets": history.buckets(),
                "recent": history.recent(),
                "stats": self._stats,
                "explanations": explanations(),
            }
        )

    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
    async def request(self, raw_request: Request, number: Annotated[int, Query(ge=1)]) -> Any:
        """One of the last requests, with its chunks."""
        self._check(raw_request)
        return self._answer(self._parts.bookkeeper.history.request(number))

    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
    async def tree(
        self,
        raw_request: Request,
        node: Annotated[int | None, Query()] = None,
        offset: Annotated[int, Query(ge=0, le=1_000_000_000)] = 0,
    ) -> Any:
        """Children of a node of the global tree, the largest subtrees first."""
        self._check(raw_request)
        chain = None if node is None else ChainId(node)
        labels = self._parts.bookkeeper.history.labels()
        return self._answer(await self._levels.children(chain, offset, labels))

    def _check(self, raw_request: Request) -> None:
        args = self._parts.manager.server_args
        check_local(raw_request, has_keys=bool(args.api_key or args.admin_api_key))

    def _answer(self, found: dict[str, Any] | None) -> ORJSONResponse:
        return ORJSONResponse(found, status_code=404 if found is None else 200, headers=NO_STORE)
