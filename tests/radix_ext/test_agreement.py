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
    """With every token listed nothing is estimated, at any temperature of the answer."""
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
    """Of an exact side that lists all, the estimate never exceeds the KL of the whole
    distributions. In general it is finite."""
    p, q = normed(p), normed(q)
    assert 0 <= compare([row_of(p, ours)], [row_of(q, theirs)], temperature=1.0).kl <= MAX_KL + 1e-9
    assert compare([row_of(p)], [row_of(q, theirs)], temperature=1.0).kl <= kl(p, q) + 1e-9


@given(WEIGHTS, st.sampled_from([1.0, 0.7, 0.25]))
def test_same_distribution_has_no_divergence(p: list[float], temperature: float) -> None:
    """Whatever is listed of it at temperature 1; below, the rest of a short list is a bound."""
    length = 3 if temperature == 1 else 6
    found = compare(
        [row_of(normed(p), length)], [row_of(hot(p, temperature), length)], temperature=temperature
    )
    assert found.agreed == 1
    assert found.kl == pytest.approx(0, abs=1e-9)


def test_certain_of_different_tokens() -> None:
    """Both are all but sure, of tokens that the other does not list:
    the largest divergence, not none."""
    found = compare([[(-1e-7, 1), (-20.0, 2)]], [[(-1e-7, 3), (-20.0, 4)]], temperature=1.0)
    assert found.agreed == 0
    assert found.kl > 10


def test_near_tie_is_a_disagreement_of_little_divergence() -> None:
    """What rounding does."""
    found = compare([row_of([0.51, 0.49])], [row_of([0.49, 0.51])], temperature=1.0)
    assert found.agreed == 0
    assert found.kl < 0.001


def test_not_a_number_disagrees() -> None:
    """An answer from KV that was never written."""
    nan = [(math.nan, 0), (math.nan, 1)]
    assert compare([row_of([0.9, 0.1])], [nan], temperature=1.0) == (1, 0, MAX_KL)


def test_positions_are_averaged() -> None:
    """One row that differs and three that do not."""
    same, other = row_of([0.9, 0.1]), row_of([0.1, 0.9])
    found = compare([same] * 4, [same, same, same, other], temperature=1.0)
    assert (found.positions, found.agreed, found.share) == (4, 3, 0.75)
    assert found.kl == pytest.approx(kl([0.9, 0.1], [0.1, 0.9]) / 4)


@pytest.mark.parametrize("temperature", [0.0, -1.0, 1.01, math.nan])
def test_other_temperatures_are_refused(temperature: float) -> None:
    """Flatter than what is listed."""
    row = row_of([0.9, 0.1])
    with pytest.raises(ValueError, match="temperature"):
        compare([row], [row], temperature=temperature)


def test_rows_must_be_as_many() -> None:
    """One a token, and some."""
    row = row_of([0.9, 0.1])
    for exact, moved in (([], []), ([row], [row, row])):
        with pytest.raises(ValueError, match="as many of both"):
            compare(exact, moved, temperature=1.0)


@pytest.mark.parametrize("temperature", [1.0, 0.8, 0.6])
def test_lists_tell_much_of_a_vocabulary(temperature: float) -> None:
    """20 and 5 of 1,000 tokens: a third of the divergence at least, and not more than there is."""
    rng = random.Random(0)
    p = normed([math.exp(rng.gauss(0, 3)) for _ in range(1000)])
    q = normed([a * math.exp(rng.gauss(0, 0.5)) for a in p])
    found = compare([row_of(p, 20)], [row_of(hot(q, temperature), 5)], temperature=temperature).kl
    whole = kl(hot(p, temperature), hot(q, temperature))
    assert whole / 3 < found <= whole


def test_tally() -> None:
    """Sums, from which the means are made, and the largest."""
    tally = Tally()
    tally.add(Agreement(4, 4, 0.0), is_below=False)
    tally.add(Agreement(4, 2, 0.5), is_below=True)
    assert (tally.samples, tally.below, tally.share, tally.kl, tally.max_kl) == (
        2,
        1,
        1.5,
        0.5,
        0.5,
    )
