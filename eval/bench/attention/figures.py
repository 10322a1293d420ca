"""What the attention bench's samples say: rates over the work that had to be done, speedups, the targets. Pure functions.

Samples of a cell: `work` (what has to be done), `layout KERNEL` (what ours execute and take), and one of each repetition of each
arm; an arm that failed has an `error`. `roof`: what the machine reaches. A rate is needed FLOPs, or bytes with each key read
once, over the median time; what a layout executes beyond that makes it slower, not faster. A speedup is the baseline's median
time over the arm's, with a bootstrap interval over repetitions, which both arms were part of.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any, NamedTuple

from eval.outcome import Row, interval, table
from eval.run import Sample
from eval.stats import contrast
from sglang_chunkcache.attention.flashinfer import KERNELS

NO_GPU = "Measured on a CPU: none of this is a GPU figure, and the GPU figures are missing."
PAPER = "FusionRAG's own figures, from its figure 14b (its kernel, its GPU, 15%, 32k): 4.2x over FlashAttention, 2.69x over SDPA."
DENSE = ("dense_fa3", "dense_fa2", "dense")
"""The first that was measured is the dense arm that rates are compared with."""
BASELINES = (*DENSE, "sdpa")
Triple = tuple[float, float, float]


class Target(NamedTuple):
    """What is aimed at in every cell of this ratio and context, by one of our kernels; `of_rate`: of dense FA3's rate."""

    name: str
    at_least: float
    of_rate: bool
    ratio: float = 0.15
    context: int = 32_768


TARGETS = (Target("speedup over FA3 dense", 5.0, False), Target("share of FA3 dense's rate", 0.7, True))


class Measured(NamedTuple):
    """The samples of one cell. `times`: arm -> seconds of each repetition; `plans`: arm -> other metrics."""

    cell: Mapping[str, Any]
    work: Mapping[str, float]
    layouts: Mapping[str, Mapping[str, float]]
    times: Mapping[str, Sequence[float]]
    plans: Mapping[str, Mapping[str, float]]
    failed: Mapping[str, str]

    @property
    def where(self) -> Row:
        """The first columns of its rows."""
        return {"pattern": self.cell["pattern"], "tokens": self.cell["context"], "requests": self.cell["batch"]} | {
            "ratio": self.cell["ratio"]
        }

    def speedup(self, arm: str, base: str) -> Triple:
        """(value, low, high) of the baseline's median time over the arm's."""
        found = contrast(list(zip(self.times[base], self.times[arm], strict=True)))
        return found["value"], found["low"], found["high"]

    def fastest(self) -> str | None:
        """The fastest kernel of ours; the reference, slow on purpose, is none."""
        ours = [kernel for kernel in KERNELS if kernel in self.times]
        return min(ours, key=lambda kernel: median(self.times[kernel])) if ours else None


def cells_of(samples: Sequence[Sample]) -> list[Measured]:
    """The cells that were measured."""
    groups: dict[str, list[Sample]] = {}
    for one in samples:
        if one["arm"] != "roof":
            groups.setdefault(str(one["cell"]), []).append(one)
    return [_measured(taken) for taken in groups.values()]


def summarize(samples: Sequence[Sample]) -> dict[str, Any]:
    """Layouts, times with rates and speedups, what failed, and a sentence for each target if a kernel of ours ran."""
    cells = cells_of(samples)
    roof = next((one["metrics"] for one in samples if one["arm"] == "roof"), None)
    on_gpu = any(one["device"] == "cuda" for one in samples if one["arm"] == "work")
    layouts = [{**cell.where, **row} for cell in cells for row in _layout_rows(cell)]
    times = [{**cell.where, **_times_row(cell, roof)} for cell in cells if cell.times or cell.failed]
    failures = list(_failures(cells))
    note = "Milliseconds a layer; rates and speedups are those of the fastest kernel of ours, over needed work."
    if any("reference" in cell.times for cell in cells):
        note += " reference: the oracle in plain torch, not a kernel."
    tables = [
        table("What the layouts execute over what is needed", _by_pattern(cells)),
        table("Layouts, cell by cell", layouts),
    ]
    tables += [table("Times", times, note), table("Left out", failures)]
    if roof:
        tables.append(table("The machine's best in this run", [{name: f"{value:.3g}" for name, value in roof.items()}]))
    ran = any(cell.fastest() for cell in cells)
    verdict = [] if on_gpu else [NO_GPU]
    verdict += [*(judge(target, cells)["text"] for target in TARGETS), PAPER] if ran else []
    return {"verdict": verdict, "tables": [one for one in tables if one["rows"]]}


