"""A rank whose tree is SGLang's own: what answers teach the front about it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.bodies import ReuseFields
from sglang_chunkcache.front.fusion_options import check_fused
from sglang_chunkcache.front.request import Identity, Passage
from sglang_chunkcache.front.stock_mirror import StockMirror
from sglang_chunkcache.scheduler.stock_rank import NO_EVENTS
from sglang_chunkcache.wire.report import Fallback
from sglang_chunkcache.wire.state import RankState
from tests.kit.front_bench import A, Asked, B, Bench, C, D
from tests.kit.front_planning import Talk, system
from tests.kit.integrity import check_tree
from tests.reference.scheduler import FakeReq, Scheduler

OTHER = Identity("me", cache_salt="other")


class StockRank:
    """SGLang's tree of a rank; nothing reports."""

    def __init__(self, capacity: int) -> None:
        self.scheduler = Scheduler(capacity, None)

    def found(self, params: Any, input_ids: Sequence[int]) -> int:
        """Serves the request, with an answer."""
        assert params == {}, "nobody would read it"
        return self.scheduler.serve(FakeReq(input_ids), answer=[65, 66])

    def serve(self, *_: Any) -> None: ...


def make_bench(pool: int | None = 10_000, *, border: int = 0, **knobs: Any) -> Bench:
    bench = Bench(tree="stock", **knobs)
    bench.ranks = [StockRank(pool or 10_000) for _ in bench.ranks]  # type: ignore[misc]
    if pool is not None:
        for mirror in bench.bookkeeper.mirrors:
            mirror.hear(RankState(mirror.rank, NO_EVENTS, {"pool": pool, "border": border}))
    return bench


def mirror_of(bench: Bench) -> StockMirror:
    mirror = bench.bookkeeper.mirrors[0]
    assert isinstance(mirror, StockMirror)
    return mirror


def answer(
    bench: Bench, *passages: Passage, chunks: int = 0, short: int = 0, **options: Any
) -> Asked:
    """A request that finds its head and so many leading chunks, less so many tokens."""
    request = bench.ask("q", *passages, **options)
    end = request.area[chunks - 1].end if chunks else request.area[0].start
    return bench.reply(request, cached=end - short)


def held(bench: Bench, *passages: Passage) -> int:
    """How many of them are expected to be cached, in this order."""
    return bench.plan("q", *passages, order="retriever").planned_len


def test_match_that_ends_within_the_first_page_says_nothing_of_a_chunk_in_it() -> None:
    """Nothing is found of `s, x`, since no whole page is the same; `s, b, c` stays."""
    bench = make_bench(border=63)
    short, other = Passage("short", "s" * 9), Passage("other", "o" * 90)
    bench.reply(bench.ask("q", short, A, B), cached=0)
    assert held(bench, short, A, B) == 3
    bench.reply(bench.ask("q", short, other, order="retriever"), cached=0)
    assert held(bench, short, A, B) == 3
    assert mirror_of(bench).num_corrections == 0


def test_answered_prompt_is_expected() -> None:
    """And the order follows it. SGLang gets the request without anything of ours."""
    bench = make_bench()
    first = bench.run("q", A, B)
    assert (first.planned_len, first.answer()["chunks_hit"]) == (0, 0)
    second = bench.run("q", C, B, A)
    assert second.order[:2] == ["a", "b"]
    assert (second.planned_len, second.answer()["chunks_hit"]) == (2, 2)
    assert second.answer()["fallbacks"] == ["new_chunk"]
    assert second.fates()["exact"] == second.area[1].end  # type: ignore[index]
    assert mirror_of(bench).num_corrections == 0
    assert bench.bookkeeper.stats()["tree"]["kind"] == "stock"
    assert bench.is_idle()


