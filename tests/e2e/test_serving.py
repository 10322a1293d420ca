"""What a user sees: answers from the chunks, fates, conversations, streams,
SGLang's own routes next to ours."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from eval.http import get, post
from eval.server import Server
from eval.tasks.world import world_requests
from radix_ext import ChunkId, Span
from sglang_chunkcache.wire.events import Acknowledgement
from sglang_chunkcache.wire.spans import RequestSpans, pack
from tests.e2e.asking import (
    CHAT,
    EXPLAIN,
    GENERATE,
    assistant,
    chat,
    chunks_of,
    flush,
    metrics_of,
    rank_of,
    stats_of,
    text_of,
    user,
)

pytestmark = pytest.mark.engine

MAKES = {
    "Dravex": "clocks",
    "Solon": "lamps",
    "Brinix": "boats",
    "Torum": "paint",
    "Quarex": "ropes",
}
CHUNKS = [
    {"id": f"doc{i}", "text": f"The company {name} makes {thing}. Later number {i} came."}
    for i, (name, thing) in enumerate(MAKES.items())
]


def ask(
    server: Server, chunks: list[int], messages: Any, *, api_key: str = "none", **fields: Any
) -> Any:
    """One request through the openai client; the whole reply."""
    client = openai.OpenAI(base_url=server.url + "/rag/v1", api_key=api_key)
    messages = [user(messages)] if isinstance(messages, str) else messages
    body = {"chunks": [CHUNKS[i] for i in chunks], **fields.pop("extra_body", {})}
    asked = {"model": "default", "temperature": 0, "max_tokens": 12, **fields}
    return client.chat.completions.create(messages=messages, extra_body=body, **asked)


def cache_of(reply: Any) -> dict[str, Any]:
    """The `chunkcache` object of a reply."""
    return dict(reply.model_extra["chunkcache"])


def test_permuted_chunks_are_reused(rag_server: Server) -> None:
    """SGLang's own `cached_tokens` is what the fates report."""
    flush(rag_server)
    cold = ask(rag_server, [0, 1, 2], "What does Dravex make?")
    warm = ask(rag_server, [2, 0, 1], "What does Solon make?")
    assert cache_of(cold)["fates"]["exact"] == 0
    assert cache_of(warm)["order"] == ["doc0", "doc1", "doc2"]
    assert cache_of(warm)["chunks_hit"] == 3
    assert sum(cache_of(warm)["fates"].values()) == warm.usage.prompt_tokens


def test_prefix_of_a_chain_is_reused_and_extended(rag_server: Server) -> None:
    """A request that shares only some chunks starts with those (CRAFT 4.2, prefix slicing)."""
    flush(rag_server)
    ask(rag_server, [0, 1, 2], "What does Dravex make?")
    reply = cache_of(ask(rag_server, [3, 1, 0], "What does Torum make?"))
    assert reply["order"] == ["doc0", "doc1", "doc3"]
    assert reply["chunks_hit"] == reply["chunks_planned"] == 2


def test_answers_come_from_the_chunks(rag_server: Server) -> None:
    """In whatever order and reuse the cache chose; a broken cache would show here."""
    flush(rag_server)
    right = reused = 0
    for request in world_requests(40, seed=11):
        reply = chat(rag_server, request.question, chunks_of(request.chunks))
        right += text_of(reply).strip() in request.answers
        reused += reply["chunkcache"]["chunks_hit"]
    assert reused > 40
    assert right >= 38  # the model is right on 200 of 200 (bundled_model/README.md)


def test_stream_carries_the_same_object(rag_server: Server) -> None:
    """A stream is an ordinary one with one more chunk, and reuses like the request it repeats."""
    text = ask(rag_server, [0, 1], "What does Dravex make?").choices[0].message.content
    chunks = list(ask(rag_server, [1, 0], "What does Dravex make?", stream=True))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    objects = [c.model_extra["chunkcache"] for c in chunks if "chunkcache" in (c.model_extra or {})]
    assert streamed == text
    assert len(objects) == 1
    assert objects[0]["chunks_hit"] == 2


def test_nothing_of_ours_leaks_into_meta_info(rag_server: Server) -> None:
    """Events name other tenants' chunks: they stay in the front process."""
    reply = chat(rag_server, "Hi", CHUNKS[:2], return_meta_info=True)
    assert "chunkcache" not in reply["choices"][0]["meta_info"]


