"""`make_plan`: what is promised of a prompt, from which sources, and why no more."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from radix_ext import ChunkId, FusionRequest, Span
from radix_ext.costs import Line, Phase, Work
from radix_ext.moved_plan import (
    MAX_TAIL_TOKENS,
    MIN_GAIN,
    Candidate,
    Limits,
    NotMoved,
    Piece,
    ReusePlan,
    make_plan,
)
from radix_ext.variants import Variant
from tests.examples import examples
from tests.reference.sources import ids, make_request, make_sums

ROOMY = Limits(max_pass_tokens=1000, max_gap_tokens=1000)
NONE = make_request("none", 0.0)


@dataclass(frozen=True)
class Copy(Candidate):
    """A source as a plan sees it."""

    where: str = "device"


def make_copy(
    prefix: tuple[ChunkId, ...] = (), where: str = "device", *, start: int = -1, **fields: Any
) -> Copy:
    return Copy(Variant(prefix, None, start=start, **fields), where)


def prompt(layout: str) -> tuple[Span, ...]:
    """Spans of "..AAABBB.C": a dot is a token outside chunks, a run of one letter a chunk."""
    spans: list[Span] = []
    for position, letter in enumerate(layout):
        if letter == ".":
            continue
        if spans and spans[-1].end == position and spans[-1].chunk == letter:
            spans[-1] = spans[-1]._replace(end=position + 1)
        else:
            spans.append(Span(position, position + 1, ChunkId(letter)))
    return tuple(spans)


def plan_of(
    layout: str,
    sources: Mapping[str, Sequence[Candidate]] | str,
    *,
    start: int = 0,
    limit: int | None = None,
    fusion: FusionRequest = NONE,
    limits: Limits = ROOMY,
    **more: Any,
) -> ReusePlan:
    """`sources` as letters: one copy each, computed after nothing."""
    known: Mapping[str, Sequence[Candidate]] = (
        {letter: [make_copy()] for letter in sources} if isinstance(sources, str) else sources
    )
    return make_plan(
        prompt(layout),
        start=start,
        limit=len(layout) if limit is None else limit,
        candidates=lambda chunk, head: known.get(chunk, ()),
        fusion=fusion,
        limits=limits,
        **more,
    )


def make_costs(
    *,
    extend: float = 1.0,
    recompute: tuple[float, float] = (1.0, 1.0),
    question: float = 0.0,
    host: float = 0.1,
) -> dict[Phase, Line]:
    """Of which each test needs some; a move on the device is a hundredth of a computed token."""
    return {
        Phase.EXTEND: Line(10.0, extend),
        Phase.RECOMPUTE: Line(*recompute),
        Phase.QUESTION: Line(question),
        Phase.DEVIATION: Line(question),
        Phase.DEVICE: Line(0.0, 0.01),
        Phase.HOST: Line(host, host),
    }


def pieces(plan: ReusePlan) -> list[tuple[int, int, bool]]:
    """(start, end, whether it is moved)."""
    return [(piece.start, piece.end, piece.source is not None) for piece in plan.pieces]


# What is promised


@pytest.mark.parametrize(
    ("layout", "sources", "arguments", "expected"),
    [
        # B is cached nowhere, C is: B is computed ahead so that C still counts
        ("..AAABBBCC..", "AC", {"start": 2}, [(2, 5, True), (5, 8, False), (8, 10, True)]),
        ("AAABBB..", "A", {}, [(0, 3, True)]),  # a prefill computes B as well
        ("..AAABB.", "B", {}, [(0, 2, False), (2, 5, False), (5, 7, True)]),
        ("AAA...BB.", "AB", {}, [(0, 3, True), (3, 6, False), (6, 8, True)]),
        ("AAA...BB.", "AB", {"start": 5}, [(5, 6, False), (6, 8, True)]),
        ("AAABB.", "AB", {"start": 3}, [(3, 5, True)]),
        ("AAABB.", "AB", {"start": 5}, []),
        # chunks are moved whole up to the limit
        ("AAABBCCC", "ABC", {"limit": 7}, [(0, 3, True), (3, 5, True)]),
        ("AAABBCCC", "ABC", {"limit": 5}, [(0, 3, True), (3, 5, True)]),
        ("AAABBCCC", "ABC", {"limit": 2}, []),
        # what is to be preprocessed after its neighbours must not be moved itself
        (
            "AABBCC.",
            "ABC",
            {"fusion": replace(NONE, fresh=frozenset({1}))},
            [(0, 2, True), (2, 4, False), (4, 6, True)],
        ),
        # plain neighbours are wanted as they are, not to save time
        (
            "AAABB..",
            "AB",
            {
                "fusion": replace(NONE, plain=True, fresh=frozenset({1})),
                "costs": make_costs(extend=0.0),
            },
            [(0, 3, True)],
        ),
    ],
)
def test_plan_ends_with_its_last_hit(
    layout: str, sources: str, arguments: dict[str, Any], expected: list[tuple[int, int, bool]]
) -> None:
    """What is between hits is computed ahead so that they count."""
    assert pieces(plan_of(layout, sources, **arguments)) == expected


def test_piece_tells_what_stands_before_it_and_what_stood_before_its_source() -> None:
    """The selector compares the two. A chunk that is named twice is moved twice."""
    plan = plan_of("ABCA.", {"A": [make_copy()], "C": [make_copy(ids("XA"))]})
    assert [(piece.chunk, piece.prefix, piece.overlap) for piece in plan.pieces] == [
        ("A", (), 0),
        (None, (), 0),
        ("C", ids("AB"), 1),
        ("A", ids("ABC"), 0),
    ]


# Why no more


@pytest.mark.parametrize(
    ("layout", "start", "limit", "reasons"),
    [
        ("AAABB.", 0, 6, (NotMoved.NO_SOURCE,)),
        ("...", 0, 3, ()),
        ("AAA..", 3, 5, ()),
        ("AA", 0, 1, ()),
    ],
)
def test_no_source_is_a_reason_and_nothing_to_move_is_none(
    layout: str, start: int, limit: int, reasons: tuple[str, ...]
) -> None:
    assert plan_of(layout, "", start=start, limit=limit) == ReusePlan((), reasons)


@pytest.mark.parametrize(
    ("layout", "max_pass", "max_gap", "end", "reasons"),
    [
        # all gaps of the request together, not each by itself
        ("AABBBCCDDEE.", 1000, 3, 7, (NotMoved.GAP_TOO_LONG,)),
        ("BBBBCC.", 1000, 3, 0, (NotMoved.GAP_TOO_LONG,)),
        # half of what is moved and the gap
        ("AAAABBCCCCEE.", 6, 10, 10, (NotMoved.PASS_BUDGET,)),
        ("AAAABBCCCCEE.", 7, 10, 12, ()),
    ],
)
def test_gaps_and_recomputed_tokens_end_the_plan_where_they_exceed_their_budgets(
    layout: str, max_pass: int, max_gap: int, end: int, reasons: tuple[str, ...]
) -> None:
    fusion = make_request("first", 0.5)
    plan = plan_of(layout, "ACE", fusion=fusion, limits=Limits(max_pass, max_gap))
    assert (plan.end if plan.pieces else 0, plan.fallbacks) == (end, reasons)


@pytest.mark.parametrize(
    ("selector", "ratio", "budget", "num_layers", "end", "reasons"),
    [
        # two of four layers: 16 tokens are measured for 8 and 2 are recomputed
        ("deviation", 0.125, 7, 4, 8, (NotMoved.MEASURING_BUDGET,)),
        ("deviation", 0.125, 10, 4, 16, ()),
        ("query", 0.125, 7, 4, 16, ()),
        ("deviation", 0.5, 7, 200, 8, (NotMoved.PASS_BUDGET,)),  # recomputing alone is too much
    ],
)
def test_measuring_counts_as_its_share_of_the_layers(
    selector: str, ratio: float, budget: int, num_layers: int, end: int, reasons: tuple[str, ...]
) -> None:
    limits = Limits(max_pass_tokens=budget, max_gap_tokens=0, num_layers=num_layers)
    plan = plan_of("A" * 8 + "B" * 8, "AB", fusion=make_request(selector, ratio), limits=limits)
    assert (plan.end, plan.fallbacks) == (end, reasons)


def test_the_budget_is_for_as_many_as_may_be_recomputed() -> None:
    """Not for as many as are expected to, by which time is estimated."""
    limits = Limits(max_pass_tokens=7, max_gap_tokens=0)
    fusion = replace(make_request("first", 0.5), expected=0.125)
    plan = plan_of("A" * 8 + "B" * 8, "AB", fusion=fusion, limits=limits, costs=make_costs())
    assert (plan.end, plan.recomputed_len, plan.works[Phase.RECOMPUTE].tokens) == (8, 4, 1)


# What it takes


@pytest.mark.parametrize(("overhead", "is_moved"), [(13.7, True), (14.0, False)])
def test_moving_must_be_faster(overhead: float, is_moved: bool) -> None:
    """10 tokens moved, 5 of them recomputed with 2 more behind them:
    overhead + 7 + .1 against 10 + 12, less a twentieth."""
    costs = make_costs(recompute=(overhead, 1.0))
    plan = plan_of("AAAAAAAAAA..", "A", fusion=make_request("first", 0.5), costs=costs)
    assert bool(plan.pieces) == is_moved
    assert plan.fallbacks == (() if is_moved else (NotMoved.NOT_WORTH_IT,))
    assert plan.estimate == pytest.approx((overhead + 7 + 0.1, 22))


def test_long_question_has_a_forward_of_its_own() -> None:
    costs, layout = make_costs(recompute=(0.0, 1.0)), "A" * 4000 + "." * MAX_TAIL_TOKENS
    limits = Limits(10_000, 10_000)
    for more, num_calls in (("", 0), (".", 1)):
        fusion = make_request("first", 0.5)
        plan = plan_of(layout + more, "A", fusion=fusion, limits=limits, costs=costs)
        assert plan.works.get(Phase.EXTEND, Work()).calls == num_calls


def test_plan_ends_where_moving_stops_paying() -> None:
    """The gap of B takes longer in the pass than C saves: A alone is moved."""
    costs = make_costs(recompute=(0.0, 4.0))
    plan = plan_of("AAAAAABBBBBBCC..", "AC", costs=costs)
    assert pieces(plan) == [(0, 6, True)]
    assert plan.fallbacks == (NotMoved.NOT_WORTH_IT,)
    assert pieces(plan_of("AAAAAABBBBBBCC..", "AC", costs=make_costs()))[-1] == (12, 14, True)


def test_chunk_that_is_dearer_to_move_than_to_compute_is_a_gap() -> None:
    """A slow host and a tiny chunk."""
    sources = {"A": [make_copy()], "B": [make_copy(where="host")], "C": [make_copy()]}
    plan = plan_of("AAAABCCCC.", sources, costs=make_costs(host=0.6))
    assert pieces(plan) == [(0, 4, True), (4, 5, False), (5, 9, True)]
    assert plan.fallbacks == (NotMoved.NOT_WORTH_IT,)


def test_question_that_eats_the_gain_is_not_asked() -> None:
    """The plan names the selector that takes its place."""
    layout, fusion = "AAAAAAAAAA..", make_request("query", 0.2)
    asked = plan_of(layout, "A", fusion=fusion, costs=make_costs(question=1.0))
    cheaper = plan_of(layout, "A", fusion=fusion, costs=make_costs(question=19.0))
    assert (asked.fusion, asked.measured_len) == (fusion, 2)
    assert (cheaper.fusion, cheaper.measured_len) == (
        replace(fusion, selector="first", recipe="r/by=first"),
        0,
    )
    assert pieces(cheaper) == pieces(asked) == [(0, 10, True)]
    assert make_request("critical", 0.2).cheaper == make_request("query", 0.2, recipe="r/by=query")


def test_source_that_has_seen_more_is_taken_if_its_load_is_worth_it() -> None:
    """One of the two chunks before Z is half of Z's computation: 5 tokens."""
    sources = {"Z": [make_copy(ids("A"), where="host"), make_copy()]}
    for host, where in ((0.4, "host"), (0.6, "device")):
        plan = plan_of("ABZZZZZZZZZZ..", sources, start=2, costs=make_costs(host=host))
        assert [piece.source.where for piece in plan.pieces if piece.source] == [where]


