"""Quality metrics against hand-computed values and slow references."""

from __future__ import annotations

import math
from functools import cache

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


# Metrics


def test_normalize_is_squads() -> None:
    assert normalize(" The  co-op's answer, an Apple; a theatre!") == "coops answer apple theatre"


def test_exact_match_takes_any_right_answer() -> None:
    assert exact_match("the Bramburg.", ["Diana visited Bramburg.", "Bramburg"])
    assert not exact_match("Bramburg Diana", ["Bramburg"])
    assert not exact_match("Bramburg", [])


def test_f1_by_hand() -> None:
    assert f1("The red blue green", ["red blue grey black"]) == pytest.approx(4 / 7)
    assert f1("red blue green", ["black", "red blue grey black"]) == pytest.approx(4 / 7)
    assert f1("red red", ["red"]) == pytest.approx(2 / 3)
    assert (f1("", ["the"]), f1("", ["red"]), f1("red", [])) == (1.0, 0.0, 0.0)


def test_rouge_l_by_hand() -> None:
    """ "police killed the gunman" and "police kill the gunman": LCS 3 of 4 and 4 words."""
    assert rouge_l("Police killed the gunman.", "police kill the gunman") == pytest.approx(0.75)
    assert rouge_l("a b c", "c b a") == pytest.approx(1 / 3)
    assert (rouge_l("", "..."), rouge_l("", "a")) == (1.0, 0.0)


def test_jaccard_by_hand() -> None:
    assert jaccard("Red, red blue!", "the blue grey red") == pytest.approx(2 / 4)
    assert (jaccard("", "..."), jaccard("", "a"), jaccard("a", "b")) == (1.0, 0.0, 0.0)


def test_normalized_f1_is_the_papers() -> None:
    assert normalized_f1(0.781, full_reuse=0.712, full_prefill=0.852) == pytest.approx(
        0.493, abs=1e-3
    )
    assert normalized_f1(0.712, full_reuse=0.712, full_prefill=0.852) == 0
    assert normalized_f1(0.852, full_reuse=0.712, full_prefill=0.852) == 1
    assert normalized_f1(0.6, full_reuse=0.712, full_prefill=0.852) == pytest.approx(-0.8)


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
    x, y = " ".join(a), " ".join(b)
    for metric in (rouge_l, jaccard, lambda p, q: f1(p, [q])):
        assert 0 <= metric(x, y) <= 1
        assert metric(x, y) == pytest.approx(metric(y, x))
        assert metric(x, x) == 1
    assert f1(x, [" ".join(sorted(a))]) == 1


def test_kl_by_hand() -> None:
    p, q = {1: math.log(0.5), 2: math.log(0.5)}, {1: math.log(0.25), 2: math.log(0.75)}
    assert kl_divergence(p, q) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))
    assert kl_divergence(q, p) == pytest.approx(0.25 * math.log(1 / 2) + 0.75 * math.log(3 / 2))


def test_kl_lumps_what_is_left_out() -> None:
    p, q = {1: math.log(0.5), 2: math.log(0.3)}, {1: math.log(0.25), 3: math.log(0.6)}
    assert kl_divergence(p, q) == pytest.approx(0.5 * math.log(2) + 0.5 * math.log(2 / 3))


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
    half = {1: math.log(0.5), 2: math.log(0.5)}
    assert kl_divergence(half, {1: 0.0, 2: -math.inf}) == math.inf
    assert kl_divergence({1: 0.0, 2: -math.inf}, half) == pytest.approx(math.log(2))
    assert math.isnan(kl_divergence({1: math.nan}, {1: 0.0}))
    assert math.isnan(kl_divergence({1: 0.0}, {2: math.nan}))


def test_kl_refuses_what_is_no_distribution() -> None:
    with pytest.raises(ValueError, match="q must add up"):
        kl_divergence({1: 0.0}, {1: 0.0, 2: -1.0})


def test_answer_kls_end_where_answers_part() -> None:
    p, q = {1: math.log(0.5), 2: math.log(0.5)}, {1: math.log(0.25), 2: math.log(0.75)}
    step = kl_divergence(p, q)
    assert answer_kls([p, p, p], [1, 1, 1], [p, q, q], [1, 2, 1]) == [0, pytest.approx(step)]
    assert answer_kls([p, p], [1, 1], [q, q], [1, 1]) == pytest.approx([step, step])
    assert answer_kls([p, p, p], [1, 1, 2], [q], [1]) == pytest.approx([step])
    with pytest.raises(ValueError):
        answer_kls([], [], [], [])
