"""A server with an index: questions in, chunks found by the server, answers out.

launch/test.sh tests/e2e/test_retrieval.py
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

pytest.importorskip("faiss")
pytest.importorskip("tantivy")

from eval.http import post
from eval.server import Server
from eval.world.world import Question
from tests.e2e.asking import assistant, chat, metrics_of, send, stats_of, text_of, user
from tests.e2e.conftest import WORLD, K, build_index
from tests.polling import until

pytestmark = pytest.mark.engine

RETRIEVE = "/rag/v1/retrieve"


def questions(count: int) -> list[Question]:
    asked = [question for question in WORLD.questions if question.hop == 1]
    return random.Random(5).sample(asked, count)


def search(server: Server, messages: Any, retrieve: Any = True, **fields: Any) -> dict[str, Any]:
    """An answer from what the server finds."""
    return chat(server, messages, retrieve=retrieve, **fields)


def search_alone(server: Server, **query: Any) -> list[dict[str, Any]]:
    passages: list[dict[str, Any]] = post(server.url + RETRIEVE, query)["passages"]
    return passages


def found(reply: dict[str, Any]) -> list[str]:
    """Ids of what was retrieved, best first."""
    return [passage["id"] for passage in reply["chunkcache"]["retrieval"]["passages"]]


def test_questions_are_answered_from_the_index(rag_server: Server) -> None:
    """No chunk was sent: what the answers say, the server has found."""
    asked = questions(30)
    right = retrieved = 0
    for question in asked:
        reply = search(rag_server, question.question)
        right += text_of(reply).strip() in question.answers
        retrieved += question.gold_passage_ids[0] in found(reply)
        assert sorted(found(reply)) == sorted(reply["chunkcache"]["order"])
        assert len(found(reply)) == K
    assert retrieved >= 29
    assert right >= 27


def test_search_alone_finds_the_same(rag_server: Server) -> None:
    """Chat and search are one retriever; sent as chunks, the passages make the very same prompt."""
    question = questions(2)[1].question
    asked = search(rag_server, question)
    passages = search_alone(rag_server, query=question)
    assert [passage["id"] for passage in passages] == found(asked)
    sent = chat(rag_server, question, passages, max_tokens=1)
    assert sent["chunkcache"]["retrieval"] is None
    assert sent["chunkcache"]["chunks_hit"] == K


def test_conversation_searches_its_last_turns(rag_server: Server) -> None:
    """A question without a name needs the previous one; chunks are shown once."""
    (first,) = questions(1)
    messages = [user(first.question)]
    answer = search(rag_server, messages, conversation_id="talk")
    messages += [assistant(text_of(answer)), user("And what else?")]
    alone = search(rag_server, messages, {"turns": 1}, max_tokens=1)
    assert alone["chunkcache"]["retrieval"]["query"] == "And what else?"
    reply = search(rag_server, messages, {"turns": 2}, conversation_id="talk")
    assert reply["chunkcache"]["retrieval"]["query"] == f"{first.question}\nAnd what else?"
    assert first.gold_passage_ids[0] in found(reply)
    assert first.gold_passage_ids[0] in reply["chunkcache"]["dropped"]
    assert reply["chunkcache"]["turns_reused"] == 1


def test_stream_says_what_was_found(rag_server: Server) -> None:
    """In the one event that is ours; with the openai client, as a user writes it."""
    client = openai.OpenAI(base_url=rag_server.url + "/rag/v1", api_key="none")
    question = questions(3)[2]
    fields: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": 24}
    fields |= {"messages": [user(question.question)], "extra_body": {"retrieve": {"k": 3}}}
    events = list(client.chat.completions.create(**fields, stream=True))
    (ours,) = (dict(event.model_extra["chunkcache"]) for event in events if event.model_extra)
    assert len(ours["retrieval"]["passages"]) == 3
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text.strip() in question.answers


def test_requests_at_once_are_searched_together(rag_server: Server) -> None:
    """Waiting requests form one batch, and each finds the same as alone."""

    def found_by(question: Question) -> dict[str, Any]:
        return post(rag_server.url + RETRIEVE, {"query": question.question, "k": 2, "text": False})

    asked = questions(25)
    alone = [found_by(question)["passages"] for question in asked]
    with ThreadPoolExecutor(20) as pool:
        replies = list(pool.map(found_by, asked * 8))
    assert [reply["passages"] for reply in replies] == alone * 8
    assert max(reply["batch"] for reply in replies) > 1


def retrieval_when(server: Server, holds: Callable[[Any], bool]) -> dict[str, Any]:
    """The stats of the index, once that holds of them."""
    return until(lambda: told if holds(told := stats_of(server)["retrieval"]) else None)


def test_newer_generation_is_served(rag_server: Server, index: Path) -> None:
    """The server follows the directory by itself, while it answers."""
    text = "The company Wolfram makes submarines. Wolfram serves Atlantis."
    query: dict[str, Any] = {"query": "Which company makes submarines?", "k": 1, "mode": "bm25"}
    assert "Wolfram" not in search_alone(rag_server, **query)[0]["text"]
    build_index(index, [{"id": "new", "text": text}])
    until(lambda: search_alone(rag_server, **query)[0]["id"] == "new")
    stats = stats_of(rag_server)["retrieval"]
    assert (stats["generation"], stats["passages"]) == (2, 61)
    assert found(search(rag_server, "What?", query)) == ["new"]


def test_damaged_generation_is_not_served(rag_server: Server, index: Path) -> None:
    """The old one goes on, and log, stats and metrics say why."""
    manifest = index / "manifest.json"
    whole = manifest.read_text(encoding="utf-8")
    try:
        newer = whole.replace('"generation": 2', '"generation": 3')
        damaged = manifest.with_name("damaged")  # the server must not read half of it
        damaged.write_text(newer.replace('"xxh3": "', '"xxh3": "0'))
        damaged.replace(manifest)
        stats = retrieval_when(rag_server, lambda found: found["state"] == "stale")
        assert "its checksum differs" in stats["reason"]
        assert "now is not served: " + stats["reason"] in rag_server.log.read_text(errors="replace")
        assert metrics_of(rag_server)['chunkcache:retrieval_state{state="stale"}'] == 1
        assert len(found(search(rag_server, questions(1)[0].question))) == K
        assert stats["generation"] == 2
    finally:
        manifest.write_text(whole, encoding="utf-8")


def test_replaced_index_is_served_whatever_its_generation(
    rag_server: Server, index: Path, tmp_path: Path
) -> None:
    """Written over in place it is down; removed and put back, served."""

    def wait(state: str, generation: int) -> dict[str, Any]:
        return retrieval_when(
            rag_server, lambda found: (found["state"], found["generation"]) == (state, generation)
        )

    build_index(tmp_path / "earlier", [{"id": "sub", "text": "The company Wolfram makes kayaks."}])
    backup = shutil.copytree(index, tmp_path / "backup")
    wait("up", 2)
    (segment,) = index.glob("dense-2-*.faiss")
    # without truncating it: it is mapped into the server's memory
    with segment.open("r+b") as file:
        file.write(bytes(segment.stat().st_size))
    assert segment.name in wait("down", 2)["reason"]
    query: dict[str, Any] = {"query": "Which company makes kayaks?", "k": 1, "mode": "dense"}
    assert send(rag_server.url + RETRIEVE, query)[0] == 500
    assert send(rag_server.url + "/health", "GET")[0] == 200
    for source, generation in ((tmp_path / "earlier", 1), (backup, 2)):
        shutil.rmtree(index)
        shutil.copytree(source, index)
        wait("up", generation)
        found_now = search_alone(rag_server, **query)[0]["id"]
        assert (found_now == "sub") == (generation == 1)


def test_nothing_is_left_behind(rag_server: Server) -> None:
    """After all of the above: no plan, no load, no waiting request, no missing slot."""
    until(lambda: stats_of(rag_server)["prompt_tokens_in_flight"] == [0])
    stats = stats_of(rag_server)
    assert (stats["tree"]["open_plans"], stats["retrieval"]["waiting"]) == (0, 0)
    assert stats["searches"]["failed"] == 1  # the one on a damaged index
    metrics = metrics_of(rag_server)
    assert metrics['chunkcache:searches_total{outcome="found"}'] > 0
    assert metrics['chunkcache:retrieval_seconds_count{phase="encode"}'] > 0