# From where


def chosen(
    options: Sequence[Candidate], *, after: str = "AB", selector: str = "query"
) -> Candidate:
    """What chunk Z is moved from in a prompt that has it after the chunks `after`."""
    plan = plan_of(f"{after}ZZ.", {"Z": options}, fusion=make_request(selector))
    source = plan.pieces[-1].source
    assert source is not None
    return source


def test_plain_request_takes_what_was_computed_alone_and_nothing_else() -> None:
    """FusionRAG eq. 10: neither what other chunks went into, nor what was preprocessed."""
    plain = make_copy(where="host")
    others = [
        make_copy(ids("A")),
        make_copy(ids("XY"), where="host", preprocessed=True),
        make_copy(preprocessed=True),
    ]
    fusion = replace(NONE, plain=True)
    assert plan_of("AZZ.", {"Z": [*others, plain]}, fusion=fusion).pieces[-1].source is plain
    assert plan_of("AZZ.", {"Z": others}, fusion=fusion) == ReusePlan((), (NotMoved.NO_SOURCE,))


def test_source_at_the_same_position_is_taken_among_equals() -> None:
    """Its keys need no rotation; one that has seen more of the prompt is taken all the same."""
    here = make_copy(ids("Y"), start=2)
    assert chosen([make_copy(ids("X"), start=7), here, make_copy(ids("V"), start=3)]) is here
    better = make_copy(ids("A"), start=7)
    assert chosen([here, better]) is better


