"""Promises that must pay: what the scheduler does with what moving is estimated to cost."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from radix_ext import FusionRequest
from radix_ext.costs import EXPLORATION_PERIOD, Line, Phase
from radix_ext.fusion_request import QUESTION as QUESTION_NAME
from sglang_chunkcache.scheduler import pricing
from sglang_chunkcache.wire.report import Fallback
from tests.kit.fused import Rank
from tests.kit.requests import HEAD, A, B, C, D, fused, rag
from tests.reference.fused_scheduler import FILLING_S
from tests.reference.sources import make_request

COSTS = {
    phase: Line(each=1.0 if phase in (Phase.EXTEND, Phase.RECOMPUTE) else 0.01) for phase in Phase
}
ASKING = replace(make_request("query", 0.25), recipe=f"query{QUESTION_NAME}who")
"""Of the four tokens of A and of D one each is recomputed, of B's three as well."""
CRITICAL = replace(make_request("critical", 0.25), recipe=f"critical{QUESTION_NAME}who")
DEAR = Line(fixed=1000.0)


def make_priced(*, capacity: int = 60, **changes: Line) -> Rank:
    """A scheduler for which a computed token costs 1, a moved one a hundredth,
    and what `changes` says."""
    rank = Rank(capacity=capacity)
    rank.fuser.pricing.costs = {**COSTS, **{Phase(name): line for name, line in changes.items()}}
    for chunks in ((A, B), (D, B)):
        rank.serve(rag(*chunks))
    return rank


def test_nothing_is_moved_where_that_takes_longer() -> None:
    """The answer says why, and what both ways were estimated to take."""
    rank = make_priced(recompute=Line(fixed=100.0, each=1.0))
    told = rank.ask(fused(B, A, fusion=ASKING))
    assert (told.relocated, told.recomputed, told.selector) == (0, 0, None)
    assert told.fallbacks == (Fallback.NOT_WORTH_IT,)
    assert told.estimated_ms["planned"] > told.estimated_ms["computed"] > 0
    rank = make_priced(recompute=Line(fixed=100.0, each=1.0))
    told = rank.ask(fused(B, A, fusion=replace(ASKING, always=True)))
    assert (told.relocated + told.recomputed, told.estimated_ms) == (len(A + B), {})


@pytest.mark.parametrize(
    ("asking", "dear", "cheaper"),
    [
        (replace(ASKING, layer=0), {"question": Line(fixed=5.0)}, "first"),
        (replace(ASKING, layer=None), {"question": Line(fixed=5.0)}, "first"),
        (replace(CRITICAL, depth=None, layer=None), {"deviation": DEAR}, "query"),
        (replace(CRITICAL, depth=None), {"deviation": DEAR, "question": DEAR}, None),
    ],
    ids=["question", "calibrated question", "critical", "nothing pays"],
)
def test_choice_that_costs_too_much_is_replaced_and_told_apart(
    asking: FusionRequest, dear: dict[str, Any], cheaper: str | None
) -> None:
    """What the cheaper one has chosen has a name of its own, by which such requests find it."""
    rank = make_priced(**dear)
    told = rank.ask(fused(B, A, fusion=asking))
    assert told.selector == cheaper
    if cheaper is None:
        assert (told.relocated, Fallback.NOT_WORTH_IT in told.fallbacks) == (0, True)
        return
    recipe = f"{rank.fuser.fusion_pass.calibration.resolve(asking).recipe}/by={cheaper}"
    assert rank.node(HEAD, B, A, recipe=recipe) is not None
    again = rank.ask(fused(B, A, fusion=asking))
    assert (again.selector, again.fused_hit >= len(B + A)) == (cheaper, True)


def test_what_follows_a_cheaper_choice_is_chosen_so_too() -> None:
    """Also once the asked selector pays: its recipe would not say how its KV was made."""
    rank = make_priced(deviation=DEAR)
    rank.serve(fused(B, A, fusion=CRITICAL))
    rank.fuser.pricing.costs = dict(COSTS)
    for _ in range(2):
        told = rank.ask(fused(B, A, D, fusion=CRITICAL))
        assert (told.selector, told.fused_hit >= len(B + A)) == ("query", True)
    assert rank.ask(fused(D, A, fusion=CRITICAL)).selector == "critical"


