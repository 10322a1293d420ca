"""From a wish to thresholds, and what observing corrects."""

from __future__ import annotations

import pytest
import torch

from eval.joint.drift import distance, least_drift_bound
from eval.joint.fast_fusion import NEVER, fast_fusion
from eval.joint.fusion_rate import unit_similarities
from eval.joint.ratio import NEAR, thresholds_for_ratio
from eval.joint.thresholds import (
    LayerStatistics,
    ThresholdController,
    predicted_ratio,
    thresholds_for_drift,
)

LENS = [12] * 6


def made_blocks(seed: int, noise: float) -> torch.Tensor:
    """Six units of twelve blocks around eight directions."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(8, 16, generator=generator)
    picked = torch.randint(8, (sum(LENS),), generator=generator)
    return centres[picked] + noise * torch.randn(sum(LENS), 16, generator=generator)


NOISES, SCALES = (0.3, 0.5, 0.7), (4.0, 4.0, 4.0)


def made_layers(
    noises: tuple[float, ...] = NOISES, scales: tuple[float, ...] = SCALES
) -> list[LayerStatistics]:
    return [
        LayerStatistics(unit_similarities(made_blocks(100 + i, noise), LENS), scale)
        for i, (noise, scale) in enumerate(zip(noises, scales, strict=True))
    ]


def fused(thresholds: list[float], noises: tuple[float, ...], seed: int) -> int:
    """Shared blocks of all layers."""
    layers = [made_blocks(1000 * seed + i, noise) for i, noise in enumerate(noises)]
    pairs = zip(layers, thresholds, strict=True)
    return sum(len(fast_fusion(layer, layer, LENS, u).leaders) for layer, u in pairs)


def test_drift_is_that_of_each_layers_threshold() -> None:
    """Larger norms, higher threshold."""
    layers = made_layers((0.3, 0.3, 0.3), (1.0, 4.0, 16.0))
    found = thresholds_for_drift(layers, LENS, 1.2)
    assert found == sorted(found)
    for layer, u in zip(layers, found, strict=True):
        if 0 < u < NEVER:
            assert least_drift_bound(layer.scale * distance(u)) == pytest.approx(1.2)
    assert 0 < found[1] < NEVER


def test_layers_of_alike_similarities() -> None:
    """Far below the threshold they are not compared; those at 1 are all or nothing."""
    low, high = torch.linspace(-0.2, 0.2, 500), torch.linspace(0.95, 1, 500)
    found = thresholds_for_drift([LayerStatistics(each, 4.0) for each in (low, high)], LENS, 1.0)
    assert found[0] == NEVER
    assert 0.95 < found[1] < 0.97
    equal = LayerStatistics(torch.ones(9), 4.0)
    assert (equal.exceedance(0.999), equal.exceedance(1.0)) == (1, 0)


def test_prediction_is_the_ratio_asked_for() -> None:
    """Before anything was observed; a higher ratio has lower thresholds in every layer."""
    layers = made_layers()
    before = [NEVER] * 3
    for ratio in (1.2, 1.6, 2.0):
        found = ThresholdController(layers, LENS, ratio=ratio, drift=2).thresholds
        assert predicted_ratio(layers, LENS, found) == pytest.approx(ratio, rel=0.02)
        assert all(now <= then for now, then in zip(found, before, strict=True))
        assert found != before
        before = found


def test_prediction_is_what_is_measured() -> None:
    layers = made_layers()
    for ratio in (1.2, 1.5):
        thresholds = ThresholdController(layers, LENS, ratio=ratio, drift=2).thresholds
        shared = sum(fused(thresholds, NOISES, seed) for seed in range(5))
        assert 5 * 3 * sum(LENS) / shared == pytest.approx(ratio, rel=0.1)


def test_observing_finds_the_ratio_from_a_wrong_start() -> None:
    """After 30 batches the ratio is within 15% for ten more."""
    controller = ThresholdController(made_layers(noises=(0.1, 0.1, 0.1)), LENS, ratio=1.5, drift=2)
    noises, ratios = (0.8, 0.8, 0.8), []
    for seed in range(40):
        shared = fused(controller.thresholds, noises, seed)
        ratios.append(3 * sum(LENS) / shared)
        controller.observe(3 * sum(LENS), shared)
    assert abs(ratios[0] - 1.5) > 0.2
    assert sum(ratios[30:]) / 10 == pytest.approx(1.5, rel=0.15)


def test_drift_is_kept_whatever_the_ratio() -> None:
    """A ratio that the bound does not allow is not reached, however often it is missed."""
    layers = made_layers()
    controller = ThresholdController(layers, LENS, ratio=10, drift=0.5)
    limit = thresholds_for_drift(layers, LENS, 0.5)
    assert controller.thresholds == pytest.approx(limit)
    for _ in range(10):
        controller.observe(100, 99)
    assert controller.thresholds == pytest.approx(limit)


@pytest.mark.parametrize(
    ("ratio", "drift", "names"),
    [(1.0, 1.0, "ratio: expected more than 1"), (2.0, 0.0, "drift"), (2.0, 2.5, "drift")],
)
def test_wrong_wishes(ratio: float, drift: float, names: str) -> None:
    with pytest.raises(ValueError, match=names):
        ThresholdController(made_layers(), LENS, ratio=ratio, drift=drift)
    with pytest.raises(ValueError, match="layers"):
        ThresholdController([], LENS, ratio=2.0, drift=1.0)
    with pytest.raises(ValueError, match="drift: expected a number between 0 and 2, got 2"):
        thresholds_for_drift(made_layers(), LENS, 2)


@pytest.mark.parametrize("ratio", [1.2, 1.5, 2.0])
def test_ratio_of_blocks_is_reached(ratio: float) -> None:
    layers = [made_blocks(1000 + i, noise) for i, noise in enumerate(NOISES)]
    found = thresholds_for_ratio(layers, LENS, ratio, head_dim=16)
    assert len(found) == len(layers)
    reached = len(layers) * sum(LENS) / fused(found, NOISES, 1)
    assert reached == pytest.approx(ratio, rel=NEAR - 1 + 1e-9)


def test_what_blocks_do_not_give_is_not_reached() -> None:
    """Six units fuse into one at best; the nearest thresholds count.
    For a ratio of one nothing would have to fuse."""
    layers = [made_blocks(i, 0.5) for i in range(2)]
    found = thresholds_for_ratio(layers, LENS, 50, head_dim=16)
    assert 2 * sum(LENS) / fused(found, (0.5, 0.5), 0) > 4
    with pytest.raises(ValueError, match="ratio: expected more than 1"):
        thresholds_for_ratio(layers, LENS, 1, head_dim=16)
