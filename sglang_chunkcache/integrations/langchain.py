"""LangChain: a chat model that takes `Document`s as chunks, the chain that passes them on, and a
retriever over the server's index.

    create_chunks_chain(ChatChunkCache(), prompt).invoke({"context": documents, "input": "Who …?"})
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from langchain_core.callbacks import (
    AsyncCallbackManagerForLLMRun,
    AsyncCallbackManagerForRetrieverRun,
    BaseCallbackHandler,
    CallbackManagerForLLMRun,
    CallbackManagerForRetrieverRun,
)
from langchain_core.documents import Document
from langchain_core.exceptions import OutputParserException
from langchain_core.language_models import LanguageModelInput
from langchain_core.language_models.chat_models import BaseChatModel
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    HumanMessage,
    convert_to_openai_messages,
)
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.output_parsers import StrOutputParser
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompt_values import PromptValue
from langchain_core.prompts import BasePromptTemplate, format_document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import AliasChoices, ConfigDict, Field, SecretStr

from sglang_chunkcache.integrations.call_log import CallLog
from sglang_chunkcache.integrations.server import (
    CHAT,
    DEFAULT_URL,
    RETRIEVE,
    Endpoint,
    chunks_of,
)

logger = logging.getLogger(__name__)

TIMEOUT_NAMES = AliasChoices("timeout_s", "timeout")
"""Of other models LangChain calls it `timeout`."""


class ChatChunkCache(BaseChatModel):
    """A model behind `/rag/v1/chat/completions`.

    Documents come with a call, `llm.invoke(messages, documents=[...])`, for the last user message;
    or in messages, as content blocks of type `text-plain` (LangChain's for plain text of a
    document), for the message that has them. Their order in the prompt is the server's; the
    answer's `response_metadata["chunkcache"]["order"]` has it by `Document.id`, or by position
    where not every document has an id of its own.
    """

    model_config = ConfigDict(extra="forbid")

    base_url: str = DEFAULT_URL
    api_key: SecretStr | None = None
    model: str = "default"
    temperature: float | None = None
    max_tokens: int | None = None
    timeout_s: float = Field(default=600.0, validation_alias=TIMEOUT_NAMES)
    conversation_id: str | None = None
    """Of the server's stored turns; also an argument of a call."""
    order: str | None = None
    """Of the chunks: `retriever`, `frequency`, `tree`; None: the server's."""
    reuse: Any = None
    """Moved KV: `"fused"`, or the field's object."""
    tools_strict: bool | None = None
    """Arguments of tools, and structured output, are held to their schemas."""
    extra_body: dict[str, Any] = Field(default_factory=dict)
    """Any other field of the request."""

    @property
    def _llm_type(self) -> str:
        return "sglang-chunkcache"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        """LangChain's cache tells models apart by them: tenants, too."""
        key = self.api_key.get_secret_value() if self.api_key else ""
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        return {"base_url": self.base_url, "key": digest, **self._fields(), **self.extra_body}

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | None = None,
        strict: bool | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """`tool_choice`: a tool's name, `auto`, `none`, or `any`. `strict`: in place of
        `tools_strict`."""
        strict = self.tools_strict if strict is None else strict
        described = [convert_to_openai_tool(tool, strict=strict) for tool in tools]
        return self.bind(tools=described, tool_choice=tool_choice, **kwargs)

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return _result(self._endpoint().post(CHAT, self._body(messages, stop, kwargs)))

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        return _result(await self._endpoint().apost(CHAT, self._body(messages, stop, kwargs)))

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for event in self._endpoint().stream(self._body(messages, stop, kwargs)):
            chunk = _generation_chunk(event)
            if run_manager is not None:
                run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        async for event in self._endpoint().astream(self._body(messages, stop, kwargs)):
            chunk = _generation_chunk(event)
            if run_manager is not None:
                await run_manager.on_llm_new_token(chunk.text, chunk=chunk)
            yield chunk

    def _endpoint(self) -> Endpoint:
        key = self.api_key.get_secret_value() if self.api_key else None
        return Endpoint(self.base_url, key, self.timeout_s)

    def _fields(self) -> dict[str, Any]:
        names = {"model", "temperature", "max_tokens", "conversation_id", "order", "reuse"}
        return self.model_dump(include=names, exclude_none=True)

    def _body(
        self, messages: Sequence[BaseMessage], stop: list[str] | None, kwargs: dict[str, Any]
    ) -> dict[str, Any]:
        documents: Sequence[Document] | None = kwargs.pop("documents", None)
        body = {**self._fields(), **self.extra_body, **kwargs}
        body["messages"] = [_message(message) for message in messages]
        if body.get("n", 1) != 1:
            raise ValueError("one answer a call: `n` must be 1")
        if stop:
            body["stop"] = stop
        if (choice := _choice(body.pop("tool_choice", None))) is not None:
            body["tool_choice"] = choice
        if documents is not None:
            _check_documents(documents, "documents")
            texts = [document.page_content for document in documents]
            body["chunks"] = chunks_of(texts, [document.id for document in documents])
        return body


