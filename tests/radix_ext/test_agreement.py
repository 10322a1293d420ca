"""Agreement and KL of listed probabilities against whole distributions."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from radix_ext.agreement import MAX_KL, Agreement, Row, Tally, compare

WEIGHTS = st.lists(st.floats(0.001, 1), min_size=6, max_size=6)


def normed(weights: list[float]) -> list[float]:
    total = math.fsum(weights)
    return [weight / total for weight in weights]


def row_of(probabilities: list[float], length: int | None = None) -> Row:
    """The best `length` tokens of a distribution over 0, 1, 2…, as SGLang lists them."""
    best = sorted(
        ((math.log(p), token) for token, p in enumerate(probabilities)),
        key=lambda one: (-one[0], one[1]),
    )
    return best[:length]


def kl(p: list[float], q: list[float]) -> float:
    return math.fsum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def hot(weights: list[float], temperature: float) -> list[float]:
    return normed([weight ** (1 / temperature) for weight in weights])


@given(WEIGHTS, WEIGHTS, st.sampled_from([1.0, 0.7, 0.25]))
def test_whole_lists_give_kl(p: list[float], q: list[float], temperature: float) -> None:
    p, q = normed(p), normed(q)
    found = compare([row_of(p)], [row_of(hot(q, temperature))], temperature=temperature)
    exact, moved = hot(p, temperature), hot(q, temperature)
    if min(moved) > 1e-5:
        assert found.kl == pytest.approx(kl(exact, moved), abs=1e-9)


@given(WEIGHTS, WEIGHTS, st.integers(1, 6), st.integers(1, 6))
@example([1.0, 1.0, 1.0, 0.125, 0.125, 0.25], [1.0, 1.0, 0.3125, 1.0, 0.375, 0.25], 1, 4)
def test_short_lists_never_give_more(
    p: list[float], q: list[float], ours: int, theirs: int
) -> None:
    """Of an exact side that lists all, than the KL of whole distributions. It is always finite."""
    p, q = normed(p), normed(q)
    assert 0 <= compare([row_of(p, ours)], [row_of(q, theirs)], temperature=1.0).kl <= MAX_KL + 1e-9
    assert compare([row_of(p)], [row_of(q, theirs)], temperature=1.0).kl <= kl(p, q) + 1e-9


@given(WEIGHTS, st.sampled_from([1.0, 0.7, 0.25]))
@example([0.9999999999999999, 1.0, 1.0, 1.0, 1.0, 0.5], 0.7)
def test_same_distribution_has_no_divergence(p: list[float], temperature: float) -> None:
    """At temperature 1 whatever is listed; below, the rest of a short list is a bound."""
    length = 3 if temperature == 1 else 6
    # Weights that differ by one bit may tie at another temperature, with another best token.
    p = [round(weight, 9) for weight in p]
    found = compare(
        [row_of(normed(p), length)], [row_of(hot(p, temperature), length)], temperature=temperature
    )
    assert found.agreed == 1
    assert found.kl == pytest.approx(0, abs=1e-9)


SAME, OTHER = row_of([0.9, 0.1]), row_of([0.1, 0.9])


@pytest.mark.parametrize(
    ("exact", "moved", "at_least", "at_most"),
    [
        ([(-1e-7, 1), (-20.0, 2)], [(-1e-7, 3), (-20.0, 4)], 10, MAX_KL),
        (row_of([0.51, 0.49]), row_of([0.49, 0.51]), 0, 0.001),
        (SAME, [(math.nan, 0), (math.nan, 1)], MAX_KL, MAX_KL),
    ],
    ids=["certain of different tokens", "near tie", "KV that was never written"],
)
def test_other_tokens_disagree(exact: Row, moved: Row, at_least: float, at_most: float) -> None:
    found = compare([exact], [moved], temperature=1.0)
    assert (found.positions, found.agreed) == (1, 0)
    assert at_least <= found.kl <= at_most


def test_positions_are_averaged() -> None:
    found = compare([SAME] * 4, [SAME, SAME, SAME, OTHER], temperature=1.0)
    assert (found.positions, found.agreed, found.share) == (4, 3, 0.75)
    assert found.kl == pytest.approx(kl([0.9, 0.1], [0.1, 0.9]) / 4)


@pytest.mark.parametrize("temperature", [1.0, 0.8, 0.6])
def test_lists_tell_much_of_a_vocabulary(temperature: float) -> None:
    """20 and 5 of 1,000 tokens: a third of the divergence at least, and not more than there is."""
    rng = random.Random(0)
    p = normed([math.exp(rng.gauss(0, 3)) for _ in range(1000)])
    q = normed([a * math.exp(rng.gauss(0, 0.5)) for a in p])
    found = compare([row_of(p, 20)], [row_of(hot(q, temperature), 5)], temperature=temperature).kl
    whole = kl(hot(p, temperature), hot(q, temperature))
    assert whole / 3 < found <= whole


def test_tally_sums_and_has_the_largest() -> None:
    tally = Tally()
    tally.add(Agreement(4, 4, 0.0), is_below=False)
    tally.add(Agreement(4, 2, 0.5), is_below=True)
    assert (tally.samples, tally.below, tally.max_kl) == (2, 1, 0.5)
    assert (tally.share, tally.kl) == (1.5, 0.5)
