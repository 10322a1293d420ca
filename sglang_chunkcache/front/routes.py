"""HTTP in and out: `/rag/v1/*` and `/chunkcache/*` on SGLang's own app. `/v1/*` stays SGLang's.

What shows or changes what other tenants see asks for the admin level.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Annotated, Any

from fastapi import Query, Request
from fastapi.responses import ORJSONResponse
from msgspec.structs import asdict
from sglang.srt.entrypoints import http_server
from sglang.srt.utils.auth import AuthLevel, auth_level

from radix_ext import snapshot
from sglang_chunkcache.errors import ChunkCacheError, EngineRefusedError, SearchFailedError
from sglang_chunkcache.front.answer import explained
from sglang_chunkcache.front.bodies import CalibrateIn, PreprocessIn
from sglang_chunkcache.front.calibration import calibrate
from sglang_chunkcache.front.fusion_options import check_fused
from sglang_chunkcache.front.generate import generate
from sglang_chunkcache.front.intake import Intake
from sglang_chunkcache.front.parse import json_object, parse
from sglang_chunkcache.front.parts import Parts
from sglang_chunkcache.front.preprocessing import preprocess
from sglang_chunkcache.front.request_log import log_refusal

Handler = Callable[..., Awaitable[Any]]

KINDS = {
    400: "BadRequestError",
    403: "ForbiddenError",
    413: "RequestTooLargeError",
    422: "UnprocessableEntityError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
"""SGLang's names of errors."""


class Routes:
    """The handlers. What they refuse `refused` answers: mostly with 400 and the field that is
    wrong."""

    def __init__(self, parts: Parts) -> None:
        self._parts, self._intake = parts, Intake(parts)

    def table(self) -> list[tuple[str, str, Handler]]:
        """(method, path, handler)."""
        return [
            ("POST", "/rag/v1/chat/completions", self.rag_chat_completions),
            ("POST", "/rag/v1/retrieve", self.rag_retrieve),
            ("POST", "/rag/v1/generate", self.rag_generate),
            ("GET", "/rag/v1/models", http_server.available_models),
            # a path, since hub names have a slash
            ("GET", "/rag/v1/models/{model:path}", http_server.retrieve_model),
            ("POST", "/chunkcache/prefetch", self.chunkcache_prefetch),
            ("GET", "/chunkcache/stats", self.chunkcache_stats),
            ("GET", "/chunkcache/tree", self.chunkcache_tree),
            ("POST", "/chunkcache/forget", self.chunkcache_forget),
            ("POST", "/chunkcache/explain", self.chunkcache_explain),
            ("POST", "/chunkcache/preprocess", self.chunkcache_preprocess),
            ("POST", "/chunkcache/clear_store", self.chunkcache_clear_store),
            ("POST", "/chunkcache/calibrate", self.chunkcache_calibrate),
        ]

    async def rag_chat_completions(self, raw_request: Request) -> Any:
        """A chat completion over `chunks`, of a conversation where it names one."""
        with self._counted():
            request, planned = await self._intake.chat(raw_request)
        return await self._parts.chat.serve(request, planned, raw_request)

    async def rag_retrieve(self, raw_request: Request) -> Any:
        """The passages that the server's index finds for a query or the last user messages."""
        body, found = await self._intake.retrieval(raw_request)
        # no prompt, so `requests` does not count it; `searches` does
        return ORJSONResponse(found.listed(with_text=body.text))

    async def rag_generate(self, raw_request: Request) -> Any:
        """SGLang's `/generate` over `parts`, texts and chunk areas: frontend programs use it."""
        with self._counted():
            body, planned = await self._intake.generate(raw_request)
            return await generate(self._parts, body, planned, raw_request)

    async def chunkcache_prefetch(self, raw_request: Request) -> Any:
        """What a request that may come needs of the storage is loaded. 202 says that this was
        understood, and nothing of what is there."""
        self._parts.engine.prefetch(await self._intake.hint(raw_request))
        return ORJSONResponse({}, status_code=202)

    async def chunkcache_stats(self) -> Any:
        """Counts of the front and of every rank."""
        stats = await self._parts.stats()
        if stats is None:
            return ORJSONResponse({"error": "a rank runs without the chunk cache"}, status_code=500)
        return ORJSONResponse(stats)

    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
    async def chunkcache_tree(
        self,
        depth: Annotated[int, Query(ge=1, le=64)] = 3,
        max_nodes: Annotated[int, Query(ge=1, le=100_000)] = 200,
    ) -> Any:
        """The first levels of the global tree."""
        return ORJSONResponse(
            snapshot(self._parts.bookkeeper.tree, depth=depth, max_nodes=max_nodes)
        )

    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
    async def chunkcache_forget(self) -> Any:
        """Forget what requests were like, as a restart would.
        `/flush_cache` empties the cache, `clear_store` the store."""
        self._parts.bookkeeper.forget()
        return ORJSONResponse({"forgotten": ["table", "conversations"]})

    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
    async def chunkcache_explain(self, raw_request: Request) -> Any:
        """A chat request's order, rank, spans and each chunk's source.
        Nothing but a search is run or counted."""
        _, planned = await self._intake.chat(raw_request)
        found = await self._parts.engine.explain(planned)
        return ORJSONResponse(explained(planned, found))

    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
    async def chunkcache_preprocess(self, raw_request: Request) -> Any:
        """Put a chunk's KV after its neighbours into every rank's store (FusionRAG 3.1)."""
        with self._counted():
            body = parse(PreprocessIn, await json_object(raw_request, self._parts.config))
            return ORJSONResponse(await preprocess(self._parts, self._intake, body, raw_request))

    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
    async def chunkcache_clear_store(self) -> Any:
        """Empty every rank's store; what was in it.
        `/flush_cache` empties the tree, and keeps what was preprocessed."""
        cleared = await self._parts.engine.clear_store()
        return ORJSONResponse(
            {"cleared": [{"dp_rank": rank, **asdict(held)} for rank, held in cleared.items()]}
        )

    @auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
    async def chunkcache_calibrate(self, raw_request: Request) -> Any:
        """Find out by which layers and heads the tokens to recompute are told, on the body's
        examples or on prompts of our own."""
        check_fused(self._parts.config, "calibrate")
        body = parse(CalibrateIn, await json_object(raw_request, self._parts.config))
        return ORJSONResponse(await calibrate(self._parts, body))

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """Counts a request that is refused."""
        try:
            yield
        except EngineRefusedError:  # it had begun, so the bookkeeper has counted it
            raise
        except ChunkCacheError as error:
            outcome = "unsearched" if isinstance(error, SearchFailedError) else "refused"
            self._parts.bookkeeper.metrics.count("requests", outcome)
            log_refusal(outcome, error.status)
            raise


async def refused(raw_request: Request, error: Exception) -> ORJSONResponse:
    """FastAPI's handler of refusals, the guard's on SGLang's endpoints among them."""
    assert isinstance(error, ChunkCacheError)
    return error_response(error)


def error_response(error: ChunkCacheError) -> ORJSONResponse:
    """SGLang's shape of an error. `param` is the field in front of the message's colon."""
    message, status = str(error), error.status
    # only a client's mistake begins with a field
    param = message.split(":")[0] if status < 500 else None
    told = {"message": message, "type": KINDS[status], "param": param, "code": status}
    # The rest of a body that is too large would be received for as long as the connection stands.
    headers = {"Connection": "close"} if status == 413 else None
    return ORJSONResponse({"object": "error", **told}, status_code=status, headers=headers)
