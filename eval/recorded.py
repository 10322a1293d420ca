"""Reads a run back: record, samples and cells in one format, whichever command wrote them.

A replay's record has one row per cell with counts of blocks of bins of requests; this module
converts it to one row per bin, as the other commands have one per request, each with its block's
mean. The replay's policies (order, tail, eviction, ...) become the arm, its other settings the
cell. Computes no figures and writes no pages.
"""

from __future__ import annotations

import json
import lzma
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from eval.errors import CommandError
from eval.metrics import is_time
from eval.packed import pack_samples, unpack_samples
from eval.run import Sample, read_record, read_samples

KINDS = ("replay", "serve", "quality", "recall", "bench")
POLICIES = ("order", "tail", "eviction", "admission", "dedup", "host_admission")
UNITS = {
    "saved_share": ("hits", "dropped", "lost", "chunks"),
    "token_saved_share": ("token_hits", "dropped_tokens", "lost_tokens", "tokens"),
}
"""Metric -> the counts of a replay for it:
found cached, shown before by the conversation, computed again, and the total."""

Cell = Mapping[str, Any]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Recorded:
    """`record`: record.json. `samples`: one per request, by arm and cell. `cells`: of the results.
    Both have `arm`, `cell`, `metrics`."""

    folder: Path
    record: Mapping[str, Any]
    samples: Sequence[Sample]
    cells: Sequence[Cell]

    @property
    def name(self) -> str:
        """The folder's."""
        return self.folder.name

    @property
    def kind(self) -> str:
        """One of `KINDS`."""
        return str(self.record["kind"])

    @property
    def results(self) -> dict[str, Any]:
        """The figures that the command computed."""
        return dict(self.record["results"])

    @property
    def contrasts(self) -> list[dict[str, Any]]:
        """The contrasts in the results."""
        return list(self.results.get("contrasts") or [])

    @property
    def servers(self) -> dict[str, dict[str, Any]]:
        """The servers' descriptions of themselves, by arm."""
        return dict(self.results.get("servers") or {})

    @property
    def arms(self) -> list[str]:
        """The arms, in the order of their first samples."""
        return list(dict.fromkeys(sample["arm"] for sample in self.samples))

    @property
    def measured(self) -> list[Sample]:
        """The samples without warm-up and failures."""
        return [one for one in self.samples if not one.get("warm_up") and not one.get("error")]


def read_recorded(path: Path) -> Recorded:
    """Read a run's folder, or the folder of a record.json.

    Raises:
        CommandError: no record, one that `python -m eval` did not write, or invalid samples.
    """
    folder = (path.parent if path.name == "record.json" else path).resolve()
    record = read_record(folder)
    try:
        # A record of schema 1 has its samples in samples.jsonl alone.
        values = record.pop("values", None) or pack_samples(
            read_samples(folder), record["spec"].get("block")
        )
        rows, cells = unpack_samples(values), _cells(record["results"])
        if record["kind"] != "replay":
            return Recorded(folder, record, rows, cells)
        samples = [one for row in _replayed(rows) for one in _requests(row)]
        return Recorded(folder, record, samples, _replayed(cells))
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, lzma.LZMAError) as error:
        raise CommandError(
            f"{folder}: its samples or cells were not written by `python -m eval`: {error!r}"
        ) from None


def cell_name(cell: Cell) -> str:
    """A cell for people: "rate 2, k 5"; empty without a sweep."""
    return ", ".join(
        f"{key.replace('_', ' ')} {setting_name(key, value)}" for key, value in cell.items()
    )


def setting_name(key: str, value: Any) -> str:
    """A setting's value for people."""
    if key.startswith("capacity") and not value:
        return "no limit"
    if value is None:
        return "all" if key == "k" else "any"
    return f"{value:g}" if isinstance(value, float) else str(value)


