"""What requests add to the front's state, what answers teach, and that all that was taken is given
back; for `--reuse fused` what the scheduler is asked for, plans explained and preprocessing."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import pytest
from msgspec import structs

from radix_ext import FusionRequest
from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front import bookkeeper
from sglang_chunkcache.front.answer import explained
from sglang_chunkcache.front.fusion_options import ReuseIn, fused_request
from sglang_chunkcache.front.request import Passage
from sglang_chunkcache.wire.events import Acknowledgement
from sglang_chunkcache.wire.message import decode
from sglang_chunkcache.wire.report import ANSWER_KEY, Explanation, Fallback, Report, Source
from sglang_chunkcache.wire.spans import MARK_KEY
from tests.kit.front_bench import (
    END,
    ME,
    SECRET,
    A,
    Asked,
    B,
    Bench,
    C,
    D,
    make_output,
    text_of,
    told,
    user,
)
from tests.kit.front_planning import Talk, assistant


@pytest.mark.parametrize(("found", "chunks_hit"), [(2, 1), (10_000, 2)])
def test_fates_sum_to_the_prompt(found: int, chunks_hit: int) -> None:
    """A retracted request's cached_tokens may count its own output."""
    bench = Bench()
    request = bench.ask("q", A, B)
    exact = request.spans[0].end + found
    answer = bench.reply(request, cached=exact).answer()
    assert sum(answer["fates"].values()) == len(request.input_ids)
    assert answer["fates"]["exact"] == min(exact, len(request.input_ids))
    assert (answer["chunks_hit"], answer["dp_rank"]) == (chunks_hit, 0)


def test_observe_incremental_output_adds_up() -> None:
    """SGLang sends either everything so far or only what is new."""
    bench = Bench()
    request = bench.ask("q", A)
    bench.observe(request, make_output([], 5, None, 0, None))
    assert request.known is None, "an output without tokens says nothing of the cache yet"
    for ids, index in (([65], 0), ([70], 1), ([66, 67], 0)):
        output = make_output(ids, 0, None, 0, None, index)
        bench.observe(request, output, index=index, incremental=True)
    assert request.output_ids == [65, 66, 67]


def test_custom_params_carry_mark_and_acknowledgement() -> None:
    """The scheduler believes only our mark; what was read is acknowledged with the next request."""
    bench = Bench(promotion_threshold=2)
    asked = [bench.reply(bench.ask("q", *chunks)) for chunks in ([A], [A, B], [A, B])]
    assert [told(each).promoted_len for each in asked] == [0, 1, 2]
    assert asked[0].custom_params[MARK_KEY] == SECRET
    log = bench.ranks[0].log
    assert told(bench.ask("q", A)).ack == Acknowledgement(log.epoch, log.seq)


def test_repeated_answer_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that is not incremental carries the rank's events with every output."""
    bench, reads = Bench(), list[str]()

    def counted(text: str, kind: Any) -> Any:
        reads.append(text)
        return decode(text, kind)

    monkeypatch.setattr(bookkeeper, "decode", counted)
    request = bench.ask("q", A)
    entry = bench.ranks[0].serve(request.custom_params, request.input_ids)
    for ids in ([65], [65, 66], [65, 66, 67]):
        output = make_output(ids, 0, None, 0, entry)
        bench.observe(request, output)
        assert ANSWER_KEY not in output["meta_info"]
    assert reads == entry[:1]
    assert len(bench.bookkeeper.tree.nodes) == 1


def test_answer_that_cannot_be_read_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    request = bench.ask("q", A)
    with caplog.at_level(logging.WARNING):
        bench.observe(request, make_output([65], 5, "stop", 0, ["[999, {}]"]))
    assert "the answer of rank 0 cannot be read" in caplog.text
    assert (request.answer()["fates"]["exact"], request.fallbacks) == (5, [Fallback.PLAIN_TEXT])
    assert bench.bookkeeper.mirrors[0].acknowledgement.seq == 0


@pytest.mark.parametrize(
    "error", [ValueError, KeyError, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt]
)
def test_any_way_out_gives_plan_and_load_back(error: type[BaseException]) -> None:
    """Leaving the block is enough, and it hides no error."""
    bench = Bench()

    def fail() -> None:
        with bench.bookkeeper.begin(Asked(bench.plan("q", A))):
            assert not bench.is_idle()
            raise error

    with pytest.raises(error):
        fail()
    assert bench.is_idle()
    assert bench.bookkeeper.metrics.totals()["requests"] == {"aborted": 1}


def test_refused_request_leaves_nothing() -> None:
    bench = Bench(context_len=200)
    with pytest.raises(RequestError):
        bench.ask("q", A, Passage("big", "x" * 300))
    assert bench.is_idle()
    assert (len(bench.bookkeeper.tree.nodes), bench.bookkeeper.tables.num_entries) == (0, 0)


