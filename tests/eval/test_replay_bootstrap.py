"""The moving-block bootstrap of a replay: blocks of neighbours, shares of sums, edges."""

from __future__ import annotations

import random

import pytest

from eval.replay.bootstrap import moving_block_share


def make_samples(n: int) -> list[float]:
    rng = random.Random(0)
    return [rng.gauss(5, 2) for _ in range(n)]


def test_mean_agrees_with_its_formula() -> None:
    """1.96 standard errors to both sides, within the noise of resampling."""
    samples = make_samples(400)
    value, low, high = moving_block_share(samples, [1] * 400, block=1)
    error = (sum((x - value) ** 2 for x in samples) / 400**2) ** 0.5
    assert value == sum(samples) / 400
    ends = (value - 1.96 * error, value + 1.96 * error)
    assert (low, high) == pytest.approx(ends, abs=0.2 * error)


def test_blocks_widen_the_interval_where_neighbours_are_alike() -> None:
    """Twenty values, each fifty times in a row, are twenty samples and not a thousand."""
    values = [x for x in make_samples(20) for _ in range(50)]
    _, low, high = moving_block_share(values, [1] * 1000, block=1, draws=300)
    _, block_low, block_high = moving_block_share(values, [1] * 1000, block=50, draws=300)
    assert block_high - block_low > 4 * (high - low)


def test_bins_give_the_interval_of_their_requests() -> None:
    """Blocks of 64 requests, or of 16 bins of four: equal but for the draws."""
    rng = random.Random(1)
    wholes = [rng.randint(1, 10) for _ in range(6400)]
    parts = [min(whole, int(rng.random() ** 2 * 10)) for whole in wholes]
    exact = moving_block_share(parts, wholes, block=64)
    binned = [[sum(counts[i : i + 4]) for i in range(0, 6400, 4)] for counts in (parts, wholes)]
    near = pytest.approx(exact, abs=0.1 * (exact[2] - exact[1]))
    assert moving_block_share(*binned, block=16) == near


def test_share_is_of_the_sums() -> None:
    """Requests with many chunks weigh more; differences may be negative."""
    assert moving_block_share([1, 0, 9], [1, 1, 18], block=2)[0] == 0.5
    value, low, high = moving_block_share([-1, -2, -3], [10, 10, 10], block=2)
    assert (value, low < value < high, high < 0) == (-0.2, True, True)


def test_edges() -> None:
    """No request, no chunk, no division by zero; nothing to vary in one long block."""
    assert moving_block_share([], [], block=5) == (0.0, 0.0, 0.0)
    assert moving_block_share([0], [0], block=5) == (0.0, 0.0, 0.0)
    assert moving_block_share([0, 0, 0, 2], [0, 0, 0, 2], block=1)[1:] == (0.0, 1.0)
    assert moving_block_share([1, 2], [4, 4], block=50) == (0.375, 0.375, 0.375)


def test_every_element_is_as_likely_as_any_other() -> None:
    """Runs wrap around at the end; else a warm-up in front would count less."""
    value, low, high = moving_block_share([1.0] + [0.0] * 19, [1] * 20, block=10, draws=4000)
    assert (value, low, high) == (0.05, 0.0, 0.1)
