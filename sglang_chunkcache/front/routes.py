"""HTTP in and out: `/rag/v1/*` and `/chunkcache/*` on SGLang's own app. `/v1/*` stays SGLang's.

POST /rag/v1/chat/completions   a chat completion with `chunks` and `conversation_id`
POST /rag/v1/retrieve           what the server's index finds, without a prompt
POST /rag/v1/generate           SGLang's /generate with `parts`: texts and chunk areas (frontend programs use it)
GET  /chunkcache/stats          counts only
GET  /chunkcache/tree           the global tree, depth-limited
POST /chunkcache/explain        what would become of a chat request that is not run
POST /chunkcache/preprocess     a chunk's KV behind its neighbours, into the store (`--reuse fused`)

The last three show or change what other tenants see, so they ask for the admin level.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections import Counter
from typing import TYPE_CHECKING, Annotated, Any

import orjson
import requests
from fastapi import APIRouter, Query, Request
from fastapi.responses import ORJSONResponse, StreamingResponse
from fastapi.routing import APIRoute
from requests.adapters import HTTPAdapter
from sglang.srt.entrypoints import http_server
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.managers.io_struct import GenerateReqInput, GetInternalStateReq
from sglang.srt.utils import kill_process_tree
from sglang.srt.utils.auth import AuthLevel, auth_level
from urllib3.util.retry import Retry

from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.front.bodies import (
    MAX_ID_CHARS,
    ChunkIn,
    GenerateIn,
    PreprocessIn,
    RagFields,
    RetrieveBody,
    parse,
)
from sglang_chunkcache.front.chat import RagServingChat, TappedManager
from sglang_chunkcache.front.prompt import PromptAssembler, PromptError, read_template
from sglang_chunkcache.front.request import Identity, Passage, RagRequest
from sglang_chunkcache.front.search import RagSearch, SearchFailedError, check_tokenizer
from sglang_chunkcache.front.service import RagService
from sglang_chunkcache.hooks import EXPLAIN_KEY, STATE_KEY

if TYPE_CHECKING:
    from retrieval.retriever import Retriever

logger = logging.getLogger(__name__)


class _State:
    """The one service of this process; made with the first request or the start-up check, when SGLang is ready."""

    def __init__(self, config: ChunkCacheConfig) -> None:
        self.config = config
        self.retriever: Retriever | None = None
        self._service: RagService | None = None
        self._chat: RagServingChat | None = None
        self._search: RagSearch | None = None

    @property
    def manager(self) -> Any:
        return http_server.get_global_state().tokenizer_manager

    @property
    def service(self) -> RagService:
        if self._service is None:
            args = self.manager.server_args
            if name := http_server.get_global_state().template_manager.chat_template_name:
                raise PromptError(f"--chat-template {name}: SGLang's built-in templates are not supported; give a file")
            assembler = PromptAssembler(
                self.manager.tokenizer,
                template=read_template(self.config.rag_template),
                separator=self.config.chunk_separator,
            )
            self._service = RagService(
                self.config,
                assembler,
                # A KV pool smaller than the context is the tighter limit.
                context_len=min(self.manager.model_config.context_len, self.manager.max_req_input_len),
                num_ranks=args.dp_size,
                prometheus=args.enable_metrics,
            )
        return self._service

    @property
    def chat(self) -> RagServingChat:
        if self._chat is None:
            self._chat = RagServingChat(self.manager, http_server.get_global_state().template_manager, self.service)
        return self._chat

    @property
    def search(self) -> RagSearch | None:
        """None for a server without an index."""
        if self._search is None and self.retriever is not None:
            self._search = RagSearch(self.retriever, self.config, self.service.metrics)
        return self._search


router = APIRouter()
_state: _State


def install(config: ChunkCacheConfig) -> None:
    """Put our routes into SGLang's app. Once per process."""
    global _state
    _state = _State(config)
    for route in router.routes:  # not include_router: it hides the endpoints from SGLang's auth levels
        assert isinstance(route, APIRoute)
        http_server.app.add_api_route(route.path, route.endpoint, methods=list(route.methods or ()))


