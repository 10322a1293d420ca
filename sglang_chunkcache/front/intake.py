"""From an HTTP request to a plan: its body is read, the index searched if it asks for that,
the prompt drafted and planned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastapi import Request
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import normalize_assistant_tool_call_arguments

from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.bodies import (
    ChunkIn,
    GenerateIn,
    MessageFields,
    Messages,
    PreprocessIn,
    RagFields,
    RetrieveBody,
    RetrieveIn,
)
from sglang_chunkcache.front.conversation import claimed_history
from sglang_chunkcache.front.misplaced import field_with_chunks
from sglang_chunkcache.front.parse import json_object, parse, refuse_misspelt
from sglang_chunkcache.front.parts import Parts
from sglang_chunkcache.front.prompt import (
    REASONING_PARTS,
    TemplateSettings,
    begun_answer,
    turn_start,
)
from sglang_chunkcache.front.request import (
    Draft,
    Identity,
    Options,
    Passage,
    Planned,
    Timeline,
)
from sglang_chunkcache.front.search import Retrieval

MAX_TOOLS = 1000
"""Far more than a model can choose from."""

UNKNOWN = {"role": "user", "content": "?"}
"""The question of a request that may come, where it is not known."""

MESSAGE_NAMES = (
    *("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content"),
    *("refusal", "function_call"),
)
"""Of OpenAI's and SGLang's messages, those that could be taken for ours misspelt among them."""

CHAT_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "json_schema": "response_format",
    "structural_tag": "response_format",
    "top_logprobs_num": "top_logprobs",
    "spaces_between_special_tokens": "chat_template_kwargs.spaces_between_special_tokens",
}
"""What a chat request calls SGLang's parameters, where it has names of its own."""


