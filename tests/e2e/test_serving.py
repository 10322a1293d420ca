"""What a user sees: answers from the chunks, fates, conversations, streams,
SGLang's own routes next to ours."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import openai
import pytest

from eval.http import get, post
from eval.server import Server
from eval.tasks.world import world_requests
from radix_ext import ChunkId, Span
from sglang_chunkcache.wire.events import Acknowledgement
from sglang_chunkcache.wire.spans import RequestSpans, pack
from tests.polling import DEADLINE_S

pytestmark = pytest.mark.engine

FACTS = [
    f"The company {name} makes {thing}."
    for name, thing in [
        ("Dravex", "clocks"),
        ("Solon", "lamps"),
        ("Brinix", "boats"),
        ("Torum", "paint"),
        ("Quarex", "ropes"),
    ]
]
CHUNKS = [
    {"id": f"doc{i}", "text": text + f" Later number {i} came."} for i, text in enumerate(FACTS)
]


def ask(
    server: Server, chunks: list[int], messages: list[dict[str, str]] | str, **extra: Any
) -> Any:
    """One request through the openai client; the whole reply."""
    client = openai.OpenAI(base_url=server.url + "/rag/v1", api_key=extra.pop("api_key", "none"))
    if isinstance(messages, str):
        messages = [{"role": "user", "content": messages}]
    body = {"chunks": [CHUNKS[i] for i in chunks], **extra.pop("extra_body", {})}
    return client.chat.completions.create(
        model="default",
        messages=messages,
        temperature=0,
        max_tokens=extra.pop("max_tokens", 12),
        extra_body=body,
        **extra,
    )


def cache_of(reply: Any) -> dict[str, Any]:
    """The `chunkcache` object of a reply."""
    return dict(reply.model_extra["chunkcache"])


def flush(server: Server) -> None:
    """Empty the cache through SGLang's own endpoint."""
    request = urllib.request.Request(server.url + "/flush_cache?timeout=100", method="POST")
    urllib.request.urlopen(request, timeout=DEADLINE_S).read()


def test_permuted_chunks_are_reused(rag_server: Server) -> None:
    """The same chunks in any order cost one prefill;
    SGLang's own `cached_tokens` is what the fates report."""
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
    """The bundled model answers from whatever order and reuse the cache chose;
    a broken cache would show here."""
    flush(rag_server)
    requests = world_requests(40, seed=11)
    right = reused = 0
    for request in requests:
        chunks = [{"id": c.id, "text": c.text} for c in request.chunks]
        body = {
            "messages": [{"role": "user", "content": request.question}],
            "chunks": chunks,
            "temperature": 0,
            "max_tokens": 24,
        }
        reply = post(rag_server.url + "/rag/v1/chat/completions", body)
        right += reply["choices"][0]["message"]["content"].strip() in request.answers
        reused += reply["chunkcache"]["chunks_hit"]
    assert reused > 40
    assert right >= 38  # the model is right on 200 of 200 (bundled_model/README.md)


def test_stream_carries_the_same_object(rag_server: Server) -> None:
    """A stream is an ordinary one with one more chunk, and reuses like the request it repeats."""
    text = ask(rag_server, [0, 1], "What does Dravex make?").choices[0].message.content
    chunks = list(ask(rag_server, [1, 0], "What does Dravex make?", stream=True))
    streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    objects = [
        c.model_extra["chunkcache"]
        for c in chunks
        if c.model_extra and "chunkcache" in c.model_extra
    ]
    assert streamed == text
    assert len(objects) == 1
    assert objects[0]["chunks_hit"] == 2


def test_nothing_of_ours_leaks_into_meta_info(rag_server: Server) -> None:
    """Events name other tenants' chunks: they stay in the front process."""
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "chunks": CHUNKS[:2],
        "max_tokens": 2,
        "return_meta_info": True,
    }
    reply = post(rag_server.url + "/rag/v1/chat/completions", body)
    assert "chunkcache" not in reply["choices"][0]["meta_info"]


def test_forged_params_on_generate_do_nothing(rag_server: Server) -> None:
    """A client that writes our keys into SGLang's own route gets a plain request."""
    request = RequestSpans((Span(0, 4, ChunkId("")),), "x", 1, Acknowledgement(0, 0))
    params = pack(request, secret="guess")
    body = {
        "text": "a b c d e f",
        "sampling_params": {"max_new_tokens": 1, "custom_params": params},
    }
    before = get(rag_server.url + "/chunkcache/stats")["ranks"][0]
    assert "chunkcache" not in post(rag_server.url + "/generate", body)["meta_info"]
    after = get(rag_server.url + "/chunkcache/stats")["ranks"][0]
    assert (after["inserted_chunks"], after["fallbacks"]) == (
        before["inserted_chunks"],
        before["fallbacks"],
    )


