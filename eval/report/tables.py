"""The tables of a report: figures as text, ready for HTML or Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eval.contrast import direction, fails_more, has_enough
from eval.metrics import METRICS
from eval.recorded import Cell, Recorded, cell_name, setting_name, varied

SCORE_KEYS = ("mean", "low", "high", "p50", "p90", "p99")
TIME_KEYS = ("p50", "low", "high", "mean", "p90", "p99")
"""Order of columns: the figure of the interval comes first."""


@dataclass(frozen=True, slots=True)
class Table:
    """The first `num_text` columns are text, the others figures."""

    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    num_text: int = 1


def label(metric: str) -> str:
    """The metric's label, or its name."""
    return METRICS[metric].label if metric in METRICS else metric.replace("_", " ")


def with_unit(metric: str) -> str:
    """The metric's label, and its unit if it has one."""
    unit = METRICS[metric].unit if metric in METRICS else ""
    return f"{label(metric)} ({unit})" if unit else label(metric)


def is_time(metric: str) -> bool:
    """Times are reported by their median, other metrics by the mean."""
    return metric.endswith("_s")


def middle(metric: str, found: Mapping[str, Any] | None) -> float | None:
    """The median or mean of a cell's metric; None if it has none."""
    value = (found or {}).get("p50" if is_time(metric) else "mean")
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def figure(value: Any) -> str:
    """A number with three digits; whole numbers unchanged."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return "none"
    return str(value) if isinstance(value, int) else f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


def plain(value: Any) -> str:
    """Any JSON as a line of text."""
    if isinstance(value, list):
        return " ".join(map(plain, value))
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)


def metric_names(cells: Sequence[Cell]) -> list[str]:
    """All metrics of the cells, known ones first."""
    names = {name for one in cells for name, found in one["metrics"].items() if middle(name, found) is not None}
    return [*(name for name in METRICS if name in names), *sorted(names - METRICS.keys())]


def metric_table(cells: Sequence[Cell], metric: str) -> Table:
    """One line per arm and cell."""
    keys = TIME_KEYS if is_time(metric) else SCORE_KEYS
    rows = [
        [
            *_who(one),
            *(figure(one.get(key)) for key in ("n", "errors")),
            *(figure(one["metrics"][metric].get(k)) for k in keys),
        ]
        for one in cells
        if isinstance(one["metrics"].get(metric), dict)
    ]
    return Table(with_unit(metric), ["cell", "arm", "n", "errors", *_named(keys)], rows, 2)


def throughput_table(cells: Sequence[Cell]) -> Table | None:
    """Throughput per second of load."""
    having = [one for one in cells if isinstance(one.get("throughput"), dict)]
    units = list(dict.fromkeys(unit for one in having for unit in one["throughput"]))
    rows = [[*_who(one), *(figure(one["throughput"].get(unit)) for unit in units)] for one in having]
    return Table("Throughput", ["cell", "arm", *map(rate_name, units)], rows, 2) if rows else None


def rate_name(name: str) -> str:
    """output_tokens_per_s -> output tokens per second."""
    return name.replace("_per_s", " per second").replace("_", " ")


def swept_table(cells: Sequence[Cell], setting: str, metrics: Sequence[str], caption: str) -> Table:
    """One line per value and arm."""
    head = [setting, "arm", "n"]
    head += [f"{with_unit(metric)}, {'median' if is_time(metric) else 'mean'}" for metric in metrics]
    rows = [
        [
            setting_name(setting, one["cell"].get(setting)),
            str(one["arm"]),
            figure(one.get("n")),
            *(_interval(metric, one["metrics"].get(metric)) for metric in metrics),
        ]
        for one in cells
    ]
    return Table(caption, head, rows, 2)


def hits_table(cells: Sequence[Cell], rate: str, caption: str) -> Table:
    """A replay's cells with the settings that differ."""
    keys = varied(one["settings"] for one in cells) or ["order"]
    counts = ("num_requests", "num_chunks", "num_evicted", "order_us_p50", "order_us_p99")
    rows = [
        [
            *(setting_name(key, one["settings"].get(key)) for key in keys),
            *(figure(one[rate].get(end)) for end in ("value", "low", "high")),
            *(figure(one.get(count)) for count in counts),
        ]
        for one in cells
    ]
    head = [key.replace("_", " ") for key in keys]
    head += ["share", "low", "high", "requests", "chunks", "evicted", "order p50 (µs)", "order p99 (µs)"]
    return Table(caption, head, list({tuple(row): row for row in rows}.values()), len(keys))


