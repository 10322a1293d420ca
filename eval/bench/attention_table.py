"""The attention bench's figures, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from eval.bench.attention_figures import BASELINES, DENSE

NO_GPU = "Measured on a CPU: none of this is a GPU figure, and the GPU figures are missing."
PLANNED = ("dense_fa2", "virtual_fa2", "custom_mask")
"""Whose planning is shown beside ours; FA3's is FA2's."""
PAPER = "FusionRAG's own figures, from its figure 14b (its kernel, its GPU, 15%, 32k): 4.2x over FlashAttention, 2.69x over SDPA."


def render(results: Mapping[str, Any], *, on_gpu: bool) -> str:
    """Plans, times, what failed, the roof, the targets."""
    cells = list(results["cells"].values())
    lines = [*_plans(cells), *_times(cells, results["roof"] or {}), *_failures(results["cells"])]
    if roof := results["roof"]:
        lines.append(
            f"roof, same run: matrix product {_si(roof['flops_per_s'])}FLOP/s, copy {_si(roof['bytes_per_s'])}B/s"
        )
    lines += [_target(target) for target in results["targets"]]
    lines.append(PAPER)
    return "\n".join([*lines, *([] if on_gpu else [NO_GPU])])


def _plans(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What our layouts cost on any machine: pairs, index bytes. Times are this host's: of the layout alone, and with FlashInfer's
    part. Then what planning the others took."""
    kernels = list(dict.fromkeys(kernel for cell in cells for kernel in cell["plans"]))
    others = [arm for arm in PLANNED if any(arm in cell["arms"] for cell in cells)]
    if not kernels:
        return
    yield "Plans: executed / needed pairs | MiB of page indices | ms of the layout | ms in all; others: MiB | ms in all"
    head = f"{'cell':<24}{'pairs':>8}" + "".join(f"{kernel:>33}" for kernel in kernels)
    yield head + "".join(f"{arm:>20}" for arm in others)
    for cell in cells:
        line = f"{_name(cell):<24}{_si(cell['work']['pairs']):>8}"
        for kernel in kernels:
            plan, arm = cell["plans"][kernel], cell["arms"].get(kernel)
            share = plan["executed_pairs"] / cell["work"]["pairs"]
            line += f"{share:>12.3f} |{_mib(plan['index_bytes'])} |{plan['layout_ms']:>5.2f} |{_plan_ms(arm, 4)}"
        for name in others:
            arm = cell["arms"].get(name)
            size = "-" if arm is None else _mib(arm.get("mask_bytes", arm["index_bytes"]))
            line += f"{size:>11} |{_plan_ms(arm, 7)}"
        yield line
    yield ""


def _times(cells: Sequence[Mapping[str, Any]], roof: Mapping[str, float]) -> Iterator[str]:
    """A table for each pattern, context and batch; rates are over needed work."""
    for key, group in groupby(cells, key=lambda cell: (cell["context"], cell["batch"])):
        rows = [cell for cell in group if cell["arms"]]
        names = list(dict.fromkeys(name for cell in rows for name in cell["arms"]))
        bases = [base for base in BASELINES if base in names]
        if not rows:
            continue
        yield f"{key[0]:,} tokens, batch {key[1]}: milliseconds a layer | the fastest of ours: rates over needed work, speedups"
        head = f"{'pattern ratio':<17}" + "".join(f"{name:>{_width(name)}}" for name in names)
        head += f" | {'fastest':<13}{'FLOP/s':>8}{'of roof':>8}{'B/s':>8}{'of dense':>9}"
        yield head + "".join(f"  over {base:<18}" for base in bases)
        for cell in rows:
            line = f"{cell['pattern']:<10}{cell['ratio']:>6.0%} "
            for name in names:
                shown = f"{cell['arms'][name]['ms']:.3f}" if name in cell["arms"] else "failed"
                line += f"{shown:>{_width(name)}}"
            yield line + " | " + _fastest(cell, bases, roof)
        yield ""


def _fastest(cell: Mapping[str, Any], bases: Sequence[str], roof: Mapping[str, float]) -> str:
    if cell["fastest"] is None:
        return "none"
    arm = cell["arms"][cell["fastest"]]
    of_roof = f"{arm['flops_per_s'] / roof['flops_per_s']:.0%}" if roof else "-"
    rates = [arm["of_dense_rate"][base][0] for base in DENSE if base in arm["of_dense_rate"]]
    text = f"{cell['fastest']:<13}{_si(arm['flops_per_s']):>8}{of_roof:>8}{_si(arm['bytes_per_s']):>8}"
    text += f"{rates[0]:>9.0%}" if rates else f"{'-':>9}"
    for base in bases:
        triple = arm["speedup"].get(base)
        text += "  " + f"{'-' if triple is None else _interval(triple):<23}"
    return text.rstrip()


def _failures(cells: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Each arm and reason once, with the cells it holds for."""
    where: dict[tuple[str, str], list[str]] = {}
    for name, cell in cells.items():
        for arm, reason in cell["failed"].items():
            where.setdefault((arm, reason), []).append(name)
    for (arm, reason), names in where.items():
        which = "all cells" if len(names) == len(cells) else ", ".join(names)
        yield f"left out: {arm}: {reason} ({which})"


def _target(target: Mapping[str, Any]) -> str:
    text = f"target: {target['name']} at least {target['at_least']:g} at {target['ratio']:.0%}, {target['context']:,} tokens: "
    worst = [f"{arm} {_interval(triple)} in {cell}" for arm, (cell, triple) in target["worst"].items()]
    where = f" in {target['num_cells']} cells; worst: {'; '.join(worst)}" if worst else ""
    return f"{text}{target['verdict']}{where}"


def _name(cell: Mapping[str, Any]) -> str:
    return f"{cell['pattern']}/{cell['context']}/{cell['batch']}/{cell['ratio']:g}"


def _mib(size: int) -> str:
    return f"{size / 2**20:>6.1f}"


def _plan_ms(arm: Mapping[str, Any] | None, width: int) -> str:
    return f"{'-' if arm is None else format(arm['plan_ms'], '.1f'):>{width}}"


def _width(name: str) -> int:
    return max(10, len(name) + 2)


def _interval(triple: Sequence[float]) -> str:
    value, low, high = (f"{number:.2f}" for number in triple)
    return f"{value} [{low}, {high}]"


def _si(value: float) -> str:
    for unit, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} "
