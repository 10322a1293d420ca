"""Which requests with moved KV are audited, and what follows: nothing is moved until audits agree
again.

    asked ──> paused ──> probation        answers below the target
      ^         ^          │ │
      └─────────│──────────┘ │            answers that meet it
                └────────────┘            again below it

    asked       requests are served as they ask
    paused      nothing is moved, for a number of requests
    probation   a tenth of the requests is moved, and each of these is audited

A state holds for one *terms*, and only answers on these very terms decide it, so that what some try
changes nothing for others. Draws, too, are by terms, seeded and numbered:

    the server's   requests that ask for what the server does by default, whoever sends them
    own            another selector, ratio or option: of one tenant, one selector and one ratio

Every state is a sequential test: an answer below the target is log(.5/.05) of evidence that the
terms are broken, one that meets it log(.5/.95) (Wald 1945; in `asked` the evidence is never below
zero, which is Page's CUSUM of 1954). A change of state begins a new period, and answers planned in
an earlier one say nothing about it.

Knows no KV and no clock.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from dataclasses import dataclass, field, replace
from enum import StrEnum
from hashlib import blake2b
from itertools import chain, islice
from typing import Any, NamedTuple

from radix_ext.fusion_request import AskedRatio, FusionRequest

SOUND, BROKEN = 0.05, 0.5  # shares of answers below the target that the tests tell apart
BELOW, MET = math.log(BROKEN / SOUND), math.log((1 - BROKEN) / (1 - SOUND))
"""Evidence of one answer: 2.30 and -.64."""
TO_PAUSE, ON_PROBATION = 11.0, 5.5
"""Enough to decide. A pause takes five answers below the target in a row, or six with at most four
between them that meet it: one in e^11 = 60,000 tests of sound terms comes to it, at most. On
probation it takes three with at most two, or nine that meet it."""

PROBATION_FACTOR, LEAST_PROBATION = 10, 0.1
"""Of the audited share; the least share of requests on probation."""
OWN_TERMS = 8
"""Terms of its own that a tenant has a state for.
Of more the least recently used ones are forgotten, and are `asked` again."""
TOLD_TERMS = 100  # own terms in the stats, the last used ones


class AuditState(StrEnum):
    ASKED = "asked"
    PAUSED = "paused"
    PROBATION = "probation"


class Whose(NamedTuple):
    """Names terms."""

    tenant: str | None  # None: the server's own, of all tenants
    selector: str
    ratio: AskedRatio


@dataclass(frozen=True, slots=True)
class AuditDecision:
    """How the next request on some terms is served: with moved KV, or exactly."""

    whose: Whose
    state: AuditState
    period: int
    is_moved: bool
    is_sampled: bool


@dataclass(frozen=True, slots=True)
class Change:
    """The state of some terms has changed, with the answers that decided it."""

    whose: Whose
    before: AuditState
    after: AuditState
    samples: int
    below: int


@dataclass(slots=True)
class _Standing:
    state: AuditState = AuditState.ASKED
    num_requests: int = 0
    period: int = 0
    evidence: float = 0.0
    samples: int = 0
    below: int = 0
    left: int = 0  # requests until a pause ends
    pauses: int = 0


@dataclass
class Audit:
    """All terms of a server.

    Args:
        share: of the requests with moved KV, on each terms, from 0 to 1.
        target: share of an answer's tokens that must agree with an exact prefill.
        pause: requests that a pause lasts.
        seed: of the draws. Who knows it knows which requests are audited.
        server: what a request gets that names nothing.
        max_tenants: with terms of their own. Of more the least recently used ones are forgotten.
    """

    share: float
    target: float
    pause: int
    seed: str
    server: FusionRequest
    max_tenants: int
    _own: OrderedDict[str, OrderedDict[Whose, _Standing]] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        # As requests are: what says nothing of an answer's quality is on neither side.
        self.server = _policy(self.server)
        self._servers = Whose(None, self.server.selector, self.server.asked_ratio)
        self._standing = _Standing()
        # Counted along: the metrics show it with each answer that is compared.
        self._own_states = Counter[AuditState]()

    def decide(self, fusion: FusionRequest, tenant: str) -> AuditDecision:
        """What holds for the tenant's next such request. Changes nothing."""
        is_servers = _policy(fusion) == self.server
        whose = self._servers if is_servers else Whose(tenant, fusion.selector, fusion.asked_ratio)
        # No entry is made: a request that is only explained must not push other terms out.
        known = self._find(whose) or _Standing()
        is_trial = known.state is AuditState.PROBATION
        share = max(LEAST_PROBATION, PROBATION_FACTOR * self.share) if is_trial else self.share
        is_drawn = self._drawn(whose, known.num_requests) < share
        is_moved = is_drawn if is_trial else known.state is not AuditState.PAUSED
        return AuditDecision(whose, known.state, known.period, is_moved, is_drawn and is_moved)

    def begin(self, terms: AuditDecision) -> Change | None:
        known = self._used(terms.whose)
        known.num_requests += 1
        # Only requests that were planned within the pause shorten it.
        if terms.period != known.period or known.state is not AuditState.PAUSED:
            return None
        known.left -= 1
        return self._enter(terms.whose, known, AuditState.PROBATION) if known.left <= 0 else None

    def observe(self, terms: AuditDecision, agreement: float) -> Change | None:
        """The answer to a sampled request was compared: this share of its tokens agrees."""
        known, is_below = self._find(terms.whose), agreement < self.target
        # None: the terms, or all of the tenant's, were forgotten while the answer was checked.
        if known is None or terms.period != known.period:
            return None
        known.samples += 1
        known.below += is_below
        known.evidence += BELOW if is_below else MET
        is_asked = known.state is AuditState.ASKED
        if is_asked:
            known.evidence = max(0.0, known.evidence)
        if known.evidence >= (TO_PAUSE if is_asked else ON_PROBATION):
            return self._enter(terms.whose, known, AuditState.PAUSED)
        # Only on probation: under `asked` evidence is never below 0, and a pause has no audits.
        if known.evidence <= -ON_PROBATION:
            return self._enter(terms.whose, known, AuditState.ASKED)
        return None

    @property
    def state(self) -> AuditState:
        """Of the server's terms."""
        return self._standing.state

    @property
    def own_states(self) -> dict[AuditState, int]:
        """How many terms of tenants' own are in each state."""
        return {state: self._own_states[state] for state in AuditState}

    def stats(self) -> dict[str, Any]:
        """Of the server's terms and of the last used ones of tenants' own."""
        return {
            "server": _told(self._servers, self._standing),
            "own_states": {state.value: number for state, number in self.own_states.items()},
            "own": [
                {"tenant": whose.tenant, **_told(whose, known)}
                for whose, known in islice(
                    chain.from_iterable(
                        reversed(own.items()) for own in reversed(self._own.values())
                    ),
                    TOLD_TERMS,
                )
            ],
        }

    # Private, in order of use

    def _find(self, whose: Whose) -> _Standing | None:
        """A look, no use. None: the tenant has no state on these terms."""
        if whose.tenant is None:
            return self._standing
        own = self._own.get(whose.tenant)
        return None if own is None else own.get(whose)

    def _drawn(self, whose: Whose, number: int) -> float:
        """From 0 to 1, below 1."""
        data = repr((self.seed, *whose, number)).encode("utf-8", "surrogatepass")
        # A float holds 48 bits exactly; with 64 a draw could round up to 1 and miss a share of 1.
        return int.from_bytes(blake2b(data, digest_size=6).digest(), "little") / (1 << 48)

    def _used(self, whose: Whose) -> _Standing:
        """Made where missing. It is its tenant's last used one, and he the last that used any."""
        if whose.tenant is None:
            return self._standing
        own = self._own.setdefault(whose.tenant, OrderedDict())
        self._own.move_to_end(whose.tenant)
        if whose not in own:
            own[whose] = _Standing()
            self._own_states[AuditState.ASKED] += 1
        own.move_to_end(whose)
        # After both moves to the end, so that what is used now never goes.
        if len(own) > OWN_TERMS:
            self._own_states[own.popitem(last=False)[1].state] -= 1
        if len(self._own) > self.max_tenants:
            self._own_states.subtract(
                known.state for known in self._own.popitem(last=False)[1].values()
            )
        return own[whose]

    def _enter(self, whose: Whose, known: _Standing, state: AuditState) -> Change:
        change = Change(whose, known.state, state, known.samples, known.below)
        if whose.tenant is not None:
            self._own_states[known.state] -= 1
            self._own_states[state] += 1
        known.state, known.period = state, known.period + 1
        # `num_requests` goes on: from 0 each period would repeat the draws of the one before.
        known.evidence, known.samples, known.below = 0.0, 0, 0
        known.left = self.pause if state is AuditState.PAUSED else 0
        known.pauses += state is AuditState.PAUSED
        return change


def _policy(fusion: FusionRequest) -> FusionRequest:
    """What decides an answer's quality: no price, no recipe, no ratio that nobody reads."""
    ratio = fusion.ratio if fusion.recomputes else 0.0
    return replace(fusion, ratio=ratio, recipe="", fresh=frozenset(), always=False)


def _told(whose: Whose, known: _Standing) -> dict[str, Any]:
    return {
        "selector": whose.selector,
        "ratio": whose.ratio,
        "state": known.state.value,
        "samples": known.samples,
        "below": known.below,
        "requests_until_probation": known.left,
        "pauses": known.pauses,
    }