def judge(target: Target, cells: Sequence[Measured]) -> dict[str, Any]:
    """Whether one kernel of ours reaches it in all of its cells where FA3 dense was measured, `num_cells`.

    `verdict`: met if one kernel's intervals are above it in all of them; not met if each kernel's is below in one, or is
    missing; else open; not measured without such a cell. `worst`: kernel -> its worst cell and the figure there.
    """
    at = (target.ratio, target.context)
    wanted = [cell for cell in cells if (cell.cell["ratio"], cell.cell["context"]) == at and "dense_fa3" in cell.times]
    worst: dict[str, tuple[Row, Triple]] = {}
    reached = reachable = False
    for arm in KERNELS:
        found = [(cell.where, _figure(target, cell, arm)) for cell in wanted if arm in cell.times]
        if found:
            worst[arm] = min(found, key=lambda item: item[1][0])
        if found and len(found) == len(wanted):
            reached |= all(low >= target.at_least for _, (_, low, _) in found)
            reachable |= all(high >= target.at_least for _, (_, _, high) in found)
    verdict = "met" if reached else "open" if reachable else "not met" if wanted else "not measured"
    told = "; ".join(
        f"{arm} {interval(triple, 2)} ({'/'.join(map(str, at.values()))})" for arm, (at, triple) in worst.items()
    )
    text = f"Target: {target.name} at least {target.at_least:g} at {target.ratio:.0%}, {target.context:,} tokens: {verdict}"
    text += f" in {len(wanted)} cells; worst: {told}" if told else ""
    return {"verdict": verdict, "num_cells": len(wanted), "worst": worst, "text": text + "."}


# Private, in order of use


def _measured(samples: Sequence[Sample]) -> Measured:
    times: dict[str, list[float]] = {}
    plans, failed = {}, {}
    for one in samples:
        if "error" in one:
            failed[one["arm"]] = one["error"]
        elif "layer_s" in one["metrics"]:
            times.setdefault(one["arm"], []).append(one["metrics"]["layer_s"])
            plans[one["arm"]] = {name: value for name, value in one["metrics"].items() if name != "layer_s"}
    named = {one["arm"]: one["metrics"] for one in samples}
    layouts = {arm.removeprefix("layout "): found for arm, found in named.items() if arm.startswith("layout ")}
    return Measured(samples[0]["cell"], named["work"], layouts, times, plans, failed)


def _layout_rows(cell: Measured) -> Iterator[Row]:
    """Our layouts, then what planning took on the host, with FlashInfer's part, of the arms that were timed."""
    for kernel, found in cell.layouts.items():
        row = {
            "arm": kernel,
            "needed pairs": cell.work["pairs"],
            "executed/needed": round(found["executed_over_needed"], 3),
        }
        yield (
            row
            | {"indices (MiB)": round(found["index_mib"], 2), "layout (ms)": round(1000 * found["layout_s"], 2)}
            | ({"plan (ms)": round(1000 * cell.plans[kernel]["plan_s"], 1)} if kernel in cell.plans else {})
        )
    for arm, found in cell.plans.items():
        if arm not in cell.layouts and "index_mib" in found:
            size = found.get("mask_mib", found["index_mib"])
            yield {"arm": arm, "indices (MiB)": round(size, 2), "plan (ms)": round(1000 * found["plan_s"], 1)}


def _by_pattern(cells: Sequence[Measured]) -> list[Row]:
    groups: dict[tuple[str, str], list[float]] = {}
    for cell in cells:
        for kernel, found in cell.layouts.items():
            groups.setdefault((cell.cell["pattern"], kernel), []).append(found["executed_over_needed"])
    return [
        {
            "pattern": pattern,
            "arm": kernel,
            "cells": len(found),
            "median": round(median(found), 3),
            "worst": round(max(found), 3),
        }
        for (pattern, kernel), found in groups.items()
    ]


def _times_row(cell: Measured, roof: Mapping[str, float] | None) -> Row:
    row: Row = {arm: round(1000 * median(times), 4) for arm, times in cell.times.items()}
    row |= dict.fromkeys(cell.failed, "failed")
    if (fastest := cell.fastest()) is None:
        return row
    flops_per_s = cell.work["flops"] / median(cell.times[fastest])
    row |= {"fastest": fastest, "TFLOP/s": round(flops_per_s / 1e12, 2)}
    row |= {"of roof": f"{flops_per_s / roof['flops_per_s']:.0%}"} if roof else {}
    row |= {f"over {base}": interval(cell.speedup(fastest, base), 2) for base in BASELINES if base in cell.times}
    return row


def _figure(target: Target, cell: Measured, arm: str) -> Triple:
    value, low, high = cell.speedup(arm, "dense_fa3")
    part = cell.work["flops"] / cell.work["dense_flops"] if target.of_rate else 1.0
    return value * part, low * part, high * part


def _failures(cells: Sequence[Measured]) -> Iterator[Row]:
    """Each arm and reason once, with the cells it is for."""
    where: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        for arm, reason in cell.failed.items():
            where.setdefault((arm, reason), []).append("/".join(map(str, cell.where.values())))
    for (arm, reason), names in where.items():
        yield {"arm": arm, "reason": reason, "cells": "all" if len(names) == len(cells) else ", ".join(names)}
