"""Two tenants on a real server: what one of them asks for shows neither in the other's answers nor
in their time."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from random import Random
from typing import Any

import pytest

from eval.server import Server
from tests.e2e.asking import chat, flush

pytestmark = pytest.mark.engine

ORDERS = ["retriever", "frequency", "tree"]
CHUNKS = [
    {"id": str(i), "text": f"Number {i}: the company Dravex{i} makes clocks."} for i in range(4)
]


def ask(server: Server, salt: str, chunks: list[dict[str, str]], **extra: Any) -> dict[str, Any]:
    """One answer's `chunkcache`."""
    reply = chat(server, "And?", chunks, cache_salt=salt, max_tokens=1, **extra)
    return dict(reply["chunkcache"])


@pytest.mark.parametrize("order", ORDERS)
def test_anothers_requests_change_no_order(rag_server: Server, order: str) -> None:
    """Asked for again and again by one tenant, a chunk stays where the other retrieved it."""
    for _ in range(5):
        mine = ask(rag_server, f"a {order}", CHUNKS[3:], order=order)
    theirs = ask(rag_server, f"b {order}", CHUNKS, order=order)
    assert mine["chunks_hit"] == 1
    assert theirs["order"] == ["0", "1", "2", "3"]
    found = theirs["fates"]["exact"], theirs["chunks_planned"], theirs["predicted_exact"]
    assert found == (0, 0, 0)


def separation(first: list[float], second: list[float]) -> float:
    """The area under the ROC curve, either way: .5 is chance, 1 is certainty."""
    ordered = sorted(second)
    wins = sum(bisect_left(ordered, x) + bisect_right(ordered, x) for x in first) / 2
    share = wins / (len(first) * len(second))
    return max(share, 1 - share)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("asker", "num_pairs", "low", "high"), [("other", 1000, 0.5, 0.55), ("same", 100, 0.75, 1.0)]
)
def test_time_of_an_answer(
    rag_server: Server, asker: str, num_pairs: int, low: float, high: float
) -> None:
    """Whether another tenant has asked for a chunk cannot be told by an answer's time; whether the
    same one has, it can. With 1,000 pairs chance alone gives .5 to .54 (three standard errors)."""
    draw = Random(0)
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(num_pairs):
        words = "The company makes clocks and paint. " * 12
        known, new = ({"text": f"{draw.random()} {words}"} for _ in range(2))
        # else the pool is full, and what was hit before stays
        flush(rag_server)
        ask(rag_server, "timed" if asker == "same" else "other", [known])
        pair = [(True, known), (False, new)]
        for is_known, chunk in draw.sample(pair, 2):
            start = time.perf_counter()
            answer = ask(rag_server, "timed", [chunk])
            times[is_known].append(time.perf_counter() - start)
            assert answer["chunks_hit"] == (is_known and asker == "same"), f"pair {number}"
    told = separation(times[True], times[False])
    print(f"{asker}: told apart with AUC {told:.3f}")
    assert low <= told <= high