def test_what_was_not_found_has_left_with_all_behind_it() -> None:
    """Then it was computed, so it is there again, alone."""
    bench = make_bench()
    answer(bench, A, B, C)
    answer(bench, A, B, D, chunks=2)
    answer(bench, B)
    assert (held(bench, A, B, C), held(bench, A, B, D)) == (3, 3)
    found = answer(bench, A, B, D, chunks=1)
    assert found.answer()["missed"][0]["reason"] == "evicted"
    assert (held(bench, A, B, C), held(bench, A, B, D), held(bench, B)) == (2, 3, 1)
    assert mirror_of(bench).num_corrections == 1
    check_tree(bench.bookkeeper.tree)


def test_what_has_come_since_it_was_planned_stays() -> None:
    """Two run at once, and neither finds what the other computes: behind the same chunk, and behind
    the same head alone."""
    for others in ((A, B), (C,)):
        bench = make_bench()
        first, second = (bench.ask("q", *each, order="retriever") for each in (others, (A, D)))
        bench.reply(first, cached=0)
        bench.reply(second, cached=0)
        assert (held(bench, *others), held(bench, A, D)) == (len(others), 2)
        assert mirror_of(bench).num_corrections == 0


def test_without_its_head_nothing_is_there() -> None:
    """As after a flush. Other heads keep what they have."""
    bench = make_bench()
    for who in (OTHER, Identity("me")):
        answer(bench, A, B, who=who)
        answer(bench, C, who=who)
    answer(bench, B, A, order="retriever", short=1)
    assert (held(bench, A, B), held(bench, C), held(bench, B, A)) == (0, 0, 2)
    assert bench.plan("q", A, B, who=OTHER, order="retriever").planned_len == 2


@pytest.mark.parametrize(("border", "short", "expected"), [(3, 3, 2), (3, 4, 1), (0, 1, 1)])
def test_match_ends_with_a_page(border: int, short: int, expected: int) -> None:
    """A chunk is found as far as its last page goes; the tokens are counted as they are."""
    bench = make_bench(border=border)
    answer(bench, A, B, C)
    found = answer(bench, A, B, D, chunks=2, short=short)
    assert found.answer()["chunks_hit"] == expected
    assert found.answer()["fates"]["exact"] == found.area[1].end - short
    assert held(bench, A, B, C) == (3 if expected == 2 else 2)
    assert mirror_of(bench).num_corrections == (expected == 1)


def test_nothing_of_a_prompt_shorter_than_a_page_is_found() -> None:
    """However often it comes; what is expected of longer prompts stays."""
    bench = make_bench(border=63)
    for reason in ("new_chunk", "must_compute"):
        request = bench.reply(bench.ask("q", A, B), cached=0)
        assert len(request.input_ids) < 64
        told = request.answer()
        assert [(each["reason"], each["chunks"]) for each in told["missed"]] == [
            (reason, ["a", "b"])
        ]
        assert (told["chunks_hit"], told["predicted_exact"]) == (0, 0)
    assert mirror_of(bench).num_corrections == 0
    shares = bench.bookkeeper.stats()["reasons"]["chunks_by_reason"]
    assert shares == {"new_chunk": 0.5, "must_compute": 0.5}


def test_first_page_that_is_not_there_holds_no_chunk() -> None:
    bench = make_bench(border=63)
    first = bench.reply(bench.ask("q" * 99, A, B), cached=0)
    assert [each["reason"] for each in first.answer()["missed"]] == ["new_chunk"]
    second = bench.reply(bench.ask("p" * 99, A, B), cached=64)
    assert (second.answer()["chunks_hit"], second.answer()["missed"]) == (2, [])


def test_other_order_is_told_of_what_is_not_mirrored() -> None:
    """That it has left would be a guess."""
    bench, who = make_bench(), Identity("me", extra_key="x")
    bench.reply(bench.ask("q", A, B, who=who), cached=0)
    for reason in ("other_order", "evicted"):
        request = bench.ask("q", B, A, who=who, order="retriever")
        told = bench.reply(request, cached=0).answer()["missed"]
        assert told[0]["reason"] == reason, told