class Intake:
    """Reads what clients send.

    Raises:
        RequestError: names the field that is wrong.
        SearchFailedError: in `chat` and `retrieval`.
        BusyError: too many long requests wait.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    @property
    def _config(self) -> ChunkCacheConfig:
        # not before a request: the tree is decided late
        return self._parts.config

    async def chat(self, raw_request: Request) -> tuple[ChatCompletionRequest, Planned]:
        """A chat completion over `chunks` or over what the index finds."""
        timeline = Timeline()
        body = await json_object(raw_request, self._config)
        return await self._chat(body, raw_request, timeline)

    async def hint(self, raw_request: Request) -> Planned:
        """A chat completion that may come: what is known of it,
        its chunks as `texts` if that is all."""
        if self._config.storage_backend is None:
            raise RequestError(
                "body: this server loads nothing ahead (--chunkcache-storage-backend)"
            )
        body = await json_object(raw_request, self._config)
        # `_chat` checks names, too, but does not know `texts`: one misspelt would pass there
        ours = (*RagFields.model_fields, "texts")
        refuse_misspelt(body, ours=ours, theirs=ChatCompletionRequest.model_fields)
        texts, messages = body.pop("texts", None), body.get("messages") or []
        is_searched = body.get("retrieve") is not None
        if not (texts or is_searched or field_with_chunks(body)):
            raise RequestError("texts: give texts, chunks or retrieve")
        if texts is not None:
            are_strings = isinstance(texts, list) and all(isinstance(text, str) for text in texts)
            if body.get("chunks") or not are_strings:
                raise RequestError("texts: must be a list of strings, and not together with chunks")
            body["chunks"] = [{"text": text} for text in texts]
        # with `retrieve` the index would be searched for the question mark
        if isinstance(messages, list) and not is_searched and _lacks_question(body, messages):
            # else the chunks would stand in front of a question that is answered already
            body["messages"] = [*messages, UNKNOWN]
        return (await self._chat(body, raw_request, Timeline()))[1]

    async def _chat(
        self, body: dict[str, Any], raw_request: Request, timeline: Timeline
    ) -> tuple[ChatCompletionRequest, Planned]:
        refuse_misspelt(
            body, ours=RagFields.model_fields, theirs=ChatCompletionRequest.model_fields
        )
        self._check_counts(body)
        brought = _taken_chunks(body)
        fields = parse(
            RagFields, {key: body.pop(key) for key in RagFields.model_fields if key in body}
        )
        request = self._openai_request(body)
        messages = searched = _messages(request)
        # the model's comes first, as in SGLang's `_resolve_lora_path`: another order would file
        # what one adapter computes under the other's name
        adapter = request.model.partition(":")[2].strip() or request.lora_path
        identity = _identity(raw_request, request, str(adapter) if adapter else None)
        fusion = fields.fusion_request(self._config)
        self._check_pair(fields, request.n or 1)
        prefill = ""
        if request.continue_final_message:
            messages, prefill = begun_answer(messages)
        start = turn_start(messages)
        if start in brought and fields.chunks is not None:
            raise RequestError(f"messages.{start}.chunks: chunks are at the top level, too")
        own = f"messages.{start}.chunks" if start in brought else "chunks"
        if fields.chunks is not None:
            brought[start] = fields.chunks
        earlier = {
            i: self._passages(each, own if i == start else f"messages.{i}.chunks")
            for i, each in brought.items()
        }
        passages = earlier.pop(start, None)
        settings = TemplateSettings(_tools(request), self._parts.chat.template_kwargs(request))
        # read here, on the event loop: a thread may make the draft, and the bookkeeper has no lock
        conversation = None
        if fields.conversation_id:
            conversation = self._parts.bookkeeper.conversations.of(
                identity.conversation(fields.conversation_id),
                claimed_history(messages, settings),
                start=start,
            )
        timeline.ended("read")
        options = Options(
            max_new_tokens=request.max_completion_tokens or request.max_tokens,
            length_field="max_completion_tokens" if request.max_completion_tokens else "max_tokens",
            order=fields.order,
            fusion=fusion,
            is_denied=fields.is_denied(self._config),
            requires_history=fields.history is not None,
            num_answers=request.n,
            timeline=timeline,
        )
        found = None
        if fields.retrieve is not None:
            if passages:
                raise RequestError("retrieve: not together with chunks")
            found = await self._find(fields.retrieve, searched, "retrieve.", raw_request)
            passages, options = found.chunks, replace(options, retrieval=found.answer())
            timeline.ended("retrieve")
        draft = partial(
            self._parts.drafter.chat,
            messages,
            passages,
            identity=identity,
            options=options,
            earlier=earlier,
            conversation=conversation,
            settings=settings,
            prefill=prefill,
        )
        try:
            # what was sent is counted by now; a search adds what it finds
            num_chunks = sum(map(len, (passages or (), *earlier.values())))
            self._check_num_chunks(num_chunks, "chunks")
            texts = (messages, passages, *earlier.values())
            return request, await self._plan(raw_request, draft, texts)
        except RequestError as error:
            reason = str(error).removeprefix("chunks:")
            if found is None or reason == str(error):
                raise
            # told of the field that the client has sent
            raise RequestError(
                f"retrieve.k: of the {len(found.chunks)} passages found,{reason}"
            ) from None

    async def retrieval(self, raw_request: Request) -> tuple[RetrieveBody, Retrieval]:
        """The passages of a query or of messages, with what was asked for."""
        body = parse(RetrieveBody, await json_object(raw_request, self._config))
        if (body.query is None) == (not body.messages):
            raise RequestError("query: give query or messages, one of them")
        return body, await self._find(body, body.messages, "", raw_request)

    async def generate(self, raw_request: Request) -> tuple[GenerateIn, Planned]:
        """A prompt of `parts`."""
        timeline = Timeline()
        raw = await json_object(raw_request, self._config)
        # `parse` would call `messages` no field here, and not say where the chunks belong
        for i in _taken_chunks(raw):
            raise RequestError(f"messages.{i}.chunks: this endpoint has parts, not messages")
        if self._config.is_paired:
            raise RequestError(
                "parts: not with --disaggregation-mode; use /rag/v1/chat/completions"
            )
        body = parse(GenerateIn, raw)
        parts = [
            part if isinstance(part, str) else self._passages(part.chunks) for part in body.parts
        ]
        num_chunks = sum(len(part) for part in parts if not isinstance(part, str))
        self._check_num_chunks(num_chunks, "parts.chunks")
        if body.sampling_params.get("n", 1) != 1:
            raise RequestError("sampling_params.n: must be 1")
        self._parts.sampling(
            body.sampling_params,
            top_logprobs_num=body.top_logprobs_num,
            called=lambda name: (
                name if name in GenerateIn.model_fields else f"sampling_params.{name}"
            ),
        )
        options = Options(
            max_new_tokens=body.sampling_params.get("max_new_tokens"),
            prompt_field="parts",
            length_field="sampling_params.max_new_tokens",
            order=body.order,
            fusion=body.fusion_request(self._config),
            is_denied=body.is_denied(self._config),
            # SGLang's -1 asks for no logprobs of the prompt, so all of it may come from the cache
            logprob_start=body.logprob_start_len
            if body.return_logprob and body.logprob_start_len >= 0
            else None,
            timeline=timeline,
        )
        identity = _identity(raw_request, body)
        timeline.ended("read")
        draft = partial(self._parts.drafter.parts, parts, identity=identity, options=options)
        planned = await self._plan(raw_request, draft, parts)
        # SGLang says so only when the request runs, in a stream behind a status of 200
        if body.return_logprob and body.logprob_start_len > len(planned.input_ids):
            raise RequestError(
                f"logprob_start_len: must be at most {len(planned.input_ids)}, the prompt's tokens,"
                f" got {body.logprob_start_len}"
            )
        return body, planned

    async def preprocessing(
        self, body: PreprocessIn, raw_request: Request, *, rank: int
    ) -> Planned:
        """A chunk after its neighbours, on one rank."""
        neighbors = self._passages(body.neighbors, "neighbors")
        (chunk,) = self._passages([body.chunk], "chunk")
        messages = [message.model_dump() for message in body.messages]
        draft = partial(
            self._parts.drafter.preprocessing,
            messages,
            neighbors,
            chunk,
            identity=_identity(raw_request, body),
            settings=TemplateSettings(kwargs=self._parts.chat.default_chat_template_kwargs or None),
            rank=rank,
        )
        return await self._plan(raw_request, draft, (messages, neighbors, chunk))

    # Private, in order of use

    def _check_pair(self, fields: RagFields, num_answers: int) -> None:
        """Raise RequestError for what depends on a server's past: a prefill and a decode server
        make the prompt each for itself, and the second reads the KV of the first's."""
        if not self._config.is_paired:
            return
        asked = {
            "order": fields.order not in (None, "retriever"),
            "conversation_id": fields.conversation_id is not None,
            "retrieve": fields.retrieve is not None,
            # SGLang sends all of them, and a prefill before them, to one room
            "n": num_answers > 1,
        }
        for name in (name for name, is_asked in asked.items() if is_asked):
            raise RequestError(
                f"{name}: not with --disaggregation-mode, whose two servers must make the same"
                " prompt for one answer"
            )

    def _check_counts(self, body: dict[str, Any]) -> None:
        """Before SGLang's model of the request is built, which takes long for many parts."""
        messages, tools, chunks = (
            value if isinstance(value := body.get(name), list) else []
            for name in ("messages", "tools", "chunks")
        )

        def num_in(name: str) -> int:
            found = (message.get(name) for message in messages if isinstance(message, dict))
            return sum(len(own) for own in found if isinstance(own, list))

        count = max(len(messages), num_in("content"))
        if count > self._config.max_messages:
            raise RequestError(
                f"messages: {count} given, parts counted, at most {self._config.max_messages}"
            )
        if len(tools) > MAX_TOOLS:
            raise RequestError(f"tools: {len(tools)} given, at most {MAX_TOOLS}")
        self._check_num_chunks(len(chunks) + num_in("chunks"), "chunks")

    def _check_num_chunks(self, num_chunks: int, field: str) -> None:
        if num_chunks > self._config.max_chunks:
            raise RequestError(
                f"{field}: {num_chunks} given, those of all messages counted, at most"
                f" {self._config.max_chunks}"
            )

    async def _plan(
        self, raw_request: Request, draft: Callable[..., Draft], texts: Sequence[Any]
    ) -> Planned:
        """Long drafts are made in a thread, plans here: they read the bookkeeper."""
        made = await self._parts.drafts.run(
            lambda is_over: draft(is_over=is_over),
            num_chars=_num_chars(texts),
            is_gone=raw_request.is_disconnected,
        )
        made.options.timeline.ended("draft")
        planned = self._parts.planner.plan(made)
        made.options.timeline.ended("plan")
        return planned

    def _openai_request(self, body: dict[str, Any]) -> ChatCompletionRequest:
        # `serve` puts the planned prompt there, and a client's would be overwritten
        if body.get("input_ids"):
            raise RequestError("input_ids: not supported here; use /v1/chat/completions")
        if not isinstance(body.get("rid"), str | None):  # a list is for a batch
            raise RequestError("rid: must be a string")
        # SGLang's model raises AttributeError
        if not isinstance(body.get("response_format"), dict | None):
            raise RequestError("response_format: must be an object")
        request = parse(ChatCompletionRequest, body)
        params = self._parts.chat.sampling_params(request)

        names = dict(CHAT_NAMES)
        if request.max_completion_tokens:
            names["max_new_tokens"] = "max_completion_tokens"
        self._parts.sampling(
            params,
            top_logprobs_num=request.top_logprobs or 0,
            called=lambda name: names.get(name, name),
        )
        self._parts.chat.check(request)
        return request

    def _passages(self, chunks: list[ChunkIn], field: str = "chunks") -> list[Passage]:
        config = self._config
        self._check_num_chunks(len(chunks), field)
        for i, chunk in enumerate(chunks):
            if len(chunk.text) > config.max_chunk_chars:
                raise RequestError(
                    f"{field}.{i}.text: {len(chunk.text)} characters, at most"
                    f" {config.max_chunk_chars}"
                )
        return [
            Passage(str(i) if chunk.id is None else str(chunk.id), chunk.text)
            for i, chunk in enumerate(chunks)
        ]

    async def _find(
        self,
        options: RetrieveIn,
        messages: list[dict[str, Any]],
        field: str,
        raw_request: Request,
    ) -> Retrieval:
        if self._parts.search is None:
            raise RequestError("retrieve: this server has no index (--index); send chunks")
        is_gone = raw_request.is_disconnected
        return await self._parts.search.find(options, messages, field=field, is_gone=is_gone)