def test_context_takes_the_lowest_fix_overhead() -> None:
    """Cache-Craft 3.3: what counts is attention that is lost, not how many chunks are shared.
    Among equals the one at the same position."""
    here = make_copy(ids("Y"), start=2)
    assert chosen([make_copy(ids("X"), start=7), here], selector="context") is here
    scores = make_sums([9.0, 1.0], [1, 1], num_tokens=2)
    lost = make_copy(ids("XA"), scores=scores, preprocessed=True)
    kept = make_copy(ids("AX"), where="host", scores=scores)
    assert chosen([lost, kept], selector="context") is kept
    assert chosen([lost, kept]) is lost


def test_piece_carries_its_fix_overhead() -> None:
    """Even odds of eq. 11 at alpha 1, half of the prefix lost: 0.25.
    Without scores it is estimated; a gap has none."""
    scores = make_sums([1.0, 1.0], [1000, 1000], intra=1e9, num_tokens=8)
    plan = plan_of("AZZZZZZZZYY.", {"Z": [make_copy(ids("AX"), scores=scores)], "Y": [make_copy()]})
    assert [piece.cfo for piece in plan.pieces] == [None, pytest.approx(0.25), 1]


def test_source_behind_another_head_is_taken_last() -> None:
    """Whatever else it has seen; and that it is one is said."""
    better = make_copy(ids("AB"), preprocessed=True, head="other")
    for selector in ("query", "context"):
        assert chosen([better, make_copy()], selector=selector).facts.head == ""
    (*_, piece) = plan_of("ABZZ.", {"Z": [better]}).pieces
    assert piece.source is better
    assert piece.other_head
    assert not plan_of("ZZ.", "Z").pieces[0].other_head


