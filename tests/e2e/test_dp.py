"""Two ranks: a tree each, one mirror of both, requests routed to where their chunks are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from eval.http import get, post
from eval.server import Server
from eval.tasks.world import world_requests
from tests.polling import until
from tests.soak.answers import STRICT

PATH = "/rag/v1/chat/completions"
pytestmark = [pytest.mark.engine, pytest.mark.nightly]
"""The fast tests of two ranks are those of planner, bookkeeper and mirror."""


def test_repeated_chunks_go_where_they_are_cached(dp_server: Server) -> None:
    """The same chunks again, in any order: same rank, all hit, although both ranks are idle."""
    home: dict[str, int] = {}
    for _ in range(3):
        for request in world_requests(4, seed=21):
            chunks = [{"id": c.id, "text": c.text} for c in reversed(request.chunks)]
            body = {
                "messages": [{"role": "user", "content": request.question}],
                "chunks": chunks,
                "max_tokens": 2,
            }
            reply = post(dp_server.url + PATH, body)["chunkcache"]
            key = " ".join(sorted(c.id for c in request.chunks))
            if key in home:
                assert (reply["dp_rank"], reply["chunks_hit"]) == (home[key], len(request.chunks))
            home[key] = reply["dp_rank"]
    assert set(home.values()) == {0, 1}


def test_client_header_does_not_choose_the_rank(dp_server: Server) -> None:
    """`X-Data-Parallel-Rank` is SGLang's for its own routes; ours decide themselves."""
    body = {
        "messages": [{"role": "user", "content": "Hello"}],
        "chunks": [{"text": "A lone chunk."}],
        "max_tokens": 1,
    }
    first = post(dp_server.url + PATH, body)["chunkcache"]["dp_rank"]
    again = post(dp_server.url + PATH, body, headers={"X-Data-Parallel-Rank": str(1 - first)})
    assert again["chunkcache"]["dp_rank"] == first
    assert again["chunkcache"]["chunks_hit"] == 1


def test_both_mirrors_agree(dp_server: Server) -> None:
    """What the front believes of each rank is what the rank holds."""
    for request in world_requests(8, seed=22):
        chunks = [{"id": c.id, "text": c.text} for c in request.chunks]
        post(
            dp_server.url + PATH,
            {
                "messages": [{"role": "user", "content": request.question}],
                "chunks": chunks,
                "max_tokens": 1,
            },
        )
    stats = get(dp_server.url + "/chunkcache/stats")
    assert [rank["dp_rank"] for rank in stats["ranks"]] == [0, 1]
    assert all(rank["mirror"]["agrees"] for rank in stats["ranks"])
    assert sum(rank["chunk_nodes"] for rank in stats["ranks"]) > 0


def test_answers_are_audited_at_their_rank(tmp_path: Path) -> None:
    """The check of each moved answer runs, and leaves nothing at either rank."""
    flags = [
        "--model-path",
        "bundled",
        "--dp-size",
        "2",
        "--reuse",
        "fused",
        "--chunkcache-move",
        "always",
    ]
    served = Counter[int]()
    with Server(
        [*flags, "--chunkcache-audit-share", "1"], log=tmp_path / "audits.log", env=STRICT
    ) as server:
        for request in world_requests(6, seed=23):
            body: dict[str, Any] = {
                "messages": [{"role": "user", "content": request.question}],
                "chunks": [{"id": c.id, "text": c.text} for c in request.chunks],
                "order": "retriever",
                "max_tokens": 8,
                "temperature": 0,
            }
            first = post(server.url + PATH, body)["chunkcache"]
            # the first one leads it to the same rank
            chunks = [body["chunks"][0], *body["chunks"][:0:-1]]
            moved = {**body, "chunks": chunks, "reuse": {"mode": "fused", "ratio": 1.0}}
            reply = post(server.url + PATH, moved)["chunkcache"]
            assert (reply["dp_rank"], reply["reuse"]["sampled"]) == (first["dp_rank"], True)
            served[reply["dp_rank"]] += 1
        stats = until(
            lambda: (
                told
                if not (told := get(server.url + "/chunkcache/stats"))["audit"]["waiting"]
                else None
            )
        )
    assert set(served) == {0, 1}
    figures = stats["audit"]["figures"]
    assert [(one["samples"], one["below_target"]) for one in figures] == [(6, 0)], (
        "everything was recomputed"
    )
    assert stats["audit_skips"] == {}
    assert all(rank["mirror"]["agrees"] and not rank["protected"] for rank in stats["ranks"])


def test_round_robin_takes_turns(tmp_path: Path) -> None:
    """CRAFT's baseline: ranks in turn, whatever they hold; what the chosen rank holds is used."""
    flags = ["--model-path", "bundled", "--dp-size", "2", "--chunkcache-routing", "round_robin"]
    chunks = [
        {"text": "The company Dravex makes clocks."},
        {"text": "The company Solon makes lamps."},
    ]
    body = {"messages": [{"role": "user", "content": "Hello"}], "chunks": chunks, "max_tokens": 1}
    with Server(flags, log=tmp_path / "turns.log") as server:
        replies = [post(server.url + PATH, body)["chunkcache"] for _ in range(4)]
    assert [reply["dp_rank"] for reply in replies] == [0, 1, 0, 1]
    assert [reply["chunks_hit"] for reply in replies] == [0, 0, 2, 2]