def _taken_chunks(body: dict[str, Any]) -> dict[int, list[ChunkIn]]:
    """The chunks of user messages, by message;
    taken out of these, since SGLang's messages have none."""
    messages = body.get("messages")
    if not isinstance(messages, list):
        return {}
    brought = dict[int, Any]()
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            continue
        try:
            refuse_misspelt(message, ours=MessageFields.model_fields, theirs=MESSAGE_NAMES)
        except RequestError as error:
            raise RequestError(f"messages.{i}.{error}") from None
        _check_content(message, f"messages.{i}.content")
        chunks = message.pop("chunks", None)
        if chunks is None:
            continue
        if message.get("role") != "user":
            raise RequestError(f"messages.{i}.chunks: only a user's message has chunks")
        # parsed under the client's own path, so that errors say messages.3.chunks.0.text
        brought[i] = {"chunks": chunks}
    parsed = parse(Messages, {"messages": brought}).messages
    return {i: fields.chunks for i, fields in parsed.items()}


def _check_content(message: Mapping[str, Any], field: str) -> None:
    """Raise RequestError for a part that no prompt can have.
    SGLang's own complaint lists what each kind of part must be."""
    if message.get("role") == "user" and "content" not in message:
        raise RequestError(f"{field}: is missing")
    content = message.get("content")
    for i, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        # clients send answers back as they came, and SGLang leaves these parts out
        if kind in REASONING_PARTS and message.get("role") == "assistant":
            continue
        if kind != "text":
            raise RequestError(f"{field}.{i}.type: must be 'text'")
        if not isinstance(part.get("text"), str):
            raise RequestError(
                f"{field}.{i}.text: " + ("must be a string" if "text" in part else "is missing")
            )


