"""Which requests with moved KV are audited, and what follows: more is recomputed, or nothing is moved, until audits agree again.

    asked ──> raised ──> paused ──> probation          answers below the target
      ^         │ ^         ^          │ │
      └─────────┘ └─────────│──────────┘ │             answers that meet it
                            └────────────┘             again below it

    asked       requests are served as they ask
    raised      twice the ratio, at least .15, at most .5, in place of a quality; what recomputes nothing is paused at once
    paused      nothing is moved, for a number of requests
    probation   a tenth of the requests is moved, and each of these is audited

Every state is a sequential test: an answer below the target is log(.5/.05) of evidence that the selector is broken, one that
meets it log(.5/.95) (Wald 1945; in `asked` the evidence is never below zero, which is Page's CUSUM of 1954). A change of state
begins a new period, and answers planned in an earlier one say nothing about it.

Knows no KV, no clock and no tenant: a selector is broken or sound for all of them, and one tenant's requests alone would take a
hundred times as long to tell. Draws are seeded, so the same requests get the same decisions.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from radix_ext.fusion_request import MAX_AUTO, FusionRequest

SOUND, BROKEN = 0.05, 0.5
"""Shares of answers below the target that the tests tell apart."""
BELOW, MET = math.log(BROKEN / SOUND), math.log((1 - BROKEN) / (1 - SOUND))
"""Evidence of one answer: 2.30 and -.64."""
EVIDENCE = 5.5
"""Enough to decide: three answers below the target with at most two between them that meet it, or nine that meet it. Of tests of
a sound selector one in e^5.5 = 245 is wrong at most, and a pause takes two in a row."""

LEAST_RATIO, MOST_RATIO = 0.15, 0.5
"""Bounds of a raised ratio: FusionRAG's operating point, and where recomputing rarely pays any more."""
PROBATION_FACTOR, LEAST_PROBATION = 10, 0.1
"""Of the audited share; the least share of requests on probation."""


class AuditState(StrEnum):
    """Of one selector."""

    ASKED = "asked"
    RAISED = "raised"
    PAUSED = "paused"
    PROBATION = "probation"


@dataclass(frozen=True, slots=True)
class Terms:
    """How the next request of a selector is served."""

    selector: str
    state: AuditState
    period: int
    is_moved: bool
    is_sampled: bool

    def served(self, fusion: FusionRequest) -> FusionRequest | None:
        """The request as it is served. None: exactly."""
        if not self.is_moved:
            return None
        if self.state is AuditState.ASKED or not fusion.recomputes:
            return fusion
        asked = fusion.ratio if fusion.quality is None else MAX_AUTO
        ratio = min(MOST_RATIO, max(LEAST_RATIO, 2 * asked))
        alpha = None if fusion.alpha is None else 2 * fusion.alpha
        return replace(fusion, ratio=max(fusion.ratio, ratio), quality=None, alpha=alpha)


@dataclass(frozen=True, slots=True)
class Change:
    """A selector's state has changed, with the answers that decided it."""

    selector: str
    before: AuditState
    after: AuditState
    samples: int
    below: int


@dataclass(slots=True)
class _Selector:
    draw: float
    is_raisable: bool
    state: AuditState = AuditState.ASKED
    period: int = 0
    evidence: float = 0.0
    samples: int = 0
    below: int = 0
    left: int = 0
    """Requests until a pause ends."""
    pauses: int = 0


@dataclass
class Audit:
    """All selectors of a server.

    Args:
        share: of the requests with moved KV, from 0 to 1.
        target: share of an answer's tokens that must agree with an exact prefill.
        pause: requests that a pause lasts.
        seed: of the draws. Who knows it knows which requests are audited.
    """

    share: float
    target: float
    pause: int
    seed: str
    _selectors: dict[str, _Selector] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def terms(self, fusion: FusionRequest) -> Terms:
        """What holds for the next request of this selector. Takes nothing: until one begins, the terms stay the same."""
        known = self._of(fusion)
        is_trial = known.state is AuditState.PROBATION
        share = max(LEAST_PROBATION, PROBATION_FACTOR * self.share) if is_trial else self.share
        is_drawn = known.draw < share
        is_moved = is_drawn if is_trial else known.state is not AuditState.PAUSED
        return Terms(fusion.selector, known.state, known.period, is_moved, is_drawn and is_moved)

    def begin(self, terms: Terms) -> Change | None:
        """A request with these terms was sent."""
        known = self._selectors[terms.selector]
        known.draw = self._random.random()
        if terms.period != known.period or known.state is not AuditState.PAUSED:
            return None
        known.left -= 1
        return self._enter(terms.selector, AuditState.PROBATION) if known.left <= 0 else None

    def observe(self, terms: Terms, agreement: float) -> Change | None:
        """The answer to a sampled request was compared; `agreement` is the share of its tokens that agree."""
        known, is_below = self._selectors[terms.selector], agreement < self.target
        if terms.period != known.period:
            return None
        known.samples += 1
        known.below += is_below
        known.evidence += BELOW if is_below else MET
        if known.state is AuditState.ASKED:
            known.evidence = max(0.0, known.evidence)
        if known.evidence >= EVIDENCE:
            is_raised = known.state is AuditState.ASKED and known.is_raisable
            return self._enter(terms.selector, AuditState.RAISED if is_raised else AuditState.PAUSED)
        if known.evidence <= -EVIDENCE:
            is_back = known.state is AuditState.RAISED or not known.is_raisable
            return self._enter(terms.selector, AuditState.ASKED if is_back else AuditState.RAISED)
        return None

    def state(self, selector: str) -> AuditState:
        """Of a selector that was asked for."""
        return self._selectors[selector].state

    def stats(self) -> dict[str, dict[str, Any]]:
        """By selector: its state, answers compared and below the target in this state, what is left of a pause."""
        return {
            name: {
                "state": known.state.value,
                "samples": known.samples,
                "below": known.below,
                "requests_until_probation": known.left,
                "pauses": known.pauses,
            }
            for name, known in self._selectors.items()
        }

    # Private, in order of use

    def _of(self, fusion: FusionRequest) -> _Selector:
        if fusion.selector not in self._selectors:
            self._selectors[fusion.selector] = _Selector(self._random.random(), fusion.recomputes)
        return self._selectors[fusion.selector]

    def _enter(self, selector: str, state: AuditState) -> Change:
        known = self._selectors[selector]
        change = Change(selector, known.state, state, known.samples, known.below)
        known.state, known.period = state, known.period + 1
        known.evidence, known.samples, known.below = 0.0, 0, 0
        known.left = self.pause if state is AuditState.PAUSED else 0
        known.pauses += state is AuditState.PAUSED
        return change