def search_with(retriever: Retriever) -> None:
    """Answer requests from this index; after `install`."""
    _state.retriever = retriever


@router.post("/rag/v1/chat/completions")
async def rag_chat_completions(raw_request: Request) -> Any:
    """A chat completion over `chunks`. 400 names the field that is wrong."""
    try:
        request, rag = await _plan_chat(raw_request)
    except (ValueError, SearchFailedError) as error:
        return _refuse(error)
    request.input_ids = rag.input_ids
    request.custom_params = rag.params_with(request.custom_params)
    request.routed_dp_rank = _routed(rag)
    rag.is_parallel = request.n > 1
    raw_request.state.chunkcache = rag
    try:
        response = await _state.chat.handle_request(request, raw_request)
    except BaseException:
        _state.service.release(rag)
        raise
    if isinstance(response, ORJSONResponse) and response.status_code >= 400:
        _state.service.release(rag)
    return response


@router.post("/rag/v1/retrieve")
async def rag_retrieve(raw_request: Request) -> Any:
    """The passages of a query or of the last user messages. 400 names the field that is wrong."""
    try:
        body = parse(RetrieveBody, await _json_object(raw_request))
        if (body.query is None) == (not body.messages):
            raise PromptError("query: give query or messages, one of them")
        found = await _search().find(body, body.messages, field="", is_gone=raw_request.is_disconnected)
    except (ValueError, SearchFailedError) as error:
        return _error_response(error)
    return ORJSONResponse(found.listed(with_text=body.text))


@router.post("/rag/v1/generate")
async def rag_generate(raw_request: Request) -> Any:
    """SGLang's `/generate` over `parts`. 400 names the field that is wrong."""
    try:
        body = parse(GenerateIn, await _json_object(raw_request))
        parts = [part if isinstance(part, str) else _passages(part.chunks) for part in body.parts]
        num_chunks = sum(len(part) for part in parts if not isinstance(part, str))
        if num_chunks > _state.config.max_chunks:
            raise PromptError(f"parts: {num_chunks} chunks given, at most {_state.config.max_chunks}")
        params = dict(body.sampling_params)
        custom = params.pop("custom_params", None) or {}
        if not isinstance(custom, dict):
            raise PromptError("sampling_params.custom_params: must be an object")
        limit = params.get("max_new_tokens")
        if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 0):
            raise PromptError("sampling_params.max_new_tokens: must be a number of tokens")
        if params.get("n") not in (None, 1):
            raise PromptError("sampling_params.n: must be 1")
        rag = _state.service.begin_parts(
            parts,
            identity=_identity(raw_request, body.cache_salt, body.extra_key, None, ""),
            max_new_tokens=limit,
            order=body.order,
            reuse=body.reuse_request(_state.config),
        )
    except ValueError as error:
        return _refuse(error)
    raw_request.state.chunkcache = rag
    obj = GenerateReqInput(
        input_ids=rag.input_ids,
        sampling_params={**params, "custom_params": rag.params_with(custom)},
        stream=body.stream,
        return_logprob=body.return_logprob,
        logprob_start_len=body.logprob_start_len,
        top_logprobs_num=body.top_logprobs_num,
        return_text_in_logprobs=body.return_text_in_logprobs,
        extra_key=body.extra_key,
        cache_salt=body.cache_salt,
        routed_dp_rank=_routed(rag),
    )
    outputs = TappedManager(_state.manager, _state.service).generate_request(obj, raw_request)
    try:
        first = await outputs.__anext__()
    except (ValueError, TypeError) as error:  # SGLang's parameters raise both
        rag.is_refused = not await raw_request.is_disconnected()
        _state.service.release(rag)
        return _error_response(PromptError(f"sampling_params: {error}"))
    except BaseException:
        _state.service.release(rag)
        raise
    if not body.stream:
        _state.service.finish(rag, None)
        return ORJSONResponse({**first, "chunkcache": rag.answer()})
    return StreamingResponse(
        _generate_events(first, outputs, rag),
        media_type="text/event-stream",
        background=_state.manager.create_abort_task(obj),
    )