def test_forged_params_on_generate_do_nothing(rag_server: Server) -> None:
    """A client that writes our keys into SGLang's own route gets a plain request."""
    request = RequestSpans((Span(0, 4, ChunkId("")),), "x", 1, Acknowledgement(0, 0))
    params = {"max_new_tokens": 1, "custom_params": pack(request, secret="guess")}
    before = rank_of(rag_server)
    reply = post(rag_server.url + "/generate", {"text": "a b c d", "sampling_params": params})
    assert "chunkcache" not in reply["meta_info"]
    after = rank_of(rag_server)
    assert all(after[name] == before[name] for name in ("inserted_chunks", "fallbacks"))


def test_conversation_reuses_history_and_drops_seen_chunks(rag_server: Server) -> None:
    """All of a turn but its last answer token is exact."""
    messages = [user("What does Dravex make?")]
    first = ask(rag_server, [0, 1], messages, extra_body={"conversation_id": "talk"})
    messages += [assistant(first.choices[0].message.content), user("What does Brinix make?")]
    second = ask(rag_server, [1, 2], messages, extra_body={"conversation_id": "talk"})
    reply = cache_of(second)
    assert reply["dropped"] == ["doc1"]
    assert reply["order"] == ["doc2"]
    assert reply["turns_reused"] == 1
    assert reply["fates"]["exact"] >= first.usage.prompt_tokens + first.usage.completion_tokens - 1


def test_stranger_with_the_conversation_id_learns_nothing(rag_server: Server) -> None:
    """A guessed id with other messages, or another key with the same ones, starts fresh."""
    messages = [user("What does Torum make?")]
    mine = {"conversation_id": "mine"}
    reply = ask(rag_server, [3, 4], messages, extra_body=mine, api_key="owner")
    messages += [assistant(reply.choices[0].message.content), user("More?")]
    for guess, key in ((messages[2:], "owner"), (messages, "thief")):
        told = cache_of(ask(rag_server, [3, 4], guess, extra_body=mine, api_key=key))
        assert (told["dropped"], told["turns_reused"]) == ([], 0)


def test_salted_requests_share_no_kv(rag_server: Server) -> None:
    """`cache_salt` keeps tenants apart: the same chunks under another salt are computed."""
    flush(rag_server)

    def hit(salt: str) -> int:
        told = cache_of(ask(rag_server, [0, 1], "Hello", extra_body={"cache_salt": salt}))
        assert (told["fates"]["exact"] > 0) == (told["chunks_hit"] > 0)
        return int(told["chunks_hit"])

    assert [hit(salt) for salt in "aba"] == [0, 0, 2]


def test_generate_takes_parts(rag_server: Server) -> None:
    """The first area is ordered."""
    flush(rag_server)
    area = {"chunks": CHUNKS[:2]}
    params = {"max_new_tokens": 2, "temperature": 0}
    for parts in (["Read: ", area, "Now: "], ["Read: ", {"chunks": CHUNKS[1::-1]}, "Then: "]):
        body = {"parts": parts, "sampling_params": params}
        reply = post(rag_server.url + GENERATE, body)
    assert reply["chunkcache"]["order"] == ["doc0", "doc1"]
    assert reply["chunkcache"]["chunks_hit"] == 2


def test_own_routes_and_metrics(rag_server: Server) -> None:
    """`/v1/*` is SGLang's, stats count, the tree is shown, Prometheus has our counters."""
    asked = {"messages": [user("Hi")], "max_tokens": 1}
    assert "chunkcache" not in post(rag_server.url + "/v1/chat/completions", asked)
    stats = stats_of(rag_server)
    assert stats["requests"]["finished"] > 0
    assert get(rag_server.url + "/chunkcache/tree?depth=2")["num_nodes"] == stats["tree"]["nodes"]
    assert 'chunkcache:prompt_tokens_total{fate="exact"}' in metrics_of(rag_server)


