"""Proposition 5.3 on attention that was drawn, on the worst there is,
and where its conditions do not hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eval.joint.drift import (
    distance,
    drift_bound,
    least_drift_bound,
    logit_drift_within,
    logit_scale,
    similarity_within,
)
from eval.joint.encoding import decode, encode, relative_errors
from tests.reference.naive_joint import attention_drift

HEADS, SIZE = 2, 4


def logits(query: Tensor, keys: Tensor) -> list[float]:
    return list((keys @ query / math.sqrt(SIZE)).tolist())


@given(
    st.integers(0, 10**6),
    st.sampled_from((1, 2, 4)),
    st.sampled_from((0.3, 0.7, 0.95)),
    st.floats(0.1, 2),
)
def test_attention_over_fused_keys_stays_within_the_bounds(
    seed: int, block_size: int, threshold: float, query_norm: float
) -> None:
    """Several units, every head, the errors as they were measured."""
    generator = torch.Generator().manual_seed(seed)
    lens = [8] * 4
    text = torch.randn(8, HEADS, SIZE, generator=generator).repeat(4, 1, 1)
    keys = text + 0.3 * torch.randn(text.shape, generator=generator)
    layer = encode(keys, keys, lens, block_size=block_size, threshold=threshold)
    decoded, errors = decode(layer)[0], relative_errors(layer, keys, keys)[0]
    norms = torch.linalg.vector_norm(keys.reshape(-1, block_size * HEADS * SIZE), dim=1)
    pairs = zip(norms.tolist(), errors.tolist(), strict=True)
    epsilon = max(logit_scale(norm, query_norm, SIZE) * error for norm, error in pairs)
    for head in range(HEADS):
        query = torch.randn(SIZE, generator=generator)
        query *= query_norm / query.norm()
        drift = attention_drift(logits(query, keys[:, head]), logits(query, decoded[:, head]))
        assert drift <= least_drift_bound(epsilon) + 1e-5
        assert drift <= drift_bound(epsilon) + 1e-5


@pytest.mark.parametrize("epsilon", [0.01, 0.1, 0.5, 1.0, 3.0])
def test_least_bound_is_reached_and_never_exceeded(epsilon: float) -> None:
    """Brute force over logits that all move by epsilon, up or down."""
    worst = 0.0
    for step in range(-60, 61):
        before = [step * epsilon / 20, 0.0]
        worst = max(worst, attention_drift(before, [before[0] + epsilon, -epsilon]))
    assert worst <= least_drift_bound(epsilon) + 1e-12
    assert worst == pytest.approx(least_drift_bound(epsilon), rel=1e-6)
    assert least_drift_bound(epsilon) <= min(epsilon, 2, drift_bound(epsilon))


@given(
    st.lists(st.tuples(st.floats(-3, 3), st.floats(-1, 1)), min_size=1, max_size=6), st.floats(0, 2)
)
def test_no_attention_exceeds_the_least_bound(
    tokens: list[tuple[float, float]], epsilon: float
) -> None:
    before = [logit for logit, _ in tokens]
    after = [logit + epsilon * part for logit, part in tokens]
    assert attention_drift(before, after) <= least_drift_bound(epsilon) + 1e-12


@given(st.floats(0.01, 1.99), st.floats(0.1, 100))
def test_similarity_within_a_drift(drift: float, scale: float) -> None:
    epsilon = logit_drift_within(drift)
    assert least_drift_bound(epsilon) == pytest.approx(drift)
    similarity = similarity_within(epsilon, scale)
    assert 0 <= similarity < 1
    if similarity:
        assert scale * distance(similarity) == pytest.approx(epsilon, rel=1e-4)
    else:
        assert scale * distance(0) <= epsilon * (1 + 1e-9)


def test_norms_are_of_blocks_not_of_tokens() -> None:
    """One token takes all of the block's turn: its logit moves by more than its norm allows."""
    before = torch.zeros(4, 2)
    before[:, 0] = 1
    after = before.clone()
    after[3] = torch.tensor([-0.2, math.sqrt(1 - 0.04)])
    similarity = float((before * after).sum() / 4)
    moved = float((after[3] - before[3]).norm())
    assert moved > 1 * distance(similarity)
    assert moved <= 2 * distance(similarity) + 1e-6
