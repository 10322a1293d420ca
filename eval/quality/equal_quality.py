"""How much each selector has to recompute for one quality: what Cache-Craft 5.4 compares times
at."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from eval.outcome import Row

EQUAL_QUALITY = 0.85
"""The paper's, of ROUGE-L F1."""
EQUAL_METRICS = ("rouge_l_full", "em_of_full", "same")
BY_ALPHA = ", by alpha"
"""Of a selector: its cells with an alpha in place of a ratio are another curve."""
EQUAL_NOTE = (
    f"the least share of moved tokens recomputed with a mean of {EQUAL_QUALITY}, on a straight line"
    " between measured shares; none: no measured one reaches it"
)


def equal_quality(
    cells: Sequence[Mapping[str, Any]], curves: Mapping[str, Sequence[str]]
) -> list[Row]:
    """For each kind, capture and selector, by each metric, the least recomputed share of the moved
    tokens at which its mean is `EQUAL_QUALITY`; None: no measured ratio reaches it.

    Args:
        cells: of `ratio`, with metrics and shares.
        curves: selector -> arms whose cells are also points of its curve.
    """
    by_alpha = {f"{arm}{BY_ALPHA}": ends for arm, ends in curves.items()}
    points: dict[tuple[str, ...], list[tuple[float, Mapping[str, Any]]]] = defaultdict(list)
    rows: dict[tuple[str, ...], Row] = {}
    own = set[tuple[str, ...]]()
    for cell in (cell for cell in cells if "ratio" in cell["cell"] and cell["fates"]):
        variant = {name: x for name, x in cell["cell"].items() if name not in ("ratio", "alpha")}
        name = cell["arm"] + (BY_ALPHA if "alpha" in cell["cell"] else "")
        for arm, ends in {**curves, **by_alpha}.items():
            if name in (arm, *ends):
                key = (*map(str, variant.values()), arm)
                rows.setdefault(key, {**variant, "selector": arm})
                points[key].append((cell["recomputed_share"], cell["metrics"]))
                own |= {key} if name == arm else set()
    # Both ends alone are nobody's curve.
    rows = {key: row for key, row in rows.items() if key in own}
    for key, measured in ((key, points[key]) for key in rows):
        measured.sort(key=lambda point: point[0])
        for metric in EQUAL_METRICS:
            curve = [(x, means[metric]["mean"]) for x, means in measured if metric in means]
            if curve:
                rows[key][metric] = _least_share(curve)
    return [row for row in rows.values() if not row.keys().isdisjoint(EQUAL_METRICS)]


def _least_share(curve: Sequence[tuple[float, float]]) -> float | None:
    """Where a curve of (share, mean), shares ascending, first reaches `EQUAL_QUALITY`."""
    before: tuple[float, float] | None = None
    for recomputed, mean in curve:
        if mean >= EQUAL_QUALITY:
            if before is None:
                return recomputed
            part = (EQUAL_QUALITY - before[1]) / (mean - before[1])
            return round(before[0] + part * (recomputed - before[0]), 4)
        before = recomputed, mean
    return None
