"""The cost model: lines fitted to measurements and observations."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from radix_ext.costs import (
    MEMORY,
    NOMINAL,
    CostModel,
    Line,
    Phase,
    Work,
    copied_within,
    extend_work,
)

LINE = Line(0.02, 1e-4, 1e-8)
SIZES = [Work(1, n, n * keys) for n in (8, 64, 512) for keys in (512, 4096)]


def measured(line: Line, works: list[Work] = SIZES) -> CostModel:
    """A model that has measured what `line` says."""
    model = CostModel()
    for work in works:
        model.measure(Phase.RECOMPUTE, work, line.seconds(work))
    return model


@given(st.tuples(*[st.sampled_from([0.0, 1e-7, 1e-4, 0.02])] * 3).filter(any))
def test_fit_recovers_the_line(coefficients: tuple[float, float, float]) -> None:
    line = Line(*coefficients)
    found = measured(line).fit()[Phase.RECOMPUTE]
    for work in SIZES:
        assert found.seconds(work) == pytest.approx(line.seconds(work), rel=1e-3)


@given(st.lists(st.floats(0.5, 2.0), min_size=len(SIZES), max_size=len(SIZES)))
def test_fit_is_the_best_with_noise(noise: list[float]) -> None:
    """Against numpy: no line with coefficients of at least 0 has less squared relative error."""
    times = [LINE.seconds(work) * factor for work, factor in zip(SIZES, noise, strict=True)]
    model = CostModel()
    for work, seconds in zip(SIZES, times, strict=True):
        model.measure(Phase.HOST, work, seconds)
    found = np.array(model.fit()[Phase.HOST])
    rows = np.array(SIZES) / np.array(times)[:, None]
    scale = np.linalg.norm(rows, axis=0)
    gradient = (rows / scale).T @ (rows @ found - 1)
    assert found.min() >= 0
    assert np.all(gradient >= -1e-6)  # no coefficient wants to grow
    assert np.all(np.abs(gradient[found > 0]) < 1e-6)  # nor one that is not 0 to change


def test_observations_replace_measurements() -> None:
    """A machine three times as slow: after `MEMORY` observations the estimate says so."""
    model = measured(LINE)
    model.fit()
    for _ in range(MEMORY // len(SIZES)):
        for work in SIZES:
            model.observe(Phase.RECOMPUTE, work, 3 * LINE.seconds(work))
            model.fit()
    found = model.fit()[Phase.RECOMPUTE]
    assert all(2.5 < found.seconds(work) / LINE.seconds(work) < 3.05 for work in SIZES)
    stats = model.stats()["recompute"]
    assert stats["observed"] == MEMORY // len(SIZES) * len(SIZES)
    # of which the first was off by all
    assert 0 < (stats["error_p50"] or 0) < (stats["error_p90"] or 0) < 2 / 3


def test_one_stall_changes_little() -> None:
    """A hundredfold time counts as a threefold one."""
    model = measured(LINE)
    for _ in range(20):
        for work in SIZES:
            model.observe(Phase.RECOMPUTE, work, LINE.seconds(work))
    before = model.fit()[Phase.RECOMPUTE].seconds(SIZES[3])
    model.observe(Phase.RECOMPUTE, SIZES[3], 100 * LINE.seconds(SIZES[3]))
    assert model.fit()[Phase.RECOMPUTE].seconds(SIZES[3]) == pytest.approx(before, rel=0.1)


def test_one_length_over_and_over_keeps_the_others() -> None:
    """Where nothing is observed, the measurements decide."""
    model = measured(LINE)
    for _ in range(500):
        model.observe(Phase.RECOMPUTE, SIZES[0], LINE.seconds(SIZES[0]))
    found = model.fit()[Phase.RECOMPUTE]
    assert [found.seconds(work) / LINE.seconds(work) for work in SIZES] == pytest.approx(
        [1] * len(SIZES), rel=0.01
    )


@given(st.integers(0, 40), st.integers(0, 40))
def test_extend_counts_each_tokens_keys(start: int, num_tokens: int) -> None:
    keys = range(start + 1, start + num_tokens + 1)
    assert extend_work(start, start + num_tokens) == (num_tokens > 0, num_tokens, sum(keys))


def test_phase_that_never_runs_keeps_pace_with_prefill() -> None:
    """Prefill tells that the machine is not three times as slow any more."""
    model = CostModel()
    for work in SIZES:
        for phase in (Phase.EXTEND, Phase.QUESTION):
            model.measure(phase, work, 3 * LINE.seconds(work))
    assert model.fit()[Phase.QUESTION].seconds(SIZES[0]) == pytest.approx(
        3 * LINE.seconds(SIZES[0])
    )
    for _ in range(20):
        for work in SIZES:
            model.observe(Phase.EXTEND, work, LINE.seconds(work))
    assert model.fit()[Phase.QUESTION].seconds(SIZES[0]) == pytest.approx(
        LINE.seconds(SIZES[0]), rel=0.05
    )


def test_a_clock_that_stood_still_does_not_make_a_phase_free() -> None:
    """It counts as a third of the estimate."""
    model = measured(LINE)
    model.fit()
    model.observe(Phase.RECOMPUTE, SIZES[3], 1e-9)
    assert model.fit()[Phase.RECOMPUTE].seconds(SIZES[3]) > 0.2 * LINE.seconds(SIZES[3])


def test_pieces_of_a_prefill_are_calls() -> None:
    assert [extend_work(100, 100 + n, piece=256).calls for n in (0, 1, 256, 257)] == [0, 1, 1, 2]


def test_copies_to_host_memory_are_bounded_by_the_way_back() -> None:
    """Of exact chains where they were loaded, else of moved ones."""
    costs = {phase: Line() for phase in Phase}
    assert copied_within(NOMINAL, 1.0) is copied_within(costs, 1.0) is None
    costs[Phase.HOST] = Line(0.1, 1e-3)
    assert copied_within(costs, 1.0) == 900
    costs[Phase.LOAD] = Line(0.5, 1e-3)
    assert copied_within(costs, 1.0) == 500
    assert copied_within(costs, 0.4) == 0
