"""Promises that must pay: what the scheduler does with what moving is estimated to cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

pytest.importorskip("sglang")

from radix_ext.costs import TRIED_EVERY, Line, Phase
from radix_ext.fusion_request import QUESTION as QUESTION_NAME
from sglang_chunkcache.wire.report import Fallback
from tests.reference.fused_scheduler import FILLING_S, FusedScheduler
from tests.reference.sources import make_request
from tests.sglang_chunkcache.fusion.test_promise import (
    A,
    B,
    C,
    D,
    fused,
    make_scheduler,
    node_of,
    rag,
    report,
    start_of,
)

COSTS = {
    phase: Line(each=1.0 if phase in (Phase.EXTEND, Phase.RECOMPUTE) else 0.01) for phase in Phase
}
ASKING = replace(make_request("query", 0.25), recipe=f"query{QUESTION_NAME}who")
"""Of the four tokens of A and of D one each is recomputed, of B's three as well."""


def make_priced(*, capacity: int = 60, **changes: Line) -> FusedScheduler:
    """A scheduler for which a computed token costs 1, a moved one a hundredth,
    and what `changes` says."""
    scheduler = make_scheduler(capacity)
    scheduler.fuser.pricing.costs = {
        **COSTS,
        **{Phase(name): line for name, line in changes.items()},
    }
    scheduler.serve(rag(A, B))
    scheduler.serve(rag(D, B))
    return scheduler


def test_nothing_is_moved_where_that_takes_longer() -> None:
    """The answer says why, and what both ways were estimated to take."""
    scheduler = make_priced(recompute=Line(fixed=100.0, each=1.0))
    req = fused(B, A, fusion=ASKING)
    scheduler.serve(req)
    told = report(req)
    assert (told.relocated, told.recomputed, told.selector) == (0, 0, None)
    assert told.fallbacks == (Fallback.NOT_WORTH_IT,)
    assert told.estimated_ms["planned"] > told.estimated_ms["computed"] > 0
    scheduler.check()


def test_a_request_may_ask_for_moves_that_do_not_pay() -> None:
    """For quality, whatever it takes; nothing is estimated."""
    scheduler = make_priced(recompute=Line(fixed=100.0, each=1.0))
    req = fused(B, A, fusion=replace(ASKING, always=True))
    scheduler.serve(req)
    assert report(req).relocated + report(req).recomputed == len(A + B)
    assert report(req).estimated_ms == {}


@pytest.mark.parametrize("layer", [0, None])
def test_question_that_costs_too_much_is_replaced_and_told_apart(layer: int | None) -> None:
    """What `first` has chosen has a name of its own, under which requests of the same recipe find
    it. So it is where the recipe names a calibration, too."""
    scheduler = make_priced(question=Line(fixed=5.0))
    asking = replace(ASKING, layer=layer)
    recipe = f"{scheduler.fuser.fusion_pass.calibration.resolve(asking).recipe}/by=first"
    req = fused(B, A, fusion=asking)
    scheduler.serve(req)
    assert report(req).selector == "first"
    assert node_of(scheduler, [90, 91], B, A, recipe=recipe) is not None
    again = fused(B, A, fusion=asking)
    scheduler.serve(again)
    assert report(again).selector == "first"
    assert report(again).fused_hit >= len(B + A)  # and of the question
    scheduler.check()


def test_critical_that_costs_too_much_is_replaced_by_the_question() -> None:
    """Which chooses far better than each chunk's first tokens, and still may not pay."""
    asking = replace(
        make_request("critical", 0.25), recipe=f"critical{QUESTION_NAME}who", depth=None, layer=None
    )
    scheduler = make_priced(deviation=Line(fixed=1000.0))
    req = fused(B, A, fusion=asking)
    scheduler.serve(req)
    assert report(req).selector == "query"
    recipe = f"{scheduler.fuser.fusion_pass.calibration.resolve(asking).recipe}/by=query"
    assert node_of(scheduler, [90, 91], B, A, recipe=recipe) is not None
    again = fused(B, A, fusion=asking)
    scheduler.serve(again)
    assert (report(again).selector, report(again).fused_hit >= len(B + A)) == ("query", True)
    scheduler = make_priced(deviation=Line(fixed=1000.0), question=Line(fixed=1000.0))
    scheduler.serve(req := fused(B, A, fusion=asking))
    assert (report(req).relocated, Fallback.NOT_WORTH_IT in report(req).fallbacks) == (0, True)