def test_another_head_is_part_of_the_prefix() -> None:
    """A took all of the chunks' mass, and the head as much again: half of the prefix is lost.
    CCI is 0.5 either way."""
    scores = make_sums([1.0], [1000], intra=1e9, num_tokens=8, head=1.0, head_len=1000)
    overheads = []
    for head in ("", "other"):
        plan = plan_of("AZZZZZZZZ.", {"Z": [make_copy(ids("A"), scores=scores, head=head)]})
        overheads.append(plan.pieces[-1].cfo)
    assert overheads == pytest.approx([1 / 8, 0.25])


@pytest.mark.parametrize(
    ("fusion", "expected"),
    [
        (make_request("query", 0.15), 2),  # ceil(0.15 * 12)
        (make_request("none", 0.5), 0),
        (make_request("context", 0.5), 6),  # alpha is solved for the ratio
        # ceil(8 * 1.9 * 0.25), and the ratio where nothing is scored
        (make_request("context", 0.5, alpha=1.9), 4 + 2),
        (make_request("context", 0.5, alpha=100.0), 8 + 2),
        # of eight and of four
        (replace(make_request("first", 0.0), tokens=5), 5 + 4),
        (make_request("query", 0.0), 0),
        (make_request("query", 1.0), 12),
    ],
)
def test_recomputed_tokens_are_foreseen(fusion: FusionRequest, expected: int) -> None:
    """Both budgets rest on it. Z has a fix overhead of 0.25."""
    scores = make_sums([1.0, 1.0], [1000, 1000], intra=1e9, num_tokens=8)
    sources = {
        "Z": [make_copy(ids("AX"), scores=scores)],
        "Y": [make_copy(ids("A"))],
        "A": [make_copy()],
    }
    plan = plan_of("AZZZZZZZZYYYY.", sources, start=1, fusion=fusion)
    assert (plan.moved_len, plan.recomputed_len) == (12, expected)


