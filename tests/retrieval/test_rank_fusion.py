"""Reciprocal rank fusion against its definition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrieval.rank_fusion import reciprocal_rank_fusion

RANKINGS = st.lists(st.lists(st.integers(0, 12), unique=True, max_size=8), max_size=4)
CONSTANTS = st.integers(0, 100)


@given(RANKINGS, st.integers(0, 20), CONSTANTS)
def test_rank_fusion_equals_the_definition(
    rankings: list[list[int]], k: int, constant: int
) -> None:
    """The sum over all rankings; ties by best rank, then by first ranking."""

    def slow_key(item: int) -> tuple[float, int, int]:
        ranks = [ranking.index(item) + 1 if item in ranking else 10**9 for ranking in rankings]
        score = sum(sorted(1.0 / (constant + rank) for rank in ranks if rank < 10**9))
        return (-round(score, 12), min(ranks), ranks.index(min(ranks)))

    fused = reciprocal_rank_fusion(rankings, k=k, constant=constant)
    expected = sorted({item for ranking in rankings for item in ranking}, key=slow_key)[:k]
    assert [item for item, _ in fused] == expected
    assert [score for _, score in fused] == pytest.approx([-slow_key(item)[0] for item in expected])


@given(RANKINGS, CONSTANTS, st.randoms(use_true_random=False))
def test_rank_fusion_scores_do_not_depend_on_the_order_of_rankings(
    rankings: list[list[int]], constant: int, random: object
) -> None:
    """Dense first or BM25 first: the same scores to the last bit."""
    shuffled = list(rankings)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    first = reciprocal_rank_fusion(rankings, k=50, constant=constant)
    assert dict(first) == dict(reciprocal_rank_fusion(shuffled, k=50, constant=constant))


@given(st.lists(st.integers(), unique=True, max_size=8), st.integers(1, 4), CONSTANTS)
def test_rank_fusion_of_equal_rankings_is_that_ranking(
    ranking: list[int], copies: int, constant: int
) -> None:
    fused = reciprocal_rank_fusion([ranking] * copies, k=50, constant=constant)
    assert [item for item, _ in fused] == ranking
