"""Fused chains from front to rank and back:
planner and bookkeeper order for what `Fuser` on SGLang's pools reports."""

from __future__ import annotations

from typing import Any

import pytest

from radix_ext import fused_chunk
from sglang_chunkcache.front.fusion_options import ReuseIn, fused_request
from sglang_chunkcache.front.request import Identity, Passage
from sglang_chunkcache.scheduler.node import facts
from sglang_chunkcache.scheduler.reporting import rank_state
from sglang_chunkcache.wire.report import ANSWER_KEY
from tests.kit.cache_integrity import nodes_of
from tests.kit.front_bench import ME, Asked, Bench, make_output
from tests.kit.integrity import check_tree
from tests.reference.fused_scheduler import FusedScheduler
from tests.reference.scheduler import FakeReq

A, B, C, D = (Passage(name, f"<{name * n}>") for name, n in zip("abcd", (3, 4, 5, 6), strict=True))
X, Y = Passage("x", "<xx>"), Passage("y", "<yyyyyyy>")
OTHER = Identity("me", cache_salt="other")


class Served:
    """A front whose ranks are real trees on counted pools; the model is a stand-in."""

    def __init__(self, *, num_ranks: int = 1, **knobs: Any) -> None:
        knobs = {"selector": "deviation", "routing": "kv_aware", **knobs}
        self.bench = Bench(reuse="fused", num_ranks=num_ranks, **knobs)
        self.ranks = [FusedScheduler(400, self.bench.config) for _ in range(num_ranks)]
        self.num_asked = 0

    def plan(
        self, *passages: Passage, fused: bool = True, who: Identity = ME, **options: Any
    ) -> Asked:
        if fused:
            wish = {key: options.pop(key) for key in ("selector", "ratio") if key in options}
            options["fusion"] = fused_request(self.bench.config, ReuseIn(mode="fused", **wish))
        self.num_asked += 1  # each has its own question, from the first token on
        return self.bench.ask(f"{self.num_asked}?", *passages, who=who, **options)

    def answer(self, request: Asked) -> Asked:
        """Served by the rank it was sent to; the front learns from the answer."""
        identity = request.draft.identity
        req = FakeReq(request.input_ids, request.custom_params, cache_salt=identity.cache_salt)
        cached = self.ranks[request.rank].serve(req, answer=[50])
        assert req.customized_info is not None
        entry = req.customized_info[ANSWER_KEY]
        self.bench.observe(request, make_output([50], cached, "stop", request.rank, entry))
        self.bench.end(request)
        self.check()
        return request

    def ask(self, *passages: Passage, **options: Any) -> Asked:
        return self.answer(self.plan(*passages, **options))

    def check(self) -> None:
        """Trees and mirrors are sound and agree."""
        check_tree(self.bench.bookkeeper.tree)
        for number, rank in enumerate(self.ranks):
            rank.check()
            mirror = self.bench.bookkeeper.mirrors[number]
            assert mirror.compared(rank_state(rank.cache, number))["agrees"] is not False


def fused_hit(request: Asked) -> int:
    assert request.report is not None
    return request.report.fused_hit


def tokens(*passages: Passage) -> int:
    return sum(len(passage.text) + 1 for passage in passages)


@pytest.fixture
def behind() -> Served:
    """B and A were computed behind Y, and then fused without it, in this order."""
    served = Served()
    served.ask(Y, A, B, fused=False)
    served.ask(B, A, order="retriever")
    return served


def test_second_request_finds_the_fused_chain_of_the_first() -> None:
    """Behind a chunk that is cached; the front puts them as they were fused."""
    served = Served()
    served.ask(A, B, C, fused=False)
    served.ask(X, fused=False)
    first = served.ask(X, C, B)
    assert (first.order, fused_hit(first)) == (["x", "c", "b"], 0)
    second = served.ask(B, X, C, D)
    assert (second.order, fused_hit(second)) == (["x", "c", "b", "d"], tokens(C, B))
    assert (second.planned_len, second.fused_from, second.hit_len) == (1, 1, 1)


@pytest.mark.parametrize(
    "other",
    [{"ratio": 0.5}, {"selector": "query"}, {"fused": False}, {"who": OTHER}],
    ids=["recipe", "question", "exact", "tenant"],
)
def test_others_do_not_aim_at_it(behind: Served, other: dict[str, Any]) -> None:
    request = behind.ask(A, B, **other)
    assert request.order == ["a", "b"]
    assert request.report is None or fused_hit(request) == 0


def test_hits_and_marks_are_those_of_exact_chunks() -> None:
    """Fused chunks are no hits, in the answer, the counters or a tree, and never promoted."""
    served = Served(promotion_threshold=1)
    for chunks in ((X,), (Y, A, B)):
        served.ask(*chunks, fused=False)
    for _ in range(3):
        request = served.ask(X, A, B)
    assert (request.hit_len, request.planned_len, fused_hit(request)) == (1, 1, tokens(A, B))
    bookkeeper = served.bench.bookkeeper
    assert bookkeeper.metrics.totals()["chunks"]["hit"] == 3
    recipe, (exact, *moved) = request.fusion.recipe, (span.chunk for span in request.area)
    nodes = bookkeeper.tree.match(
        request.namespace, [exact, *(fused_chunk(recipe, chunk) for chunk in moved)], rank=0
    )
    assert [(node.hits, node.promoted) for node in nodes] == [(3, True), (0, False), (0, False)]
    chains = {node.chain for node in nodes}
    known = [each for each in map(facts, nodes_of(served.ranks[0].cache)) if each.chain in chains]
    assert sorted((each.hits, each.promoted) for each in known) == [(0, False)] * 2 + [(3, True)]


def test_request_under_way_is_planned_as_it_will_be_fused() -> None:
    served = Served()
    served.ask(Y, A, B, fused=False)
    first = served.plan(B, A)
    second, exact = served.plan(A, B), served.plan(A, B, fused=False)
    assert (second.order, exact.order) == (["b", "a"], ["a", "b"])
    for request in (first, second, exact):
        served.answer(request)
    assert fused_hit(second) == tokens(A, B)
    assert served.bench.is_idle()


def test_router_sends_a_request_to_its_fused_chain() -> None:
    """Both ranks hold X exactly, one holds C and B behind it, fused."""
    served = Served(num_ranks=2)
    for rank in (0, 1):
        served.ask(A, B, C, fused=False, rank=rank)
        served.ask(X, fused=False, rank=rank)
    served.ask(X, C, B, rank=1)
    for _ in range(2):
        request = served.ask(B, C, X)
        assert (request.rank, fused_hit(request)) == (1, tokens(B, C))
