"""LlamaIndex: a response synthesizer that sends nodes as chunks, and a retriever over the server's
index.

    RetrieverQueryEngine(retriever=..., response_synthesizer=ChunkCacheSynthesizer())

A postprocessor could only reorder nodes: the synthesizer writes the prompt.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.base.response.schema import RESPONSE_TYPE
from llama_index.core.instrumentation.event_handlers import BaseEventHandler
from llama_index.core.instrumentation.events import BaseEvent
from llama_index.core.instrumentation.events.llm import LLMChatStartEvent, LLMCompletionStartEvent
from llama_index.core.instrumentation.events.retrieval import RetrievalEndEvent
from llama_index.core.llms import MockLLM
from llama_index.core.prompts.mixin import PromptDictType
from llama_index.core.response_synthesizers.base import BaseSynthesizer, QueryTextType
from llama_index.core.schema import MetadataMode, NodeWithScore, QueryBundle, TextNode
from llama_index.core.types import RESPONSE_TEXT_TYPE
from pydantic import PrivateAttr

from sglang_chunkcache.integrations.call_log import CallLog
from sglang_chunkcache.integrations.server import (
    CHAT,
    DEFAULT_URL,
    RETRIEVE,
    Endpoint,
    chunks_of,
)


class ChunkCacheSynthesizer(BaseSynthesizer):
    """One answer over all nodes, which go to the server as chunks.

    `response.source_nodes` are the nodes as they came; `response.metadata["chunkcache"]` is what
    the server tells, of which `order` names nodes by id in the order of the prompt. Of a stream it
    is there when the stream ends.

    Args:
        system_prompt: in front of all chunks; None: no system message.
        extra_body: any other field of the request. Of one call, arguments of `synthesize` are.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        model: str = "default",
        system_prompt: str | None = None,
        temperature: float | None = None,
        max_tokens: int | None = None,
        conversation_id: str | None = None,
        order: str | None = None,
        reuse: Any = None,
        extra_body: Mapping[str, Any] | None = None,
        streaming: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        super().__init__(llm=MockLLM(), streaming=streaming)  # never asked
        self._endpoint = Endpoint(base_url, api_key, timeout_s)
        named = {
            "temperature": temperature,
            "max_tokens": max_tokens,
            "conversation_id": conversation_id,
            "order": order,
            "reuse": reuse,
        }
        given = {name: value for name, value in named.items() if value is not None}
        self._fields = {"model": model, **given, **(extra_body or {})}
        self._system_prompt = system_prompt

    def synthesize(
        self,
        query: QueryTextType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        told: dict[str, Any] = {}
        more = {"node_ids": [node.node_id for node in nodes], "told": told, **response_kwargs}
        return _with(super().synthesize(query, nodes, additional_source_nodes, **more), told)

    async def asynthesize(
        self,
        query: QueryTextType,
        nodes: list[NodeWithScore],
        additional_source_nodes: Sequence[NodeWithScore] | None = None,
        **response_kwargs: Any,
    ) -> RESPONSE_TYPE:
        told: dict[str, Any] = {}
        more = {"node_ids": [node.node_id for node in nodes], "told": told, **response_kwargs}
        return _with(await super().asynthesize(query, nodes, additional_source_nodes, **more), told)

    def get_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        *,
        node_ids: Sequence[str] | None = None,
        told: dict[str, Any] | None = None,
        **fields: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """`told`: filled with what the server tells of the answer."""
        body = self._body(query_str, text_chunks, node_ids, fields)
        told = {} if told is None else told
        if self._streaming:
            return _texts(self._endpoint.stream(body), told)
        return _text(self._endpoint.post(CHAT, body), told)

    async def aget_response(
        self,
        query_str: str,
        text_chunks: Sequence[str],
        *,
        node_ids: Sequence[str] | None = None,
        told: dict[str, Any] | None = None,
        **fields: Any,
    ) -> RESPONSE_TEXT_TYPE:
        """As `get_response`."""
        body = self._body(query_str, text_chunks, node_ids, fields)
        told = {} if told is None else told
        if self._streaming:
            return _atexts(self._endpoint.astream(body), told)
        return _text(await self._endpoint.apost(CHAT, body), told)

    def _body(
        self,
        question: str,
        texts: Sequence[str],
        node_ids: Sequence[str] | None,
        fields: Mapping[str, Any],
    ) -> dict[str, Any]:
        system = [{"role": "system", "content": self._system_prompt}] if self._system_prompt else []
        return {
            **self._fields,
            **fields,
            "messages": [*system, {"role": "user", "content": question}],
            "chunks": chunks_of(texts, [None] * len(texts) if node_ids is None else node_ids),
        }

    def _get_prompts(self) -> PromptDictType:
        return {}

    def _update_prompts(self, prompts: PromptDictType) -> None:
        pass


class ChunkCacheRetriever(BaseRetriever):
    """Passages of the server's index (`--index`), best first.

    Args:
        mode: `dense`, `bm25`, `fusion` or `filled`; None: the server's.
    """

    def __init__(
        self,
        base_url: str = DEFAULT_URL,
        *,
        api_key: str | None = None,
        k: int = 5,
        mode: str | None = None,
        timeout_s: float = 60.0,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self._endpoint = Endpoint(base_url, api_key, timeout_s)
        self._how = {"k": k, **({"mode": mode} if mode else {})}

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        body = {"query": query_bundle.query_str, **self._how}
        return _nodes(self._endpoint.post(RETRIEVE, body))

    async def _aretrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        body = {"query": query_bundle.query_str, **self._how}
        return _nodes(await self._endpoint.apost(RETRIEVE, body))


class CallLogHandler(BaseEventHandler):
    """Writes what `python -m eval replay --log` reads, of whatever models and retrievers:
    `get_dispatcher().add_event_handler(CallLogHandler("calls.jsonl"))`."""

    _log: CallLog = PrivateAttr()
    _chats: deque[str] = PrivateAttr()

    def __init__(self, path: str | Path) -> None:
        super().__init__()
        self._log, self._chats = CallLog(path), deque(maxlen=64)

    @classmethod
    def class_name(cls) -> str:
        return "CallLogHandler"

    def handle(self, event: BaseEvent, **_: Any) -> None:
        if isinstance(event, RetrievalEndEvent):
            nodes = [each.node for each in event.nodes]
            texts = [node.get_content(metadata_mode=MetadataMode.LLM).strip() for node in nodes]
            self._log.retrieved(zip((node.node_id for node in nodes), texts, strict=True))
        elif isinstance(event, LLMChatStartEvent):
            said = [{"role": each.role.value, "content": each.content} for each in event.messages]
            self._log.asked(said, model=event.model_dict.get("model"))
            self._chats.append(event.messages[-1].content or "")
        elif isinstance(event, LLMCompletionStartEvent) and not any(
            # some models complete what was a chat: one call, and two events
            chat and chat in event.prompt
            for chat in self._chats
        ):
            prompt = {"role": "user", "content": event.prompt}
            self._log.asked([prompt], model=event.model_dict.get("model"))


def _with(response: Any, told: dict[str, Any]) -> Any:
    response.metadata = {**(response.metadata or {}), "chunkcache": told}
    return response


def _text(answer: dict[str, Any], told: dict[str, Any]) -> str:
    told.update(answer["chunkcache"] or {})
    return str(answer["choices"][0]["message"]["content"] or "")


def _texts(events: Iterator[dict[str, Any]], told: dict[str, Any]) -> Iterator[str]:
    for event in events:
        told.update(event.get("chunkcache") or {})
        yield from _delta(event)


async def _atexts(
    events: AsyncIterator[dict[str, Any]], told: dict[str, Any]
) -> AsyncIterator[str]:
    async for event in events:
        told.update(event.get("chunkcache") or {})
        for text in _delta(event):
            yield text


def _delta(event: dict[str, Any]) -> list[str]:
    """Of the first answer."""
    first = (choice for choice in event["choices"] if not choice["index"])
    return [text for choice in first if (text := choice["delta"].get("content"))]


def _nodes(found: dict[str, Any]) -> list[NodeWithScore]:
    return [
        NodeWithScore(
            node=TextNode(
                id_=each["id"],
                text=each["text"],
                metadata={"title": each["title"]} if each.get("title") else {},
                # a title would be other text than the passage that others send
                excluded_llm_metadata_keys=["title"],
            ),
            score=each["score"],
        )
        for each in found["passages"]
    ]