def test_exact_gaps_are_computed_outside_the_gap_budget() -> None:
    """A could be moved and B not; C's own gap would be one too long. The pass has them all."""
    limits, exact = Limits(max_pass_tokens=9, max_gap_tokens=3), frozenset({0, 1})
    plan = plan_of("AAABBBDDDCC.", "AC", limits=limits, exact=exact)
    assert pieces(plan) == [(0, 3, False), (3, 6, False), (6, 9, False), (9, 11, True)]
    assert (plan.fused_from, plan.gap_len, plan.fallbacks) == (9, 9, ())
    longer = plan_of("AAABBBDDDDCC.", "AC", limits=limits, exact=exact)
    assert longer.fallbacks == (NotMoved.GAP_TOO_LONG,)
    tight = replace(limits, max_pass_tokens=8)
    assert plan_of("AAABBBDDDCC.", "AC", limits=tight, exact=exact).fallbacks == (
        NotMoved.PASS_BUDGET,
    )


# Against a slow version


def slow_plan(
    spans: Sequence[Span],
    start: int,
    limit: int,
    sources: Mapping[str, Sequence[Candidate]],
    fusion: FusionRequest,
    limits: Limits,
) -> tuple[set[int], int, tuple[str, ...]]:
    """(moved positions, end of the promise, reasons):
    as many hits as fit, tried one by one, each from scratch."""
    usable = [span for span in spans if span.start >= start and span.end <= limit]
    hits = [s for s in usable if sources.get(s.chunk) and spans.index(s) not in fusion.fresh]
    if not hits:
        return set(), start, (NotMoved.NO_SOURCE,) if usable else ()

    def promise(num_hits: int) -> tuple[set[int], int]:
        moved = {position for span in hits[:num_hits] for position in range(span.start, span.end)}
        return moved, max(moved, default=start - 1) + 1

    def reason(moved: set[int], end: int) -> NotMoved | None:
        gaps = end - start - len(moved)
        if gaps > limits.max_gap_tokens:
            return NotMoved.GAP_TOO_LONG
        tokens = gaps + (0 if fusion.selector == "none" else math.ceil(fusion.ratio * len(moved)))
        if tokens > limits.max_pass_tokens:
            return NotMoved.PASS_BUDGET
        num_layers, measured = limits.num_layers, 0.0
        if fusion.selector in ("deviation", "critical"):
            measured += min(fusion.depth or num_layers, num_layers) / num_layers * (end - start)
        if fusion.selector in ("query", "critical"):
            asked = max(0, min(limits.question_window, limit - spans[-1].end))
            measured += min(fusion.layer or num_layers, num_layers) / num_layers * asked
        is_over = 0 < fusion.ratio < 1 and tokens + math.ceil(measured) > limits.max_pass_tokens
        return NotMoved.MEASURING_BUDGET if is_over else None

    for num_hits in range(1, len(hits) + 1):
        if why := reason(*promise(num_hits)):
            return *promise(num_hits - 1), (why,)
    return *promise(len(hits)), ()


