"""Rates against the paper's formulas term by term, against counting, and against drawing."""

from __future__ import annotations

import math
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eval.joint.fusion_rate import (
    compression_ratio,
    density,
    distribution,
    expected_blocks,
    expected_joins,
    extreme_rate,
    gaussian_rate,
    kernel_rate,
    most_joins,
    no_fusion,
    normal_bandwidth,
    num_pairs,
    unit_similarities,
)
from tests.reference import naive_joint

samples = st.lists(st.floats(-1, 1, width=32), min_size=2, max_size=30)
bandwidths = st.floats(0.01, 1)
thresholds = st.floats(-1, 1)


@given(samples, bandwidths, thresholds)
def test_equations_are_the_papers(drawn: list[float], h: float, u: float) -> None:
    similarities, at = torch.tensor(drawn), torch.tensor([u, -u], dtype=torch.float64)
    for found, expected in (
        (density(at, similarities, h), naive_joint.kernel_density),
        (distribution(at, similarities, h), naive_joint.kernel_distribution),
    ):
        assert found.tolist() == pytest.approx([expected(float(x), drawn, h) for x in at], abs=1e-9)
    n_above = len(drawn) * (1 - naive_joint.kernel_distribution(u, drawn, h))
    assert kernel_rate(u, similarities, h) == pytest.approx(n_above, abs=1e-9)
    try:
        rate = naive_joint.extreme_rate(u, drawn, h)
    except OverflowError:
        rate = math.inf
    assert extreme_rate(u, similarities, h) == pytest.approx(rate, rel=1e-6)


@given(samples, thresholds)
def test_rate_without_smoothing_is_the_count(drawn: list[float], u: float) -> None:
    similarities = torch.tensor([each for each in drawn if abs(each - u) > 1e-3])
    assert kernel_rate(u, similarities, 1e-6) == pytest.approx(int((similarities > u).sum()))


@pytest.mark.parametrize(("mean", "std", "u"), [(0.2, 0.1, 0.45), (0.5, 0.2, 0.5), (0.0, 0.3, 0.8)])
def test_gaussian_similarities_are_counted(mean: float, std: float, u: float) -> None:
    drawn = mean + std * torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    counted, exact = int((drawn > u).sum()), drawn.double()
    near = 3 * math.sqrt(counted)
    gaussian = gaussian_rate(u, float(exact.mean()), float(exact.std(correction=0)), len(drawn))
    assert abs(gaussian - counted) < near
    assert abs(kernel_rate(u, drawn, normal_bandwidth(drawn)) - counted) < 0.1 * counted + near


@given(st.lists(st.integers(0, 3), min_size=1, max_size=5), st.integers(0, 99))
def test_similarities_are_of_different_units(lens: list[int], seed: int) -> None:
    blocks = torch.randn(sum(lens), 3, generator=torch.Generator().manual_seed(seed))
    units = [
        [naive_joint.normalize(block) for block in unit.tolist()]
        for unit in torch.split(blocks, lens)
    ]
    pairs = combinations(units, 2)
    by_hand = [naive_joint.dot(a, b) for one, other in pairs for a in one for b in other]
    found = unit_similarities(blocks, lens)
    assert len(found) == num_pairs(lens) == len(by_hand)
    assert sorted(found.tolist()) == pytest.approx(sorted(by_hand), abs=1e-6)
    assert bool((found <= 1).all())


def test_no_fusion_against_drawing() -> None:
    over = torch.rand(20_000, 200, generator=torch.Generator().manual_seed(0)) < 0.004
    share = float((~over).all(1).float().mean())
    assert share == pytest.approx(no_fusion(200 * 0.004), abs=0.01)


def test_compression_ratio_is_the_corollarys() -> None:
    """Two layers of 4 + 6 blocks, 3 and 2 over the threshold. More than six cannot join."""
    assert compression_ratio(4, 6, [3, 2]) == pytest.approx(20 / 15)
    assert compression_ratio(4, 6, [100, 0]) == pytest.approx(20 / 14)
    assert compression_ratio(4, 6, [0.0, 0.0]) == 1


@given(st.integers(0, 30), st.integers(0, 30), st.floats(0, 1))
def test_joins_have_their_limits(left: int, right: int, exceedance: float) -> None:
    rate = left * right * exceedance
    most = most_joins(rate, right)
    assert 0 <= expected_joins(rate, right) <= most + 1e-9
    assert most <= min(right, rate)
    if right:
        ratio = compression_ratio(1, right, [rate])
        assert ratio == pytest.approx((1 + right) / (1 + right - most))


def test_expected_blocks_against_drawing() -> None:
    """Each right block joins if any of its pairs is over the threshold."""
    generator = torch.Generator().manual_seed(0)
    exceedance, lens = 0.01, [6, 9, 3, 12, 7]

    def drawn(units: list[int]) -> int:
        if len(units) == 1:
            return units[0]
        left, right = drawn(units[: len(units) // 2]), drawn(units[len(units) // 2 :])
        over = torch.rand(left, right, generator=generator) < exceedance
        return left + int((~over.any(0)).sum())

    mean = sum(drawn(lens) for _ in range(2_000)) / 2_000
    assert expected_blocks(lens, exceedance) == pytest.approx(mean, abs=0.1)
    assert sum(lens) - mean > 2