def test_conversation_reuses_history_and_drops_seen_chunks(rag_server: Server) -> None:
    """Turn t is token for token a prefix of turn t+1:
    all of it but the last answer token is exact."""
    messages = [{"role": "user", "content": "What does Dravex make?"}]
    first = ask(rag_server, [0, 1], messages, extra_body={"conversation_id": "talk"})
    messages += [
        {"role": "assistant", "content": first.choices[0].message.content},
        {"role": "user", "content": "What does Brinix make?"},
    ]
    second = ask(rag_server, [1, 2], messages, extra_body={"conversation_id": "talk"})
    reply = cache_of(second)
    assert reply["dropped"] == ["doc1"]
    assert reply["order"] == ["doc2"]
    assert reply["turns_reused"] == 1
    assert reply["fates"]["exact"] >= first.usage.prompt_tokens + first.usage.completion_tokens - 1


def test_stranger_with_the_conversation_id_learns_nothing(rag_server: Server) -> None:
    """A guessed id with other messages, or another key with the same ones, starts fresh:
    nothing dropped or reused."""
    messages = [{"role": "user", "content": "What does Torum make?"}]
    reply = ask(
        rag_server, [3, 4], messages, extra_body={"conversation_id": "mine"}, api_key="owner"
    )
    messages += [
        {"role": "assistant", "content": reply.choices[0].message.content},
        {"role": "user", "content": "More?"},
    ]
    for guess, key in ((messages[2:], "owner"), (messages, "thief")):
        answer = cache_of(
            ask(rag_server, [3, 4], guess, extra_body={"conversation_id": "mine"}, api_key=key)
        )
        assert answer["dropped"] == []
        assert answer["turns_reused"] == 0


def test_salted_requests_share_no_kv(rag_server: Server) -> None:
    """`cache_salt` keeps tenants apart: the same chunks under another salt are computed."""
    flush(rag_server)
    ask(rag_server, [0, 1], "Hello", extra_body={"cache_salt": "a"})
    assert (
        cache_of(ask(rag_server, [0, 1], "Hello", extra_body={"cache_salt": "b"}))["fates"]["exact"]
        == 0
    )
    assert (
        cache_of(ask(rag_server, [0, 1], "Hello", extra_body={"cache_salt": "a"}))["chunks_hit"]
        == 2
    )


def test_generate_takes_parts(rag_server: Server) -> None:
    """Frontend programs send texts and chunk areas;
    the first area is ordered, ids go as they are."""
    flush(rag_server)
    area = {"chunks": CHUNKS[:2]}
    params = {"max_new_tokens": 2, "temperature": 0}
    for parts in (["Read: ", area, "Now: "], ["Read: ", {"chunks": CHUNKS[1::-1]}, "Then: "]):
        reply = post(
            rag_server.url + "/rag/v1/generate", {"parts": parts, "sampling_params": params}
        )
    assert reply["chunkcache"]["order"] == ["doc0", "doc1"]
    assert reply["chunkcache"]["chunks_hit"] == 2


def test_own_routes_and_metrics(rag_server: Server) -> None:
    """`/v1/*` is SGLang's, stats count, the tree is shown, Prometheus has our counters."""
    plain = post(
        rag_server.url + "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1},
    )
    assert "chunkcache" not in plain
    stats = get(rag_server.url + "/chunkcache/stats")
    assert stats["requests"]["finished"] > 0
    assert get(rag_server.url + "/chunkcache/tree?depth=2")["num_nodes"] == stats["tree"]["nodes"]
    with urllib.request.urlopen(rag_server.url + "/metrics", timeout=30) as response:
        text = response.read().decode()
    assert 'chunkcache:prompt_tokens_total{fate="exact"}' in text


def test_why_nothing_was_found_is_told(rag_server: Server) -> None:
    """The usual mistakes, on a real server: a reason in the answer, beforehand in `explain`,
    and its share in the stats."""
    flush(rag_server)
    path, stats = "/rag/v1/chat/completions", rag_server.url + "/chunkcache/stats"
    salt = "why"

    def body(system: str, **extra: Any) -> dict[str, Any]:
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": "What does Dravex make?"},
        ]
        return {
            "messages": messages,
            "chunks": CHUNKS[:2],
            "cache_salt": salt,
            "max_tokens": 1,
            **extra,
        }

    def why(**sent: Any) -> list[tuple[str, list[str], str | None]]:
        plan = post(rag_server.url + "/chunkcache/explain", sent)
        reply = post(rag_server.url + path, sent)["chunkcache"]
        assert (plan["missed"], list(plan["fallbacks"])) == (reply["missed"], reply["fallbacks"])
        found = sum(span["end"] - span["start"] for span in plan["spans"]) - sum(
            m["tokens"] for m in reply["missed"]
        )
        assert (found > 0) == (reply["chunks_hit"] > 0)
        return [(each["reason"], each["chunks"], each.get("field")) for each in reply["missed"]]

    before = get(stats)["chunks_by_reason"]
    both = ["doc0", "doc1"]
    assert why(**body("Be brief. It is 12:00:01.")) == [("new_tenant", both, None)]
    assert why(**body("Be brief. It is 12:00:01.")) == []
    assert why(**body("Be brief. It is 12:00:02.")) == [("other_head", both, "messages.0")]
    assert why(**body("Be brief. It is 12:00:02.", chunks=CHUNKS[1::-1], order="retriever")) == [
        ("other_order", both[::-1], None)
    ]
    scored = [{**chunk, "text": f"[score 0.9] {chunk['text']}"} for chunk in CHUNKS[:2]]
    assert why(**body("Be brief. It is 12:00:02.", chunks=scored)) == [("new_chunk", both, None)]
    flush(rag_server)
    assert why(**body("Be brief. It is 12:00:02.")) == [("evicted", both, None)]
    after = get(stats)
    counted = {
        reason: count - before.get(reason, 0) for reason, count in after["chunks_by_reason"].items()
    }
    assert {reason: count for reason, count in counted.items() if count} == {
        "new_tenant": 2,
        "found": 2,
        "other_head": 2,
        "other_order": 2,
        "new_chunk": 2,
        "evicted": 2,
    }
    assert sum(after["reasons"]["tokens_by_reason"].values()) == pytest.approx(1)


