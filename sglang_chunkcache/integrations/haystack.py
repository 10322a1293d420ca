"""Haystack: a chat generator that takes documents as chunks, and a retriever over the server's
index.

    pipeline.connect("retriever.documents", "generator.documents")
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from haystack import Document, component, default_from_dict, default_to_dict
from haystack.dataclasses import ChatMessage, StreamingCallbackT, StreamingChunk, ToolCall
from haystack.dataclasses.streaming_chunk import FinishReason, select_streaming_callback
from haystack.tools import (
    ToolsType,
    deserialize_tools_or_toolset_inplace,
    flatten_tools_or_toolsets,
    serialize_tools_or_toolset,
)
from haystack.utils import Secret, deserialize_callable, serialize_callable

from sglang_chunkcache.integrations.server import (
    CHAT,
    DEFAULT_URL,
    RETRIEVE,
    Endpoint,
    Joined,
    chunks_of,
)

logger = logging.getLogger(__name__)


@component
class ChunkCacheChatGenerator:
    """
    Replies have in `meta` what the server tells (`chunkcache`): its `order` names documents by id,
    in the order of the prompt.

    Args:
        generation_kwargs: of the request: `temperature`, `max_tokens`, `conversation_id`, `reuse`,
            ...
        tools_strict: arguments are held to the tools' schemas.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: Secret | None = None,
        model: str = "default",
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
        tools: ToolsType | None = None,
        tools_strict: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        self.base_url, self.api_key, self.model = base_url, api_key, model
        self.generation_kwargs = generation_kwargs or {}
        self.streaming_callback, self.tools = streaming_callback, tools
        self.tools_strict, self.timeout_s = tools_strict, timeout_s

    def to_dict(self) -> dict[str, Any]:
        return default_to_dict(
            self,
            **_server(self),
            model=self.model,
            generation_kwargs=self.generation_kwargs,
            streaming_callback=self.streaming_callback
            and serialize_callable(self.streaming_callback),
            tools=serialize_tools_or_toolset(self.tools),
            tools_strict=self.tools_strict,
        )

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ChunkCacheChatGenerator:
        options = data["init_parameters"]
        deserialize_tools_or_toolset_inplace(options, key="tools")
        if name := options.get("streaming_callback"):
            options["streaming_callback"] = deserialize_callable(name)
        return _from_dict(cls, data)

    @component.output_types(replies=list[ChatMessage])
    def run(
        self,
        messages: list[ChatMessage],
        documents: list[Document] | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
        tools: ToolsType | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """`documents`: of the last user message."""
        body = self._body(messages, documents, generation_kwargs, tools)
        callback: Any = select_streaming_callback(
            self.streaming_callback, streaming_callback, requires_async=False
        )
        if callback is None:
            return {"replies": _replies(_endpoint(self).post(CHAT, body))}
        joined = Joined()
        for event in _endpoint(self).stream(body):
            joined.add(event)
            callback(_streamed(event))
        return {"replies": _replies(joined.answer())}

    @component.output_types(replies=list[ChatMessage])
    async def run_async(
        self,
        messages: list[ChatMessage],
        documents: list[Document] | None = None,
        generation_kwargs: dict[str, Any] | None = None,
        streaming_callback: StreamingCallbackT | None = None,
        tools: ToolsType | None = None,
    ) -> dict[str, list[ChatMessage]]:
        """As `run`."""
        body = self._body(messages, documents, generation_kwargs, tools)
        callback: Any = select_streaming_callback(
            self.streaming_callback, streaming_callback, requires_async=True
        )
        if callback is None:
            return {"replies": _replies(await _endpoint(self).apost(CHAT, body))}
        joined = Joined()
        async for event in _endpoint(self).astream(body):
            joined.add(event)
            if (awaited := callback(_streamed(event))) is not None:  # one that is no coroutine
                await awaited
        return {"replies": _replies(joined.answer())}

    def _body(
        self,
        messages: Sequence[ChatMessage],
        documents: Sequence[Document] | None,
        generation_kwargs: Mapping[str, Any] | None,
        tools: ToolsType | None,
    ) -> dict[str, Any]:
        body = {"model": self.model, **self.generation_kwargs, **(generation_kwargs or {})}
        body["messages"] = [message.to_openai_dict_format() for message in messages]
        if known := flatten_tools_or_toolsets(tools or self.tools):
            strict = {"strict": True} if self.tools_strict else {}
            body["tools"] = [
                {"type": "function", "function": {**tool.tool_spec, **strict}} for tool in known
            ]
        if documents is not None:
            texts = [document.content or "" for document in documents]
            body["chunks"] = chunks_of(texts, [document.id for document in documents])
        return body


@component
class ChunkCacheRetriever:
    """Passages of the server's index (`--index`), best first.

    Args:
        mode: `dense`, `bm25`, `fusion` or `filled`; None: the server's.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: Secret | None = None,
        top_k: int = 5,
        mode: str | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        self.base_url, self.api_key, self.top_k = base_url, api_key, top_k
        self.mode, self.timeout_s = mode, timeout_s

    def to_dict(self) -> dict[str, Any]:
        return default_to_dict(self, **_server(self), top_k=self.top_k, mode=self.mode)

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ChunkCacheRetriever:
        return _from_dict(cls, data)

    @component.output_types(documents=list[Document])
    def run(self, query: str, top_k: int | None = None) -> dict[str, list[Document]]:
        return _documents(_endpoint(self).post(RETRIEVE, self._body(query, top_k)))

    @component.output_types(documents=list[Document])
    async def run_async(self, query: str, top_k: int | None = None) -> dict[str, list[Document]]:
        """As `run`."""
        return _documents(await _endpoint(self).apost(RETRIEVE, self._body(query, top_k)))

    def _body(self, query: str, top_k: int | None) -> dict[str, Any]:
        mode = {"mode": self.mode} if self.mode else {}
        return {"query": query, "k": self.top_k if top_k is None else top_k, **mode}


def _endpoint(of: ChunkCacheChatGenerator | ChunkCacheRetriever) -> Endpoint:
    key = of.api_key.resolve_value() if of.api_key else None
    return Endpoint(of.base_url, key, of.timeout_s)


def _server(of: ChunkCacheChatGenerator | ChunkCacheRetriever) -> dict[str, Any]:
    key = of.api_key.to_dict() if of.api_key else None
    return {"base_url": of.base_url, "api_key": key, "timeout_s": of.timeout_s}


def _from_dict(cls: Any, data: dict[str, Any]) -> Any:
    if key := data["init_parameters"].get("api_key"):
        data["init_parameters"]["api_key"] = Secret.from_dict(key)
    return default_from_dict(cls, data)


def _replies(answer: Mapping[str, Any]) -> list[ChatMessage]:
    replies = []
    for choice in answer["choices"]:
        said = choice["message"]
        meta = {"model": answer["model"], "index": choice["index"]}
        meta |= {name: answer.get(name) for name in ("usage", "chunkcache")}
        meta["finish_reason"] = choice["finish_reason"]
        message = ChatMessage.from_assistant(
            said.get("content") or None,
            meta=meta,
            tool_calls=[*filter(None, map(_tool_call, said.get("tool_calls") or []))],
            reasoning=said.get("reasoning_content") or None,
        )
        replies.append(message)
    return replies


def _tool_call(call: Mapping[str, Any]) -> ToolCall | None:
    """None: its arguments are no JSON object. Haystack's own generators skip such a call, too."""
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except ValueError:
        arguments = None
    if isinstance(arguments, dict):
        return ToolCall(id=call["id"], tool_name=function["name"], arguments=arguments)
    logger.warning("arguments of the tool %s are no JSON object", function["name"])
    return None


def _streamed(event: Mapping[str, Any]) -> StreamingChunk:
    """Text; calls of tools are in the reply."""
    text = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
    reasons = {choice.get("finish_reason") for choice in event["choices"]}
    reason = next((each for each in get_args(FinishReason) if each in reasons), None)
    return StreamingChunk(content=text, meta={"model": event["model"]}, finish_reason=reason)


def _documents(found: Mapping[str, Any]) -> dict[str, list[Document]]:
    documents = [
        Document(
            id=each["id"],
            content=each["text"],
            score=each["score"],
            meta={name: each[name] for name in ("title", "mode") if each.get(name)},
        )
        for each in found["passages"]
    ]
    return {"documents": documents}
