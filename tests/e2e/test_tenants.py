"""Two tenants on a real server: what one of them asks for shows neither in the other's answers nor
in their time."""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from random import Random
from typing import Any

import pytest

from eval.http import post
from eval.server import Server

pytestmark = pytest.mark.engine

ORDERS = ["retriever", "frequency", "tree"]
CHUNKS = [
    {"id": str(i), "text": f"Number {i}: the company Dravex{i} makes clocks."} for i in range(4)
]


def ask(server: Server, salt: str, chunks: list[dict[str, str]], **extra: Any) -> dict[str, Any]:
    """One answer's `chunkcache`."""
    body = {
        "messages": [{"role": "user", "content": "What does Dravex make?"}],
        "chunks": chunks,
        "cache_salt": salt,
        "max_tokens": 1,
        "temperature": 0,
        **extra,
    }
    return dict(post(server.url + "/rag/v1/chat/completions", body)["chunkcache"])


@pytest.mark.parametrize("order", ORDERS)
def test_anothers_requests_change_no_order(rag_server: Server, order: str) -> None:
    """One tenant asks for a chunk again and again;
    the other's chunks stay as they were retrieved, and are computed."""
    for _ in range(5):
        mine = ask(rag_server, f"a {order}", CHUNKS[3:], order=order)
    theirs = ask(rag_server, f"b {order}", CHUNKS, order=order)
    assert mine["chunks_hit"] == 1
    assert theirs["order"] == ["0", "1", "2", "3"]
    assert (theirs["fates"]["exact"], theirs["chunks_planned"], theirs["predicted_exact"]) == (
        0,
        0,
        0,
    )


def separation(first: list[float], second: list[float]) -> float:
    """How well one number tells which list it is from:
    .5 is chance, 1 is certainty (area under the ROC curve, either way)."""
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
    same one has, it can.

    Each pair is a chunk that was asked for and one that was not, in random order. With 1,000 pairs
    chance alone gives .5 to .54 (three standard errors). The control's bound leaves room for a busy
    machine.
    """
    draw = Random(0)
    times: dict[bool, list[float]] = {True: [], False: []}
    for number in range(num_pairs):
        words = "The company makes clocks and paint. " * 12
        known, new = ({"text": f"{draw.random()} {words}"} for _ in range(2))
        # else the pool is full, and what was hit before stays
        post(rag_server.url + "/flush_cache?timeout=100", {})
        ask(rag_server, "timed" if asker == "same" else "other", [known])
        pair = [(True, known), (False, new)]
        for is_known, chunk in draw.sample(pair, 2):
            start = time.perf_counter()
            answer = ask(rag_server, "timed", [chunk])
            times[is_known].append(time.perf_counter() - start)
            assert answer["chunks_hit"] == (is_known and asker == "same"), f"pair {number}"
    told = separation(times[True], times[False])
    medians = {name: sorted(found)[num_pairs // 2] for name, found in times.items()}
    print(
        f"{asker}: told apart with AUC {told:.3f}; medians {1000 * medians[True]:.1f} and"
        f" {1000 * medians[False]:.1f} ms"
    )
    assert low <= told <= high
