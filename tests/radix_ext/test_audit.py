"""The audit's states: what leads from one to the next, and how often a broken or a sound selector is paused."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from radix_ext.audit import Audit, AuditState, Change, Terms
from radix_ext.fusion_request import FusionRequest

QUERY = FusionRequest("query", 0.15)
ASKED, RAISED, PAUSED, PROBATION = AuditState


def make_audit(*, share: float = 1.0, pause: int = 5, seed: str = "s") -> Audit:
    return Audit(share=share, target=0.9, pause=pause, seed=seed)


def sample(audit: Audit, *, is_below: bool, fusion: FusionRequest = QUERY) -> Change | None:
    """One audited request, from its plan to the comparison of its answer."""
    terms = audit.terms(fusion)
    assert terms.is_sampled
    begun = audit.begin(terms)
    assert begun is None
    return audit.observe(terms, 0.89 if is_below else 0.9)


def bring_to(audit: Audit, state: AuditState, fusion: FusionRequest = QUERY) -> None:
    """By answers below the target, and by waiting for the end of a pause."""
    for _ in range(100):
        terms = audit.terms(fusion)
        if terms.state is state:
            return
        audit.begin(terms)
        if terms.is_sampled:
            audit.observe(terms, 0.0)
    raise AssertionError(f"never {state}")


def samples_until_pause(rate: float, seed: int, most: int) -> int | None:
    """Answers of which a share of `rate` is below the target. None: not paused within `most`."""
    audit, drawn = make_audit(seed=str(seed)), random.Random(seed)
    for number in range(1, most + 1):
        change = sample(audit, is_below=drawn.random() < rate)
        if change and change.after is PAUSED:
            return number
    return None


@pytest.mark.parametrize("rate", [0.7, 1.0])
def test_broken_selector_is_paused_within_20_samples(rate: float) -> None:
    """In at least 99 of 100 runs, with the samples that raise the ratio first."""
    assert sum(samples_until_pause(rate, seed, 20) is not None for seed in range(100)) >= 99


@pytest.mark.parametrize("rate", [0.0, 0.02, 0.05])
def test_sound_selector_is_hardly_ever_paused(rate: float) -> None:
    """At most one false pause in 100 runs of 500 samples."""
    assert sum(samples_until_pause(rate, seed, 500) is not None for seed in range(100)) <= 1


@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_share_is_sampled(share: float) -> None:
    """Of 20,000 requests, within four standard deviations; all are moved."""
    audit, count = make_audit(share=share), 0
    for _ in range(20_000):
        terms = audit.terms(QUERY)
        assert terms.is_moved
        audit.begin(terms)
        count += terms.is_sampled
    assert abs(count - 20_000 * share) <= 4 * (20_000 * share * (1 - share)) ** 0.5


def test_terms_hold_until_a_request_begins() -> None:
    """A plan that is only explained shows what the next request gets, and changes nothing."""
    audit = make_audit(share=0.5)
    for _ in range(50):
        terms = audit.terms(QUERY)
        assert audit.terms(QUERY) == terms
        audit.begin(terms)


def test_same_seed_decides_alike() -> None:
    """Runs can be repeated."""

    def drawn(seed: str) -> list[bool]:
        audit, found = make_audit(share=0.5, seed=seed), []
        for _ in range(50):
            terms = audit.terms(QUERY)
            audit.begin(terms)
            found.append(terms.is_sampled)
        return found

    assert drawn("s") == drawn("s") != drawn("t")


def test_way_down() -> None:
    """Three answers below the target raise the ratio, three more pause; a change says what decided it."""
    audit = make_audit()
    changes = [sample(audit, is_below=True) for _ in range(6)]
    assert changes == [
        None,
        None,
        Change("query", ASKED, RAISED, 3, 3),
        None,
        None,
        Change("query", RAISED, PAUSED, 3, 3),
    ]


def test_way_back() -> None:
    """Clean answers bring a raised ratio back, and a selector on probation to a raised ratio."""
    audit = make_audit()
    for state in (RAISED, PROBATION):
        bring_to(audit, state)
        changes = list(filter(None, (sample(audit, is_below=False) for _ in range(20))))
        wanted = {RAISED: [ASKED], PROBATION: [RAISED, ASKED]}[state]
        assert [change.after for change in changes] == wanted


def test_clean_answers_are_no_credit() -> None:
    """A selector that breaks after a thousand good answers is caught as soon as one that was broken from the start."""
    audit = make_audit()
    for _ in range(1000):
        assert sample(audit, is_below=False) is None
    changes = [sample(audit, is_below=True) for _ in range(6)]
    assert [change.after for change in changes if change] == [RAISED, PAUSED]


def test_pause_ends_after_its_requests() -> None:
    """They are served exactly, and none is sampled."""
    audit = make_audit(pause=5)
    bring_to(audit, PAUSED)
    for _ in range(4):
        terms = audit.terms(QUERY)
        assert (terms.served(QUERY), terms.is_sampled) == (None, False)
        assert audit.begin(terms) is None
    change = audit.begin(audit.terms(QUERY))
    assert change == Change("query", PAUSED, PROBATION, 0, 0)


def test_probation_moves_a_tenth_and_audits_it() -> None:
    """The others stay exact: a selector that is still broken harms few."""
    audit = make_audit(share=0.01)
    audit.terms(QUERY)
    audit._enter("query", PROBATION)
    seen = []
    for _ in range(5000):
        seen.append(audit.terms(QUERY))
        audit.begin(seen[-1])
    assert all(terms.is_moved == terms.is_sampled for terms in seen)
    assert 400 <= sum(terms.is_moved for terms in seen) <= 600


def test_probation_pauses_again() -> None:
    """Three answers below the target."""
    audit = make_audit()
    bring_to(audit, PROBATION)
    changes = [sample(audit, is_below=True) for _ in range(3)]
    assert changes == [None, None, Change("query", PROBATION, PAUSED, 3, 3)]
    assert audit.stats()["query"]["pauses"] == 2


def test_answer_of_an_earlier_period_is_not_counted() -> None:
    """It was planned under another ratio, and arrives late."""
    audit = make_audit()
    late = audit.terms(QUERY)
    bring_to(audit, RAISED)
    for _ in range(20):
        assert audit.observe(late, 0.0) is None
    assert audit.stats()["query"]["samples"] == 0


def test_selectors_are_apart() -> None:
    """One that is broken says nothing of another."""
    audit, other = make_audit(), FusionRequest("first", 0.15)
    audit.terms(other)
    bring_to(audit, PAUSED)
    assert (audit.terms(QUERY).state, audit.terms(other).state) == (PAUSED, ASKED)


@pytest.mark.parametrize(
    ("asked", "served"),
    [(0.0, 0.15), (0.05, 0.15), (0.15, 0.3), (0.4, 0.5), (0.5, 0.5), (0.7, 0.7), (1.0, 1.0)],
)
def test_raised_ratio(asked: float, served: float) -> None:
    """Twice as much, within bounds, and never less than was asked for. Before, as asked."""
    fusion = FusionRequest("query", asked, alpha=1.5)
    assert Terms("query", ASKED, 0, True, False).served(fusion) == fusion
    for state in (RAISED, PROBATION):
        found = Terms("query", state, 1, True, False).served(fusion)
        assert found is not None
        assert (found.ratio, found.alpha) == (served, 3.0)
        auto = Terms("query", state, 1, True, False).served(replace(fusion, quality=0.99))
        assert auto == replace(found, ratio=max(0.5, asked)), "more than auto may take"


def test_selector_that_recomputes_nothing_is_paused_at_once() -> None:
    """There is no ratio to raise; back from probation it is served as asked."""
    audit, fusion = make_audit(), FusionRequest("none", 0.15)
    changes = [sample(audit, is_below=True, fusion=fusion) for _ in range(3)]
    assert [change.after for change in changes if change] == [PAUSED]
    bring_to(audit, PROBATION, fusion)
    assert audit.terms(fusion).served(fusion) == fusion
    back = [sample(audit, is_below=False, fusion=fusion) for _ in range(10)]
    assert [change.after for change in back if change] == [ASKED]
