"""A server with an index: questions in, chunks found by the server, answers out.

launch/test.sh tests/e2e/test_retrieval.py
"""

from __future__ import annotations

import json
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

from eval.http import get, post
from eval.server import Server
from eval.world.world import Question
from sglang_chunkcache import config, launch_server
from tests.e2e.conftest import WORLD, K, build_index
from tests.e2e.test_bad_input import IMAGE, send
from tests.polling import until

pytestmark = pytest.mark.engine

CHAT, RETRIEVE = "/rag/v1/chat/completions", "/rag/v1/retrieve"


def questions(count: int) -> list[Question]:
    asked = [question for question in WORLD.questions if question.hop == 1]
    return random.Random(5).sample(asked, count)


def chat(server: Server, messages: Any, retrieve: Any = True, **extra: Any) -> dict[str, Any]:
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    body = {"messages": messages, "retrieve": retrieve, "temperature": 0, "max_tokens": 24, **extra}
    return post(server.url + CHAT, body)


def found(reply: dict[str, Any]) -> list[str]:
    """Ids of what was retrieved, best first."""
    return [passage["id"] for passage in reply["chunkcache"]["retrieval"]["passages"]]


def test_questions_are_answered_from_the_index(rag_server: Server) -> None:
    """No chunk was sent: what the answers say, the server has found."""
    asked = questions(30)
    right = retrieved = 0
    for question in asked:
        reply = chat(rag_server, question.question)
        right += reply["choices"][0]["message"]["content"].strip() in question.answers
        retrieved += question.gold_passage_ids[0] in found(reply)
        assert sorted(found(reply)) == sorted(reply["chunkcache"]["order"])
        assert len(found(reply)) == K
    assert retrieved >= 29
    assert right >= 27


def test_what_is_found_again_is_cached(rag_server: Server) -> None:
    """A passage is the same chunk whenever it is retrieved."""
    question = questions(1)[0].question
    cold, warm = chat(rag_server, question), chat(rag_server, question)
    assert found(warm) == found(cold)
    assert warm["chunkcache"]["chunks_hit"] == K
    assert warm["choices"][0]["message"]["content"] == cold["choices"][0]["message"]["content"]


def test_search_alone_finds_the_same(rag_server: Server) -> None:
    """Chat and search are one retriever; sent as chunks, the passages make the very same prompt."""
    question = questions(2)[1].question
    asked = chat(rag_server, question)
    passages = post(rag_server.url + RETRIEVE, {"query": question})["passages"]
    assert [passage["id"] for passage in passages] == found(asked)
    assert all(passage["text"] == WORLD.passage(passage["id"]).text for passage in passages)
    body = {
        "messages": [{"role": "user", "content": question}],
        "chunks": passages,
        "max_tokens": 1,
    }
    sent = post(rag_server.url + CHAT, body)
    assert sent["chunkcache"]["retrieval"] is None
    assert sent["chunkcache"]["chunks_hit"] == K


@pytest.mark.parametrize("mode", ["fusion", "dense", "bm25"])
def test_modes_and_times(rag_server: Server, mode: str) -> None:
    """The answer says how it was searched and what that took."""
    retrieval = chat(rag_server, questions(1)[0].question, {"mode": mode, "k": 2})["chunkcache"][
        "retrieval"
    ]
    phases = {
        "fusion": {"encode", "dense", "bm25"},
        "dense": {"encode", "dense"},
        "bm25": {"bm25"},
    }[mode]
    assert (retrieval["mode"], retrieval["k"], len(retrieval["passages"])) == (mode, 2, 2)
    assert retrieval["ms"].keys() == {"queued", "read", *phases}
    assert all(value >= 0 for value in retrieval["ms"].values())


def test_nothing_found_is_answered_without_chunks(rag_server: Server) -> None:
    """BM25 knows none of these words."""
    reply = chat(rag_server, "zzqq xxyy?", {"mode": "bm25"}, max_tokens=2)
    assert (found(reply), reply["chunkcache"]["order"]) == ([], [])