@router.get("/chunkcache/stats")
async def chunkcache_stats() -> Any:
    """Counts of the front and of every rank."""
    from sglang_chunkcache import __version__

    service = _state.service
    states = await _state.manager.get_internal_state()
    ranks = []
    if any(STATE_KEY not in state for state in states):
        return ORJSONResponse({"error": "a rank runs without the chunk cache"}, status_code=500)
    for stats in sorted((state[STATE_KEY] for state in states), key=lambda stats: int(stats["dp_rank"])):
        rank = stats["dp_rank"]
        mirror = service.mirrors[rank]
        seen = mirror.acknowledgement
        if seen.epoch and seen.epoch != stats["epoch"]:
            mirror.restart(stats["epoch"])
            seen = mirror.acknowledgement
        nodes, digest = service.tree.digest(rank)
        behind = stats["seq"] - seen.seq
        ranks.append(
            {
                **{key: value for key, value in stats.items() if key not in ("epoch", "digest")},
                "mirror": {
                    "chunk_nodes": nodes,
                    "events_behind": behind,
                    "agrees": (nodes, digest) == (stats["chunk_nodes"], stats["digest"]) if behind == 0 else None,
                    "restarts": mirror.num_restarts,
                    "gaps": mirror.num_gaps,
                },
            }
        )
    retrieval = _state.search.stats() if _state.search else None
    return ORJSONResponse({"version": __version__, **service.stats(), "retrieval": retrieval, "ranks": ranks})


@router.get("/chunkcache/tree")
@auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
async def chunkcache_tree(
    depth: Annotated[int, Query(ge=1, le=64)] = 3, max_nodes: Annotated[int, Query(ge=1, le=100_000)] = 200
) -> Any:
    """The first levels of the global tree."""
    return ORJSONResponse(_state.service.tree.snapshot(depth=depth, max_nodes=max_nodes))


@router.post("/chunkcache/forget")
@auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
async def chunkcache_forget() -> Any:
    """Forget what requests were like, as a restart would: access counts and conversations. `/flush_cache` empties the cache."""
    _state.service.forget()
    return ORJSONResponse({"forgotten": ["table", "conversations"]})


@router.post("/chunkcache/explain")
@auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
async def chunkcache_explain(raw_request: Request) -> Any:
    """What would become of a chat request: order, rank, spans and each chunk's source. Nothing but a search is run or counted."""
    try:
        request, rag = await _plan_chat(raw_request, dry_run=True)
    except (ValueError, SearchFailedError) as error:
        return _error_response(error)
    asked = {
        "input_ids": rag.input_ids,
        "custom_params": rag.custom_params,
        "extra_key": request.extra_key,
        "cache_salt": request.cache_salt,
    }
    _state.manager.auto_create_handle_loop()
    # SGLang's one way to a scheduler outside of serving; `rid` is the only field of this request that carries text.
    message = GetInternalStateReq(rid=orjson.dumps({EXPLAIN_KEY: asked}).decode())
    answers = await _state.manager.get_internal_state_communicator(message)
    states = [answer.internal_state.get(STATE_KEY, {}) for answer in answers]
    found = next((state.get("explain") for state in states if state.get("dp_rank") == rag.rank), None)
    if found is None:
        return ORJSONResponse({"error": f"rank {rag.rank} does not explain"}, status_code=500)
    return ORJSONResponse(rag.explained(found))


