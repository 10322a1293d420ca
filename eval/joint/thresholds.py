"""Thresholds by layer from a wish: a compression ratio or a bound on attention drift (Fast Fusion,
remark 4.2).

All layers get one bound on the drift of their logits, so one with larger norms gets a higher
threshold. Of all thresholds that save as much these have the lowest worst drift. Layers in which
probably nothing fuses are skipped: their threshold is `NEVER`.

    statistics of a few blocks --> logit drift --> threshold of each layer
        --> blocks that fused --> logit drift ...
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from eval.joint.drift import logit_drift_within, similarity_within
from eval.joint.fast_fusion import NEVER
from eval.joint.fusion_rate import expected_blocks, no_fusion, num_pairs

SKIPPED_FROM = 0.5
"""Probability that nothing fuses from which on a layer is not compared at all."""
_HALVINGS = 40
"""Of a bisection: the logit drift to 12 digits."""
_STEPS = 0.01, 0.5
"""The least and the largest change of the logit drift's logarithm."""
_FASTER, _SLOWER = 1.3, 0.5
"""Changes grow until they overshoot: how steeply the ratio follows the threshold differs by orders
between kinds of blocks."""


@dataclass(frozen=True, eq=False)
class LayerStatistics:
    """What a layer's blocks are like."""

    similarities: Tensor
    """[n] float, of blocks of different units (`unit_similarities`); at least one."""
    scale: float
    """`drift.logit_scale`: how far similarity 1/2 would move a logit."""

    def exceedance(self, threshold: float) -> float:
        """Share of the pairs that are over the threshold.
        Counted: near 1 a kernel's width would decide (fusion_rate.py)."""
        return float((self.similarities > threshold).double().mean())


def thresholds_for_drift(
    layers: Sequence[LayerStatistics], lens: Sequence[int], drift: float
) -> list[float]:
    """The lowest thresholds with which fusing a pair moves no layer's attention by more than
    `drift` in L1.

    Args:
        layers: statistics of every layer.
        lens: numbers of blocks of the units of a typical batch or prompt.
        drift: above 0, below 2.
    Returns:
        Of each layer; `NEVER` for one to skip.
    Raises:
        ValueError: `drift` is not between 0 and 2.
    """
    if not 0 < drift < 2:
        raise ValueError(f"drift: expected a number between 0 and 2, got {drift}")
    return _skipping(layers, lens, _thresholds(layers, logit_drift_within(drift)))


def predicted_ratio(
    layers: Sequence[LayerStatistics], lens: Sequence[int], thresholds: Sequence[float]
) -> float:
    """Blocks of units with these numbers of blocks, in all layers, before over after the tree."""
    after = [
        expected_blocks(lens, layer.exceedance(u)) if u < NEVER else sum(lens)
        for layer, u in zip(layers, thresholds, strict=True)
    ]
    return len(layers) * sum(lens) / sum(after)


class ThresholdController:
    """Thresholds for a compression ratio, corrected by what is observed. Not thread-safe.

    Args:
        layers: statistics of a calibration's blocks, of every layer.
        lens: numbers of blocks of the units of a typical batch or prompt.
        ratio: blocks before over after fusing, in all layers together, that is asked for; above 1.
            What the blocks do not give within `drift` is not reached.
        drift: a bound on what fusing a pair may do to a layer's attention, in L1, above 0, kept
            whatever the ratio; 2 for none.
    Raises:
        ValueError: a ratio of 1 or below, a drift outside its range, or no layers.
    """

    def __init__(
        self, layers: Sequence[LayerStatistics], lens: Sequence[int], *, ratio: float, drift: float
    ) -> None:
        if not ratio > 1:
            raise ValueError(f"ratio: expected more than 1, got {ratio}")
        if not 0 < drift <= 2:
            raise ValueError(f"drift: expected a number between 0 and 2, got {drift}")
        if not layers:
            raise ValueError("layers: expected one or more, got none")
        self._layers, self._lens, self._ratio = layers, lens, ratio
        self._limit = max(layer.scale for layer in layers) * 2**0.5  # all thresholds are 0 there
        if drift < 2:
            self._limit = min(self._limit, logit_drift_within(drift))
        self._logit_drift = self._predicted()
        self._step, self._direction = _STEPS[1], 0

    @property
    def thresholds(self) -> list[float]:
        """Of each layer; `NEVER` for one to skip."""
        return _skipping(self._layers, self._lens, _thresholds(self._layers, self._logit_drift))

    def observe(self, num_blocks: int, num_shared: int) -> None:
        """Tell what became of a batch in all layers, skipped ones too: too few fused lowers the
        thresholds, too many raise them.

        Args:
            num_blocks: before, at least 1.
            num_shared: after.
        """
        direction = 1 if num_shared * self._ratio > num_blocks else -1
        factor = _FASTER if direction == self._direction else _SLOWER
        self._step = min(max(self._step * factor, _STEPS[0]), _STEPS[1])
        self._direction = direction
        # In the logarithm: the ratio may need a drift that is orders away.
        self._logit_drift = min(self._logit_drift * math.exp(direction * self._step), self._limit)

    def _predicted(self) -> float:
        """The least logit drift that is expected to give the ratio, or the limit."""
        low, high = 0.0, self._limit
        # Bisection: the predicted ratio is no smooth function, but grows with the drift.
        for _ in range(_HALVINGS):
            middle = (low + high) / 2
            enough = (
                predicted_ratio(self._layers, self._lens, _thresholds(self._layers, middle))
                >= self._ratio
            )
            low, high = (low, middle) if enough else (middle, high)
        return high


def _thresholds(layers: Sequence[LayerStatistics], logit_drift: float) -> list[float]:
    return [similarity_within(logit_drift, layer.scale) for layer in layers]


def _skipping(
    layers: Sequence[LayerStatistics], lens: Sequence[int], thresholds: Sequence[float]
) -> list[float]:
    # Of so many pairs one is likely over the threshold even where their share is small.
    pairs = num_pairs(lens)
    return [
        NEVER if no_fusion(pairs * layer.exceedance(u)) >= SKIPPED_FROM else u
        for layer, u in zip(layers, thresholds, strict=True)
    ]
