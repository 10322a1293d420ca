"""Haystack's own packages against a server."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

pytest.importorskip("haystack")

from haystack import Document, Pipeline
from haystack.dataclasses import ChatMessage, StreamingChunk
from haystack.tools import Tool
from haystack.utils import Secret

from eval.examples import PASSAGES, QUESTIONS
from sglang_chunkcache.errors import RefusedError
from sglang_chunkcache.integrations.haystack import (
    ChunkCacheChatGenerator,
    ChunkCacheRetriever,
    _replies,
)

QUESTION, ANSWER = next(iter(QUESTIONS.items()))
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 24}
MESSAGES = [ChatMessage.from_user(QUESTION)]


def documents(*names: str) -> list[Document]:
    return [Document(id=each, content=PASSAGES[each]) for each in names]


@pytest.fixture
def generator(url: str) -> ChunkCacheChatGenerator:
    return ChunkCacheChatGenerator(url, generation_kwargs=SETTINGS)


def test_documents_are_chunks(generator: ChunkCacheChatGenerator) -> None:
    for names in (("jonas", "boris", "simon"), ("simon", "boris", "jonas")):
        (reply,) = generator.run(MESSAGES, documents(*names))["replies"]
        assert ANSWER in (reply.text or "")
        told = reply.meta["chunkcache"]
        assert sorted(told["order"]) == ["boris", "jonas", "simon"]
        assert sum(told["fates"].values()) == reply.meta["usage"]["prompt_tokens"]
    assert told["fates"]["exact"] > 0


def test_pipeline(url: str) -> None:
    """As it is, and as it comes back from its own text."""
    pipeline = Pipeline()
    pipeline.add_component("retriever", ChunkCacheRetriever(url, top_k=3))
    pipeline.add_component("generator", ChunkCacheChatGenerator(url, generation_kwargs=SETTINGS))
    pipeline.connect("retriever.documents", "generator.documents")
    asked = {"retriever": {"query": QUESTION}, "generator": {"messages": MESSAGES}}
    modules = ["sglang_chunkcache.integrations.haystack"]
    for each in (pipeline, Pipeline.loads(pipeline.dumps(), allowed_modules=modules)):
        found = each.run(asked, include_outputs_from={"retriever"})
        assert found["retriever"]["documents"][0].id == "boris"
        (reply,) = found["generator"]["replies"]
        assert ANSWER in reply.text


def test_key_is_no_part_of_a_pipelines_text(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("A_KEY", "secret")
    kept = ChunkCacheRetriever(url, api_key=Secret.from_env_var("A_KEY")).to_dict()
    assert "secret" not in str(kept)
    assert ChunkCacheRetriever.from_dict(kept).api_key == Secret.from_env_var("A_KEY")


def test_stream_and_async(generator: ChunkCacheChatGenerator) -> None:
    given = documents("boris", "jonas")
    (whole,) = generator.run(MESSAGES, given)["replies"]
    texts: list[str] = []
    reasons: list[str | None] = []

    def keep(chunk: StreamingChunk) -> None:
        texts.append(chunk.content)
        reasons.append(chunk.finish_reason)

    async def keep_async(chunk: StreamingChunk) -> None:
        keep(chunk)

    (streamed,) = generator.run(MESSAGES, given, streaming_callback=keep)["replies"]
    assert streamed.text == "".join(texts) == whole.text
    assert streamed.meta["finish_reason"] == whole.meta["finish_reason"]
    assert [*filter(None, reasons)] == [whole.meta["finish_reason"]]
    assert streamed.meta["usage"]["prompt_tokens"] == whole.meta["usage"]["prompt_tokens"]
    assert streamed.meta["chunkcache"]["fates"]["exact"] > 0
    texts.clear()
    found = asyncio.run(generator.run_async(MESSAGES, given, streaming_callback=keep_async))
    assert found["replies"][0].text == "".join(texts) == whole.text
    (plain,) = asyncio.run(generator.run_async(MESSAGES, given))["replies"]
    assert plain.text == whole.text


def test_tools(url: str, writes_json: dict[str, Any]) -> None:
    generator = ChunkCacheChatGenerator(url, tools_strict=True)
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "enum": ["Ashburg", "Norton"]}},
        "additionalProperties": False,
        "required": ["city"],
    }
    tool = Tool("weather", "The weather of a city.", schema, function=lambda city: city)
    forced = {"tool_choice": {"type": "function", "function": {"name": "weather"}}}
    how = {"generation_kwargs": {"temperature": 0, **forced, **writes_json}, "tools": [tool]}
    (whole,) = generator.run(MESSAGES, documents("boris"), **how)["replies"]
    (streamed,) = generator.run(
        MESSAGES, documents("boris"), streaming_callback=lambda _: None, **how
    )["replies"]
    for reply in (whole, streamed):
        assert [call.tool_name for call in reply.tool_calls] == ["weather"]
        assert reply.tool_calls[0].arguments["city"] in ("Ashburg", "Norton")


@pytest.mark.parametrize("arguments", ['{"city": ', "[1]"])
def test_call_whose_arguments_are_no_object_is_left_out(arguments: str) -> None:
    """As Haystack's own generators leave out malformed ones."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"content": "Yes.", "tool_calls": [call], "reasoning_content": "Hm."}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    (reply,) = _replies({"model": "m", "choices": [choice]})
    assert (reply.text, reply.tool_calls) == ("Yes.", [])
    assert reply.reasoning is not None
    assert reply.reasoning.reasoning_text == "Hm."


def test_errors(generator: ChunkCacheChatGenerator) -> None:
    with pytest.raises(RefusedError, match="order"):
        generator.run(MESSAGES, documents("boris"), {"order": "alphabet"})