@router.post("/chunkcache/preprocess")
@auth_level(AuthLevel.ADMIN_OPTIONAL)  # type: ignore[untyped-decorator]
async def chunkcache_preprocess(raw_request: Request) -> Any:
    """Put a chunk's KV behind its neighbours into every rank's store (FusionRAG 3.1). 400 names the field that is wrong."""
    fates: Counter[str] = Counter()
    start = time.perf_counter()
    try:
        body = parse(PreprocessIn, await _json_object(raw_request))
        neighbors, (chunk,) = _passages(body.neighbors, "neighbors"), _passages([body.chunk], "chunk")
        for rank in range(len(_state.service.mirrors)):
            rag = _state.service.begin_preprocessing(
                [message.model_dump() for message in body.messages],
                neighbors,
                chunk,
                identity=_identity(raw_request, body.cache_salt, body.extra_key, None, ""),
                template_kwargs=_state.chat.default_chat_template_kwargs or None,
                rank=rank,
            )
            raw_request.state.chunkcache = rag
            params = {"max_new_tokens": 1, "temperature": 0, "custom_params": rag.custom_params}
            obj = GenerateReqInput(
                input_ids=rag.input_ids,
                sampling_params=params,
                extra_key=body.extra_key,
                cache_salt=body.cache_salt,
                routed_dp_rank=_routed(rag),
            )
            try:
                async for _ in TappedManager(_state.manager, _state.service).generate_request(obj, raw_request):
                    pass
            finally:
                _state.service.finish(rag, None)
            fates.update(rag.fates() or {})
    except ValueError as error:
        return _refuse(error)
    span = rag.spans[-1]
    return ORJSONResponse(
        {"chunk_tokens": span.end - span.start, "fates": fates, "seconds": round(time.perf_counter() - start, 6)}
    )


def check_ranks(server_args: Any) -> None:
    """Start-up check: every rank reports our cache, and the tokenizer suits us. Otherwise the server stops, with the reason."""
    try:
        headers = {"Authorization": f"Bearer {server_args.api_key}"} if server_args.api_key else {}
        session = requests.Session()
        session.trust_env = False  # a proxy has no business between us and ourselves
        for scheme in ("http://", "https://"):  # the port may not be open yet
            session.mount(scheme, HTTPAdapter(max_retries=Retry(connect=40, backoff_factor=0.2, backoff_max=2)))
        answer = session.get(server_args.url() + "/chunkcache/stats", headers=headers, timeout=60, verify=False)
        answer.raise_for_status()
        logger.info("chunk cache: in on %d rank(s)", len(answer.json()["ranks"]))
        if _state.retriever is not None:
            check_tokenizer(_state.retriever, server_args.tokenizer_path or server_args.model_path)
    except Exception as error:
        logger.critical("chunk cache: start-up check failed, stopping: %s", error)
        kill_process_tree(os.getpid())


# Private, in order of use


async def _json_object(raw_request: Request) -> dict[str, Any]:
    try:
        body = orjson.loads(await raw_request.body())
    except orjson.JSONDecodeError as error:
        raise PromptError(f"body: not JSON: {error}") from None
    if not isinstance(body, dict):
        raise PromptError("body: must be a JSON object")
    return body


async def _plan_chat(raw_request: Request, *, dry_run: bool = False) -> tuple[ChatCompletionRequest, RagRequest]:
    """The chat request and its plan. Raises ValueError naming the field that is wrong."""
    body = await _json_object(raw_request)
    rag_fields = parse(RagFields, {key: body.pop(key) for key in RagFields.model_fields if key in body})
    for field in ("input_ids", "continue_final_message"):
        if body.get(field):
            raise PromptError(f"{field}: not supported here; use /v1/chat/completions")
    request = parse(ChatCompletionRequest, body)
    _check_like_sglang(request)
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    identity = _identity(raw_request, request.cache_salt, request.extra_key, request.lora_path, request.model)
    reuse = rag_fields.reuse_request(_state.config)
    passages, found = _passages(rag_fields.chunks), None
    if rag_fields.retrieve is not None:
        if passages:
            raise PromptError("retrieve: not together with chunks")
        is_gone = raw_request.is_disconnected
        found = await _search().find(rag_fields.retrieve, messages, field="retrieve.", is_gone=is_gone)
        passages = found.chunks
    retrieval = found.answer() if found else None  # before a plan is opened that an error would leave open
    try:
        rag = _state.service.begin_chat(
            messages,
            passages,
            identity=identity,
            conversation_id=rag_fields.conversation_id,
            max_new_tokens=request.max_completion_tokens or request.max_tokens,
            tools=[tool.model_dump() for tool in request.tools]
            if request.tools and request.tool_choice != "none"
            else None,
            template_kwargs=_template_kwargs(request),
            order=rag_fields.order,
            reuse=reuse,
            dry_run=dry_run,
        )
    except PromptError as error:
        if found and str(error).startswith("chunks:"):  # a field that the client has not sent
            raise PromptError(
                f"retrieve.k: of the {len(passages)} passages found,{str(error).removeprefix('chunks:')}"
            ) from None
        raise
    rag.retrieval = retrieval
    return request, rag