def fates_table(sums: Mapping[str, Mapping[str, int]]) -> Table:
    """Tokens of each fate, one line per arm."""
    names = list(dict.fromkeys(fate for found in sums.values() for fate in found))
    rows = [[arm, *(str(found.get(fate, 0)) for fate in names)] for arm, found in sums.items()]
    return Table("Fates of the prompt tokens (tokens)", ["arm", *names], rows)


def permutation_table(points: Sequence[Mapping[str, Any]], metric: str) -> Table:
    """A line a request."""
    rows = [[one["request"], *(figure(one[key]) for key in ("baseline", "mean", "sd"))] for one in points]
    return Table(f"{with_unit(metric)}, request by request", ["request", "given order", "mean of others", "sd"], rows)


def scores_table(cells: Sequence[Cell], metrics: Sequence[str]) -> Table:
    """Means with intervals, one line per arm."""
    rows = [
        [
            *_who(one),
            figure(one.get("n")),
            figure(one.get("errors")),
            *(_interval(m, one["metrics"].get(m)) for m in metrics),
        ]
        for one in cells
    ]
    return Table("Scores, mean [95% interval]", ["cell", "arm", "n", "errors", *map(with_unit, metrics)], rows, 2)


def contrast_table(run: Recorded) -> Table | None:
    """The contrasts of the results."""
    keys = varied(one.get("cell") or {} for one in run.contrasts)
    keys = [key for key in keys if run.kind != "replay" or key != "order"]  # A replay's order is `b`.
    has_p = any(one.get("p") is not None for one in run.contrasts)
    rows = []
    for one in run.contrasts:
        judged = ("yes" if direction(one) else "no") if has_enough(one) else "too few"
        said = "failures" if fails_more(one) else judged
        cell = {key: value for key, value in (one.get("cell") or {}).items() if key in keys}
        words = [cell_name(cell) or "all", *(plain(one.get(key)) for key in ("a", "b", "metric", "statistic"))]
        rows.append(
            [
                *words,
                said,
                *(figure(one.get(key)) for key in ("value", "low", "high", "n")),
                *([_p(one.get("p"))] if has_p else []),
            ]
        )
    head = [
        "cell",
        "a",
        "b",
        "metric",
        "statistic",
        "beyond chance",
        "value",
        "low",
        "high",
        "n",
        *(["p"] if has_p else []),
    ]
    return Table("Comparison of arms: ratios are a / b, differences b - a", head, rows, 6) if rows else None


def servers_table(run: Recorded) -> Table | None:
    """The servers' own descriptions, one column per server; nested objects are in the record only."""
    servers = run.results.get("servers")
    servers = (
        {arm: facts for arm, facts in servers.items() if isinstance(facts, dict)} if isinstance(servers, dict) else {}
    )
    told = dict.fromkeys(key for facts in servers.values() for key in facts)
    keys = [key for key in told if not any(_is_nested(facts.get(key)) for facts in servers.values())]
    rows = [[key.replace("_", " "), *(plain(facts.get(key)) for facts in servers.values())] for key in keys]
    return Table("What really ran", ["server", *servers], rows, 1 + len(servers)) if rows else None


def storage_table(run: Recorded) -> Table | None:
    """FusionRAG's storage simulation with the paper's figures, one line per run and way of matching."""
    storage = run.results.get("storage")
    if not isinstance(storage, dict) or not storage.get("runs"):
        return None
    keys = ("storage_reduction", "eliminated", "hit_rate")
    sources = [("paper", "", storage["paper"])]
    sources += [(one["key"], way, found) for one in storage["runs"] for way, found in one["figures"].items()]
    rows = [[key, way, *(figure(found.get(name)) for name in keys)] for key, way, found in sources]
    head = ["run", "matching", "storage reduction", "recomputations avoided", "hit rate"]
    return Table("Storage simulation, with FusionRAG's figures", head, rows, 2)


# Private, in order of use


def _who(one: Cell) -> list[str]:
    return [cell_name(one["cell"]) or "all", str(one["arm"])]


def _named(keys: Sequence[str]) -> list[str]:
    return [{"p50": "median"}.get(key, key) for key in keys]


def _interval(metric: str, found: Mapping[str, Any] | None) -> str:
    """The median or mean, and its interval if there is one."""
    ends = [(found or {}).get(end) for end in ("low", "high")]
    return figure(middle(metric, found)) + (f" [{figure(ends[0])}, {figure(ends[1])}]" if None not in ends else "")


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(one, dict | list) for one in value))


def _p(value: Any) -> str:
    return f"{value:.2g}" if isinstance(value, float) else "none"