def _lacks_question(body: Mapping[str, Any], messages: Sequence[Any]) -> bool:
    """Whether a user's message is still to come: none has, or the last one was answered."""
    roles = [message.get("role") for message in messages if isinstance(message, dict)]
    # after a tool's result the model goes on with the same question
    return len(roles) == len(messages) and not (
        body.get("continue_final_message") or roles[-1:] in (["user"], ["tool"], ["function"])
    )


def _num_chars(texts: Any) -> int:
    """Of texts, passages, messages and their parts, and of lists of these."""
    if isinstance(texts, Passage):
        return len(texts.text)
    if isinstance(texts, dict):
        return _num_chars(texts.get("content")) + _num_chars(texts.get("text"))
    if isinstance(texts, list | tuple):
        return sum(map(_num_chars, texts))
    return len(texts) if isinstance(texts, str) else 0


def _identity(raw_request: Request, body: Any, adapter: str | None = None) -> Identity:
    for name, value in (("cache_salt", body.cache_salt), ("extra_key", body.extra_key)):
        if not isinstance(value, str | None):
            raise RequestError(f"{name}: must be a string")
    # SGLang takes an empty cache_salt for none, but not an empty extra_key.
    key = raw_request.headers.get("authorization", "")
    return Identity(key, body.cache_salt or None, body.extra_key, adapter)


def _messages(request: ChatCompletionRequest) -> list[dict[str, Any]]:
    """As SGLang gives them to the chat template: the arguments of tool calls are objects there."""
    # SGLang drops fields without a value as well: a template may ask whether one is there
    messages = [message.model_dump(exclude_none=True) for message in request.messages]
    for i, message in enumerate(messages):
        try:
            normalize_assistant_tool_call_arguments(message)
        except ValueError as error:
            raise RequestError(f"messages.{i}.tool_calls: {error}") from None
    return messages


def _tools(request: ChatCompletionRequest) -> list[dict[str, Any]] | None:
    """Those that the template shows, as in SGLang: the one that `tool_choice` names, or all."""
    if not request.tools or request.tool_choice == "none":
        return None
    named = None if isinstance(request.tool_choice, str) else request.tool_choice.function.name
    return [tool.model_dump() for tool in request.tools if named in (None, tool.function.name)]
