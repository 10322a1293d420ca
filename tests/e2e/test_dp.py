"""Two ranks: a tree each, one mirror of both, requests routed to where their chunks are."""

from __future__ import annotations

from collections import Counter

import pytest

from eval.http import post
from eval.server import Server
from eval.tasks.world import world_requests
from tests.e2e.asking import CHAT, chat, chunks_of, stats_of, task_body, user
from tests.polling import until

pytestmark = [pytest.mark.engine, pytest.mark.nightly]
"""The fast tests of two ranks are those of planner, bookkeeper and mirror."""


def test_repeated_chunks_go_where_they_are_cached(dp_server: Server) -> None:
    """The same chunks again, in any order: same rank, all hit, although both ranks are idle."""
    home: dict[str, int] = {}
    for _ in range(3):
        for request in world_requests(4, seed=21):
            chunks = chunks_of(reversed(request.chunks))
            reply = chat(dp_server, request.question, chunks, max_tokens=2)["chunkcache"]
            key = " ".join(sorted(c.id for c in request.chunks))
            if key in home:
                assert (reply["dp_rank"], reply["chunks_hit"]) == (home[key], len(request.chunks))
            home[key] = reply["dp_rank"]
    assert set(home.values()) == {0, 1}


def test_client_header_does_not_choose_the_rank(dp_server: Server) -> None:
    """`X-Data-Parallel-Rank` is SGLang's for its own routes; ours decide themselves."""
    body = {"messages": [user("Hello")], "chunks": [{"text": "A lone chunk."}], "max_tokens": 1}
    first = post(dp_server.url + CHAT, body)["chunkcache"]["dp_rank"]
    headers = {"X-Data-Parallel-Rank": str(1 - first)}
    again = post(dp_server.url + CHAT, body, headers=headers)["chunkcache"]
    assert (again["dp_rank"], again["chunks_hit"]) == (first, 1)


def test_answers_are_audited_at_their_rank(dp_server: Server) -> None:
    """The check of each moved answer runs, and leaves nothing at either rank."""
    served = Counter[int]()
    for request in world_requests(6, seed=23):
        body = task_body(request, order="retriever", max_tokens=8)
        first = post(dp_server.url + CHAT, body)["chunkcache"]
        # the first one leads it to the same rank
        chunks = [body["chunks"][0], *body["chunks"][:0:-1]]
        moved = {**body, "chunks": chunks, "reuse": {"mode": "fused", "ratio": 1.0}}
        reply = post(dp_server.url + CHAT, moved)["chunkcache"]
        assert (reply["dp_rank"], reply["reuse"]["sampled"]) == (first["dp_rank"], True)
        served[reply["dp_rank"]] += 1
    until(lambda: not stats_of(dp_server)["audit"]["waiting"])
    stats = stats_of(dp_server)
    assert set(served) == {0, 1}
    figures = [(one["samples"], one["below_target"]) for one in stats["audit"]["figures"]]
    assert figures == [(6, 0)], "everything was recomputed"
    assert stats["audit_skips"] == {}
    assert [rank["dp_rank"] for rank in stats["ranks"]] == [0, 1]
    assert all(rank["mirror"]["agrees"] and not rank["protected"] for rank in stats["ranks"])
