"""Rounds of a bench: none is taken twice, none is left out."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from eval.bench.rounds import by_cell, take_rounds
from eval.run import Run


def open_run(folder: Path) -> Run:
    return Run(folder, kind="bench", spec={}, summarize=lambda samples: {"n": len(samples)})


def take(value: int, number: int) -> dict[str, Any]:
    return {"metrics": {"value": value}}


def test_cells_of_equal_values_are_two(tmp_path: Path) -> None:
    """Parts of one bench vary other settings, perhaps over the same numbers."""
    with open_run(tmp_path) as run:
        for name in ("us_per_token", "search_ms"):
            take_rounds(run, {"tokens": 20, name: 5}, {"computed": partial(take, 1)}, 2)
        assert [len(arms["computed"]) for _, arms in by_cell(run.samples)] == [2, 2]


def test_round_of_other_arms_is_taken_anew(tmp_path: Path) -> None:
    """An arm that could not be prepared before the run was interrupted may be there when it goes
    on: arms are compared round by round, so all of them run again."""
    with open_run(tmp_path) as run:
        for arms in ("b", "ab", "ab"):
            takes = {arm: partial(take, len(run.samples)) for arm in arms}
            take_rounds(run, {"tokens": 20}, takes, 1)
        ((_, found),) = by_cell(run.samples)
    assert {arm: [one["metrics"]["value"] for one in taken] for arm, taken in found.items()} == {
        "a": [2],
        "b": [2],
    }