def _search() -> RagSearch:
    if _state.search is None:
        raise PromptError("retrieve: this server has no index (--index); send chunks")
    return _state.search


def _passages(chunks: list[ChunkIn], field: str = "chunks") -> list[Passage]:
    config = _state.config
    if len(chunks) > config.max_chunks:
        raise PromptError(f"{field}: {len(chunks)} given, at most {config.max_chunks}")
    for i, chunk in enumerate(chunks):
        if len(chunk.text) > config.max_chunk_chars:
            raise PromptError(f"{field}.{i}.text: {len(chunk.text)} characters, at most {config.max_chunk_chars}")
        if chunk.id is not None and len(str(chunk.id)) > MAX_ID_CHARS:
            raise PromptError(f"{field}.{i}.id: at most {MAX_ID_CHARS} characters")
    return [Passage(str(i) if chunk.id is None else str(chunk.id), chunk.text) for i, chunk in enumerate(chunks)]


def _routed(rag: RagRequest) -> int | None:
    return rag.rank if len(_state.service.mirrors) > 1 else None


def _identity(raw_request: Request, cache_salt: Any, extra_key: Any, lora_path: Any, model: str) -> Identity:
    for name, value in (("cache_salt", cache_salt), ("extra_key", extra_key)):
        if value is not None and not isinstance(value, str):
            raise PromptError(f"{name}: must be a string")
    adapter = lora_path or model.partition(":")[2] or None
    return Identity(
        raw_request.headers.get("authorization", ""), cache_salt, extra_key, str(adapter) if adapter else None
    )


def _check_like_sglang(request: ChatCompletionRequest) -> None:
    """What SGLang checks before it renders, before we render: a template of the client's above all."""
    if problem := _state.chat._validate_request(request):
        raise PromptError(f"messages: {problem}")
    for name in ("chat_template", "documents", "tokenizer_kwargs", "continue_final_message", "tokenize", "return_dict"):
        if name in (request.chat_template_kwargs or {}):
            raise PromptError(f"chat_template_kwargs.{name}: not supported here")


def _template_kwargs(request: ChatCompletionRequest) -> dict[str, Any] | None:
    """What the chat template gets beside the messages: the server's defaults, then the request's own, as in SGLang."""
    kwargs = {**(_state.chat.default_chat_template_kwargs or {}), **(request.chat_template_kwargs or {})}
    if request.reasoning_effort is not None:
        kwargs.setdefault("reasoning_effort", request.reasoning_effort)
    return kwargs or None


def _refuse(error: Exception) -> ORJSONResponse:
    _state.service.metrics.count("requests", "unsearched" if isinstance(error, SearchFailedError) else "refused")
    return _error_response(error)


def _error_response(error: Exception) -> ORJSONResponse:
    """SGLang's shape of an error. `param` is the field in front of the message's colon."""
    message, status = str(error), error.status if isinstance(error, SearchFailedError) else 400
    kinds = {400: "BadRequestError", 500: "InternalServerError", 503: "ServiceUnavailableError"}
    param = message.split(":")[0] if status == 400 else None
    body = {"object": "error", "message": message, "type": kinds[status], "param": param, "code": status}
    return ORJSONResponse(body, status_code=status)


async def _generate_events(first: dict[str, Any], outputs: Any, rag: RagRequest) -> Any:
    try:
        yield b"data: " + orjson.dumps(first) + b"\n\n"
        async for output in outputs:
            yield b"data: " + orjson.dumps(output) + b"\n\n"
        _state.service.finish(rag, None)
        yield b"data: " + orjson.dumps({"chunkcache": rag.answer()}) + b"\n\n"
        yield b"data: [DONE]\n\n"
    except (ValueError, asyncio.CancelledError) as error:
        if isinstance(error, asyncio.CancelledError):
            raise
        yield b"data: " + orjson.dumps({"error": {"message": str(error)}}) + b"\n\n"
    finally:
        _state.service.release(rag)