@st.composite
def layouts(draw: st.DrawFn) -> str:
    parts = st.one_of(
        st.sampled_from(["", ".", "..."]),
        st.builds(str.__mul__, st.sampled_from("ABCD"), st.integers(1, 5)),
    )
    return "".join(draw(st.lists(parts, min_size=draw(st.sampled_from([4, 0])), max_size=9)))


@settings(max_examples=examples(500))
@given(st.data(), layouts())
def test_plan_equals_slow_plan(data: st.DataObject, layout: str) -> None:
    """Any prompt, any sources, any limits: the same promise for the same reasons, without holes,
    whole chunks only."""
    spans = prompt(layout)
    inside = {position for span in spans for position in range(span.start + 1, span.end)}
    outside = [p for p in range(len(layout) + 1) if p not in inside]
    start = data.draw(st.just(0) | st.sampled_from(outside))
    limit = data.draw(st.just(len(layout)) | st.integers(0, len(layout)))
    copies = st.lists(
        st.builds(
            make_copy,
            st.text("ABCDX", max_size=3).map(ids),
            st.sampled_from(["device", "host"]),
            preprocessed=st.booleans(),
            head=st.sampled_from(["", "other"]),
        ),
        max_size=3,
    )
    sources = {letter: data.draw(copies) for letter in "ABCD"}
    fusion = FusionRequest(
        data.draw(st.sampled_from(["none", "query", "context", "deviation", "critical"])),
        data.draw(st.sampled_from([0.0, 0.15, 0.5, 1.0])),
        "r",
        fresh=data.draw(st.frozensets(st.integers(0, 8), max_size=2)),
        plain=data.draw(st.booleans()),
        depth=data.draw(st.integers(1, 6)),
        layer=data.draw(st.integers(0, 6)),
    )
    small = st.just(1000) | st.integers(0, 12)
    limits = Limits(
        data.draw(small),
        data.draw(small),
        question_window=data.draw(st.integers(1, 4)),
        num_layers=data.draw(st.sampled_from([2, 4, 20])),
    )

    plan = plan_of(layout, sources, start=start, limit=limit, fusion=fusion, limits=limits)

    if fusion.plain:
        sources = {
            letter: [
                copy
                for copy in copies
                if not (copy.facts.prefix or copy.facts.preprocessed or copy.facts.head)
            ]
            for letter, copies in sources.items()
        }
    moved, end, reasons = slow_plan(spans, start, limit, sources, fusion, limits)
    found = [piece for piece in plan.pieces if piece.source]
    assert {p for piece in found for p in range(piece.start, piece.end)} == moved
    assert plan.fallbacks == reasons
    if not plan.pieces:
        return
    assert (plan.start, plan.end, plan.fused_from) == (start, end, min(moved))
    assert plan.pieces[-1].source is not None
    assert all(left.end == right.start for left, right in pairwise(plan.pieces))
    assert plan.gap_len == end - start - len(moved) <= limits.max_gap_tokens
    assert plan.num_pass_tokens <= limits.max_pass_tokens
    for piece in plan.pieces:
        if piece.span is None:
            assert piece.source is None
            assert not any(span.start < piece.end and span.end > piece.start for span in spans)
            continue
        assert spans[piece.span][:2] == (piece.start, piece.end)
        if piece.source is not None:
            assert piece.chunk == spans[piece.span].chunk
            assert piece.prefix == tuple(span.chunk for span in spans[: piece.span])
            if fusion.selector != "context":
                merits = [_merit(copy, piece.prefix) for copy in sources[piece.chunk]]
                assert _merit(piece.source, piece.prefix) == max(merits)


def _merit(copy: Candidate, before: Sequence[ChunkId]) -> tuple[bool, int, bool, bool, int]:
    """The same head, chunks it has seen, in the pool, preprocessed, little else seen."""
    return (
        copy.facts.head == "",
        len(set(copy.facts.prefix) & set(before)),
        copy.where == "device",
        copy.facts.preprocessed,
        -len(copy.facts.prefix),
    )


