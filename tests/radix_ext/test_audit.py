"""The audit's states: what leads from one to the next, whose answers do,
and how often broken or sound terms are paused."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from radix_ext.audit import OWN_TERMS, TOLD_TERMS, Audit, AuditDecision, AuditState, Change, Whose
from radix_ext.fusion_request import FusionRequest

QUERY = FusionRequest("query", 0.15)
SERVERS = Whose(None, "query", 0.15)
ASKED, PAUSED, PROBATION = AuditState


def make_audit(
    *, share: float = 1.0, pause: int = 5, seed: str = "s", max_tenants: int = 100
) -> Audit:
    return Audit(
        share=share, target=0.9, pause=pause, seed=seed, server=QUERY, max_tenants=max_tenants
    )


def sample(
    audit: Audit, *, is_below: bool, fusion: FusionRequest = QUERY, tenant: str = "me"
) -> Change | None:
    """One audited request, from its plan to the comparison of its answer."""
    terms = audit.decide(fusion, tenant)
    assert terms.is_sampled
    begun = audit.begin(terms)
    assert begun is None
    return audit.observe(terms, 0.89 if is_below else 0.9)


def bring_to(
    audit: Audit, state: AuditState, fusion: FusionRequest = QUERY, tenant: str = "me"
) -> None:
    """By answers below the target, and by waiting for the end of a pause."""
    for _ in range(100):
        terms = audit.decide(fusion, tenant)
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


# From state to state


@pytest.mark.parametrize(
    ("rate", "most", "num_paused"),
    [
        *((rate, 20, range(99, 101)) for rate in (0.7, 1.0)),
        *((rate, 500, range(2)) for rate in (0.0, 0.02, 0.05)),
    ],
)
def test_broken_terms_are_paused_soon_and_sound_ones_hardly_ever(
    rate: float, most: int, num_paused: range
) -> None:
    """Of 100 runs at least 99 within 20 samples, and at most one within 500."""
    runs = (samples_until_pause(rate, seed, most) for seed in range(100))
    assert sum(run is not None for run in runs) in num_paused


@pytest.mark.parametrize(
    "fusion", [QUERY, FusionRequest("first", 0.3)], ids=["the server's", "own"]
)
@pytest.mark.parametrize("share", [0.0, 0.01, 0.3, 1.0])
def test_share_is_sampled(share: float, fusion: FusionRequest) -> None:
    """Of 20,000 requests, within four standard deviations, on whatever terms; all are moved.
    The same seed decides alike."""

    def drawn(seed: str, num_requests: int) -> list[bool]:
        audit, found = make_audit(share=share, seed=seed), []
        for _ in range(num_requests):
            terms = audit.decide(fusion, "me")
            assert terms.is_moved
            audit.begin(terms)
            found.append(terms.is_sampled)
        return found

    sampled = drawn("s", 20_000)
    assert abs(sum(sampled) - 20_000 * share) <= 4 * (20_000 * share * (1 - share)) ** 0.5
    assert drawn("s", 2000) == sampled[:2000]
    assert (drawn("t", 2000) != sampled[:2000]) == (0 < share < 1)


def test_terms_hold_until_a_request_begins() -> None:
    """A plan that is only explained shows what the next request gets, and changes nothing."""
    audit = make_audit(share=0.5)
    for fusion in (QUERY, FusionRequest("first", 0.3)):
        for _ in range(50):
            terms = audit.decide(fusion, "me")
            assert audit.decide(fusion, "me") == terms
            audit.begin(terms)
    audit.decide(FusionRequest("first", 0.4), "me")
    assert len(audit.stats()["own"]) == 1


@pytest.mark.parametrize(
    ("before", "is_below", "num_answers", "after"),
    [(ASKED, True, 5, PAUSED), (PROBATION, True, 3, PAUSED), (PROBATION, False, 9, ASKED)],
)
def test_answers_lead_from_state_to_state(
    before: AuditState, is_below: bool, num_answers: int, after: AuditState
) -> None:
    """The change says what decided it."""
    audit = make_audit()
    bring_to(audit, before)
    changes = [sample(audit, is_below=is_below) for _ in range(num_answers)]
    num_below = num_answers * is_below
    assert changes[:-1] == [None] * (num_answers - 1)
    assert changes[-1] == Change(SERVERS, before, after, num_answers, num_below)
    assert audit.stats()["server"]["pauses"] == (before is PROBATION) + (after is PAUSED)


def test_clean_answers_are_no_credit() -> None:
    """Terms that break late are caught as soon as those that were broken from the start."""
    audit = make_audit()
    changes = [sample(audit, is_below=number >= 1000) for number in range(1005)]
    assert [change and change.after for change in changes] == [None] * 1004 + [PAUSED]


def test_pause_ends_after_its_requests() -> None:
    audit = make_audit(pause=5)
    bring_to(audit, PAUSED)
    for _ in range(4):
        terms = audit.decide(QUERY, "me")
        assert (terms.is_moved, terms.is_sampled) == (False, False)
        assert audit.begin(terms) is None
    change = audit.begin(audit.decide(QUERY, "me"))
    assert change == Change(SERVERS, PAUSED, PROBATION, 0, 0)


def test_probation_moves_a_tenth_and_audits_it() -> None:
    audit = make_audit(share=0.01)
    audit._enter(SERVERS, audit._standing, PROBATION)
    seen = []
    for _ in range(5000):
        seen.append(audit.decide(QUERY, "me"))
        audit.begin(seen[-1])
    assert all(terms.is_moved == terms.is_sampled for terms in seen)
    assert 400 <= sum(terms.is_moved for terms in seen) <= 600


def test_answer_of_an_earlier_period_is_not_counted() -> None:
    audit = make_audit()
    late = audit.decide(QUERY, "me")
    bring_to(audit, PROBATION)
    for _ in range(20):
        assert audit.observe(late, 0.0) is None
    assert audit.stats()["server"]["samples"] == 0


# Whose answers


@pytest.mark.parametrize(
    ("fields", "whose"),
    [
        ({}, SERVERS),
        ({"recipe": "query/0.15/question=1"}, SERVERS),
        ({"fresh": frozenset({1})}, SERVERS),
        ({"selector": "critical"}, Whose("me", "critical", 0.15)),
        ({"selector": "none"}, Whose("me", "none", None)),
        ({"ratio": 1.0}, Whose("me", "query", 1.0)),
        ({"quality": 0.9}, Whose("me", "query", "auto")),
        ({"layer": 1}, Whose("me", "query", 0.15)),
    ],
    ids=str,
)
def test_whose_answers_count_together(fields: dict[str, Any], whose: Whose) -> None:
    """Another selector, ratio or option is no sign of what others get."""
    assert make_audit().decide(replace(QUERY, **fields), "me").whose == whose


def test_ratio_that_nobody_reads_is_no_term() -> None:
    none = FusionRequest("none", 0.15)
    audit = Audit(share=1.0, target=0.9, pause=5, seed="s", server=none, max_tenants=1)
    assert audit.decide(replace(none, ratio=0.4), "me").whose == Whose(None, "none", None)


def served(
    *, others: FusionRequest | None, mine: FusionRequest, my_rate: float, others_rate: float
) -> list[AuditDecision]:
    """What 4,000 requests on terms of `mine` get whose moved answers fail by `my_rate`,
    every second request being another's."""
    audit, found = make_audit(share=0.2, pause=50), []
    mine_drawn, others_drawn = random.Random(1), random.Random(2)
    for _ in range(4000):
        if others is not None:
            terms = audit.decide(others, "other")
            audit.begin(terms)
            if terms.is_sampled:
                audit.observe(terms, 0.0 if others_drawn.random() < others_rate else 1.0)
        found.append(audit.decide(mine, "me"))
        audit.begin(found[-1])
        if found[-1].is_sampled:
            audit.observe(found[-1], 0.0 if mine_drawn.random() < my_rate else 1.0)
    return found


