"""LangChain's own packages against a server."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Any, Literal

import pytest

pytest.importorskip("langchain_core")

from langchain_core.caches import InMemoryCache
from langchain_core.documents import Document
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from pydantic import BaseModel, ValidationError

from eval.examples import PASSAGES, QUESTIONS
from eval.logs.log_file import LogFile
from eval.logs.passages import Passages, digest
from sglang_chunkcache.errors import RefusedError, ServerError
from sglang_chunkcache.integrations.langchain import (
    CallLogHandler,
    ChatChunkCache,
    ChunkCacheRetriever,
    _result,
    _warn_of_introduction,
    create_chunks_chain,
    with_documents,
)

QUESTION, ANSWER = next(iter(QUESTIONS.items()))


def documents(*names: str) -> list[Document]:
    return [Document(id=each, page_content=PASSAGES[each]) for each in names]


@pytest.fixture
def llm(url: str) -> ChatChunkCache:
    return ChatChunkCache(base_url=url, temperature=0, max_tokens=24)


def test_documents_are_chunks(llm: ChatChunkCache) -> None:
    """Whatever order the prompt has, the answer names them as they were given."""
    given = documents("jonas", "boris", "simon")
    first = llm.invoke(QUESTION, documents=given)
    again = llm.invoke(QUESTION, documents=given[::-1])
    assert [each.id for each in given] == ["jonas", "boris", "simon"]
    for message in (first, again):
        assert ANSWER in str(message.content)
        told, usage = message.response_metadata["chunkcache"], message.usage_metadata
        assert sorted(told["order"]) == ["boris", "jonas", "simon"]
        assert usage is not None
        assert sum(told["fates"].values()) == usage["input_tokens"]
    assert again.usage_metadata is not None
    found = again.usage_metadata["input_token_details"]["cache_read"]
    assert found == again.response_metadata["chunkcache"]["fates"]["exact"] > 0


def test_documents_without_ids_are_named_by_position(llm: ChatChunkCache) -> None:
    same = [Document(page_content=PASSAGES[each]) for each in ("jonas", "boris")]
    twice = [Document(id="a", page_content=PASSAGES[each]) for each in ("jonas", "boris")]
    for given in (same, twice):
        told = llm.invoke(QUESTION, documents=given).response_metadata["chunkcache"]
        assert sorted(told["order"]) == ["0", "1"]


def test_documents_in_a_message(llm: ChatChunkCache) -> None:
    """As LangChain's blocks for a document's text."""
    block: dict[str, Any] = {"type": "text-plain", "mime_type": "text/plain"}
    blocks = [{**block, "id": name, "text": PASSAGES[name]} for name in ("boris", "jonas")]
    question = HumanMessage(content=[*blocks, {"type": "text", "text": QUESTION}])
    message = llm.invoke([SystemMessage("Answer."), question])
    assert ANSWER in str(message.content)
    assert sorted(message.response_metadata["chunkcache"]["order"]) == ["boris", "jonas"]
    assert len(question.content) == 3


def test_stream_is_the_same_answer(llm: ChatChunkCache) -> None:
    given = documents("boris", "jonas")
    whole = llm.invoke(QUESTION, documents=given)
    pieces = list(llm.stream(QUESTION, documents=given))
    assert len(pieces) > 2
    joined = pieces[0]
    for piece in pieces[1:]:
        joined += piece
    assert joined.content == whole.content
    assert joined.response_metadata["finish_reason"] == whole.response_metadata["finish_reason"]
    assert joined.usage_metadata is not None
    fates = joined.response_metadata["chunkcache"]["fates"]
    assert sum(fates.values()) == joined.usage_metadata["input_tokens"]
    assert fates["exact"] == joined.usage_metadata["input_token_details"]["cache_read"] > 0


def test_logprobs_are_those_of_the_tokens(llm: ChatChunkCache) -> None:
    """Whole and in pieces."""
    asked: dict[str, Any] = {"documents": documents("boris"), "logprobs": True, "top_logprobs": 2}
    told = llm.invoke(QUESTION, **asked)
    first, *pieces = llm.stream(QUESTION, **asked)
    joined = sum(pieces, first)
    for message in (told, joined):
        tokens = [each["token"] for each in message.response_metadata["logprobs"]["content"]]
        assert "".join(tokens).startswith(str(told.content))


def test_async(llm: ChatChunkCache) -> None:
    given = documents("boris", "jonas")

    async def both() -> tuple[str, str]:
        whole, texts = await llm.ainvoke(QUESTION, documents=given), []
        async for piece in llm.astream(QUESTION, documents=given):
            texts.append(str(piece.content))
        return str(whole.content), "".join(texts)

    whole, streamed = asyncio.run(both())
    assert whole == streamed
    assert ANSWER in whole


def test_tools(llm: ChatChunkCache, writes_json: dict[str, Any]) -> None:
    def weather(city: Literal["Ashburg", "Norton"]) -> str:
        """The weather of a city."""
        return city

    bound = llm.bind_tools([weather], tool_choice="weather", strict=True)
    whole = bound.invoke(QUESTION, documents=documents("boris"), **writes_json)
    assert [call["name"] for call in whole.tool_calls] == ["weather"]
    assert whole.tool_calls[0]["args"]["city"] in ("Ashburg", "Norton")
    joined = None
    for piece in bound.stream(QUESTION, documents=documents("boris"), **writes_json):
        joined = piece if joined is None else joined + piece
    assert joined is not None
    assert [call["args"] for call in joined.tool_calls] == [whole.tool_calls[0]["args"]]


@pytest.mark.parametrize("arguments", ['{"city": ', "[1]"])
def test_arguments_that_are_no_object_are_an_invalid_call(arguments: str) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    answer = {"id": "a", "model": "m", "choices": [choice], "usage": None, "chunkcache": None}
    (found,) = _result(answer).generations
    assert found.message.tool_calls == []
    assert [each["args"] for each in found.message.invalid_tool_calls] == [arguments]


def test_chain_in_place_of_stuffing(llm: ChatChunkCache) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Answer."), ("user", "{context}{input}")])
    chain = create_chunks_chain(llm, prompt)
    inputs = {"context": documents("jonas", "boris"), "input": QUESTION}
    answer = chain.invoke(inputs)
    assert ANSWER in answer
    assert "".join(chain.stream(inputs)) == answer
    assert asyncio.run(chain.ainvoke(inputs)) == answer
    assert inputs["context"][0].id == "jonas"
    with pytest.raises(ValueError, match="no documents in 'context'"):
        chain.invoke({"input": QUESTION})


@pytest.mark.parametrize(
    ("system", "user", "want", "is_told"),
    [
        ("Answer.", "{context}\n\nQ: {input}", ["Answer.", "Q: x"], False),
        ("Answer.\n\n{context}", "{input}", ["Answer.", "x"], False),
        ("a", "Read.\n\n{context}\n\nQ: {input}", ["a", "Read.\n\nQ: x"], False),
        ("a", "Context:\n{context}\n\nQ: {input}", ["a", "Context:\nQ: x"], True),
        ("Context: {context}", "{input}", ["Context:", "x"], True),
        ("a", [{"type": "text", "text": "Of {context}, {input}"}], ["a", "Of , x"], True),
    ],
)
def test_nothing_is_in_the_documents_place(
    caplog: pytest.LogCaptureFixture, system: str, user: Any, want: list[str], is_told: bool
) -> None:
    """Words that introduce it are told once."""
    _warn_of_introduction.cache_clear()
    prompt = ChatPromptTemplate.from_messages([("system", system), ("user", user)])
    chain = create_chunks_chain(RunnablePassthrough(), prompt, output_parser=RunnablePassthrough())
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            messages = chain.invoke({"context": documents("boris"), "input": "x"})
    block, _ = messages[1].content
    assert (block["id"], block["text"]) == ("boris", PASSAGES["boris"])
    assert [messages[0].content, messages[1].content[1]["text"]] == want
    told = ["before {context} introduce nothing" in each for each in caplog.messages]
    assert told == [True] * is_told


def test_document_prompt_writes_the_chunks_and_a_message_comes_back(llm: ChatChunkCache) -> None:
    """So a source can be cited, by its name in the text or by the order of the ids."""
    given = [
        Document(id=each, page_content=PASSAGES[each], metadata={"source": f"{each}.txt"})
        for each in ("jonas", "boris")
    ]
    cited = PromptTemplate.from_template("{page_content} ({source})")
    prompt = ChatPromptTemplate.from_messages([("user", "{context}\n\n{input}")])
    how: dict[str, Any] = {"document_prompt": cited, "output_parser": RunnablePassthrough()}
    inputs = {"context": given, "input": QUESTION}
    block, *_ = create_chunks_chain(RunnablePassthrough(), prompt, **how).invoke(inputs)[0].content
    assert block["text"] == f"{PASSAGES['jonas']} (jonas.txt)"
    message = create_chunks_chain(llm, prompt, **how).invoke(inputs)
    assert sorted(message.response_metadata["chunkcache"]["order"]) == ["boris", "jonas"]


@pytest.mark.parametrize("given", ["", "text", ["text"]])
def test_formatted_documents_are_refused(given: Any) -> None:
    llm = ChatChunkCache()
    chain = create_chunks_chain(llm, ChatPromptTemplate.from_messages([("user", "{context}")]))
    with pytest.raises(TypeError, match="'context' must be a list of Documents"):
        chain.invoke({"context": given})
    with pytest.raises(TypeError, match="'documents' must be a list of Documents"):
        llm.invoke(QUESTION, documents=given)


@pytest.mark.parametrize("made", [ChatChunkCache, ChunkCacheRetriever])
def test_unknown_options_are_refused(made: Any) -> None:
    """`timeout` is LangChain's name."""
    assert made(timeout=5).timeout_s == made(timeout_s=5).timeout_s == 5
    for extra in ("temprature", "conversationId", "max_retries"):
        with pytest.raises(ValidationError, match=extra):
            made(**{extra: 0})


