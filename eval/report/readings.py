"""One sentence per chart, computed from the figures that the chart shows."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from eval.contrast import shown
from eval.metrics import METRICS
from eval.recorded import Cell, cell_name, setting_name
from eval.report.tables import is_time, label, middle

FATES_REUSED = ("exact", "relocated")
MAX_NAMED = 6
"""With more arms only the best and the worst are named."""


def cdf_reading(samples: Sequence[Cell], metric: str = "ttft_s") -> str:
    """The cell in which the arms' medians are farthest apart."""
    values: dict[str, dict[str, list[float]]] = {}
    for one in samples:
        values.setdefault(json.dumps(one["cell"]), {}).setdefault(one["arm"], []).append(one["metrics"][metric])
    medians = {cell: {arm: statistics.median(taken) for arm, taken in arms.items()} for cell, arms in values.items()}
    cell, arms = max(medians.items(), key=lambda found: max(found[1].values()) / (min(found[1].values()) or 1))
    first, last = min(arms, key=lambda arm: arms[arm]), max(arms, key=lambda arm: arms[arm])
    where = f"At {cell_name(json.loads(cell))} half" if json.loads(cell) else "Half"
    text = f"{where} of the requests have their first token within {shown(metric, arms[first])} ({first})"
    return text + (f" to {shown(metric, arms[last])} ({last})." if first != last else ".")


def hits_reading(cells: Sequence[Cell], rate: str, of: str) -> str:
    """The best and the worst policy, and their capacities."""
    best, worst = (pick(cells, key=lambda one: one[rate]["value"]) for pick in (max, min))
    text = f"Most {of} are found by {_hit(best, rate)}"
    return text + ("." if len(cells) == 1 else f"; fewest by {_hit(worst, rate)}.")


def sweep_reading(cells: Sequence[Cell], setting: str, metric: str) -> str:
    """From the best to the worst point."""
    points = _points(cells, metric)
    if not points:
        return f"{_upper(label(metric))}: nothing was measured."
    if len({value for _, value in points}) == 1:
        return f"{_upper(label(metric))}: {shown(metric, points[0][1])} everywhere."
    lower = metric in METRICS and METRICS[metric].better == "lower"
    ends = [min(points, key=_second), max(points, key=_second)]
    told = [
        f"{shown(metric, value)} ({one['arm']} at {setting_name(setting, one['cell'][setting])})"
        for one, value in (ends if lower else reversed(ends))
    ]
    return f"{_upper(label(metric))}, {_kind(metric)}: best {told[0]}, worst {told[1]}."


def score_reading(cells: Sequence[Cell], metric: str) -> str:
    """From the lowest to the highest arm."""
    points = _points(cells, metric)
    if not points:
        return f"{_upper(label(metric))}: nothing was measured."
    if len({value for _, value in points}) == 1:
        return f"{_upper(label(metric))}: {shown(metric, points[0][1])} everywhere."
    told = [f"{shown(metric, value)} ({one['arm']})" for one, value in sorted(points, key=_second)]
    return f"{_upper(label(metric))}: {told[0]} to {told[-1]}."


def fates_reading(sums: Mapping[str, Mapping[str, int]]) -> str:
    """The share of prompt tokens that each arm did not compute."""
    shares = {
        arm: sum(found.get(fate, 0) for fate in FATES_REUSED) / (sum(found.values()) or 1)
        for arm, found in sums.items()
    }
    told = sorted(shares, key=lambda arm: shares[arm])
    if len(told) > MAX_NAMED:
        told = [told[0], told[-1]]
    return f"Of the prompt tokens {', '.join(f'{arm} took {shares[arm]:.0%}' for arm in told)} from the cache."


def permutation_reading(points: Sequence[Mapping[str, Any]]) -> str:
    """Means and spread over the requests."""
    given, other, spread = (statistics.fmean(one[key] for one in points) for key in ("baseline", "mean", "sd"))
    return (
        f"Over {len(points)} requests the mean is {given:.3g} in the given order and {other:.3g} in other orders; "
        f"between the orders of one request the standard deviation is {spread:.3g} on average."
    )


# Private, in order of use


def _hit(one: Cell, rate: str) -> str:
    where = cell_name(
        {key: value for key, value in one["cell"].items() if value is not None and key.startswith("capacity")}
    )
    return f"{one['arm']}, {one[rate]['value']:.1%}" + (f" ({where})" if where else "")


def _points(cells: Sequence[Cell], metric: str) -> list[tuple[Cell, float]]:
    found = ((one, middle(metric, one["metrics"].get(metric))) for one in cells)
    return [(one, value) for one, value in found if value is not None]


def _second(point: tuple[Cell, float]) -> float:
    return point[1]


def _kind(metric: str) -> str:
    return "median" if is_time(metric) else "mean"


def _upper(text: str) -> str:
    return text[:1].upper() + text[1:]