@settings(max_examples=examples(300))
@given(st.data(), layouts(), st.lists(st.floats(0, 3), min_size=18, max_size=18))
def test_a_source_more_makes_no_plan_dearer(
    data: st.DataObject, layout: str, coefficients: list[float]
) -> None:
    """Wherever it is, whatever it has seen, and whether it was preprocessed. Moving pays."""
    costs = {phase: Line(*coefficients[3 * i : 3 * i + 3]) for i, phase in enumerate(Phase)}
    costs[Phase.EXTEND] = Line(each=1e6)
    copies = st.builds(
        make_copy,
        prefix=st.sampled_from(["", "A", "AB", "XY"]).map(ids),
        where=st.sampled_from(["device", "host"]),
        preprocessed=st.booleans(),
    )
    sources = {letter: data.draw(st.lists(copies, max_size=3)) for letter in "ABCD"}
    fusion = make_request(data.draw(st.sampled_from(["none", "first"])), 0.5)
    before = plan_of(layout, sources, fusion=fusion, costs=costs)
    letter, more = data.draw(st.sampled_from("ABCD")), data.draw(copies)
    assume(sources[letter])
    known = {**sources, letter: [*sources[letter], more]}
    after = plan_of(layout, known, fusion=fusion, costs=costs)
    for each in (piece for piece in before.pieces if piece.span is not None and piece.source):
        (now,) = (piece for piece in after.pieces if piece.span == each.span)
        assert now.source is not None
        assert _saved(now, costs) >= _saved(each, costs)


def test_source_that_pays_comes_before_one_that_has_seen_more() -> None:
    costs = dict.fromkeys(Phase, Line())
    costs |= {Phase.DEVICE: Line(each=0.6), Phase.HOST: Line(each=0.1)}
    costs |= {Phase.RECOMPUTE: Line(each=1.0), Phase.EXTEND: Line(each=1e6)}
    far, near = make_copy(prefix=(), where="host"), make_copy(prefix=ids("A"), where="device")
    for sources in ([far], [far, near]):
        plan = plan_of("AC", {"C": sources}, fusion=make_request("first", 0.5), costs=costs)
        assert [piece.source for piece in plan.pieces if piece.source] == [far]


def test_dear_source_that_has_seen_more_does_not_end_a_plan_that_pays() -> None:
    """Each chunk's move alone would pay: the pass has a price of its own."""
    costs = {**make_costs(recompute=(5.0, 1.0), host=0.25), Phase.EXTEND: Line(1.0, 1.0)}
    near, far, fusion = make_copy(), make_copy(ids("A"), where="host"), make_request("first", 0.15)
    for sources in ([near], [near, far]):
        plan = plan_of("AAABBBBBBBBB.", {"B": sources}, fusion=fusion, costs=costs)
        assert [piece.source for piece in plan.pieces if piece.source] == [near]


def test_of_the_soonest_sources_the_one_that_has_seen_more_is_moved() -> None:
    """Preprocessed or not; one that has seen all would end the plan, as in the test before."""
    costs = {**make_costs(recompute=(5.0, 1.0), host=0.25), Phase.EXTEND: Line(1.0, 1.0)}
    near, far = make_copy(ids("A")), make_copy(ids("AD"), where="host")
    sources = {"B": [make_copy(preprocessed=True), near, far]}
    plan = plan_of("AADBBBBBBBBB.", sources, fusion=make_request("first", 0.15), costs=costs)
    assert [piece.source for piece in plan.pieces if piece.source] == [near]


def _saved(piece: Piece, costs: Mapping[Phase, Line]) -> float:
    """Of computing the share of the chunk that has seen what it sees here, less the move."""
    num_tokens = piece.end - piece.start
    computed = costs[Phase.RECOMPUTE].seconds(Work(0, num_tokens, num_tokens * piece.end))
    assert piece.source is not None
    tier = Phase.DEVICE if piece.source.where == "device" else Phase.HOST
    move = costs[tier].seconds(Work(tier is Phase.HOST, num_tokens))
    return computed * piece.overlap / max(1, len(set(piece.prefix))) - move