def test_answer_is_booked_where_it_was_served() -> None:
    bench = Bench(num_ranks=2)
    request = bench.ask("q", A, B)
    other = 1 - request.rank
    bench.reply(request, by=other)
    assert request.answer()["dp_rank"] == other
    assert bench.is_idle()
    assert [bench.bookkeeper.tree.holdings.digest(rank)[0] for rank in (other, request.rank)] == [
        2,
        0,
    ]


@pytest.mark.parametrize(("reason", "content"), [("abort", ""), ("stop", None)])
def test_turn_without_a_whole_text_is_not_kept(reason: str, content: str | None) -> None:
    """An aborted answer, or one of tool calls, is not what the client will send back."""
    talk = Talk(Bench())
    talk.turn("one", A)
    talk.bench.reply(talk.ask("two"), reason=reason, content=content)
    talk.messages += [user("two"), assistant("ok")]
    assert talk.ask("three").num_turns == 1


# Moved KV

FUSED: dict[str, Any] = {"reuse": "fused", "store_threshold": 2}


def fused(bench: Bench, **wish: Any) -> FusionRequest:
    """A client's wish, defaults filled in."""
    return fused_request(bench.config, ReuseIn(mode="fused", **wish))


def fused_turn(talk: Talk, text: str, *chunks: Passage, **wish: Any) -> FusionRequest:
    """What its scheduler was asked for."""
    asked = talk.turn(text, *chunks, fusion=fused(talk.bench, **wish)).fusion
    assert asked is not None
    return asked  # type: ignore[no-any-return]


def make_report(request: Asked, **fields: Any) -> Report:
    """A scheduler's report: the first chunk moved from the host, 3 of its tokens recomputed,
    the second a gap."""
    first, second = request.spans[:2]
    report = Report(
        exact=first.start,
        relocated=first.end - first.start - 3,
        recomputed=3,
        fused_hit=0,
        gap=second.end - second.start,
        sources=(
            Source(first.start, first.end, 0, "host", num_before=2, overlap=1, cfo=0.5),
            Source(second.start, second.end, 1, "gap"),
        ),
        focused=(0,),
        fallbacks=(),
        ms={"lookup": 1.0, "relocate": 2.0, "select": 0.5, "recompute": 4.0},
        estimated_ms={"planned": 8.0, "computed": 9.0},
        selector="first",
    )
    return structs.replace(report, **fields)


NOTHING_MOVED: dict[str, Any] = {"relocated": 0, "recomputed": 0, "sources": ()}


def begun(wish: dict[str, Any] | None = None, **options: Any) -> tuple[Bench, Asked]:
    """A fused request under way."""
    bench = Bench(**FUSED)
    return bench, bench.ask("q", A, B, fusion=fused(bench, **(wish or {})), **options)


# What the scheduler is asked for


def test_fused_request_reaches_the_scheduler() -> None:
    bench = Bench(**FUSED, selector="first", recompute_ratio=0.25)
    reuse = told(bench.ask("q", A, B, fusion=fused(bench))).fusion
    assert reuse is not None
    assert (reuse.selector, reuse.ratio, reuse.focus, reuse.alpha) == ("first", 0.25, "off", None)
    assert reuse.recipe == "first/0.25/alpha=-/focus=off"


@pytest.mark.parametrize(("order", "expected"), [(None, True), ("retriever", False)])
def test_chains_of_the_trees_order_grow(order: Any, expected: bool) -> None:
    """So the scheduler is told; an exact request has nothing to tell."""
    bench = Bench(**FUSED)
    assert told(bench.ask("q", A, B, fusion=fused(bench), order=order)).grows is expected
    exact = told(bench.ask("q", A, B))
    assert (exact.grows, exact.fusion) == (False, None)


@pytest.mark.parametrize(("is_fused", "order"), [(False, "abd"), (True, "adb")])
def test_fused_request_puts_new_chunks_before_moved_ones(is_fused: bool, order: str) -> None:
    """After the chunk that its exact chain grows by. An exact request has them last."""
    bench = Bench(**FUSED)
    bench.reply(bench.ask("one", C, A, B))
    fusion = fused(bench) if is_fused else None
    assert bench.ask("two", A, B, D, fusion=fusion).order == list(order)


def test_recipe_of_a_conversation_stays() -> None:
    """Otherwise the next question would not find the history's fused KV."""
    talk = Talk(Bench(**FUSED))
    nothing, first = fused_turn(talk, "zero"), fused_turn(talk, "one", A)
    talk.turn("exact", B)
    assert nothing.recipe != first.recipe
    assert first == fused_turn(talk, "two", C) == fused_turn(talk, "three", D)
    other, again = (
        fused_turn(talk, each, Passage("", each), ratio=0.5) for each in ("four", "five")
    )
    assert other.recipe.startswith("critical/0.5/")
    assert other == again


