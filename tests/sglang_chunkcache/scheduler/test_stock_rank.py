"""What a rank says of a tree that is SGLang's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_chunkcache import hooks
from sglang_chunkcache.scheduler.stock_rank import stock_state
from sglang_chunkcache.wire.events import NOTHING_READ
from sglang_chunkcache.wire.message import decode, encode
from sglang_chunkcache.wire.spans import RequestSpans
from sglang_chunkcache.wire.state import STATE_KEY, Asked, ExplainRequest, RankState
from tests.reference.scheduler import FakeReq, Scheduler

pytestmark = pytest.mark.matrix

SPANS = RequestSpans((), "n", 0, NOTHING_READ)


def made(cache: Any, *, page_size: int = 1, is_eagle: bool = False, keeps: bool = True) -> Any:
    """As much of SGLang's Scheduler as is read."""
    cache.page_size = page_size
    return SimpleNamespace(
        tree_cache=cache,
        spec_algorithm=SimpleNamespace(is_eagle=lambda: is_eagle),
        disable_radix_cache=not keeps,
        max_total_num_tokens=100,
        waiting_queue=["a", "b"],
        chunked_req="c",
    )


@pytest.mark.parametrize(
    ("settings", "border", "pool"),
    [
        ({}, 0, 100),
        ({"page_size": 16}, 15, 100),
        ({"page_size": 16, "is_eagle": True}, 16, 100),
        ({"keeps": False}, 0, 0),
    ],
)
def test_counts_are_what_the_front_assumes_by(
    settings: dict[str, Any], border: int, pool: int
) -> None:
    cache = Scheduler(100, None).cache
    state = stock_state(made(cache, **settings), 3, Asked(clear_store=True), num_waiting=2)
    page_size = settings.get("page_size", 1)
    assert state.counts == {
        "tree": "RadixCache",
        "page_size": page_size,
        "border": border,
        "pool": pool,
    }
    assert (state.dp_rank, state.num_waiting, state.events.events) == (3, 2, ())
    assert state.cleared is not None
    assert state.cleared.chunks == 0


def test_prompt_is_explained_by_its_tokens() -> None:
    """A token is left to compute; another salt finds nothing; other ranks' prompts are theirs."""
    rank, prompt = Scheduler(100, None), [*range(1, 9)]
    rank.serve(FakeReq(prompt), answer=[50])
    asked = [
        ExplainRequest(prompt, SPANS, None, None, 3),
        ExplainRequest([*prompt[:5], 60, 61], SPANS, None, None, 3),
        ExplainRequest(prompt, SPANS, None, "salt", 3),
        ExplainRequest(prompt, SPANS, None, None, 2),
    ]
    state = stock_state(made(rank.cache), 3, Asked(explain=tuple(asked)), num_waiting=0)
    assert [each.exact for each in state.explanations] == [7, 5, 0]
    assert [each.end for each in state.explanations] == [7, 5, 0]


def test_state_is_added_to_sglangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked comes with the request; what is under way counts as waiting."""
    monkeypatch.setattr(hooks, "get_parallel", lambda: SimpleNamespace(dp_rank=None))
    result = SimpleNamespace(internal_state={"theirs": 1})
    scheduler = made(Scheduler(100, None).cache)
    request = SimpleNamespace(rid=encode(Asked(clear_store=True)))
    assert hooks._add_stock_stats(result, scheduler, request) is result
    state = decode(result.internal_state[STATE_KEY], RankState)
    assert (state.dp_rank, state.num_waiting, state.cleared is None) == (0, 3, False)
    assert result.internal_state["theirs"] == 1
