"""LlamaIndex's own packages against a server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("llama_index.core")

from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.instrumentation import get_dispatcher
from llama_index.core.llms import MockLLM
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode

from eval.examples import PASSAGES, QUESTIONS
from eval.logs.log_file import LogFile
from eval.logs.passages import Passages, digest
from sglang_chunkcache.errors import RefusedError
from sglang_chunkcache.integrations.llamaindex import (
    CallLogHandler,
    ChunkCacheRetriever,
    ChunkCacheSynthesizer,
)

QUESTION, ANSWER = next(iter(QUESTIONS.items()))
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 24}


class Found(BaseRetriever):
    """These passages."""

    names: tuple[str, ...] = ("jonas", "boris", "simon")

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return [NodeWithScore(node=TextNode(id_=each, text=PASSAGES[each])) for each in self.names]


def engine(url: str, retriever: BaseRetriever | None = None, **more: Any) -> RetrieverQueryEngine:
    synthesizer = ChunkCacheSynthesizer(url, **SETTINGS, **more)
    return RetrieverQueryEngine(retriever=retriever or Found(), response_synthesizer=synthesizer)


def test_nodes_are_chunks(url: str) -> None:
    """Sources stay as they were found, whatever order the prompt has."""
    retriever = Found()
    asked = engine(url, retriever, system_prompt="Answer.")
    asked.query(QUESTION)
    retriever.names = ("simon", "boris", "jonas")
    response = asked.query(QUESTION)
    assert ANSWER in str(response)
    assert [each.node_id for each in response.source_nodes] == list(retriever.names)
    told = response.metadata["chunkcache"]
    assert sorted(told["order"]) == ["boris", "jonas", "simon"]
    assert told["fates"]["exact"] > 0
    assert response.metadata["boris"] == {}


def test_stream_and_async(url: str) -> None:
    whole = str(engine(url).query(QUESTION))
    response = engine(url, streaming=True).query(QUESTION)
    assert response.metadata["chunkcache"] == {}
    assert "".join(response.response_gen) == whole
    assert response.metadata["chunkcache"]["fates"]["exact"] > 0

    async def both() -> tuple[str, str]:
        answered = await engine(url).aquery(QUESTION)
        streamed = await engine(url, streaming=True).aquery(QUESTION)
        return str(answered), "".join([text async for text in streamed.response_gen])

    assert asyncio.run(both()) == (whole, whole)


def test_without_nodes(url: str) -> None:
    """LlamaIndex's own answer."""
    nothing = Found()
    nothing.names = ()
    assert str(engine(url, nothing).query(QUESTION)) == "Empty Response"


def test_retriever(url: str) -> None:
    retriever = ChunkCacheRetriever(url, k=3)
    found = retriever.retrieve(QUESTION)
    assert found[0].node_id == "boris"
    assert found[0].text == PASSAGES["boris"]
    assert (found[0].score or 0) > 0
    ids = [each.node_id for each in asyncio.run(retriever.aretrieve(QUESTION))]
    assert ids == [each.node_id for each in found]
    response = engine(url, retriever).query(QUESTION)
    assert ANSWER in str(response)
    assert [each.node_id for each in response.source_nodes] == ids


def test_errors(url: str) -> None:
    with pytest.raises(RefusedError, match="order"):
        engine(url, order="alphabet").query(QUESTION)


def test_unknown_options_are_refused() -> None:
    """The server would pass over them."""
    made: Any = ChunkCacheSynthesizer
    for extra in ("temprature", "timeout", "max_retries"):
        with pytest.raises(TypeError, match=extra):
            made(**{extra: 0})


@pytest.mark.parametrize("is_chat", [False, True])
def test_log_of_an_engine_is_read(tmp_path: Path, is_chat: bool) -> None:
    """LlamaIndex's own synthesizer, metadata in the texts as it puts them; no server is asked."""

    class Titled(Found):
        def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
            found = super()._retrieve(query_bundle)
            found[0].node.metadata = {"title": "Jonas"}
            return found

    log, dispatcher = tmp_path / "calls.jsonl", get_dispatcher()
    handler = CallLogHandler(log)
    dispatcher.add_event_handler(handler)
    try:
        model = MockLLM(is_chat_model=is_chat)
        RetrieverQueryEngine.from_args(Titled(), llm=model).query(QUESTION)
    finally:
        dispatcher.event_handlers.remove(handler)
    (request,) = LogFile(log, Passages())
    texts = [f"title: Jonas\n\n{PASSAGES['jonas']}", PASSAGES["boris"], PASSAGES["simon"]]
    assert [chunk.id for chunk in request.chunks] == [*map(digest, texts)]