def create_chunks_chain(
    llm: Runnable[LanguageModelInput, BaseMessage],
    prompt: BasePromptTemplate[Any],
    *,
    output_parser: Runnable[Any, Any] | None = None,
    document_prompt: BasePromptTemplate[str] | None = None,
    document_variable_name: str = "context",
) -> Runnable[dict[str, Any], Any]:
    """In place of LangChain's `create_stuff_documents_chain`, and called like it, but for
    `document_separator`, which is the server's: the documents in `document_variable_name` go to
    the server as chunks in front of the last user message's text, and the prompt has nothing in
    their place. The chain raises TypeError where they are no list of `Document`s.

    Args:
        llm: a `ChatChunkCache`, or one with tools or other arguments bound.
        output_parser: None: the text; `RunnablePassthrough()`: the message, with its metadata.
        document_prompt: a chunk's text, of `page_content` and metadata; None: `page_content`.
    """
    parser = output_parser or StrOutputParser()
    name = document_variable_name
    place = f"\ue000{{{name}}}\ue001"  # readable in traces, and in nobody's text

    def route(inputs: dict[str, Any]) -> Runnable[dict[str, Any], Any]:
        documents = inputs.get(name)
        if documents is None:
            raise ValueError(f"no documents in {name!r}")
        _check_documents(documents, name)
        if document_prompt is not None:
            documents = [
                Document(id=each.id, page_content=format_document(each, document_prompt))
                for each in documents
            ]

        def placed(value: PromptValue) -> list[BaseMessage]:
            messages = [_without_place(each, place) for each in value.to_messages()]
            return with_documents(messages, documents)

        filled = RunnableLambda(lambda given: {**given, name: place})
        return filled | prompt | RunnableLambda(placed) | llm | parser

    return RunnableLambda(route).with_config(run_name="chunks_chain")


class ChunkCacheRetriever(BaseRetriever):
    """Passages of the server's index (`--index`), best first, with `score`, `title` and `mode` as
    metadata."""

    model_config = ConfigDict(extra="forbid")

    base_url: str = DEFAULT_URL
    api_key: SecretStr | None = None
    k: int = 5
    mode: str | None = None
    """`dense`, `bm25`, `fusion` or `filled`; None: the server's."""
    timeout_s: float = Field(default=60.0, validation_alias=TIMEOUT_NAMES)

    def _get_relevant_documents(
        self, query: str, *, run_manager: CallbackManagerForRetrieverRun
    ) -> list[Document]:
        return _documents(self._endpoint().post(RETRIEVE, self._body(query)))

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        return _documents(await self._endpoint().apost(RETRIEVE, self._body(query)))

    def _endpoint(self) -> Endpoint:
        key = self.api_key.get_secret_value() if self.api_key else None
        return Endpoint(self.base_url, key, self.timeout_s)

    def _body(self, query: str) -> dict[str, Any]:
        return {"query": query, "k": self.k, **({"mode": self.mode} if self.mode else {})}


