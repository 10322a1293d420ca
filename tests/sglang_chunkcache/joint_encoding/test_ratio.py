"""From a ratio to thresholds, by what blocks give."""

from __future__ import annotations

import pytest

from sglang_chunkcache.joint_encoding.ratio import NEAR, thresholds_for_ratio
from tests.sglang_chunkcache.joint_encoding.test_thresholds import LENS, NOISES, fused, made_blocks


@pytest.mark.parametrize("ratio", [1.2, 1.5, 2.0])
def test_ratio_is_reached(ratio: float) -> None:
    """Within what counts as near, on the blocks themselves; one threshold a layer."""
    layers = [made_blocks(1000 + i, noise) for i, noise in enumerate(NOISES)]
    found = thresholds_for_ratio(layers, LENS, ratio, head_dim=16)
    assert len(found) == len(layers)
    assert len(layers) * sum(LENS) / fused(found, NOISES, 1) == pytest.approx(
        ratio, rel=NEAR - 1 + 1e-9
    )


def test_what_blocks_do_not_give_is_not_reached() -> None:
    """Six units fuse into one at best; the nearest thresholds count."""
    layers = [made_blocks(i, 0.5) for i in range(2)]
    found = thresholds_for_ratio(layers, LENS, 50, head_dim=16)
    assert 2 * sum(LENS) / fused(found, (0.5, 0.5), 0) > 4


def test_ratio_of_one_is_refused() -> None:
    """Nothing would have to fuse."""
    with pytest.raises(ValueError, match="ratio: expected more than 1"):
        thresholds_for_ratio([made_blocks(0, 0.5)], LENS, 1, head_dim=16)