def test_chunks_over_the_threshold_are_kept() -> None:
    """Counted with this request, from exact requests too; spans of the history included."""
    talk = Talk(Bench(order="retriever", **FUSED))
    assert told(talk.turn("one", A, B)).keep == frozenset()
    assert told(talk.bench.reply(talk.bench.ask("x", C, B))).keep == {1}
    assert told(talk.turn("two", C)).keep == {1, 2}
    exact = Bench(store_threshold=1)
    assert told(exact.ask("x", A)).keep == frozenset(), "without --reuse fused"


# What its report becomes


def test_report_becomes_the_answer() -> None:
    bench, request = begun()
    report = make_report(request, fallbacks=(Fallback.NO_ROOM,))
    answer = bench.reply(request, cached=request.spans[1].end, report=report).answer()
    assert answer["fallbacks"] == ["no_room"]
    fates = answer["fates"]
    assert sum(fates.values()) == len(request.input_ids)
    found = [fates[fate] for fate in ("exact", "relocated", "recomputed")]
    assert found == [request.spans[0].start, 9, 3]
    assert answer["chunks_hit"] == 0
    moved = {"chunk": "a", "from": "host", "variant_prefix": 2, "overlap": 1, "cfo": 0.5}
    gap = {"chunk": "b", "from": "gap", "variant_prefix": 0, "overlap": 0, "cfo": None}
    policy = {"mode": "fused", "selector": "critical", "ratio": 0.15, "quality": None}
    outcome = {"focused": ["a"], "fused_hit": 0, "gap": 11, "selected_by": "first", "shared": 0}
    assert answer["reuse"] == {
        **policy,
        **outcome,
        "alpha": None,
        "tokens": None,
        "focus": "off",
        "sources": [{**source, "other_head": False} for source in (moved, gap)],
        "ms": report.ms,
        "estimated_ms": report.estimated_ms,
        "sampled": False,
    }
    totals = bench.bookkeeper.metrics.totals()
    assert (totals["prompt_tokens"], totals["sources"]) == (fates, {"host": 1, "gap": 1})
    assert totals["fallbacks"] == {"no_room": 1}
    seconds = {"lookup": 0.001, "relocate": 0.002, "select": 0.0005, "recompute": 0.004}
    assert bench.bookkeeper.stats()["reuse_seconds"] == seconds


AUTO = {"selector": "critical", "ratio": "auto", "quality": 0.9}


@pytest.mark.parametrize(
    ("wish", "report", "ratio"),
    [
        (AUTO, {"relocated": 9, "recomputed": 3, "fused_hit": 2}, 0.3),
        (AUTO, NOTHING_MOVED, None),
        ({"selector": "none"}, {}, None),
    ],
)
def test_ratio_of_an_answer(wish: Any, report: Any, ratio: Any) -> None:
    """`auto` becomes the share that was taken, of what was moved for the request."""
    bench, request = begun(wish)
    reuse = bench.reply(request, report=make_report(request, **report)).answer()["reuse"]
    assert (reuse["ratio"], reuse["quality"]) == (ratio, wish.get("quality"))


def test_missing_report_is_said() -> None:
    """What SGLang counts as cached may then be moved KV:
    calling it exact would be a lie, so no fates."""
    bench, request = begun()
    answer = bench.reply(request, cached=request.spans[0].end).answer()
    assert (answer["fates"], answer["chunks_hit"]) == (None, None)
    assert answer["fallbacks"] == ["no_report"]
    assert bench.bookkeeper.metrics.totals()["prompt_tokens"] == {}
    assert bench.is_idle()


def test_fused_request_without_tokens_blames_nobody() -> None:
    """Asked for no token, SGLang drops our entry: not known, but nothing went wrong."""
    bench, request = begun(max_new_tokens=0)
    bench.observe(request, make_output([], 5, "length", 0, []))
    assert (request.answer()["fates"], request.answer()["fallbacks"]) == (None, [])


def test_parallel_answers_tell_no_fates() -> None:
    """SGLang fills its cache with a request of its own first."""
    bench, request = begun(num_answers=2)
    answer = bench.reply(request, report=make_report(request)).answer()
    assert (answer["fates"], answer["chunks_hit"]) == (None, None)
    assert answer["fallbacks"] == ["parallel_sampling"]
    assert bench.bookkeeper.metrics.totals()["sources"] == {}


# Plans that are not begun


