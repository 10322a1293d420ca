"""The figures of the reuse bench, from its samples alone:
shares of full prefill, their phases, crossovers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from statistics import mean, median
from typing import Any

import numpy as np

from eval.bench.rounds import by_cell, told_ratio
from eval.outcome import Row, interval, table
from eval.run import Sample
from eval.stats import quantile

PHASES = ("lookup", "relocate", "select", "recompute")
DRAWS = 2000
PLANNED_RATIO = 0.15
"""Of the arms whose moves the server plans."""


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """Verdict and tables of every prompt length. `wrong` must be 0. Rounds lack no arm."""
    tables, verdict = [], []
    for cell, arms in by_cell(samples):
        name, rows = f"{cell['tokens']} tokens", [_row(arm, arms) for arm in arms]
        wrong = sum(bool(one["wrong"]) for taken in arms.values() for one in taken)
        note = (
            f"{len(arms['full'])} rounds, {wrong} samples with other fates than their arm's; phases"
            " are shares of full, too."
        )
        tables.append(table(f"{name}: time to first token", rows, note))
        if crossed := _crossovers(arms):
            note = "Interpolated; none: it pays at every measured ratio."
            tables.append(table(f"{name}: ratio from which on moving does not pay", crossed, note))
        verdict += [
            f"{name}, {row['arm']}: full prefill takes {row['full / arm']} times as long to the"
            f" first token (share {row['share of full']})."
            for row in rows
            if "/" in row["arm"]
        ]
    if regrets := [
        row for cell, arms in by_cell(samples) for row in _regrets(cell["tokens"], arms)
    ]:
        shares = [row["regret"] for row in regrets]
        note = (
            "Regret: median of `planned` over the better of the medians of `full` and of moving"
            " everything, less 1."
        )
        tables.append(table("What the plan costs", regrets, note))
        verdict.append(
            f"Plans are {quantile(shares, 0.5):.1%} (median) and {quantile(shares, 0.9):.1%} (p90)"
            " slower than the better of moving and computing."
        )
    return {
        "verdict": verdict,
        "tables": tables,
        "wrong": sum(bool(one["wrong"]) for one in samples),
    }


def crossover(points: Sequence[tuple[float, float]]) -> float:
    """The ratio where the share of full prefill first reaches 1, linear between points.

    points: (ratio, share), ratios ascending. Returns the first ratio if its share is above 1,
    infinity if all are below.
    """
    if points[0][1] >= 1:
        return points[0][0]
    for (low, below), (high, above) in pairwise(points):
        if above >= 1:
            return low + (high - low) * (1 - below) / (above - below)
    return math.inf


# Private, in order of use


def _row(arm: str, arms: Mapping[str, Sequence[Sample]]) -> Row:
    samples, times, full_s = arms[arm], _times(arms[arm]), median(_times(arms["full"]))
    row: Row = {
        "arm": arm,
        "median (s)": round(median(times), 4),
        "p90 (s)": round(quantile(times, 0.9), 4),
    }
    for base in ("full", "stock"):
        if base in arms:
            # the arm is passed as the base: a share is its median over that of `base`
            row[f"share of {base}"] = told_ratio(samples, arms[base], "ttft_s")
            row[f"{base} / arm"] = round(median(_times(arms[base])) / median(times), 2)
    if "lookup_s" in samples[0]["metrics"]:
        phases = {phase: [one["metrics"][f"{phase}_s"] for one in samples] for phase in PHASES}
        # HTTP, and SGLang's extend of the question, which is no phase of moving
        phases["rest"] = [
            took - sum(parts) for took, *parts in zip(times, *phases.values(), strict=True)
        ]
        row["recomputed"] = round(mean(one["metrics"]["recomputed_share"] for one in samples), 3)
        row |= {phase: round(median(seconds) / full_s, 4) for phase, seconds in phases.items()}
    return row


def _times(samples: Sequence[Sample]) -> list[float]:
    return [one["metrics"]["ttft_s"] for one in samples]


def _regrets(num_tokens: int, arms: Mapping[str, Sequence[Sample]]) -> list[Row]:
    """One row a source; the moved arm is that of the plan's selector and ratio."""
    rows = []
    for source in ("host", "device"):
        planned = arms.get(f"planned/{source}", ())
        moved = next(
            (taken for arm, taken in arms.items() if arm.endswith(f"/{source}/{PLANNED_RATIO}")),
            None,
        )
        if not planned or moved is None:
            continue
        took, full, all_moved = (median(_times(taken)) for taken in (planned, arms["full"], moved))
        told = [one for one in planned if "estimated_s" in one["metrics"]]
        errors = [
            abs(one["metrics"]["estimated_s"] / one["metrics"]["passed_s"] - 1) for one in told
        ]
        row: Row = {
            "tokens": num_tokens,
            "from": source,
            "planned (s)": round(took, 4),
            "computed (s)": round(full, 4),
        }
        row |= {
            "moved (s)": round(all_moved, 4),
            "regret": round(took / min(full, all_moved) - 1, 4),
        }
        row["plans that move"] = round(mean(one["fates"]["relocated"] > 0 for one in planned), 2)
        rows.append(row | {"estimate's error": round(median(errors), 3) if errors else None})
    return rows


def _crossovers(arms: Mapping[str, Sequence[Sample]]) -> list[Row]:
    """One row a sweep, that is a selector and a source with several ratios;
    intervals over rounds."""
    sweeps: dict[str, dict[float, list[float]]] = {}
    for arm, samples in arms.items():
        if arm.count("/") == 2:
            sweep, ratio = arm.rsplit("/", 1)
            sweeps.setdefault(sweep, {})[float(ratio)] = _times(samples)
    full, rows = np.array(_times(arms["full"])), []
    # The first draw is the rounds themselves.
    drawn = np.random.default_rng(0).integers(0, len(full), (DRAWS, len(full)))
    # all ratios and `full` share the drawn rounds, since a round's noise is common to them
    drawn = np.vstack([np.arange(len(full)), drawn])
    for sweep, found in sweeps.items():
        if len(found) > 1:
            times = np.array([found[ratio] for ratio in sorted(found)])
            shares = np.median(times[:, drawn], axis=2) / np.median(full[drawn], axis=1)
            value, *crossed = (
                crossover(list(zip(sorted(found), column, strict=True))) for column in shares.T
            )
            # not `np.quantile`, which interpolates infinities (no crossover) to NaN
            crossed.sort()
            ends = value, crossed[DRAWS // 40], crossed[-1 - DRAWS // 40]
            rows.append(
                {
                    "selector/source": sweep,
                    "ratio": interval([None if math.isinf(x) else x for x in ends], 2),
                }
            )
    return rows