def test_what_must_be_computed_may_be_there() -> None:
    """Logprobs of the prompt from a place on: SGLang looks no further."""
    bench = make_bench()
    answer(bench, A, B, C)
    start = bench.plan("q", A, B, C).area[1].end - 1
    found = answer(bench, A, B, C, chunks=1, logprob_start=start)
    assert found.answer()["missed"][0]["reason"] == "must_compute"
    answer(bench, A, B, C, short=1, logprob_start=0)
    assert (held(bench, A, B, C), mirror_of(bench).num_corrections) == (3, 0)


def test_several_answers_tell_nothing_of_what_was_found() -> None:
    bench = make_bench()
    answer(bench, A, B)
    found = answer(bench, A, B, num_answers=2)
    assert (found.fallbacks, found.fates()) == ([Fallback.PARALLEL_SAMPLING], None)
    assert held(bench, A, B) == 2


@pytest.mark.parametrize(("pool", "left"), [(66, 2), (55, 1), (45, 0), (0, 0)])
def test_least_recently_used_leave_from_their_ends(pool: int, left: int) -> None:
    """What does not fit into the pool is not there: what follows the chunks leaves before them."""
    bench = make_bench(pool)
    request = answer(bench, A, B)
    used = len(request.input_ids) + len(request.output_ids)
    assert mirror_of(bench).num_tokens == min(used, pool)
    answer(bench, C)
    answer(bench, D)
    kept = int(pool > 0)
    assert (held(bench, A, B), held(bench, C), held(bench, D)) == (left, kept, kept)
    assert mirror_of(bench).num_tokens <= pool
    check_tree(bench.bookkeeper.tree)


def test_conversation_stays_on_its_rank() -> None:
    """Nobody reports, but who has answered has the history."""
    bench = make_bench(num_ranks=2)
    talk = Talk(bench, system("s"))
    home = talk.turn("q", A, rank=1)
    assert (home.rank, talk.ask("r", B).rank) == (1, 1)


@pytest.mark.parametrize(
    ("reuse", "is_denied"), [("fused", True), ({"mode": "fused"}, True), ("exact", False)]
)
def test_request_for_moved_kv_is_served_exactly(reuse: Any, is_denied: bool) -> None:
    """And told. A selector is read as ever; what only moves KV is refused."""
    bench = make_bench()
    body = ReuseFields.model_validate({"reuse": reuse})
    assert (body.fusion_request(bench.config), body.is_denied(bench.config)) == (None, is_denied)
    body = ReuseFields.model_validate({"reuse": {"mode": "fused", "selector": "x"}})
    with pytest.raises(RequestError, match="selector"):
        body.fusion_request(bench.config)
    with pytest.raises(RequestError, match="calibrate: this server's tree is SGLang's"):
        check_fused(bench.config, "calibrate")
    request = bench.run("q", A, is_denied=is_denied)
    assert request.fallbacks == [*[Fallback.STOCK_TREE] * is_denied, Fallback.NEW_CHUNK]


@pytest.mark.parametrize(("pool", "share"), [(10_000, 1.0), (400, 0.97)])
def test_view_is_like_sglangs_tree(pool: int, share: float) -> None:
    """Over SGLang's own cache: without eviction what is planned is found, under eviction mostly,
    since SGLang evicts a whole branch where this view takes it chunk by chunk."""
    draw = random.Random(5)
    bench = make_bench(pool)
    bench.ranks = [StockRank(pool)]  # type: ignore[list-item]
    passages = [Passage(f"p{i}", chr(97 + i) * draw.randint(5, 15)) for i in range(12)]
    right = found = 0
    for _ in range(300):
        chosen = draw.sample(passages, draw.randint(1, 4))
        request = bench.run("q" * draw.randint(1, 9), *chosen)
        right += request.planned_len == request.hit_len
        found += request.hit_len
        check_tree(bench.bookkeeper.tree)
    assert right / 300 >= share, right
    assert found > 150
    state = RankState(0, NO_EVENTS, {"pool": pool, "border": 0})
    told = mirror_of(bench).compared(state)
    assert told["agrees"] is None
    assert told["chunk_nodes"] == len(bench.bookkeeper.tree.nodes)
    assert (told["assumed_evictions"] > 0) == (pool < 1000)
