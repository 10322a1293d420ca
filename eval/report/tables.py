"""The tables of a record: frames of text, for the page and the terminal.
Nested objects of a record become columns."""

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
from eval.recorded import Recorded, middle, setting_name, varied

MAX_LIST = 12
"""Longer lists, and lists of objects within rows, are in the record only."""
KNOWN = {
    "cells",
    "overlap",
    "contrasts",
    "verdict",
    "tables",
    "servers",
    "ends",
    "skipped",
    "resumed_at",
}
KNOWN |= {"note", "notes"}
"""Results that are shown in a form of their own."""


@dataclass(frozen=True)
class Table:
    """`frame`: text, one column per name; `numbers`:
    the columns of figures, which are aligned to the right."""

    title: str
    frame: pd.DataFrame
    numbers: frozenset[str]
    note: str = ""

    def text(self) -> str:
        """A table for the terminal."""
        return str(
            tabulate(
                self.frame.to_dict("list"),
                headers="keys",
                # The figures are texts: tabulate would print 0.500 as 0.5.
                disable_numparse=True,
                maxheadercolwidths=16,
            )
        )


def create_table(title: str, rows: Iterable[Mapping[str, Any]], note: str = "") -> Table:
    """The rows as text; nested objects become columns, and columns without a value are left out."""
    kept = (
        {name: value for name, value in flat(row).items() if not _is_rows(value)} for row in rows
    )
    # Integers beside a missing value are floats in pandas: `figure` prints them as integers.
    frame = pd.DataFrame(kept).dropna(axis=1, how="all").astype(object).map(figure)
    # A figure begins with a number, such as one with its interval.
    numbers = [
        str(name)
        for name in frame
        if frame[name].str.fullmatch(r"([-+]?[\d.]+(e-?\d+)?( \[.*)?)?").all()
    ]
    return Table(title, frame, frozenset(numbers), note)


def tables_of(run: Recorded) -> list[Table]:
    """The record's own tables, its cells, quantiles and contrasts,
    and whatever else its results hold."""
    own = [
        create_table(one["title"], one["rows"], one.get("note", ""))
        for one in run.results.get("tables") or []
    ]
    found = [*own, cells_table(run), quantiles_table(run), contrast_table(run.contrasts)]
    return [
        table for table in [*found, *([] if own else other_tables(run.results))] if len(table.frame)
    ]


def cells_table(run: Recorded) -> Table:
    """One line per cell and arm: the settings that vary, and the middle of each metric with its
    interval."""
    cells = run.results.get("cells") or []
    keys = varied(one["cell"] for one in cells)
    rows = []
    for one in cells:
        figures = {
            with_unit(name): interval(name, found) for name, found in one.get("metrics", {}).items()
        }
        rest = {
            key: value
            for key, value in one.items()
            if key not in ("cell", "arm", "metrics", "n", "errors")
        }
        counted = {"n": one.get("n"), "errors": one.get("errors") or None}
        rows.append(
            {"arm": one.get("arm"), **_settings(one["cell"], keys), **counted, **figures, **rest}
        )
    return create_table(
        "Figures, with 95% intervals", rows, "Times are medians, other metrics means."
    )


def quantiles_table(run: Recorded) -> Table:
    """Times by their quantiles, one line per metric, cell and arm."""
    keys = varied(one["cell"] for one in run.cells)
    rows = [
        {
            "metric": with_unit(name),
            "arm": one["arm"],
            **_settings(one["cell"], keys),
            "mean": found["mean"],
        }
        | {"median": found["p50"], "p90": found["p90"], "p99": found.get("p99")}
        for name in metric_names(run.cells)
        # `packed` keeps no quantiles of other metrics.
        if is_time(name)
        for one in run.cells
        if (found := one["metrics"].get(name))
    ]
    return create_table("Times by quantile", rows)


def contrast_table(contrasts: Sequence[Mapping[str, Any]]) -> Table:
    """Contrasts with both arms' own figures."""
    keys = varied(one["cell"] for one in contrasts)
    rows = []
    for one in contrasts:
        judged = ("yes" if direction(one) else "no") if has_enough(one) else "too few"
        names = {
            "a": one["a"],
            "b": one["b"],
            "metric": label(one["metric"]),
            "statistic": one["statistic"],
        }
        figures = {"of a": one.get("a_value"), "of b": one.get("b_value")}
        figures |= {key: one.get(key) for key in ("value", "low", "high", "n", "p")}
        figures |= {
            # None for 0: without failures `create_table` leaves the column out.
            f"{what} {side}": one.get(f"{what}_{side}") or None
            for what in ("asked", "failed")
            for side in "ab"
        }
        found = {"beyond chance": "failures" if fails_more(one) else judged}
        rows.append(_settings(one["cell"], keys) | names | found | figures)
    return create_table(
        "Comparison of arms: ratios are a / b, of rates b / a, differences b - a", rows
    )


def other_tables(results: Mapping[str, Any]) -> list[Table]:
    """Results that no other table shows: a table for each list of objects,
    and one for all single values."""
    rest = flat({key: value for key, value in results.items() if key not in KNOWN})
    lists = [
        create_table(name.capitalize(), value) for name, value in rest.items() if _is_rows(value)
    ]
    single = [
        {"result": name, "value": value} for name, value in rest.items() if not _is_rows(value)
    ]
    return [*lists, create_table("Further results", single)]


def servers_table(run: Recorded) -> Table:
    """The servers' own descriptions, one column per server."""
    told = {arm: flat(facts) for arm, facts in run.servers.items()}
    keys = dict.fromkeys(key for facts in told.values() for key in facts)
    rows = (
        {"server": key, **{arm: plain(facts.get(key)) for arm, facts in told.items()}}
        for key in keys
    )
    return create_table("What really ran", rows)


def flat(row: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested objects as columns of one row; a figure with an interval is one text.
    Long lists of values are left out."""
    found: dict[str, Any] = {}
    for key, value in row.items():
        name = f"{prefix} {words(key)}".strip()
        if isinstance(value, dict):
            found |= (
                {name: interval(key, value)}
                if {"low", "high"} <= value.keys()
                else flat(value, name)
            )
        elif not isinstance(value, list) or _is_rows(value):
            found[name] = value
        elif len(value) <= MAX_LIST:
            found[name] = " ".join(map(figure, value))
    return found


def metric_names(cells: Sequence[Mapping[str, Any]]) -> list[str]:
    """All metrics of the cells, known ones first."""
    return ranked({name for one in cells for name in one["metrics"]})


def with_unit(metric: str) -> str:
    """The metric's label, and its unit if it has one."""
    unit = METRICS[metric].unit if metric in METRICS else ""
    return f"{label(metric)} ({unit})" if unit else label(metric)


def interval(metric: str, found: Mapping[str, Any]) -> str:
    """The median of times, else the mean, with its interval: "0.5 [0.4, 0.6]"."""
    value, *ends = map(figure, middle(metric, found) or [None])
    # `middle` gives the value for missing ends.
    return f"{value} [{', '.join(ends)}]" if ends and found.get("low") is not None else value


def figure(value: Any) -> str:
    """A number with three digits; whole numbers and texts unchanged."""
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.0f}" if value.is_integer() or abs(value) >= 1000 else f"{value:.3g}"
    return "" if value is None or isinstance(value, float) else plain(value)


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
    shown = ((key, cell.get(key)) for key in keys)
    return {
        words(key): None if value is None and key != "k" else setting_name(key, value)
        for key, value in shown
    }


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)
