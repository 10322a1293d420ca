"""Requests to a running server, and what its answers say."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from typing import Any
from urllib.parse import urlsplit

from eval.http import get, post
from eval.server import Server
from eval.task import Request
from eval.world.world import Passage, Question
from sglang_chunkcache.client import Client, settle
from tests.polling import DEADLINE_S, until
from tests.soak import mixed_load

CHAT, GENERATE = "/rag/v1/chat/completions", "/rag/v1/generate"
EXPLAIN, PREPROCESS = "/chunkcache/explain", "/chunkcache/preprocess"
Reply = dict[str, Any]
UNHURRIED = [
    *("--chunkcache-calibrate", "off", "--chunkcache-selector", "query"),
    *("--chunkcache-audit-share", "0", "--chunkcache-store-threshold", "1"),
]
"""Flags of a server that stores whatever is computed, and does nothing of its own accord."""


def user(text: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **fields}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def chunks_of(passages: Iterable[Any]) -> list[dict[str, str]]:
    """Passages of a world, or a task's chunks."""
    return [{"id": passage.id, "text": passage.text} for passage in passages]


def task_body(request: Request, **fields: Any) -> dict[str, Any]:
    """What is posted for a task's request."""
    chunks = chunks_of(request.chunks)
    return {"messages": [user(request.question)], "chunks": chunks, "temperature": 0, **fields}


def chat(server: Server, messages: Any, chunks: Sequence[Any] = (), **fields: Any) -> Reply:
    """A greedy answer, to a question or a conversation."""
    messages = [user(messages)] if isinstance(messages, str) else messages
    body = {"messages": messages, "chunks": [*chunks], "temperature": 0, "max_tokens": 24}
    return post(server.url + CHAT, {**body, **fields})


def body_of(passages: Sequence[Passage], question: Question | str, **fields: Any) -> dict[str, Any]:
    """A request with log probabilities, its passages in this order."""
    content = question if isinstance(question, str) else question.question
    body = {"messages": [user(content)], "chunks": chunks_of(passages), "order": "retriever"}
    return {**body, "temperature": 0, "max_tokens": 24, "logprobs": True, **fields}


def ask(
    server: Server, passages: Sequence[Passage], question: Question | str, **fields: Any
) -> Reply:
    """A reply whose log probabilities are numbers and whose fates add up."""
    reply = post(server.url + CHAT, body_of(passages, question, **fields))
    assert_finite(reply)
    fates = reply["chunkcache"]["fates"]
    assert fates is None or sum(fates.values()) == reply["usage"]["prompt_tokens"]
    return reply


def fused(selector: str = "none", ratio: float | str = 0.0, **fields: Any) -> dict[str, Any]:
    return {"mode": "fused", "selector": selector, "ratio": ratio, "move": "always", **fields}


def preprocess(
    server: Server, passage: Passage, neighbors: Sequence[Passage] = (), **fields: Any
) -> Reply:
    (chunk,) = chunks_of([passage])
    body = {"chunk": chunk, "neighbors": chunks_of(neighbors), **fields}
    return post(server.url + PREPROCESS, body)


def send(url: str, body: Any, *, timeout_s: float = DEADLINE_S) -> tuple[int, str]:
    """Status and text of a request with any body; "GET" for none."""
    data = None if body == "GET" else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")


def stream(server: Server, body: Mapping[str, Any], path: str = CHAT) -> Generator[Any]:
    """The events of a stream as they come; the connection ends with the generator."""
    address = urlsplit(server.url).netloc
    with closing(http.client.HTTPConnection(address, timeout=DEADLINE_S)) as connection:
        data, headers = json.dumps({**body, "stream": True}), {"Content-Type": "application/json"}
        connection.request("POST", path, data, headers)
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                yield json.loads(line[len(b"data: ") :])


def streamed_text(events: Iterable[Any]) -> str:
    return "".join(c["delta"].get("content") or "" for event in events for c in event["choices"])


def flush(server: Server) -> None:
    """Empty the tree, and the store but for preprocessed chunks."""
    send(server.url + "/flush_cache?timeout=100", {})


def stats_of(server: Server) -> dict[str, Any]:
    return get(server.url + "/chunkcache/stats")


def rank_of(server: Server) -> dict[str, Any]:
    """The stats of the only rank."""
    return dict(stats_of(server)["ranks"][0])


def metrics_of(server: Server) -> dict[str, float]:
    """What Prometheus is told of us."""
    lines = send(server.url + "/metrics", "GET")[1].splitlines()
    ours = (line.rsplit(" ", 1) for line in lines if line.startswith("chunkcache:"))
    return {name: float(value) for name, value in ours}


def logprobs_of(reply: Mapping[str, Any]) -> list[Any]:
    return [token["logprob"] for c in reply["choices"] for token in c["logprobs"]["content"]]


def assert_finite(reply: Mapping[str, Any]) -> None:
    assert mixed_load.is_finite(logprobs_of(reply)), (logprobs_of(reply), reply["chunkcache"])


def text_of(reply: Mapping[str, Any]) -> str:
    return str(reply["choices"][0]["message"]["content"])


def sources_of(reply: Mapping[str, Any]) -> list[tuple[str | None, str, int]]:
    """(chunk, from, chunks in front of the source) of every piece."""
    sources = reply["chunkcache"]["reuse"]["sources"]
    return [(s["chunk"], s["from"], s["variant_prefix"]) for s in sources]


def settled(server: Server) -> dict[str, Any]:
    """The storage's stats once nothing waits to enter store or storage."""
    settle(Client(server.url, None))
    return drained(server)


def drained(server: Server) -> dict[str, Any]:
    """Nothing waits to enter the storage."""
    return until(lambda: None if (found := rank_of(server)["storage"])["queue"] else dict(found))


def assert_clean(server: Server, pool_tokens: int = 2400) -> None:
    """Idle: every slot is free or evictable, no plan or load is open, and mirror and tree agree."""

    def is_clean() -> bool:
        chat(server, "Who?", [{"text": "A lone chunk."}], max_tokens=1)
        stats = stats_of(server)
        (rank,) = stats["ranks"]
        found = rank["protected"], rank["free"] + rank["evictable"], rank["mirror"]["agrees"]
        is_open = stats["tree"]["open_plans"], stats["prompt_tokens_in_flight"]
        return (found, is_open) == ((0, pool_tokens, True), (0, [0]))

    until(is_clean, every_s=0.2)
