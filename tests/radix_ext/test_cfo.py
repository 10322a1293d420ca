"""Cache-Craft's equations: one example by hand each, then what must hold for all."""

from __future__ import annotations

from math import exp, inf, log

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from radix_ext.cfo import (
    Attention,
    cfo,
    context_impact,
    fix_overhead,
    inter_density,
    intra_density,
    order_penalty,
    prefix_overlap,
    solve_alpha,
)
from tests.examples import examples
from tests.reference.naive_selectors import bisect_alpha, kendall_distance, mean_cfo
from tests.reference.sources import ids, make_sums

prefixes = st.lists(st.sampled_from("abcdef"), unique=True).map("".join)


def three_quarters(num_tokens: int = 4) -> Attention:
    """A chunk of CCI 0.75 after p and q: b = 1, a = log 3, three quarters of it from p,
    which is as long as q."""
    mass = num_tokens * log(3)
    return make_sums([0.75 * mass, 0.25 * mass], [1, 1], intra=num_tokens**2, num_tokens=num_tokens)


@pytest.mark.parametrize(
    ("old", "masses", "new", "expected"),
    [
        ("pqr", (1, 2, 5), "rp", 6 / 8),
        ("pqr", (1, 2, 5), "xq", 2 / 8),
        ("", (), "p", 0),
        ("p", (0.0,), "p", 0),
    ],
)
def test_prefix_overlap_by_hand(
    old: str, masses: tuple[float, ...], new: str, expected: float
) -> None:
    """Eq. 6: the mass of what is here again; its order plays no part, nor does what is new."""
    assert prefix_overlap(ids(old), masses, ids(new)) == expected


def test_prefix_overlap_refuses_scores_of_another_prefix() -> None:
    with pytest.raises(ValueError, match="zip"):
        prefix_overlap(ids("pq"), (1.0,), ids("p"))


def test_adjusted_overlap_by_hand() -> None:
    """Eq. 8, which is what is left of CCI."""
    scores = make_sums([1, 2, 4, 1], [1] * 4, intra=1, num_tokens=4)
    overlap = 1 - fix_overhead(ids("pqrs"), scores, ids("prq")) / context_impact(scores)
    assert overlap == pytest.approx(7 / 8 * 2 / 3)


def test_densities_by_hand() -> None:
    """Eq. 9: 6/(4*3) + 3/(4*5) = 0.65 and 8/16 = 0.5."""
    scores = make_sums([6, 3], [3, 5], intra=8, num_tokens=4)
    assert inter_density(scores) == pytest.approx(0.65)
    assert intra_density(scores) == 0.5


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        (make_sums([6, 3], [3, 5], intra=8, num_tokens=4), 1 / (1 + exp(-1.3))),
        (three_quarters(), 0.75),
        (make_sums([4], [1], intra=1, num_tokens=4), 1 / (1 + exp(-16))),  # a/b, not b/a
        (make_sums(intra=3, num_tokens=2), 0.5),  # nothing before it
        (make_sums([1], [1], intra=0, num_tokens=1), 1),  # nothing inside it
        (make_sums([0], [1], intra=0, num_tokens=1), 0.5),
        (make_sums([1e30], [1], intra=1e-30, num_tokens=1), 1),
    ],
)
def test_context_impact_by_hand(scores: Attention, expected: float) -> None:
    """Eq. 11."""
    assert context_impact(scores) == pytest.approx(expected)


def test_fix_overhead_by_hand() -> None:
    """0.75 * (1 - 0.75). Unscored takes the worst: CCI 1, and each chunk alike."""
    assert fix_overhead(ids("pq"), three_quarters(), ids("p")) == pytest.approx(0.1875)
    assert fix_overhead(ids("pq"), None, ids("p")) == 0.5
    assert fix_overhead((), None, ids("p")) == 1


def test_another_head_adds_to_eq_6_and_9() -> None:
    """beta: 2 of 2 + 6. a: 2/(4*1) + 6/(4*3) = 1 where b is 8/16. The same head counts not."""
    scores = make_sums([2], [1], intra=8, num_tokens=4, head=6, head_len=3)
    assert inter_density(scores) == 0.5
    assert inter_density(scores, other_head=True) == 1
    assert fix_overhead(ids("p"), scores, ids("p")) == fix_overhead((), None, ()) == 0
    assert fix_overhead(ids("p"), scores, ids("p"), other_head=True) == pytest.approx(
        0.75 / (1 + exp(-2))
    )
    assert fix_overhead(ids("p"), None, ids("p"), other_head=True) == 0.5


