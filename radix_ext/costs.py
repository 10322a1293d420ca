"""What serving a prompt takes, in seconds: fitted to what was measured, so that a plan can compare
moving KV with computing it.

    seconds = calls * fixed + tokens * each + pairs * attended   one line a phase, coefficients at
                                                                 least 0

`pairs` counts the keys that the tokens attend to, summed over tokens. Least squares of the relative
error, over the measurements made at the start and over what was observed since, of which older ones
count less and less. Pure: it reads no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import combinations
from statistics import quantiles
from typing import NamedTuple


class Phase(StrEnum):
    """What takes time before the first token."""

    EXTEND = "extend"  # SGLang's prefill of what is not cached
    RECOMPUTE = "recompute"  # the pass over critical tokens and gaps
    QUESTION = "question"  # the question's window over all that is moved
    DEVIATION = "deviation"  # the promised region through the first layers
    DEVICE = "device"  # moves within the device
    HOST = "host"  # moves from host memory, a call a chunk
    LOAD = "load"  # exact chains from host memory, a call a forward


class Work(NamedTuple):
    calls: float = 0
    tokens: float = 0
    pairs: float = 0


class Line(NamedTuple):
    """Seconds per call, token and pair."""

    fixed: float = 0.0
    each: float = 0.0
    attended: float = 0.0

    def seconds(self, work: Work) -> float:
        return self.fixed * work.calls + self.each * work.tokens + self.attended * work.pairs


Costs = Mapping[Phase, Line]  # one line of each phase

NOMINAL: Costs = {
    Phase.EXTEND: Line(each=1.0),
    Phase.RECOMPUTE: Line(each=1.0),
    Phase.QUESTION: Line(),
    Phase.DEVIATION: Line(),
    Phase.DEVICE: Line(each=0.001),
    Phase.HOST: Line(each=0.002),
    Phase.LOAD: Line(each=0.001),
}
"""In units of a computed token, where nothing was measured:
moving costs nearly nothing, from the host twice as much."""


def extend_work(start: int, end: int, *, piece: int | None = None) -> Work:
    """SGLang's prefill of positions `[start, end)`, `piece` tokens a call; None: all in one."""
    num_tokens = end - start
    # Token p, counted from 0, attends to p + 1 keys.
    calls = -(-num_tokens // piece) if piece else num_tokens > 0
    return Work(calls, num_tokens, (end * (end + 1) - start * (start + 1)) / 2)


def through(share: float, num_tokens: int, num_keys: int) -> Work:
    """A pass of tokens over so many keys, through a share of the model's layers."""
    return Work(num_tokens > 0, share * num_tokens, share * num_tokens * num_keys)


def copied_within(costs: Costs, seconds: float) -> int | None:
    """Tokens that are copied to host memory in so much time: as many as come back. None: nobody has
    measured that."""
    if costs is NOMINAL:
        return None
    lines = (costs[phase] for phase in (Phase.LOAD, Phase.HOST) if phase in costs)
    line = next((line for line in lines if line.each), None)
    return line and int(max(0.0, seconds - line.fixed) / line.each)


def seconds(costs: Costs, works: Mapping[Phase, Work]) -> float:
    return sum(costs[phase].seconds(work) for phase, work in works.items())


EXPLORATION_PERIOD = 32
"""Of the moves and loads that are estimated not to pay one in so many is made: what never runs is
never observed, and what was measured while the machine was busy would look dear for ever. It costs
a hundredth or two of the time."""
MEMORY = 64  # observations of a phase that count, about
PRIOR = 4.0
"""Observations that the measurements made at the start stand for, however many they are; fewer the
more there are of others: a tenth of it decides where those say nothing."""
MAX_SURPRISE = 3.0
"""An observation counts as at most this multiple of its estimate, and at least its reciprocal: a
machine that stood still says nothing of the next pass, and a clock that did would make a phase look
free."""


def explores(num_refused: int) -> bool:
    """Whether the `num_refused`-th of what is estimated not to pay is done all the same."""
    return num_refused % EXPLORATION_PERIOD == 0


@dataclass(slots=True)
class _Sums:
    """The normal equations of a fit, weighted. The right side is the last column."""

    rows: list[list[float]] = field(default_factory=lambda: [[0.0] * 4 for _ in range(3)])
    weight: float = 0.0

    def add(self, work: Work, seconds: float) -> None:
        # Over `seconds`, for a relative error: else long forwards alone would decide the line.
        row = [part / seconds for part in work]
        for sums, x in zip(self.rows, row, strict=True):
            sums[:] = [old + x * y for old, y in zip(sums, (*row, 1.0), strict=True)]
        self.weight += 1

    def plus(self, other: _Sums, share: float) -> _Sums:
        rows = [
            [x + share * y for x, y in zip(*both, strict=True)]
            for both in zip(self.rows, other.rows, strict=True)
        ]
        return _Sums(rows, self.weight + share * other.weight)


class CostModel:
    """Measurements of each phase, the lines fitted to them, and how far these were off."""

    def __init__(self) -> None:
        self._measured = {phase: _Sums() for phase in Phase}
        self._observed = {phase: _Sums() for phase in Phase}
        self._costs: dict[Phase, Line] = dict.fromkeys(Phase, Line())
        self._errors: dict[Phase, deque[float]] = {
            phase: deque(maxlen=4 * MEMORY) for phase in Phase
        }
        self._mean_work = Work()  # of the prefills observed, as they are forgotten
        self.num_observed = dict.fromkeys(Phase, 0)

    def measure(self, phase: Phase, work: Work, seconds: float) -> None:
        """A measurement made at the start: it is never forgotten."""
        self._measured[phase].add(work, seconds)

    def observe(self, phase: Phase, work: Work, seconds: float) -> None:
        """What a phase took in service. `seconds` over 0."""
        estimate = self._costs[phase].seconds(work)
        if estimate > 0:
            # Before `seconds` is bounded, since the stats say how far estimates really are off.
            self._errors[phase].append(abs(estimate - seconds) / seconds)
            seconds = min(max(seconds, estimate / MAX_SURPRISE), MAX_SURPRISE * estimate)
        if phase is Phase.EXTEND:
            parts = zip(self._mean_work, work, strict=True)
            self._mean_work = Work(*(old + (new - old) / MEMORY for old, new in parts))
        # Older ones count less and less, so that weights sum up to `MEMORY` at most.
        self._observed[phase] = _Sums().plus(self._observed[phase], 1 - 1 / MEMORY)
        self._observed[phase].add(work, seconds)
        self.num_observed[phase] += 1

    def fit(self) -> Costs:
        """The lines, fitted anew: what `observe` compares with from now on.

        A phase that was never observed is taken to have become slower or faster as prefill has.
        """
        for phase, measured in self._measured.items():
            observed = self._observed[phase]
            prior = PRIOR / (1 + observed.weight / PRIOR)
            share = min(1.0, prior / measured.weight) if measured.weight else 0.0
            self._costs[phase] = _solve(observed.plus(measured, share))
        pace = self._pace()
        for phase, observed in self._observed.items():
            if not observed.weight:
                self._costs[phase] = Line(*(pace * part for part in self._costs[phase]))
        return dict(self._costs)

    def _pace(self) -> float:
        """What prefill takes now, of what it took at the start, for the work observed."""
        measured, observed = (
            _solve(sums[Phase.EXTEND]) for sums in (self._measured, self._observed)
        )
        # For the same work: the two lines were fitted to different lengths, and may cross.
        work = self._mean_work
        before, now = measured.seconds(work), observed.seconds(work)
        return now / before if before > 0 and now > 0 else 1.0

    def stats(self) -> dict[str, dict[str, float | None]]:
        """By phase: the line in seconds, and the relative error of its last 256 estimates."""
        return {
            phase.value: {
                **line._asdict(),
                "observed": self.num_observed[phase],
                **spread(self._errors[phase]),
            }
            for phase, line in self._costs.items()
        }


def _solve(sums: _Sums) -> Line:
    """The non-negative line of least error: of every subset the best without constraint."""
    # All zero is an error of 1 each, from which the others are told apart by what they take away.
    best, least = Line(), 0.0
    # Least squares over all coefficients, with negative ones set to 0, is not the best such line.
    for size in (1, 2, 3):
        for chosen in combinations(range(3), size):
            found = _gauss([[sums.rows[i][j] for j in (*chosen, -1)] for i in chosen])
            if found is None or min(found) < 0:
                continue
            gained = sum(x * sums.rows[i][-1] for x, i in zip(found, chosen, strict=True))
            if gained > least * (1 + 1e-9):  # rounding alone chooses no larger subset
                line = dict(zip(chosen, found, strict=True))
                best, least = Line(*(line.get(i, 0.0) for i in range(3))), gained
    return best


def _gauss(matrix: Sequence[Sequence[float]]) -> list[float] | None:
    """The solution of a small symmetric system. None: it has none, within rounding."""
    size = len(matrix)
    # To a diagonal of 1, which makes the bound on pivots relative: pairs exceed calls by far.
    scale = [row[i] ** 0.5 for i, row in enumerate(matrix)]
    if min(scale) == 0:
        return None
    rows = [
        [x / (scale[i] * s) for x, s in zip(row, (*scale, 1.0), strict=True)]
        for i, row in enumerate(matrix)
    ]
    for i, row in enumerate(rows):
        if row[i] < 1e-9:  # positive definite, so the diagonal is the pivot
            return None
        for below in rows[i + 1 :]:
            factor = below[i] / row[i]
            below[:] = [x - factor * y for x, y in zip(below, row, strict=True)]
    found = [0.0] * size
    for i, row in reversed([*enumerate(rows)]):
        found[i] = (row[-1] - sum(row[j] * found[j] for j in range(i + 1, size))) / row[i]
    return [x / s for x, s in zip(found, scale, strict=True)]


def spread(errors: Collection[float]) -> dict[str, float | None]:
    """Median and 90th percentile; None of less than two."""
    if len(errors) < 2:
        return {"error_p50": None, "error_p90": None}
    cuts = quantiles(errors, n=10, method="inclusive")
    return {"error_p50": cuts[4], "error_p90": cuts[8]}