@pytest.mark.parametrize("my_rate", [0.02, 0.7], ids=["sound", "broken"])
@pytest.mark.parametrize(("ratio", "others_rate"), [(0.0, 0.9), (1.0, 0.0)])
@pytest.mark.parametrize("others", [QUERY, FusionRequest("first", 0.15)], ids=["query", "first"])
def test_half_of_the_traffic_at_another_ratio_changes_nothing(
    others: FusionRequest, ratio: float, others_rate: float, my_rate: float
) -> None:
    """Bad answers at ratio 0 pause nobody else, good ones at ratio 1 hide nothing."""
    alone = served(others=None, mine=QUERY, my_rate=my_rate, others_rate=others_rate)
    overlapped = served(
        others=replace(others, ratio=ratio), mine=QUERY, my_rate=my_rate, others_rate=others_rate
    )
    assert overlapped == alone
    assert any(terms.state is PAUSED for terms in alone) == (my_rate == 0.7)


def test_tenants_own_terms_are_paused_apart_and_return() -> None:
    audit, fusion = make_audit(), FusionRequest("first", 0.15)
    bring_to(audit, PAUSED, fusion, "me")
    others = ((fusion, "you"), (replace(fusion, ratio=0.3), "me"), (QUERY, "me"))
    assert [audit.decide(*each).state for each in others] == [ASKED] * 3
    assert audit.state is ASKED
    assert audit.own_states == {ASKED: 0, PAUSED: 1, PROBATION: 0}
    bring_to(audit, PROBATION, fusion)
    for _ in range(9):
        sample(audit, is_below=False, fusion=fusion)
    assert audit.own_states == {ASKED: 1, PAUSED: 0, PROBATION: 0}


