"""What a user sees: answers from the chunks, fates, conversations, streams,
SGLang's own routes next to ours."""

from __future__ import annotations

from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

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

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

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
    server: Server, chunks: list[int], messages: Any, *, api_key: str = "none", **extra: Any
) -> Any:
    """One request through the openai client; the whole reply."""
    client = openai.OpenAI(base_url=server.url + "/rag/v1", api_key=api_key)
    messages = [user(messages)] if isinstance(messages, str) else messages
    body = {"chunks": [CHUNKS[i] for i in chunks], **extra}
    asked: dict[str, Any] = {"model": "default", "temperature": 0, "max_tokens": 12}
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
    first = ask(rag_server, [0, 1], messages, conversation_id="talk")
    messages += [assistant(first.choices[0].message.content), user("What does Brinix make?")]
    second = ask(rag_server, [1, 2], messages, conversation_id="talk")
    reply = cache_of(second)
    assert reply["dropped"] == ["doc1"]
    assert reply["order"] == ["doc2"]
    assert reply["turns_reused"] == 1
    assert reply["fates"]["exact"] >= first.usage.prompt_tokens + first.usage.completion_tokens - 1


def test_stranger_with_the_conversation_id_learns_nothing(rag_server: Server) -> None:
    """A guessed id with other messages, or another key with the same ones, starts fresh."""
    messages = [user("What does Torum make?")]
    mine = {"conversation_id": "mine"}
    reply = ask(rag_server, [3, 4], messages, api_key="owner", **mine)
    messages += [assistant(reply.choices[0].message.content), user("More?")]
    for guess, key in ((messages[2:], "owner"), (messages, "thief")):
        told = cache_of(ask(rag_server, [3, 4], guess, api_key=key, **mine))
        assert (told["dropped"], told["turns_reused"]) == ([], 0)


def test_salted_requests_share_no_kv(rag_server: Server) -> None:
    """`cache_salt` keeps tenants apart: the same chunks under another salt are computed."""
    flush(rag_server)

    def hit(salt: str) -> int:
        told = cache_of(ask(rag_server, [0, 1], "Hello", cache_salt=salt))
        assert (told["fates"]["exact"] > 0) == (told["chunks_hit"] > 0)
        return int(told["chunks_hit"])

    assert [hit(salt) for salt in "aba"] == [0, 0, 2]


def test_own_routes_and_metrics(rag_server: Server) -> None:
    """`/v1/*` is SGLang's, stats count, the tree is shown, Prometheus has our counters."""
    asked = {"messages": [user("Hi")], "max_tokens": 1}
    assert "chunkcache" not in post(rag_server.url + "/v1/chat/completions", asked)
    stats = stats_of(rag_server)
    assert stats["requests"]["finished"] > 0
    assert get(rag_server.url + "/chunkcache/tree?depth=2")["num_nodes"] == stats["tree"]["nodes"]
    assert 'chunkcache:prompt_tokens_total{fate="exact"}' in metrics_of(rag_server)


def test_live_page_tells_what_answers_do(rag_server: Server) -> None:
    """To this machine: the server has no key."""
    told = cache_of(ask(rag_server, [0, 1], "Hello"))
    with urlopen(rag_server.url + "/chunkcache/") as page:
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    live = rag_server.url + "/chunkcache/live"
    newest = get(live)["recent"][0]["number"]
    plan = get(f"{live}/request?number={newest}")
    assert plan["fates"] == told["fates"]
    assert [each["label"] for each in plan["prompt"]] == told["order"]
    assert len(plan["retrieved"]) == 2
    assert get(f"{live}/tree")["num_children"] > 0
    elsewhere = Request(live, headers={"Host": "evil.example"})
    with pytest.raises(HTTPError, match="403"):
        urlopen(elsewhere)


def test_why_nothing_was_found_is_told(rag_server: Server) -> None:
    """In the answer, beforehand in `explain`, and in the stats;
    each reason: tests/sglang_chunkcache/front/test_reasons.py."""
    flush(rag_server)

    def why(time: str) -> list[tuple[str, list[str], str | None]]:
        head = {"role": "system", "content": f"Be brief. It is 12:00:0{time}."}
        sent: dict[str, Any] = {"messages": [head, user("Hi")], "chunks": CHUNKS[:2]}
        sent |= {"cache_salt": "why", "max_tokens": 1}
        plan = post(rag_server.url + EXPLAIN, sent)
        reply = post(rag_server.url + CHAT, sent)["chunkcache"]
        assert (plan["missed"], list(plan["fallbacks"])) == (reply["missed"], reply["fallbacks"])
        return [(each["reason"], each["chunks"], each.get("field")) for each in reply["missed"]]

    before = stats_of(rag_server)["chunks_by_reason"].get("other_head", 0)
    both = ["doc0", "doc1"]
    assert why("1") == [("new_tenant", both, None)]
    assert why("1") == []
    assert why("2") == [("other_head", both, "messages.0")]
    assert stats_of(rag_server)["chunks_by_reason"]["other_head"] == before + 2