def test_conversation_searches_its_last_turns(rag_server: Server) -> None:
    """A question without a name is searched with the previous one,
    and chunks in the prompt are not shown again."""
    (first,) = questions(1)
    messages = [{"role": "user", "content": first.question}]
    answer = chat(rag_server, messages, conversation_id="talk")
    messages += [
        {"role": "assistant", "content": answer["choices"][0]["message"]["content"]},
        {"role": "user", "content": "And what else?"},
    ]
    alone = chat(rag_server, messages, {"turns": 1}, max_tokens=1)
    assert alone["chunkcache"]["retrieval"]["query"] == "And what else?"
    reply = chat(rag_server, messages, {"turns": 2}, conversation_id="talk")
    assert reply["chunkcache"]["retrieval"]["query"] == f"{first.question}\nAnd what else?"
    assert first.gold_passage_ids[0] in found(reply)
    assert first.gold_passage_ids[0] in reply["chunkcache"]["dropped"]
    assert reply["chunkcache"]["turns_reused"] == 1


def test_stream_says_what_was_found(rag_server: Server) -> None:
    """In the one event that is ours; with the openai client, as a user writes it."""
    client = openai.OpenAI(base_url=rag_server.url + "/rag/v1", api_key="none")
    question = questions(3)[2]
    events = list(
        client.chat.completions.create(
            model="default",
            messages=[{"role": "user", "content": question.question}],
            temperature=0,
            max_tokens=24,
            stream=True,
            extra_body={"retrieve": {"k": 3}},
        )
    )
    ours = [dict(event.model_extra["chunkcache"]) for event in events if event.model_extra]
    assert len(ours) == 1
    assert len(ours[0]["retrieval"]["passages"]) == 3
    text = "".join(event.choices[0].delta.content or "" for event in events if event.choices)
    assert text.strip() in question.answers


def test_explain_searches_too(rag_server: Server) -> None:
    """And runs nothing."""
    question = questions(1)[0].question
    body = {"messages": [{"role": "user", "content": question}], "retrieve": {"k": 2}}
    plan = post(rag_server.url + "/chunkcache/explain", body)
    assert sorted(passage["id"] for passage in plan["retrieval"]["passages"]) == sorted(
        plan["order"]
    )


def test_frontend_programs_can_search(rag_server: Server) -> None:
    """What the endpoint finds is what `chunks` takes."""
    from sglang_chunkcache.lang import ChunkCacheEndpoint, chunks

    question = questions(1)[0]
    passages = ChunkCacheEndpoint(rag_server.url).retrieve(question.question, k=2)
    assert passages[0]["id"] == question.gold_passage_ids[0]
    assert chunks(passages).value.startswith(passages[0]["text"])


def test_requests_at_once_are_searched_together(rag_server: Server) -> None:
    """Waiting requests form one batch, and each finds the same as alone."""

    def search(question: Question) -> dict[str, Any]:
        return post(rag_server.url + RETRIEVE, {"query": question.question, "k": 2, "text": False})

    asked = questions(25)
    alone = [search(question)["passages"] for question in asked]
    before = get(rag_server.url + "/chunkcache/stats")["retrieval"]
    with ThreadPoolExecutor(20) as pool:
        replies = list(pool.map(search, asked * 8))
        answers = list(
            pool.map(lambda question: chat(rag_server, question.question, max_tokens=1), asked[:20])
        )
    after = get(rag_server.url + "/chunkcache/stats")["retrieval"]
    assert [reply["passages"] for reply in replies] == alone * 8
    assert all(
        passages[0]["id"] in found(reply) for passages, reply in zip(alone, answers, strict=False)
    )
    num_searches, num_batches = (after[name] - before[name] for name in ("searches", "batches"))
    assert num_searches == len(replies) + len(answers)
    assert num_batches < num_searches
    assert max(reply["batch"] for reply in replies) > 1