# What is kept


def ask(audit: Audit, ratio: float, tenant: str) -> None:
    audit.begin(audit.decide(FusionRequest("first", ratio), tenant))


def test_inventing_ratios_costs_the_inventor() -> None:
    """Only a tenant's own least recently used terms go; a late answer on them changes nothing."""
    audit, fusion = make_audit(), FusionRequest("first", 0.15)
    bring_to(audit, PAUSED, fusion, "me")
    forgotten = audit.decide(FusionRequest("first", 0.0), "you")
    for number in range(10 * OWN_TERMS):
        ask(audit, number / (10 * OWN_TERMS), "you")
    assert audit.decide(fusion, "me").state is PAUSED
    assert audit.own_states == {ASKED: OWN_TERMS, PAUSED: 1, PROBATION: 0}
    for _ in range(10):
        assert audit.observe(forgotten, 0.0) is None
    assert sum(audit.own_states.values()) == OWN_TERMS + 1


def test_tenants_are_bounded() -> None:
    """Who has not asked on own terms for longest is forgotten, and asked again."""
    audit, fusion = make_audit(max_tenants=3), FusionRequest("first", 0.15)
    bring_to(audit, PAUSED, fusion, "me")
    bring_to(audit, PAUSED, fusion, "you")
    ask(audit, 0.15, "me")
    for tenant in ("a", "b"):
        ask(audit, 0.15, tenant)
    assert [audit.decide(fusion, tenant).state for tenant in ("me", "you")] == [PAUSED, ASKED]
    assert audit.own_states == {ASKED: 2, PAUSED: 1, PROBATION: 0}


def test_stats() -> None:
    audit = make_audit(max_tenants=1000)
    for number in range(TOLD_TERMS + 5):
        ask(audit, 0.5, f"t{number}")
    sample(audit, is_below=True)
    stats = audit.stats()
    told = {"state": "asked", "requests_until_probation": 0, "pauses": 0}
    server = {"selector": "query", "ratio": 0.15, "samples": 1, "below": 1}
    own = {"selector": "first", "ratio": 0.5, "samples": 0, "below": 0}
    assert stats["server"] == server | told
    assert stats["own_states"] == {"asked": TOLD_TERMS + 5, "paused": 0, "probation": 0}
    assert len(stats["own"]) == TOLD_TERMS
    assert stats["own"][0] == {"tenant": f"t{TOLD_TERMS + 4}"} | own | told