def test_structured_output_reads_documents_in_a_message(
    url: str, writes_json: dict[str, Any]
) -> None:
    """Arguments of a call LangChain drops on the way."""

    class Weather(BaseModel):
        """The weather of a city."""

        city: Literal["Ashburg", "Norton"]

    llm = ChatChunkCache(base_url=url, temperature=0, tools_strict=True, extra_body=writes_json)
    structured = llm.with_structured_output(Weather, include_raw=True)
    found: Any = structured.invoke(with_documents([HumanMessage(QUESTION)], documents("boris")))
    assert found["parsed"].city in ("Ashburg", "Norton")
    assert found["raw"].response_metadata["chunkcache"]["order"] == ["boris"]


def test_answer_goes_back_as_its_text(llm: ChatChunkCache) -> None:
    said = AIMessage([{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": "Yes."}])
    message = llm.invoke([HumanMessage("Are you there?"), said, HumanMessage(QUESTION)])
    assert message.content


def test_cache_of_langchain_keeps_tenants_apart(url: str) -> None:
    kept, given = InMemoryCache(), documents("boris")
    asked: dict[str, Any] = {"base_url": url, "temperature": 0, "max_tokens": 24, "cache": kept}
    answers = [
        ChatChunkCache(**asked, extra_body={"cache_salt": salt}).invoke(QUESTION, documents=given)
        for salt in ("a", "b", "a")
    ]
    assert answers[0].id == answers[2].id != answers[1].id


def test_one_answer_a_call(llm: ChatChunkCache) -> None:
    with pytest.raises(ValueError, match="`n` must be 1"):
        llm.invoke(QUESTION, n=2)


def test_retriever(url: str, llm: ChatChunkCache) -> None:
    retriever = ChunkCacheRetriever(base_url=url, k=3)
    found = retriever.invoke(QUESTION)
    assert found[0].id == "boris"
    assert found[0].page_content == PASSAGES["boris"]
    assert found[0].metadata["score"] > 0
    assert asyncio.run(retriever.ainvoke(QUESTION)) == found
    assert ANSWER in str(llm.invoke(QUESTION, documents=found).content)


def test_errors(url: str, llm: ChatChunkCache) -> None:
    with pytest.raises(RefusedError, match="order"):
        llm.invoke(QUESTION, documents=documents("boris"), order="alphabet")
    with pytest.raises(RefusedError, match="order"):
        list(llm.stream(QUESTION, documents=documents("boris"), order="alphabet"))
    nobody = ChatChunkCache(base_url="http://127.0.0.1:9")
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9: ConnectError"):
        nobody.invoke(QUESTION)
    with pytest.raises(ServerError, match=r"127\.0\.0\.1:9: ConnectError"):
        asyncio.run(nobody.ainvoke(QUESTION))


def test_log_of_a_chain_is_read(tmp_path: Path) -> None:
    """Passages in the prompt's order, whatever the prompt puts around them; no server is asked."""

    class Found(BaseRetriever):
        def _get_relevant_documents(self, query: str, **_: Any) -> list[Document]:
            return documents("jonas", "boris", "simon")

    def filled(question: str) -> str:
        texts = [f"[{n}] {each.page_content}" for n, each in enumerate(Found().invoke(question))]
        return "\n".join(["Read.", *texts[:2], question])

    log, handler = tmp_path / "calls.jsonl", CallLogHandler(tmp_path / "calls.jsonl")
    model = FakeListChatModel(responses=["Yes."])
    chain = RunnableLambda(filled) | model
    config: Any = {"callbacks": [handler], "metadata": {"thread_id": "t1"}}
    chain.invoke(QUESTION, config=config)
    asyncio.run(chain.ainvoke(QUESTION, config=config))
    model.invoke("Are you there?", config=config)
    read = LogFile(log, Passages())
    want = [digest(PASSAGES["jonas"]), digest(PASSAGES["boris"])]
    assert [[c.id for c in each.chunks] for each in read] == [want, want]
    assert {each.conversation for each in read} == {"t1"}
    assert read.unread["reasons"] == {"no passages beside this call, and no --separator": 1}