@settings(max_examples=examples(500))
@given(
    st.data(),
    layouts(),
    st.sampled_from(["none", "first", "query", "deviation", "critical"]),
    st.lists(st.floats(0, 3), min_size=18, max_size=18),
)
def test_no_end_of_the_plan_is_faster(
    data: st.DataObject, layout: str, selector: str, coefficients: list[float]
) -> None:
    """Against every end, each estimated from scratch, token by token;
    nothing is moved where that saves less than a twentieth."""
    spans = prompt(layout)
    where = {letter: data.draw(st.sampled_from(["device", "host", None])) for letter in "ABCD"}
    sources = {letter: [make_copy(where=tier)] for letter, tier in where.items() if tier}
    costs = {phase: Line(*coefficients[3 * i : 3 * i + 3]) for i, phase in enumerate(Phase)}
    depth, layer, num_layers = (data.draw(st.integers(low, 6)) for low in (1, 0, 1))
    fusion = replace(
        make_request(selector, 0.5),
        depth=depth,
        layer=layer,
        expected=data.draw(st.sampled_from([None, 0.2])),
    )
    limits = Limits(1000, 1000, question_window=2, num_layers=num_layers)
    plan = plan_of(layout, sources, fusion=fusion, limits=limits, costs=costs)

    def slow_seconds(hits: Sequence[Span], choice: FusionRequest) -> float:
        end = hits[-1].end if hits else 0
        moved_len = sum(span.end - span.start for span in hits)
        total, rest = 0.0, range(end + 1, len(layout) + 1)
        for phase in (Phase.DEVICE, Phase.HOST):
            mine = [span.end - span.start for span in hits if where[span.chunk] == phase]
            num_calls = len(mine) if phase is Phase.HOST else min(1, len(mine))
            total += costs[phase].fixed * num_calls + costs[phase].each * sum(mine)
        recomputed = math.ceil(choice.expected_ratio * moved_len) if choice.recomputes else 0
        computed = [end] * (end - moved_len + recomputed)
        if hits and computed and end == spans[-1].end:
            total += _slow(costs[Phase.RECOMPUTE], [*computed, *rest])
        else:
            total += _slow(costs[Phase.RECOMPUTE], computed) + _slow(costs[Phase.EXTEND], rest)
        asked = min(2, len(layout) - spans[-1].end) if hits else 0
        if choice.selector in ("query", "critical"):
            share = min(layer or num_layers, num_layers) / num_layers
            total += _slow(costs[Phase.QUESTION], [end] * asked, share)
        if choice.selector in ("deviation", "critical"):
            total += _slow(costs[Phase.DEVIATION], [end] * end, min(depth, num_layers) / num_layers)
        return total

    def slow_best(choice: FusionRequest) -> float:
        share = choice.expected_ratio if choice.recomputes else 0.0
        worth = []
        for span in spans:
            tier = where[span.chunk]
            if tier is None:
                continue
            num, line, move = span.end - span.start, costs[Phase.RECOMPUTE], costs[Phase(tier)]
            computed = num * (line.each + line.attended * span.end)
            if move.fixed * (tier == "host") + move.each * num + share * computed < computed:
                worth.append(span)
        return min(
            (slow_seconds(worth[: n + 1], choice) for n in range(len(worth))), default=math.inf
        )

    computed = slow_seconds([], fusion)
    times = [slow_best(choice) for choice in (fusion, fusion.cheaper) if choice is not None]
    paying = [time for time in times if time <= (1 - MIN_GAIN) * computed]
    margin = min((abs(time - (1 - MIN_GAIN) * computed) for time in times), default=1.0)
    assume(margin > 1e-6)
    assert bool(plan.pieces) == bool(paying)
    if paying:
        assert plan.estimate == pytest.approx((paying[0], computed))


def _slow(line: Line, keys: Sequence[int], share: float = 1.0) -> float:
    return line.fixed * bool(keys) + share * (line.each * len(keys) + line.attended * sum(keys))