@pytest.mark.parametrize("routing", ["kv_aware", "round_robin"])
def test_plan_alone_leaves_nothing(routing: str) -> None:
    """It is what the request would get, and the next request sees no trace of it."""
    bench = Bench(num_ranks=2, routing=routing, **FUSED)
    bench.reply(bench.ask("one", A, B))
    before = bench.bookkeeper.stats()
    options: dict[str, Any] = {"fusion": fused(bench), "to": "c"}
    plans = [bench.plan("two", C, B, A, **options) for _ in range(2)]
    told_alone = bench.bookkeeper.spans_of(plans[0])
    assert bench.bookkeeper.stats() == before
    assert bench.is_idle()
    real = bench.ask("two", C, B, A, **options)
    for plan in plans:
        for name in ("rank", "order", "input_ids", "spans", "fusion"):
            assert getattr(plan, name) == getattr(real, name)
    assert told_alone.spans == told(real).spans


def test_plan_is_explained() -> None:
    bench = Bench(**FUSED)
    plan = bench.plan("q", A, B, fusion=fused(bench, selector="context", alpha=2))
    (first, second), size = plan.spans, len(plan.input_ids)
    sources = (
        Source(first.start, first.end, 0, "device", num_before=1),
        Source(second.start, second.end, 1, "gap"),
    )
    shown = explained(plan, Explanation(first.start, 0, second.end, sources, (Fallback.UNSCORED,)))
    at_first, at_second = ({"start": s.start, "end": s.end} for s in plan.spans)
    assert shown["spans"][1] == {"chunk": "b", "id": second.chunk, **at_second}
    source = {"chunk": "a", "from": "device", "variant_prefix": 1, "overlap": 0, "cfo": None}
    assert shown["sources"][0] == {**source, "other_head": False, **at_first}
    assert plan.fusion is not None
    policy = {"mode": "fused", "selector": "context", "ratio": 0.15, "quality": None, "alpha": 2.0}
    more = {"tokens": None, "focus": "spare", "recipe": plan.fusion.recipe}
    assert shown["reuse"] == {**policy, **more}
    assert (shown["order"], shown["dp_rank"], shown["prompt_tokens"]) == (["a", "b"], 0, size)
    assert (shown["exact"], shown["end"]) == (first.start, second.end)
    assert shown["fallbacks"] == ("unscored",)


# Preprocessing


def preprocess(bench: Bench, chunk: Passage, *neighbors: Passage, **options: Any) -> Asked:
    head = options.pop("head", [])
    draft = bench.drafter.preprocessing(head, neighbors, chunk, identity=ME, **options)
    return bench.begin(bench.planner.plan(draft))


def test_preprocessing_puts_the_chunk_behind_its_neighbors() -> None:
    """Neighbours in their order, moved as they are; the chunk computed and kept."""
    bench = Bench(**FUSED)
    bench.reply(bench.ask("one", A, B))
    request = preprocess(bench, C, B, A)
    assert text_of(request) == f"\x02\x01u{B.text};{A.text};{C.text};{END}\x01a"
    spans = told(request)
    assert spans.is_preprocessing
    assert spans.fusion is not None
    assert (spans.fusion.selector, spans.fusion.ratio, spans.fusion.plain) == ("none", 0.0, True)
    assert spans.fusion.fresh == spans.keep == frozenset({2})
    assert spans.fusion.recipe.startswith("none/0.0/alpha=-/focus=off/fresh=2/question=")
    assert spans.fusion.recipe != told(preprocess(bench, C, B, A)).fusion.recipe  # type: ignore[union-attr]
    assert not told(bench.ask("q", A)).is_preprocessing


def test_preprocessing_counts_as_no_access() -> None:
    """Nobody has asked for these chunks."""
    bench = Bench(**FUSED)
    request = preprocess(bench, B, A)
    report = make_report(request, exact=request.spans[0].end, relocated=0, recomputed=0)
    bench.reply(request, report=report)
    assert bench.bookkeeper.tables.num_entries == 0
    totals = bench.bookkeeper.metrics.totals()
    assert totals["chunks"] == {}
    assert sum(totals["prompt_tokens"].values()) == len(request.input_ids)
    assert bench.is_idle()


@pytest.mark.parametrize(
    ("knobs", "neighbors", "named"),
    [
        ({}, [A], "--reuse fused"),
        (FUSED, [A, B], "neighbors: the chunk itself"),
        (FUSED, [Passage("again", B.text)], "neighbors: the chunk itself"),
        (FUSED, [Passage(str(i), str(i) * 60) for i in range(4)], "the context is 200"),
    ],
)
def test_preprocessing_is_refused(knobs: Any, neighbors: Any, named: str) -> None:
    bench = Bench(context_len=200, **knobs)
    with pytest.raises(RequestError, match=named):
        preprocess(bench, B, *neighbors)
    assert bench.is_idle()
