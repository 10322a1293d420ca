"""Chains that leave the device of a real server, and come back from host memory."""

from __future__ import annotations

import pytest

from eval.http import post
from eval.server import Server
from eval.world.world import World
from tests.e2e.asking import EXPLAIN, ask, body_of, logprobs_of, metrics_of, rank_of, text_of

QUESTION = "Which passage comes first?"


def crowd_out(server: Server, salt: str) -> None:
    """Prompts of others that are hit more often:
    more than the pool holds, less than the host, which is twice as large."""
    tokens, number = 0, 0
    while tokens < 2700:
        passages = World(500 + number, 20).passages[:8]
        for _ in range(3):
            reply = ask(server, passages, QUESTION, cache_salt=f"{salt}{number}", max_tokens=1)
        tokens, number = tokens + reply["usage"]["prompt_tokens"], number + 1


def check_that_chain_comes_back(server: Server, page_size: int = 1) -> None:
    """Until then it is computed, found on the device, and evicted.
    Another tenant's request finds nothing of it."""
    passages, before = World(77, 20).passages[:4], rank_of(server)["host"]
    first, again = (ask(server, passages, QUESTION, cache_salt="host") for _ in range(2))
    crowd_out(server, "crowd")
    told = post(server.url + EXPLAIN, body_of(passages, QUESTION, cache_salt="host"))
    back = ask(server, passages, QUESTION, cache_salt="host")
    chunks = told["spans"][-1]["end"] // page_size * page_size
    assert first["chunkcache"]["loaded"] == again["chunkcache"]["loaded"] == 0
    assert (told["exact"], told["loaded"]) == (0, chunks)
    found = back["chunkcache"]
    assert (found["fates"]["exact"], found["loaded"]) == (chunks, chunks), rank_of(server)["host"]
    assert text_of(back) == text_of(again)
    assert logprobs_of(back) == pytest.approx(logprobs_of(first), abs=1e-5)
    other = ask(server, passages, QUESTION, cache_salt="other")
    assert other["chunkcache"]["fates"]["exact"] == 0
    after, shown = rank_of(server)["host"], metrics_of(server)
    assert after["loads"] >= before["loads"] + 1
    assert after["loaded_tokens"] >= before["loaded_tokens"] + chunks
    assert after["bytes"] <= after["max_bytes"]
    for name in ("max_bytes", "loads", "loaded_tokens"):
        total = "" if name == "max_bytes" else "_total"
        assert shown[f"chunkcache:host_{name}{total}"] == after[name]
