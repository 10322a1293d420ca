"""Quality metrics against hand-computed values and slow references."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eval.quality.text_metrics import (
    answer_kls,
    exact_match,
    f1,
    jaccard,
    kl_divergence,
    lcs_len,
    normalize,
    normalized_f1,
    rouge_l,
)

WORDS = st.lists(st.sampled_from("abc"), max_size=9)
WEIGHTS = st.lists(st.floats(0.01, 1), min_size=4, max_size=4)
P, Q = {1: math.log(0.5), 2: math.log(0.5)}, {1: math.log(0.25), 2: math.log(0.75)}


def test_normalize_is_squads() -> None:
    """Articles are dropped as whole words only, punctuation without leaving a space."""
    assert normalize(" The  co-op's answer, an Apple; a theatre!") == "coops answer apple theatre"


@pytest.mark.parametrize(
    ("metric", "answer", "right", "value"),
    [
        (exact_match, "the Bramburg.", ["Diana visited Bramburg.", "Bramburg"], True),
        (exact_match, "Bramburg Diana", ["Bramburg"], False),
        (exact_match, "Bramburg", [], False),
        # two of three words right, two of four found: precision 2/3, recall 1/2
        (f1, "The red blue green", ["red blue grey black"], 4 / 7),
        (f1, "red blue green", ["black", "red blue grey black"], 4 / 7),
        (f1, "red red", ["red"], 2 / 3),
        (f1, "", ["the"], 1),
        (f1, "", ["red"], 0),
        (f1, "red", [], 0),
        # the longest common subsequence is 3 of 4 and 4 words
        (rouge_l, "Police killed the gunman.", "police kill the gunman", 0.75),
        (rouge_l, "a b c", "c b a", 1 / 3),
        (rouge_l, "", "...", 1),
        (rouge_l, "", "a", 0),
        # how often and in which order does not matter, articles count
        (jaccard, "Red, red blue!", "the blue grey red", 2 / 4),
        (jaccard, "", "...", 1),
        (jaccard, "", "a", 0),
    ],
)
def test_metrics_by_hand(
    metric: Callable[..., float], answer: str, right: Any, value: float
) -> None:
    assert metric(answer, right) == pytest.approx(value)


@pytest.mark.parametrize(
    ("value", "ends", "share"),
    [
        (0.781, (0.712, 0.852), 0.493),  # FusionRAG 5.1, by its own equation
        (0.712, (0.712, 0.852), 0),
        (0.852, (0.712, 0.852), 1),
        (0.6, (0.712, 0.852), -0.8),
        (0.5, (0.8, 0.8), None),  # nothing was lost
        (0.5, (0.9, 0.8), None),
    ],
)
def test_normalized_f1_is_the_papers(
    value: float, ends: tuple[float, float], share: float | None
) -> None:
    found = normalized_f1(value, full_reuse=ends[0], full_prefill=ends[1])
    assert found == (share and pytest.approx(share, abs=1e-3))


@given(WORDS, WORDS)
def test_lcs_equals_recursion(a: list[str], b: list[str]) -> None:
    @cache
    def slow(i: int, j: int) -> int:
        if i == len(a) or j == len(b):
            return 0
        return 1 + slow(i + 1, j + 1) if a[i] == b[j] else max(slow(i + 1, j), slow(i, j + 1))

    assert lcs_len(a, b) == slow(0, 0)


@given(WORDS, WORDS)
def test_f1_and_rouge_are_shares(a: list[str], b: list[str]) -> None:
    """Symmetric, and 1 for a text itself; order matters to ROUGE-L alone."""
    x, y = " ".join(a), " ".join(b)
    for metric in (rouge_l, jaccard, lambda p, q: f1(p, [q])):
        assert 0 <= metric(x, y) <= 1
        assert metric(x, y) == pytest.approx(metric(y, x))
        assert metric(x, x) == 1
    assert f1(x, [" ".join(sorted(a))]) == 1


def test_kl_by_hand() -> None:
    """A token that is missing on one side counts as the rest on both."""
    forth, back = (
        sum(p * math.log(p / q) for p, q in pairs)
        for pairs in (((0.5, 0.25), (0.5, 0.75)), ((0.25, 0.5), (0.75, 0.5)))
    )
    assert kl_divergence(P, Q) == pytest.approx(forth)
    assert kl_divergence(Q, P) == pytest.approx(back)
    lumped = {1: math.log(0.5), 2: math.log(0.3)}, {1: math.log(0.25), 3: math.log(0.6)}
    assert kl_divergence(*lumped) == pytest.approx(forth)


@given(WEIGHTS, WEIGHTS, st.integers(0, 4), st.integers(0, 4))
def test_kl_is_never_negative_and_lumping_only_lowers_it(
    a: list[float], b: list[float], kept_a: int, kept_b: int
) -> None:
    p, q = ({token: math.log(w / sum(each)) for token, w in enumerate(each)} for each in (a, b))
    exact = sum(math.exp(p[t]) * (p[t] - q[t]) for t in p)
    assert kl_divergence(p, q) == pytest.approx(exact, abs=1e-9)
    assert kl_divergence(p, p) == 0
    partly = kl_divergence(dict(list(p.items())[:kept_a]), dict(list(q.items())[:kept_b]))
    assert 0 <= partly <= exact + 1e-9


def test_kl_of_what_is_not_finite_is_not_zero() -> None:
    """q rules a token out that p gives half: infinite. A NaN is not "no difference"."""
    assert kl_divergence(P, {1: 0.0, 2: -math.inf}) == math.inf
    assert kl_divergence({1: 0.0, 2: -math.inf}, P) == pytest.approx(math.log(2))
    assert math.isnan(kl_divergence({1: math.nan}, {1: 0.0}))
    assert math.isnan(kl_divergence({1: 0.0}, {2: math.nan}))
    with pytest.raises(ValueError, match="q must add up"):
        kl_divergence({1: 0.0}, {1: 0.0, 2: -1.0})


def test_answer_kls_end_where_answers_part() -> None:
    """The step at which they part counts; later ones have other tokens before them."""
    step = pytest.approx(kl_divergence(P, Q))
    assert answer_kls([P, P, P], [1, 1, 1], [P, Q, Q], [1, 2, 1]) == [0, step]
    assert answer_kls([P, P], [1, 1], [Q, Q], [1, 1]) == [step, step]
    assert answer_kls([P, P, P], [1, 1, 2], [Q], [1]) == [step]
    with pytest.raises(ValueError):
        answer_kls([], [], [], [])
