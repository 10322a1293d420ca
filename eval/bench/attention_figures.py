"""What the attention bench's samples say: rates over the work that had to be done, speedups, the targets. Pure functions.

A sample is a cell (`kind` cell) or the machine's roof (`kind` roof). A rate is needed FLOPs, or bytes with each key read once,
over the median time; what a layout executes beyond that makes it slower, not faster. A speedup is the baseline's median
time over the arm's, with a bootstrap interval over repetitions, which both arms were part of.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from eval.intervals import bootstrap

OURS = ("fa2", "fa3", "fa3_two_part", "reference")
DENSE = ("dense_fa3", "dense_fa2", "dense")
"""The first that was measured is the dense arm that rates are compared with."""
BASELINES = (*DENSE, "sdpa")
DRAWS = 500
"""Of a bootstrap: hundreds of intervals are drawn, within the time that a command has on a GPU."""


class Target(NamedTuple):
    """What issue 6 wants in every cell of this ratio and context, of one arm."""

    name: str
    figure: str
    at_least: float
    ratio: float = 0.15
    context: int = 32_768


TARGETS = (
    Target("speedup over FA3 dense", "speedup", 5.0),
    Target("share of FA3 dense's rate", "of_dense_rate", 0.7),
)


def summarize(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Figures of every cell, the roof, and whether the targets are met."""
    cells = {sample["key"]: summarize_cell(sample) for sample in samples if sample["kind"] == "cell"}
    roofs = [sample for sample in samples if sample["kind"] == "roof"]
    return {"cells": cells, "roof": _roof(roofs), "targets": [judge(target, cells) for target in TARGETS]}


def summarize_cell(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Of each arm the median, rates and plan; of ours also speedups and the share of the dense arm's rate."""
    measured = sample["arms"]
    arms: dict[str, Any] = {}
    for name, row in measured.items():
        work = sample["dense_work" if name in DENSE else "work"]
        seconds = median(row["ms"]) / 1000
        arms[name] = {
            "ms": 1000 * seconds,
            "flops_per_s": work["flops"] / seconds,
            "bytes_per_s": work["bytes"] / seconds,
            "host_ms": median(row["host_ms"]),
            **{key: value for key, value in row.items() if key not in ("ms", "host_ms")},
        }
        if name in OURS:
            speedup = {base: _speedup(measured[base]["ms"], row["ms"]) for base in BASELINES if base in measured}
            arms[name]["speedup"] = speedup
            needed = sample["work"]["flops"] / sample["dense_work"]["flops"]
            arms[name]["of_dense_rate"] = {
                base: [value * needed for value in speedup[base]] for base in DENSE if base in speedup
            }
    ours = [name for name in OURS if name in arms]
    kept = ("pattern", "context", "batch", "ratio", "work", "dense_work", "plans", "failed")
    fastest = min(ours, key=lambda name: arms[name]["ms"]) if ours else None
    return {**{key: sample[key] for key in kept}, "arms": arms, "fastest": fastest}


def judge(target: Target, cells: Mapping[str, Any]) -> dict[str, Any]:
    """Whether one of ours reaches it in all of its cells where FA3 dense was measured, `num_cells`.

    `verdict`: met where one arm's intervals lie above it in all of them; not met where each arm's lies below in one, or is
    missing; else open; not measured without such a cell. `worst`: arm -> its worst cell and the figure there.
    """
    wanted = {
        name: cell
        for name, cell in cells.items()
        if (cell["ratio"], cell["context"]) == (target.ratio, target.context) and "dense_fa3" in cell["arms"]
    }
    worst: dict[str, tuple[str, Sequence[float]]] = {}
    reached, reachable = False, False
    for arm in OURS:
        found = {
            name: cell["arms"][arm][target.figure]["dense_fa3"] for name, cell in wanted.items() if arm in cell["arms"]
        }
        if found:
            worst[arm] = min(found.items(), key=lambda item: item[1][0])
        if found and len(found) == len(wanted):
            reached |= all(low >= target.at_least for _, low, _ in found.values())
            reachable |= all(high >= target.at_least for _, _, high in found.values())
    verdict = "met" if reached else "open" if reachable else "not met" if wanted else "not measured"
    return {**target._asdict(), "verdict": verdict, "num_cells": len(wanted), "worst": worst}


def _roof(samples: Sequence[Mapping[str, Any]]) -> dict[str, float] | None:
    if not samples:
        return None
    product_s = median(ms for sample in samples for ms in sample["product_ms"]) / 1000
    copy_s = median(ms for sample in samples for ms in sample["copy_ms"]) / 1000
    return {
        "flops_per_s": samples[0]["product_flops"] / product_s,
        "bytes_per_s": samples[0]["copy_bytes"] / copy_s,
    }


def _speedup(base: Sequence[float], arm: Sequence[float]) -> tuple[float, float, float]:
    pairs = list(zip(base, arm, strict=True))
    return bootstrap(pairs, lambda drawn: median(b for b, _ in drawn) / median(a for _, a in drawn), draws=DRAWS)