class CallLogHandler(BaseCallbackHandler):
    """Writes what `python -m eval replay --log` reads, of whatever models and retrievers:
    `chain.invoke(..., config={"callbacks": [CallLogHandler("calls.jsonl")]})`."""

    def __init__(self, path: str | Path) -> None:
        self._log = CallLog(path)

    def on_retriever_end(self, documents: Sequence[Document], **_: Any) -> None:
        self._log.retrieved((each.id, each.page_content) for each in documents)

    def on_chat_model_start(
        self, serialized: dict[str, Any], messages: list[list[BaseMessage]], **told: Any
    ) -> None:
        given = told.get("invocation_params") or {}
        fields = {name: given.get(name) for name in ("model", "tools")}
        for each in messages:
            said = convert_to_openai_messages(each)
            self._log.asked(said, metadata=told.get("metadata"), **fields)

    def on_llm_start(self, serialized: dict[str, Any], prompts: list[str], **_: Any) -> None:
        for each in prompts:
            self._log.asked([{"role": "user", "content": each}])


def with_documents(
    messages: Sequence[BaseMessage], documents: Sequence[Document]
) -> list[BaseMessage]:
    """The documents in the last message of a user, where nothing on the way to the model drops
    them, as LangChain's structured output drops arguments of a call.
    Raises ValueError: there is no such message; TypeError: no list of `Document`s."""
    _check_documents(documents, "documents")
    for index in reversed(range(len(messages))):
        message = messages[index]
        if isinstance(message, HumanMessage):
            blocks = [
                {"type": "text-plain", "id": each.id, "text": each.page_content}
                for each in documents
            ]
            asked = message.content
            rest = [{"type": "text", "text": asked}] if isinstance(asked, str) else asked
            changed = message.model_copy(update={"content": [*blocks, *rest]})
            return [*messages[:index], changed, *messages[index + 1 :]]
    raise ValueError("the prompt has no message of a user")


def _check_documents(given: Any, name: str) -> None:
    if isinstance(given, str) or not all(isinstance(each, Document) for each in given):
        raise TypeError(
            f"{name!r} must be a list of Documents, not formatted text: the server finds a"
            " document's KV by the text of that document alone (`document_prompt` formats each)"
        )


def _without_place(message: BaseMessage, place: str) -> BaseMessage:
    """The message, in which nothing stands for the documents."""
    content = message.content
    changed: Any = (
        _text_without(content, place)
        if isinstance(content, str)
        else [
            {**each, "text": _text_without(each["text"], place)}
            if isinstance(each, dict) and each.get("type") == "text"
            else each
            for each in content
        ]
    )
    return message.model_copy(update={"content": changed})


def _text_without(text: str, place: str) -> str:
    """White space around the place goes with it where it would end or begin the text, or double."""
    before, found, after = text.partition(place)
    if not found:
        return text
    if any(line.strip() for line in before.split("\n")[-2:]):
        _warn_of_introduction(place[1:-1])
    if not after.strip():
        return before.rstrip()
    if not before.strip():
        return _text_without(after.lstrip(), place)
    return _text_without(before + (after.lstrip() if before[-1].isspace() else after), place)


@cache
def _warn_of_introduction(name: str) -> None:
    """Once, and without the prompt's words, which may be a user's."""
    logger.warning(
        "words directly before %s introduce nothing: the documents go in front of the text of the"
        " last user message (a template: sglang_chunkcache/integrations/README.md, LangChain)",
        name,
    )