def test_what_follows_a_cheaper_choice_is_chosen_so_too() -> None:
    """Also once the asked selector pays: its recipe would not say how its KV was made."""
    asking = replace(make_request("critical", 0.25), recipe=f"critical{QUESTION_NAME}who")
    scheduler = make_priced(deviation=Line(fixed=1000.0))
    scheduler.serve(fused(B, A, fusion=asking))
    scheduler.fuser.pricing.costs = dict(COSTS)
    for _ in range(2):
        scheduler.serve(req := fused(B, A, D, fusion=asking))
        assert (report(req).selector, report(req).fused_hit >= len(B + A)) == ("query", True)
    elsewhere = fused(D, A, fusion=asking)
    scheduler.serve(elsewhere)
    assert report(elsewhere).selector == "critical"
    scheduler.check()


def test_nothing_cheaper_follows_what_the_selector_itself_has_chosen() -> None:
    """Else a recipe would not say how its KV was made."""
    scheduler = make_priced()
    scheduler.serve(fused(B, fusion=ASKING))
    scheduler.fuser.pricing.costs = {**COSTS, Phase.QUESTION: Line(fixed=3.0)}
    req = fused(B, A, fusion=ASKING)
    scheduler.serve(req)
    assert (report(req).fused_hit, report(req).selector) == (len(B), "query"), (
        "that of what was found"
    )
    assert Fallback.NOT_WORTH_IT in report(req).fallbacks
    elsewhere = fused(D, A, fusion=ASKING)
    start_of(scheduler, elsewhere)
    assert node_of(scheduler, [90, 91], D, A, recipe=f"{ASKING.recipe}/by=first") is not None


def test_focus_that_eats_the_gain_is_left_out() -> None:
    """And named so, when its KV is found again, too."""
    focused = replace(
        make_request("context", 0.25), focus="spare", recipe=f"context{QUESTION_NAME}who"
    )
    scheduler = make_priced(question=Line(fixed=1000.0))
    for _ in range(2):
        req = fused(B, A, fusion=focused)
        scheduler.serve(req)
        assert report(req).selector == "context without focus"
    assert report(req).fused_hit


@pytest.mark.parametrize(
    "deviation", [Line(each=0.01), Line(fixed=1000.0)], ids=["pays", "does not"]
)
def test_a_quality_of_which_nothing_is_known_is_said(deviation: Line) -> None:
    """And what does not pay is computed: no cheaper selector is known to keep a quality."""
    scheduler = make_priced(deviation=deviation)
    req = fused(B, A, fusion=replace(make_request("deviation", 0.25), depth=None, quality=0.9))
    scheduler.serve(req)
    is_moved = bool(report(req).relocated)
    assert is_moved is (not deviation.fixed)
    assert (Fallback.UNCALIBRATED in report(req).fallbacks) is is_moved


def test_what_does_not_pay_is_tried_now_and_then() -> None:
    """Else a machine that was slow while it measured itself would never learn that it is not."""
    scheduler = make_priced(capacity=3000, recompute=Line(fixed=7.0, each=1.0))
    moved = []
    for number in range(2 * TRIED_EVERY):
        req = fused(B, A, fusion=ASKING, head=[200 + number, 91])
        scheduler.serve(req)
        moved.append(report(req).relocated > 0)
    assert sum(moved) == 2
    assert moved[TRIED_EVERY - 1]


def test_plan_is_compared_with_what_filling_and_extend_took() -> None:
    """An hour of filling was not foreseen."""
    scheduler = make_priced()
    scheduler.fuser.pricing.start()
    scheduler.fuser.pricing.costs = dict(COSTS)
    req = fused(B, A, fusion=ASKING)
    scheduler.serve(req)
    told = report(req)
    [error] = scheduler.fuser.pricing._plan_errors
    assert error == pytest.approx(1 - told.estimated_ms["planned"] / 1000 / FILLING_S, rel=1e-3)
    scheduler.serve(fused(D, A, fusion=replace(ASKING, always=True)))
    assert len(scheduler.fuser.pricing._plan_errors) == 1, "nothing was estimated"


@pytest.mark.parametrize("chunks", [(C, B), (B, C)])
def test_extends_of_every_request_are_learnt(chunks: tuple[list[int], ...]) -> None:
    """Exact ones, too."""
    scheduler = make_priced()
    pricing = scheduler.fuser.pricing
    pricing.poll()
    before = pricing.model.num_observed[Phase.EXTEND]
    scheduler.serve(rag(*chunks))
    pricing.poll()
    assert pricing.model.num_observed[Phase.EXTEND] == before + 1