def test_nothing_cheaper_follows_what_the_selector_itself_has_chosen() -> None:
    """Else a recipe would not say how its KV was made."""
    rank = make_priced()
    rank.serve(fused(B, fusion=ASKING))
    rank.fuser.pricing.costs = {**COSTS, Phase.QUESTION: Line(fixed=3.0)}
    told = rank.ask(fused(B, A, fusion=ASKING))
    assert (told.fused_hit, told.selector) == (len(B), "query"), "that of what was found"
    assert Fallback.NOT_WORTH_IT in told.fallbacks
    rank.serve(fused(D, A, fusion=ASKING))
    assert rank.node(HEAD, D, A, recipe=f"{ASKING.recipe}/by=first") is not None


def test_focus_that_eats_the_gain_is_left_out() -> None:
    recipe = f"context{QUESTION_NAME}who"
    focused = replace(make_request("context", 0.25), focus="spare", recipe=recipe)
    rank = make_priced(question=DEAR)
    told = [rank.ask(fused(B, A, fusion=focused)) for _ in range(2)]
    assert [each.selector for each in told] == ["context without focus"] * 2
    assert told[1].fused_hit


@pytest.mark.parametrize("deviation", [Line(each=0.01), DEAR], ids=["pays", "does not"])
def test_a_quality_of_which_nothing_is_known_is_said(deviation: Line) -> None:
    """And what does not pay is computed: no cheaper selector is known to keep a quality."""
    asking = replace(make_request("deviation", 0.25), depth=None, quality=0.9)
    told = make_priced(deviation=deviation).ask(fused(B, A, fusion=asking))
    assert bool(told.relocated) is (deviation is not DEAR)
    assert (Fallback.UNCALIBRATED in told.fallbacks) is (deviation is not DEAR)


@pytest.mark.parametrize(
    ("fixed", "period"), [(7.0, 1), (16.9, 2), pytest.param(28.9, 4, marks=pytest.mark.nightly)]
)
def test_what_does_not_pay_is_tried_now_and_then(
    fixed: float, period: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a machine that was slow while it measured itself would never learn that it is not. What
    takes longer is tried more rarely: every try costs more."""
    monkeypatch.setattr(pricing, "REFRESH", 10**9)
    rank = make_priced(capacity=6000, recompute=Line(fixed=fixed, each=1.0))
    period *= EXPLORATION_PERIOD
    reqs = [fused(B, A, fusion=ASKING, head=[200 + i, 91]) for i in range(2 * period)]
    told = [rank.ask(req) for req in reqs]
    tried = [number for number, each in enumerate(told, 1) if each.relocated]
    assert tried == [period, 2 * period]


def test_plan_is_compared_with_what_filling_and_extend_took() -> None:
    """An hour of filling was not foreseen."""
    rank = make_priced()
    rank.fuser.pricing.start()
    rank.fuser.pricing.costs = dict(COSTS)
    told = rank.ask(fused(B, A, fusion=ASKING))
    [error] = rank.fuser.pricing._plan_errors
    assert error == pytest.approx(1 - told.estimated_ms["planned"] / 1000 / FILLING_S, rel=1e-3)
    rank.serve(fused(D, A, fusion=replace(ASKING, always=True)))
    assert len(rank.fuser.pricing._plan_errors) == 1, "nothing was estimated"


@pytest.mark.parametrize("chunks", [(C, B), (B, C)])
def test_extends_of_every_request_are_learnt(chunks: tuple[list[int], ...]) -> None:
    rank = make_priced()
    pricing = rank.fuser.pricing
    pricing.poll()
    before = pricing.model.num_observed[Phase.EXTEND]
    rank.serve(rag(*chunks))
    pricing.poll()
    assert pricing.model.num_observed[Phase.EXTEND] == before + 1