def test_chunks_on_v1_are_counted(rag_server: Server) -> None:
    """SGLang ignores them, and its answer stays as it is;
    a log line and a count say that nobody read them."""
    stats, url = rag_server.url + "/chunkcache/stats", rag_server.url + "/v1/chat/completions"
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0}
    before, plain = get(stats)["misplaced"], post(url, body)
    in_a_message = {**body, "messages": [{**body["messages"][0], "chunks": CHUNKS[:1]}]}  # type: ignore[index]
    for sent in ({**body, "chunks": CHUNKS[:1]}, in_a_message):
        assert post(url, sent)["choices"] == plain["choices"]
    counted = {
        field: count - before.get(field, 0) for field, count in get(stats)["misplaced"].items()
    }
    assert counted == {"chunks": 1, "messages.chunks": 1}
    assert "/v1/chat/completions got `chunks`, which SGLang ignores" in rag_server.log_tail(10_000)


def test_plain_traffic_is_cached_as_ever(rag_server: Server) -> None:
    """Requests without spans see SGLang's own radix cache."""
    flush(rag_server)
    body = {
        "text": "The company Dravex makes clocks. " * 6,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0},
    }
    cold, warm = (post(rag_server.url + "/generate", body)["meta_info"] for _ in range(2))
    assert cold["cached_tokens"] == 0
    assert warm["cached_tokens"] == warm["prompt_tokens"] - 1


def test_n_answers_at_once(rag_server: Server) -> None:
    """Parallel sampling works. SGLang fills its cache with a request of its own first, so no fates
    are claimed; the conversation goes on from the first answer's own tokens."""
    messages = [{"role": "user", "content": "What does Dravex make?"}]
    body = {
        "messages": messages,
        "chunks": CHUNKS[:2],
        "max_tokens": 12,
        "n": 2,
        "temperature": 1.5,
        "conversation_id": "two",
    }
    reply = post(rag_server.url + "/rag/v1/chat/completions", body)
    assert len(reply["choices"]) == 2
    assert reply["chunkcache"]["fates"] is None
    assert reply["chunkcache"]["fallbacks"] == ["parallel_sampling"]
    for choice, turns in ((0, 1), (1, 0)):
        answer = {"role": "assistant", "content": reply["choices"][choice]["message"]["content"]}
        again = [*messages, answer, {"role": "user", "content": "And Solon?"}]
        if choice == 1 and answer["content"] == reply["choices"][0]["message"]["content"]:
            continue
        follow = {
            "messages": again,
            "chunks": [],
            "max_tokens": 1,
            "conversation_id": "two",
            "return_token_ids": True,
        }
        second = post(rag_server.url + "/rag/v1/chat/completions", follow)
        assert second["chunkcache"]["turns_reused"] == turns


def test_answer_is_json_the_openai_client_accepts(rag_server: Server) -> None:
    """`chunkcache` is one more object; everything else is the ordinary shape."""
    reply = ask(rag_server, [0], "Hello")
    assert json.loads(reply.model_dump_json())["object"] == "chat.completion"


def test_long_conversation_loses_its_oldest_turns(rag_server: Server) -> None:
    """Beyond the context the oldest turns leave, once for several turns:
    no error, and the prefix holds again after it."""
    messages: list[dict[str, str]] = []
    replies = []
    for turn in range(12):
        messages.append({"role": "user", "content": f"What does number {turn} make?"})
        chunks = [
            {
                "id": f"t{turn}",
                "text": f"Number {turn}. " + "The company Dravex makes clocks. " * 40,
            }
        ]
        body = {
            "messages": messages,
            "chunks": chunks,
            "max_tokens": 4,
            "temperature": 0,
            "conversation_id": "long",
        }
        replies.append(post(rag_server.url + "/rag/v1/chat/completions", body))
        messages.append(
            {"role": "assistant", "content": replies[-1]["choices"][0]["message"]["content"]}
        )
    departures = [i for i, reply in enumerate(replies) if reply["chunkcache"]["turns_departed"]]
    assert departures
    assert len(departures) < 6
    for i, reply in enumerate(replies[1:], start=1):
        if i not in departures:
            before = replies[i - 1]["usage"]
            assert reply["chunkcache"]["fates"]["exact"] >= before["total_tokens"] - 1