@pytest.mark.parametrize(
    ("alpha", "overhead", "num_tokens", "expected"),
    [
        (0.5, 0.8, 10, 0.4),
        (0.0, 0.8, 10, 0.1),
        (0.1, 0.1, 4, 0.25),
        (9, 0.8, 10, 1),
        (inf, 0, 10, 1),
        (5, 0, 10, 0.1),
    ],
)
def test_cfo_by_hand(alpha: float, overhead: float, num_tokens: int, expected: float) -> None:
    """Eq. 12 within [1/n, 1]."""
    assert cfo(alpha, overhead, num_tokens) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("overheads", "lens", "ratio", "alpha"),
    [
        ([0.5, 0.25], [10, 30], 0.25, 0.8),  # 5a + 7.5a = 10; a mean by chunk would say 2/3
        ([0.0, 0.5], [10, 10], 0.9, 2.0),  # at most 1 + 10 of 20: the least alpha that gets there
        ([0.5], [10], 1.0, inf),
        ([0.5], [10], 0.0, 0.0),
        ([0.0], [10], 0.5, 0.0),
        ([], [], 0.5, 0.0),
    ],
)
def test_solve_alpha_by_hand(
    overheads: list[float], lens: list[int], ratio: float, alpha: float
) -> None:
    assert solve_alpha(overheads, lens, ratio) == pytest.approx(alpha)


BETTER_AND_BETTER = [
    ("", make_sums(intra=1, num_tokens=4)),
    *((before, three_quarters()) for before in ("xy", "xq", "qp", "pq")),
]


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        (BETTER_AND_BETTER, 4),
        # 0.5 < 0.75 * (1 - 0.25); q-p is discordant, so 0.75
        (BETTER_AND_BETTER[:4], 0),
        (BETTER_AND_BETTER[1:4], 1),
        ([("xy", three_quarters()), ("yx", three_quarters())], 0),  # every rank takes the same
        ([("xy", None), ("xy", three_quarters())], 1),
        ([("pq", None), ("xy", three_quarters())], 0),
    ],
)
def test_best_variant_needs_least(
    candidates: list[tuple[str, Attention | None]], expected: int
) -> None:
    """In a prompt that has p and q before the chunk."""
    overheads = [fix_overhead(ids(before), scores, ids("pq")) for before, scores in candidates]
    assert overheads.index(min(overheads)) == expected


@given(old=prefixes, new=prefixes)
def test_order_penalty_equals_all_pairs(old: str, new: str) -> None:
    gamma = order_penalty(ids(old), ids(new))
    assert gamma == pytest.approx(kendall_distance(old, new))
    assert 0 <= gamma <= 1
    assert gamma == order_penalty(ids(new), ids(old))


@given(old=prefixes, new=prefixes, data=st.data())
def test_overhead_is_a_share(old: str, new: str, data: st.DataObject) -> None:
    """Sharing more never costs more at the same order."""
    inter = data.draw(st.lists(st.floats(0, 10), min_size=len(old), max_size=len(old)))
    scores = make_sums(inter, [3] * len(old), intra=data.draw(st.floats(0, 10)), num_tokens=5)
    assert 0 <= prefix_overlap(ids(old), inter, ids(new)) <= 1 + 1e-12
    assert -1e-12 <= fix_overhead(ids(old), scores, ids(new)) <= 1
    assert (
        fix_overhead(ids(old), scores, ids(old)) <= fix_overhead(ids(old), scores, ids(new)) + 1e-12
    )


@given(
    chunks=st.lists(
        st.tuples(st.floats(0.001, 1) | st.just(0.0), st.integers(1, 50)), min_size=1, max_size=8
    ),
    ratio=st.floats(0, 0.999),
)
@settings(max_examples=examples(300))
def test_solved_alpha_hits_the_ratio_unless_clamps_forbid(
    chunks: list[tuple[float, int]], ratio: float
) -> None:
    """The mean equals bisection's, and the ratio wherever it can be reached."""
    overheads, lens = [x for x, _ in chunks], [n for _, n in chunks]
    mean = mean_cfo(solve_alpha(overheads, lens, ratio), overheads, lens)
    assert mean == pytest.approx(
        mean_cfo(bisect_alpha(overheads, lens, ratio), overheads, lens), abs=1e-6
    )
    if mean_cfo(0, overheads, lens) <= ratio <= mean_cfo(1e6, overheads, lens):
        assert mean == pytest.approx(ratio, abs=1e-6)
