"""Exact chains that left the device and came back from host memory:
their answers are those of before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.request import urlopen

import pytest

from eval.http import get, post
from eval.server import Server
from eval.world.world import Passage, World
from tests.e2e.test_reuse import ask, body_of, logprobs_of, text_of

pytestmark = pytest.mark.engine

QUESTION = "Which passage comes first?"


def host_of(server: Server) -> dict[str, Any]:
    found: dict[str, Any] = get(server.url + "/chunkcache/stats")["ranks"][0]["host"]
    return found


def crowd_out(server: Server, salt: str) -> None:
    """Prompts of others that are hit more often:
    more than the pool holds, less than the host, which is twice as large."""
    tokens, number = 0, 0
    while tokens < 2700:
        passages = World(500 + number, 20).passages[:8]
        for _ in range(3):
            reply = ask(server, passages, QUESTION, cache_salt=f"{salt}{number}", max_tokens=1)
        tokens, number = tokens + reply["usage"]["prompt_tokens"], number + 1


def served(server: Server, passages: Sequence[Passage], salt: str) -> dict[str, Any]:
    return ask(server, passages, QUESTION, cache_salt=salt)


def test_chain_comes_back_from_the_host(rag_server: Server) -> None:
    """Until then it is computed, found on the device, and evicted.
    Another tenant's request finds nothing of it."""
    passages, before = World(77, 20).passages[:4], host_of(rag_server)
    first, again = served(rag_server, passages, "host"), served(rag_server, passages, "host")
    crowd_out(rag_server, "crowd")
    told = post(
        rag_server.url + "/chunkcache/explain", body_of(passages, QUESTION, cache_salt="host")
    )
    back = served(rag_server, passages, "host")
    chunks = told["spans"][-1]["end"]
    assert first["chunkcache"]["loaded"] == again["chunkcache"]["loaded"] == 0
    assert (told["exact"], told["loaded"]) == (0, chunks)
    assert (back["chunkcache"]["fates"]["exact"], back["chunkcache"]["loaded"]) == (chunks, chunks)
    assert text_of(back) == text_of(again)
    assert logprobs_of(back) == pytest.approx(logprobs_of(first), abs=1e-5)
    assert served(rag_server, passages, "other")["chunkcache"]["fates"]["exact"] == 0
    after = host_of(rag_server)
    assert after["loads"] >= before["loads"] + 1
    assert after["loaded_tokens"] >= before["loaded_tokens"] + chunks
    assert after["bytes"] <= after["max_bytes"]
    with urlopen(rag_server.url + "/metrics", timeout=30) as response:
        lines = response.read().decode().splitlines()
    shown = dict(line.rsplit(" ", 1) for line in lines if line.startswith("chunkcache:host_"))
    for name, key in (
        ("max_bytes", "max_bytes"),
        ("loads_total", "loads"),
        ("loaded_tokens_total", "loaded_tokens"),
    ):
        assert float(shown[f"chunkcache:host_{name}"]) == after[key]