def varied(cells: Iterable[Cell]) -> dict[str, list[Any]]:
    """The settings that differ between cells, and their values.
    None: a setting does not apply, but for `k`: all chunks."""
    cells = list(cells)
    values = {
        key: [cell.get(key) for cell in cells]
        for key in dict.fromkeys(key for cell in cells for key in cell)
    }
    found = {
        key: {json.dumps(value): value for value in given if value is not None or key == "k"}
        for key, given in values.items()
    }
    return {key: list(each.values()) for key, each in found.items() if len(each) > 1}


def middle(metric: str, found: Mapping[str, Any] | None) -> tuple[float, ...]:
    """(value, low, high): the median of times, else the mean, with its interval;
    () if it was not measured."""
    found = found or {}
    value = found.get("value", found.get("p50" if is_time(metric) else "mean"))
    if value is None or not math.isfinite(value):
        return ()
    # Without an interval both ends are the value: a chart then draws a point.
    return float(value), *(
        value if found.get(end) is None else found[end] for end in ("low", "high")
    )


def grouped(rows: Iterable[T], key: Callable[[T], Any]) -> list[tuple[Any, list[T]]]:
    """The rows by a JSON key, in order of appearance."""
    # Keys such as cells are objects, which are not hashable.
    groups: dict[str, list[T]] = {}
    for row in rows:
        groups.setdefault(json.dumps(key(row), sort_keys=True), []).append(row)
    return [(key(taken[0]), taken) for taken in groups.values()]


# Private, in order of use


def _cells(results: Mapping[str, Any]) -> list[Cell]:
    """The cells with their throughput, and a replay's shares, among the metrics."""
    cells: list[Cell] = []
    for one in results.get("cells") or []:
        saved, throughput = one.get("saved") or {}, one.get("throughput") or {}
        metrics = {name: saved[unit] for name, (*_, unit) in UNITS.items() if unit in saved}
        metrics |= {name: {"value": value} for name, value in throughput.items()} | one.get(
            "metrics", {}
        )
        cells.append({"arm": "", **one, "metrics": metrics})
    return cells


def _telling(cells: Iterable[Cell]) -> list[str]:
    """The policies that name an arm: the order, and others that vary beyond it.
    None means that a policy does not apply."""
    cells = list(cells)
    settled = {
        (key, cell["order"], cell.get(key))
        for cell in cells
        for key in POLICIES
        if cell.get(key) is not None
    }
    pairs = [(key, order) for key, order, _ in settled]
    return [
        key
        for key in POLICIES
        if key == "order" or any(pairs.count((key, cell["order"])) > 1 for cell in cells)
    ]


def _replayed(cells: Sequence[Cell]) -> list[Cell]:
    """Each with its arm, and with the differing settings as `cell`;
    if a setting does not apply, once for each value of it."""
    settings = [one["cell"] for one in cells]
    keys, free = (
        _telling(settings),
        {key: of for key, of in varied(settings).items() if key not in POLICIES},
    )
    return [
        {
            **one,
            "arm": " ".join(
                str(one["cell"][key]) for key in keys if one["cell"].get(key) is not None
            ),
            "cell": dict(zip(free, chosen, strict=True)),
            "settings": one["cell"],
        }
        for one in cells
        for chosen in product(
            *([one["cell"][key]] if one["cell"][key] in of else of for key, of in free.items())
        )
    ]


def _requests(row: Cell) -> list[Sample]:
    # Neighbours in a trace share chunks, so blocks are resampled, as long as replay's own.
    num, step, length = row["num"], row["step"], row["length"]
    sizes = [min(step, num - at) for at in range(0, num, step)]
    # Divided by the mean number of chunks, so that the mean over bins is the share of all chunks,
    # as replay reports it.
    shares = {
        name: np.repeat(
            (np.add(row[hits], row[dropped]) - row[lost]) / sizes / (row[total] / num), sizes
        )
        for name, (hits, dropped, lost, total) in UNITS.items()
        if row.get(total)
    }
    return [
        # By its number a bin is paired with the same bin of other policies.
        {"arm": row["arm"], "cell": row["cell"], "request": str(i), "block": i // length}
        | {"metrics": dict(zip(shares, map(float, values), strict=True))}
        for i, values in enumerate(zip(*shares.values(), strict=True))
    ]