def test_why_nothing_was_found_is_told(rag_server: Server) -> None:
    """The usual mistakes: in the answer, beforehand in `explain`, and in the stats."""
    flush(rag_server)

    def why(time: str, **fields: Any) -> list[tuple[str, list[str], str | None]]:
        head = {"role": "system", "content": f"Be brief. It is 12:00:0{time}."}
        sent = {"messages": [head, user("What does Dravex make?")], "chunks": CHUNKS[:2], **fields}
        sent |= {"cache_salt": "why", "max_tokens": 1}
        plan = post(rag_server.url + EXPLAIN, sent)
        reply = post(rag_server.url + CHAT, sent)["chunkcache"]
        assert (plan["missed"], list(plan["fallbacks"])) == (reply["missed"], reply["fallbacks"])
        total = sum(span["end"] - span["start"] for span in plan["spans"])
        missed = sum(each["tokens"] for each in reply["missed"])
        assert (total > missed) == (reply["chunks_hit"] > 0)
        return [(each["reason"], each["chunks"], each.get("field")) for each in reply["missed"]]

    before = stats_of(rag_server)["chunks_by_reason"]
    both, turned = ["doc0", "doc1"], {"chunks": CHUNKS[1::-1], "order": "retriever"}
    scored = [{**chunk, "text": f"[score 0.9] {chunk['text']}"} for chunk in CHUNKS[:2]]
    assert why("1") == [("new_tenant", both, None)]
    assert why("1") == []
    assert why("2") == [("other_head", both, "messages.0")]
    assert why("2", **turned) == [("other_order", both[::-1], None)]
    assert why("2", chunks=scored) == [("new_chunk", both, None)]
    flush(rag_server)
    assert why("2") == [("evicted", both, None)]
    after = stats_of(rag_server)
    counts = after["chunks_by_reason"].items()
    counted = {reason: count - before.get(reason, 0) for reason, count in counts}
    reasons = "new_tenant", "found", "other_head", "other_order", "new_chunk", "evicted"
    assert {reason: n for reason, n in counted.items() if n} == dict.fromkeys(reasons, 2)
    assert sum(after["reasons"]["tokens_by_reason"].values()) == pytest.approx(1)


def test_chunks_on_v1_are_counted(rag_server: Server) -> None:
    """SGLang ignores them; a log line and a count say that nobody read them."""
    url, question = rag_server.url + "/v1/chat/completions", user("Hi")
    body = {"messages": [question], "max_tokens": 1, "temperature": 0}
    before, plain = stats_of(rag_server)["misplaced"], post(url, body)
    in_a_message = {**body, "messages": [{**question, "chunks": CHUNKS[:1]}]}
    for sent in ({**body, "chunks": CHUNKS[:1]}, in_a_message):
        assert post(url, sent)["choices"] == plain["choices"]
    after = stats_of(rag_server)["misplaced"].items()
    counted = {field: count - before.get(field, 0) for field, count in after}
    assert counted == {"chunks": 1, "messages.chunks": 1}
    assert "/v1/chat/completions got `chunks`, which SGLang ignores" in rag_server.log_tail(10_000)


def test_plain_traffic_is_cached_as_ever(rag_server: Server) -> None:
    """Requests without spans see SGLang's own radix cache."""
    flush(rag_server)
    text, params = "The company Dravex makes clocks. " * 6, {"max_new_tokens": 1, "temperature": 0}
    body = {"text": text, "sampling_params": params}
    cold, warm = (post(rag_server.url + "/generate", body)["meta_info"] for _ in range(2))
    assert cold["cached_tokens"] == 0
    assert warm["cached_tokens"] == warm["prompt_tokens"] - 1


def test_n_answers_at_once(rag_server: Server) -> None:
    """No fates are claimed; the conversation goes on from the first answer's own tokens."""
    messages, fields = [user("What does Dravex make?")], {"conversation_id": "two"}
    reply = chat(rag_server, messages, CHUNKS[:2], n=2, temperature=1.5, **fields)
    texts = [choice["message"]["content"] for choice in reply["choices"]]
    assert (reply["chunkcache"]["fates"], len(texts)) == (None, 2)
    assert reply["chunkcache"]["fallbacks"] == ["parallel_sampling"]
    for text, turns in ((texts[0], 1), (texts[1], int(texts[0] == texts[1]))):
        again = [*messages, assistant(text), user("And Solon?")]
        assert chat(rag_server, again, **fields)["chunkcache"]["turns_reused"] == turns


def test_long_conversation_loses_its_oldest_turns(rag_server: Server) -> None:
    """Once for several turns: the prefix holds again after it."""
    messages, replies = list[dict[str, Any]](), list[dict[str, Any]]()
    for turn in range(12):
        messages.append(user(f"What does number {turn} make?"))
        text = f"Number {turn}. " + "The company Dravex makes clocks. " * 40
        fields = {"conversation_id": "long", "max_tokens": 4}
        replies.append(chat(rag_server, messages, [{"id": f"t{turn}", "text": text}], **fields))
        messages.append(assistant(text_of(replies[-1])))
    departures = [i for i, reply in enumerate(replies) if reply["chunkcache"]["turns_departed"]]
    assert 0 < len(departures) < 6
    for i, reply in enumerate(replies[1:], start=1):
        if i not in departures:
            before = replies[i - 1]["usage"]
            assert reply["chunkcache"]["fates"]["exact"] >= before["total_tokens"] - 1
