"""The tables of a record: frames of text, for the page and the terminal. Nested objects of a record become columns."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
from tabulate import tabulate

from eval.contrast import direction, fails_more, has_enough
from eval.metrics import METRICS, is_time, label, ranked
from eval.recorded import Recorded, setting_name, varied

MAX_LIST = 12
"""Longer lists, and lists of objects within rows, are in the record only."""
KNOWN = {"cells", "overlap", "contrasts", "verdict", "tables", "servers", "ends"}
KNOWN |= {"skipped", "resumed_at", "note", "notes", "caveats"}
"""Results that are shown in a form of their own."""


@dataclass(frozen=True)
class Table:
    """`frame`: text, one column per name; `numbers`: the columns of figures, which are aligned to the right."""

    title: str
    frame: pd.DataFrame
    numbers: frozenset[str]
    note: str = ""

    def text(self) -> str:
        """A table for the terminal."""
        return str(tabulate(self.frame.to_dict("list"), headers="keys", disable_numparse=True, maxheadercolwidths=16))


def create_table(title: str, rows: Iterable[Mapping[str, Any]], note: str = "") -> Table:
    """The rows as text; nested objects become columns, and columns without a value are left out."""
    frame = pd.DataFrame([flat(row) for row in rows]).dropna(axis=1, how="all").astype(object)
    numbers = {name for name in frame if all(is_figure(value) for value in frame[name].dropna())}
    return Table(title, frame.where(frame.notna(), None).map(figure), frozenset(map(str, numbers)), note)


def tables_of(run: Recorded) -> list[Table]:
    """The record's own tables, its cells, quantiles and contrasts, and whatever else its results hold."""
    own = [create_table(one["title"], one["rows"], one.get("note", "")) for one in run.results.get("tables") or []]
    found = [*own, cells_table(run), quantiles_table(run), contrast_table(run.contrasts)]
    return [table for table in [*found, *([] if own else other_tables(run.results))] if len(table.frame)]


def cells_table(run: Recorded) -> Table:
    """One line per cell and arm: the settings that vary, and the middle of each metric with its interval."""
    cells = [one for one in run.results.get("cells") or [] if isinstance(one, dict)]
    keys = varied(one["cell"] for one in cells)
    rows = []
    for one in cells:
        figures = {with_unit(name): interval(name, value) for name, value in (one.get("metrics") or {}).items()}
        rest = {key: value for key, value in one.items() if key not in ("cell", "arm", "metrics", "n", "errors")}
        counted = {"n": one.get("n"), "errors": one.get("errors") or None}
        rows.append({"arm": one.get("arm"), **_settings(one["cell"], keys), **counted, **figures, **rest})
    return create_table("Figures, with 95% intervals", rows, "Times are medians, other metrics means.")


def quantiles_table(run: Recorded) -> Table:
    """Times by their quantiles, one line per metric, cell and arm."""
    keys = varied(one["cell"] for one in run.cells)
    rows = [
        {"metric": with_unit(name), "arm": one["arm"], **_settings(one["cell"], keys)}
        | {{"p50": "median"}.get(key, key): found.get(key) for key in ("mean", "p50", "p90", "p99")}
        for name in metric_names(run.cells)
        if is_time(name)
        for one in run.cells
        if isinstance(found := one["metrics"].get(name), dict)
    ]
    return create_table("Times by quantile", rows)


def contrast_table(contrasts: Sequence[Mapping[str, Any]]) -> Table:
    """Contrasts with both arms' own figures."""
    keys = varied(one["cell"] for one in contrasts)
    rows = []
    for one in contrasts:
        judged = ("yes" if direction(one) else "no") if has_enough(one) else "too few"
        names = {"a": one["a"], "b": one["b"], "metric": label(one["metric"]), "statistic": one["statistic"]}
        figures = {"of a": one.get("a_value"), "of b": one.get("b_value")}
        figures |= {key: one.get(key) for key in ("value", "low", "high", "n", "p")}
        found = {"beyond chance": "failures" if fails_more(one) else judged}
        rows.append(_settings(one["cell"], keys) | names | found | figures)
    return create_table("Comparison of arms: ratios are a / b, differences b - a", rows)


def other_tables(results: Mapping[str, Any]) -> list[Table]:
    """Results that no other table shows: a table for each list of objects, and one for all single values."""
    found, single = [], []
    for key, value in results.items():
        if key in KNOWN or value is None:
            continue
        parts = {f"{key} {name}": one for name, one in value.items()} if isinstance(value, dict) else {key: value}
        found += [create_table(words(name).capitalize(), one) for name, one in parts.items() if _is_rows(one)]
        single += [{"result": name, "value": one} for name, one in flat({key: value}).items()]
    return [*found, create_table("Further results", single)]


def servers_table(run: Recorded) -> Table:
    """The servers' own descriptions, one column per server; nested objects are in the record only."""
    told = dict.fromkeys(key for one in run.servers.values() for key in one)
    keys = [key for key in told if not any(_is_nested(one.get(key)) for one in run.servers.values())]
    rows = [{"server": words(key), **{arm: plain(one.get(key)) for arm, one in run.servers.items()}} for key in keys]
    return create_table("What really ran", rows)


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as columns of one row; a figure with an interval is one text."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        name = f"{prefix} {words(key)}".strip()
        if isinstance(value, dict):
            found |= {name: interval(key, value)} if {"low", "high"} <= value.keys() else flat(value, name)
        elif not _is_nested(value) and not (isinstance(value, list) and len(value) > MAX_LIST):
            found[name] = " ".join(map(figure, value)) if isinstance(value, list) else value
    return found


def metric_names(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """All metrics of the cells, known ones first."""
    return ranked({name for one in cells for name, found in one["metrics"].items() if isinstance(found, dict)})


def with_unit(metric: str) -> str:
    """The metric's label, and its unit if it has one."""
    unit = METRICS[metric].unit if metric in METRICS else ""
    return f"{label(metric)} ({unit})" if unit else label(metric)


def interval(metric: str, found: Any) -> Any:
    """The median of times, else the mean, with its interval: "0.5 [0.4, 0.6]"."""
    if not isinstance(found, dict):
        return found
    value = found.get("value", found.get("p50" if is_time(metric) else "mean"))
    ends = [found.get("low"), found.get("high")]
    return figure(value) + (f" [{figure(ends[0])}, {figure(ends[1])}]" if None not in ends else "")


def figure(value: Any) -> str:
    """A number with three digits; whole numbers and texts unchanged."""
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.0f}" if value.is_integer() or abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None or isinstance(value, float) else plain(value)


def is_figure(value: Any) -> bool:
    """Whether a value is a number, or a text that begins with one, such as a number with its interval."""
    if isinstance(value, str):
        return re.match(r"[-+]?[\d.]+(e-?\d+)?( \[|$)", value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool)


def plain(value: Any) -> str:
    """Any JSON as a line of text."""
    if isinstance(value, list):
        return " ".join(map(plain, value))
    return value if isinstance(value, str) else "none" if value is None else json.dumps(value)


def words(name: Any) -> str:
    """output_tokens_per_s -> output tokens per second."""
    return re.sub("_per_s$", " per second", str(name)).replace("_", " ")


# Private, in order of use


def _settings(cell: Mapping[str, Any], keys: Iterable[str]) -> dict[str, str | None]:
    applies = {key for key in keys if cell.get(key) is not None or key == "k"}
    return {words(key): setting_name(key, cell.get(key)) if key in applies else None for key in keys}


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def _is_nested(value: Any) -> bool:
    return isinstance(value, dict) or (isinstance(value, list) and any(isinstance(one, dict | list) for one in value))
