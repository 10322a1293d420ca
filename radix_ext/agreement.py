"""How far an answer's probabilities are from those of an exact prefill, from the best few tokens of
both at each position.

    exact    A .70  B .20  C .05  rest .05        best first, as SGLang lists them
    moved    A .60  C .30         rest .10        B is not listed: at most .30, and at most the rest
    bins     A  B  C  rest                        KL(exact || moved) over these

The bins are the tokens that either side has among its best, as many of each as the answer lists. A
token that one side does not list gets what makes the sides most alike: of the rest as large a share
as it has on the other side, but no more than the last one that is listed. So KL is estimated low:
where `exact` lists all that counts, it is never more than that of the whole vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

Row = Sequence[tuple[float, int]]
"""The best tokens of one position, best first: (log probability, token id)."""

FLOOR = 1e-6
"""The least probability that counts: float16 and bfloat16 logits tell no smaller one from noise.
Bounds KL to 13.8 nats."""
MAX_KL = -math.log(FLOOR)


class Agreement(NamedTuple):
    positions: int
    agreed: int  # positions whose best token is the same
    kl: float  # KL(exact || moved) in nats, mean of the positions

    @property
    def share(self) -> float:
        return self.agreed / self.positions


def compare(exact: Sequence[Row], moved: Sequence[Row], *, temperature: float) -> Agreement:
    """Compare the rows of an answer's tokens, one each, at least one.

    Args:
        exact: at temperature 1, as SGLang computes them for a prompt.
        moved: at `temperature`, as it computes them for an answer.
        temperature: above 0 and at most 1. Above it, what is not listed of `exact` would count, and
            nobody knows it.
    Raises:
        ValueError: not as many on both sides.
    """
    agreed, divergences = 0, list[float]()
    for ours, theirs in zip(exact, moved, strict=True):
        if not all(math.isfinite(row[0][0]) for row in (ours, theirs)):
            divergences.append(MAX_KL)  # NaN: some KV was none
            continue
        agreed += ours[0][1] == theirs[0][1]
        divergences.append(_divergence(_sharpened(_listed(ours), temperature), _listed(theirs)))
    return Agreement(len(exact), agreed, math.fsum(divergences) / len(divergences))


@dataclass(slots=True)
class Tally:
    """Answers of one selector, ratio and tenant."""

    samples: int = 0
    below: int = 0  # those below the target
    share: float = 0.0  # sum of the shares of positions that agree
    kl: float = 0.0  # sum in nats
    max_kl: float = 0.0

    def add(self, found: Agreement, *, is_below: bool) -> None:
        self.samples += 1
        self.below += is_below
        self.share += found.share
        self.kl += found.kl
        self.max_kl = max(self.max_kl, found.kl)


# Private, in order of use


class _Listed(NamedTuple):
    tokens: Mapping[int, float]  # probabilities
    rest: float  # of all tokens that are not listed


def _listed(row: Row) -> _Listed:
    # A listed probability of 0 would become `least` in `_bins`, and leave 0 to all unlisted tokens.
    tokens = {token: math.exp(logprob) for logprob, token in row if math.isfinite(logprob)}
    # Probabilities rounded to float32 may sum to more than 1.
    return _Listed(tokens, max(0.0, 1.0 - math.fsum(tokens.values())))


def _sharpened(listed: _Listed, temperature: float) -> _Listed:
    """At `temperature`. The rest's tokens are no better than the last that is listed, so together
    they weigh at most what is taken here."""
    if temperature == 1:
        return listed
    power, least = 1 / temperature, min(listed.tokens.values())
    weights = {token: p**power for token, p in listed.tokens.items()}
    rest = listed.rest * least ** (power - 1)
    total = math.fsum(weights.values()) + rest
    return _Listed({token: weight / total for token, weight in weights.items()}, rest / total)


def _divergence(exact: _Listed, moved: _Listed) -> float:
    best = sorted(exact.tokens, key=exact.tokens.__getitem__, reverse=True)
    # A token that both sides list is one bin.
    tokens = [*dict.fromkeys([*moved.tokens, *best[: len(moved.tokens)]])]
    pairs = zip(_bins(exact, moved, tokens), _bins(moved, exact, tokens), strict=True)
    # 0 log 0 is 0. Rounding may leave the sum a little below 0, which KL never is.
    return max(0.0, math.fsum(p * math.log(p / max(q, FLOOR)) for p, q in pairs if p > 0))


def _bins(mine: _Listed, theirs: _Listed, tokens: Sequence[int]) -> list[float]:
    """My probabilities of `tokens`, then of all others. What I do not list the other side tells."""
    left = max(0.0, 1.0 - math.fsum(mine.tokens.get(token, 0.0) for token in tokens))
    others = max(0.0, 1.0 - math.fsum(theirs.tokens.get(token, 0.0) for token in tokens))
    unlisted = {token: theirs.tokens[token] for token in tokens if token not in mine.tokens}
    weight, least = math.fsum(unlisted.values()) + others, min(mine.tokens.values())
    found = dict(mine.tokens)
    # What is over `least` goes to those that follow.
    for token in sorted(unlisted, key=unlisted.__getitem__, reverse=True):
        # At the last token rounding may leave a `weight` of 0 or less.
        found[token] = min(least, left * unlisted[token] / max(weight, FLOOR))
        left, weight = max(0.0, left - found[token]), weight - unlisted[token]
    return [*(found[token] for token in tokens), left]