MESSAGES = [{"role": "user", "content": "What does Dravex make?"}]
CASES: list[tuple[str, Any, str]] = [
    ("k not finite", b'{"messages": [], "retrieve": {"k": 1e999}}', "body"),
    ("k not a number", b'{"messages": [], "retrieve": {"k": NaN}}', "body"),
    ("query blank", {"retrieve": {"query": " \n\t"}}, "retrieve.query"),
    ("query of a megabyte", {"retrieve": {"query": "x" * 1_000_000}}, "retrieve.query"),
    ("query half a character", b'{"messages": [], "retrieve": {"query": "\\ud800"}}', "body"),
    ("query and turns", {"retrieve": {"query": "x", "turns": 2}}, "retrieve.turns"),
    ("question empty", {"messages": [{"role": "user", "content": ""}], "retrieve": True}, "messages"),
    ("question an image", {"messages": [{"role": "user", "content": [IMAGE]}], "retrieve": True}, "content"),
    ("question of a megabyte", {"messages": [{"role": "user", "content": "x " * 500_000}], "retrieve": True}, "context"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("body", "field"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
def test_bad_wish_is_refused_by_name(rag_server: Server, body: Any, field: str) -> None:
    """A 400 whose text names the field."""
    status, text = send(
        rag_server.url + CHAT, body if isinstance(body, bytes) else {"messages": MESSAGES, **body}
    )
    assert status == 400, text
    assert field in text


SEARCH_CASES: list[tuple[str, Any, str]] = [
    ("null", None, "body"),
    ("not json", b"{", "body"),
    ("query null", {"query": None}, "query"),
    ("query of a megabyte", {"query": "x" * 1_000_000}, "query"),
    ("message without content", {"messages": [{"role": "user"}]}, "messages.0.content"),
    (
        "message of a nested list",
        {"messages": [{"role": "user", "content": [["x"]]}]},
        "messages.0.content",
    ),
]


@pytest.mark.parametrize(
    ("body", "field"), [case[1:] for case in SEARCH_CASES], ids=[case[0] for case in SEARCH_CASES]
)
def test_bad_search_is_refused_by_name(rag_server: Server, body: Any, field: str) -> None:
    """As above, without a prompt."""
    status, text = send(rag_server.url + RETRIEVE, body)
    assert status == 400, text
    assert json.loads(text)["param"] == field


@pytest.mark.parametrize(
    "query",
    [
        "🙂 中文 é",
        "\0",
        "a\0b",
        "\u202e",
        "AND OR NOT (",
        '"unclosed',
        "id:5 *:* ~2^3",
        "x" * 8000,
        "% ' ; DROP TABLE",
    ],
    ids=lambda query: ascii(query)[:20],
)
@pytest.mark.parametrize(
    "mode",
    [*(pytest.param(mode, marks=pytest.mark.nightly) for mode in ("dense", "bm25")), "fusion"],
)
def test_odd_query_is_answered(rag_server: Server, query: str, mode: str) -> None:
    """A query is text, never syntax."""
    status, text = send(rag_server.url + RETRIEVE, {"query": query, "mode": mode})
    assert status == 200, text
    assert len(json.loads(text)["passages"]) <= K


def retrieval_when(server: Server, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    """The stats of the index, once that holds of them."""
    return until(
        lambda: told if holds(told := get(server.url + "/chunkcache/stats")["retrieval"]) else None
    )


def test_newer_generation_is_served(rag_server: Server, index: Path) -> None:
    """The server follows the directory by itself, while it answers."""
    text = "The company Wolfram makes submarines. Wolfram serves Atlantis."
    query = {"query": "Which company makes submarines?", "k": 1, "mode": "bm25"}
    assert "Wolfram" not in post(rag_server.url + RETRIEVE, query)["passages"][0]["text"]
    build_index(index, [{"id": "new", "text": text}])
    until(lambda: post(rag_server.url + RETRIEVE, query)["passages"][0]["id"] == "new")
    stats = get(rag_server.url + "/chunkcache/stats")["retrieval"]
    assert (stats["generation"], stats["passages"]) == (2, 61)
    assert found(chat(rag_server, "What?", query)) == ["new"]


def test_damaged_generation_is_not_served(rag_server: Server, index: Path) -> None:
    """The old one goes on, and log, stats and metrics say why."""
    manifest = index / "manifest.json"
    whole = manifest.read_text(encoding="utf-8")
    try:
        manifest.write_text(
            whole.replace('"generation": 2', '"generation": 3').replace('"xxh3": "', '"xxh3": "0')
        )
        stats = retrieval_when(rag_server, lambda found: found["state"] == "stale")
        assert "its checksum differs" in stats["reason"]
        assert "now is not served: " + stats["reason"] in rag_server.log.read_text(errors="replace")
        assert (
            'chunkcache:retrieval_state{state="stale"} 1.0'
            in send(rag_server.url + "/metrics", "GET")[1]
        )
        assert len(found(chat(rag_server, questions(1)[0].question))) == K
        assert stats["generation"] == 2
    finally:
        manifest.write_text(whole, encoding="utf-8")


def test_replaced_index_is_served_whatever_its_generation(
    rag_server: Server, index: Path, tmp_path: Path
) -> None:
    """Written over in place: down, and searches are refused.
    Removed and put back: served, without a restart."""

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
    query = {"query": "Which company makes kayaks?", "k": 1, "mode": "dense"}
    assert send(rag_server.url + RETRIEVE, query)[0] == 500
    assert send(rag_server.url + "/health", "GET")[0] == 200
    for source, generation in ((tmp_path / "earlier", 1), (backup, 2)):
        shutil.rmtree(index)
        shutil.copytree(source, index)
        wait("up", generation)
        found_now = post(rag_server.url + RETRIEVE, query)["passages"][0]["id"]
        assert (found_now == "sub") == (generation == 1)


def test_nothing_is_left_behind(rag_server: Server) -> None:
    """After all of the above: no plan, no load, no waiting request, no missing slot,
    and the counters show it."""
    until(lambda: get(rag_server.url + "/chunkcache/stats")["prompt_tokens_in_flight"] == [0])
    stats = get(rag_server.url + "/chunkcache/stats")
    assert stats["tree"]["open_plans"] == 0
    assert stats["retrieval"]["waiting"] == 0
    assert stats["searches"]["found"] > 0
    assert stats["searches"]["empty"] > 0
    assert "full" not in stats["searches"]
    assert stats["searches"]["failed"] == 1  # the one on a damaged index
    metrics = send(rag_server.url + "/metrics", "GET")[1]
    assert 'chunkcache:searches_total{outcome="found"}' in metrics
    assert 'chunkcache:retrieval_seconds_count{phase="encode"}' in metrics


# The start


@pytest.mark.parametrize("harm", ["missing", "damaged", "another encoder"])
def test_start_with_a_bad_index_says_why(
    index: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    harm: str,
) -> None:
    """Exit code 2 and the reason, before the model is loaded."""
    folder, flags = tmp_path / "index", list[str]()
    if harm != "missing":
        shutil.copytree(index, folder)
    if harm == "damaged":
        (vectors,) = folder.glob("dense-1-0.faiss")
        data = bytearray(vectors.read_bytes())
        data[-5] ^= 1
        vectors.write_bytes(data)
    elif harm == "another encoder":
        flags = ["--encoder", str(tmp_path)]
    reason = {
        "missing": "no index there",
        "damaged": "checksum",
        "another encoder": "does not fit",
    }[harm]
    monkeypatch.setenv(config.ENV_VAR, "")  # what `main` sets is undone
    monkeypatch.setattr("sglang_chunkcache.quiet.hide", lambda settings: None)
    monkeypatch.setattr(
        launch_server, "_run", lambda *args, **kwargs: pytest.fail("the server would start")
    )
    with pytest.raises(SystemExit) as caught:
        launch_server.main(["--model-path", "bundled", "--index", str(folder), *flags])
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err.splitlines()[-1]