def _message(message: BaseMessage) -> dict[str, Any]:
    """OpenAI's, with `chunks` of its blocks `text-plain`. Of an answer the text: calls of tools are
    beside it, reasoning does not go back."""
    if isinstance(message, AIMessage) and isinstance(message.content, list):
        message = message.model_copy(update={"content": str(message.text)})
    blocks = message.content if isinstance(message.content, list) else []
    texts = [
        each
        for each in blocks
        if isinstance(each, dict) and "text" in each and each.get("type") == "text-plain"
    ]
    if texts:
        rest = [each for each in blocks if each not in texts]
        message = message.model_copy(update={"content": rest})
    told: dict[str, Any] = convert_to_openai_messages(message)
    if texts:
        told["chunks"] = chunks_of([b["text"] for b in texts], [b.get("id") for b in texts])
    return told


def _choice(choice: str | bool | dict[str, Any] | None) -> Any:
    """OpenAI's, of a name, of `any`, or of itself."""
    if choice is True or choice == "any":
        return "required"
    if isinstance(choice, str) and choice not in ("auto", "none", "required"):
        return {"type": "function", "function": {"name": choice}}
    return choice or None


def _result(answer: dict[str, Any]) -> ChatResult:
    usage, generations = _usage(answer.get("usage")), []
    for choice in answer["choices"]:
        message = _said(choice["message"])
        message.id, message.usage_metadata = answer["id"], usage
        message.response_metadata = _metadata(answer, choice)
        generations.append(ChatGeneration(message=message))
    return ChatResult(generations=generations)


def _said(said: dict[str, Any]) -> AIMessage:
    """A tool's arguments that are no JSON object are an invalid call, as LangChain has it."""
    message = AIMessage(said.get("content") or "")
    for call in said.get("tool_calls") or []:
        try:
            parsed: Any = parse_tool_call(call)
            if not isinstance(parsed["args"], dict):
                raise OutputParserException("arguments must be an object")
            message.tool_calls.append(parsed)
        except OutputParserException as error:
            message.invalid_tool_calls.append(make_invalid_tool_call(call, str(error)))
    if reasoning := said.get("reasoning_content"):
        message.additional_kwargs["reasoning_content"] = reasoning
    return message


def _generation_chunk(event: dict[str, Any]) -> ChatGenerationChunk:
    if not event["choices"]:
        usage = _usage(event.get("usage"))
        return ChatGenerationChunk(message=AIMessageChunk(content="", usage_metadata=usage))
    (choice,) = event["choices"]
    delta = choice["delta"]
    calls = [
        tool_call_chunk(
            name=each["function"].get("name"),
            args=each["function"].get("arguments"),
            id=each.get("id"),
            index=each.get("index"),
        )
        for each in delta.get("tool_calls") or []
    ]
    reasoning = delta.get("reasoning_content")
    is_last = bool(choice.get("finish_reason"))
    message = AIMessageChunk(
        content=delta.get("content") or "",
        tool_call_chunks=calls,
        additional_kwargs={"reasoning_content": reasoning} if reasoning else {},
        response_metadata=_metadata(event, choice) if is_last else _logprobs(choice),
        id=event["id"],
    )
    return ChatGenerationChunk(message=message)


def _metadata(answer: dict[str, Any], choice: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_name": answer["model"],
        "finish_reason": choice["finish_reason"],
        "chunkcache": answer.get("chunkcache"),
        **_logprobs(choice),
    }


def _logprobs(choice: dict[str, Any]) -> dict[str, Any]:
    """Where they are asked for; a stream's pieces add up."""
    return {"logprobs": choice["logprobs"]} if choice.get("logprobs") else {}


def _usage(usage: dict[str, Any] | None) -> UsageMetadata | None:
    if usage is None:
        return None
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    details = InputTokenDetails() if cached is None else InputTokenDetails(cache_read=cached)
    return UsageMetadata(
        input_tokens=usage["prompt_tokens"],
        output_tokens=usage["completion_tokens"],
        total_tokens=usage["total_tokens"],
        input_token_details=details,
    )


def _documents(found: dict[str, Any]) -> list[Document]:
    return [
        Document(
            id=each["id"],
            page_content=each["text"],
            metadata={
                name: each[name]
                for name in ("score", "title", "mode")
                if each.get(name) is not None
            },
        )
        for each in found["passages"]
    ]
