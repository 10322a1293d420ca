"""The attention bench's figures, for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from eval.bench.attention_figures import BASELINES, DENSE
from sglang_chunkcache.attention.flashinfer import KERNELS

NO_GPU = "Measured on a CPU: none of this is a GPU figure, and the GPU figures are missing."
PLANNED = ("dense_fa2", "virtual_fa2", "custom_mask")
"""Arms whose planning is shown next to ours. FA3's is FA2's."""
PAPER = "FusionRAG's own figures, from its figure 14b (its kernel, its GPU, 15%, 32k): 4.2x over FlashAttention, 2.69x over SDPA."


def render(results: Mapping[str, Any], *, on_gpu: bool) -> str:
    """Plans, times, what failed, the roof, the targets where a kernel of ours ran. Without a GPU that is said first and last."""
    cells = list(results["cells"].values())
    lines = [] if on_gpu else [NO_GPU, ""]
    lines += [*_plans(cells), *_times(cells, results["roof"] or {}), *_failures(results["cells"])]
    if roof := results["roof"]:
        lines.append(
            f"roof, the machine's best in this run: product {_si(roof['flops_per_s'])}FLOP/s, copy {_si(roof['bytes_per_s'])}B/s"
        )
    if any(cell["arms"].keys() & set(KERNELS) for cell in cells):
        lines += [*map(_target, results["targets"]), PAPER]
    return "\n".join([*lines, *([] if on_gpu else [NO_GPU])])


def _plans(cells: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What our layouts cost, then what planning the others took."""
    kernels = list(dict.fromkeys(kernel for cell in cells for kernel in cell["plans"]))
    planned, others = (
        [name for name in names if any(name in cell["arms"] for cell in cells)] for names in (kernels, PLANNED)
    )
    if not kernels:
        return
    yield "Plans: what our layouts of a cell (pattern/tokens/requests/ratio) take before anything is computed."
    yield "  needed: query-key pairs that are not masked; executed/needed: pairs that a kernel's tiles walk over those, at best 1"
    with_others = " (custom_mask: of its mask)" if "custom_mask" in others else ""
    with_all = "; all ms: with FlashInfer's part" if planned or others else ""
    yield f"  MiB: of page indices{with_others}; ms: planning on the host, our layout alone{with_all}"
    heads = ["executed/needed    MiB     ms" + ("  all ms" if kernel in planned else "") for kernel in kernels]
    yield " " * 32 + "".join(
        [f"{kernel:>{3 + len(head)}}" for kernel, head in zip(kernels, heads, strict=True)]
        + [f"{name:>20}" for name in others]
    )
    yield f"{'cell':<24}{'needed':>8}" + "".join(f"   {head}" for head in heads) + f"{'MiB  all ms':>20}" * len(others)
    for cell in cells:
        needed = cell["work"]["pairs"]
        line = f"{_name(cell):<24}{_si(needed):>8}"
        for kernel in kernels:
            plan = cell["plans"][kernel]
            line += f"{plan['executed_pairs'] / needed:>18.3f}{_mib(plan['index_bytes'])}{plan['layout_ms']:>7.2f}"
            line += _plan_ms(cell["arms"].get(kernel)) if kernel in planned else ""
        for name in others:
            arm = cell["arms"].get(name)
            size = "failed" if arm is None else _mib(arm.get("mask_bytes", arm["index_bytes"]))
            line += f"{size:>12}{_plan_ms(arm)}"
        yield line
    yield ""


def _times(cells: Sequence[Mapping[str, Any]], roof: Mapping[str, float]) -> Iterator[str]:
    """A table for each context and batch; rates are over needed work, those of a kernel of ours."""
    for key, group in groupby(cells, key=lambda cell: (cell["context"], cell["batch"])):
        rows = [cell for cell in group if cell["arms"]]
        names = list(dict.fromkeys(name for cell in rows for name in cell["arms"]))
        bases = [base for base in BASELINES if base in names]
        if not rows:
            continue
        title = f"{key[0]:,} tokens, batch {key[1]}: milliseconds a layer"
        head = f"{'pattern ratio':<17}" + "".join(f"{name:>{_width(name)}}" for name in names)
        has_kernels = any(kernel in names for kernel in KERNELS)
        if has_kernels:
            title += " | the fastest of ours: rates over needed work, speedups"
            head += f" | {'fastest':<13}{'FLOP/s':>8}{'of roof':>8}{'B/s':>8}{'of dense':>9}"
            head += "".join(f"  over {base:<18}" for base in bases)
        yield title + (" | reference (the oracle, not a kernel)" if "reference" in names else "")
        yield head.rstrip()
        for cell in rows:
            line = f"{cell['pattern']:<10}{cell['ratio']:>6.0%} "
            for name in names:
                shown = f"{cell['arms'][name]['ms']:.3f}" if name in cell["arms"] else "failed"
                line += f"{shown:>{_width(name)}}"
            yield line + (" | " + _fastest(cell, bases, roof) if has_kernels else "")
        yield ""


def _fastest(cell: Mapping[str, Any], bases: Sequence[str], roof: Mapping[str, float]) -> str:
    if cell["fastest"] is None:
        return "none"
    arm = cell["arms"][cell["fastest"]]
    of_roof = f"{arm['flops_per_s'] / roof['flops_per_s']:.0%}" if roof else "none"
    rates = [f"{arm['of_dense_rate'][base][0]:.0%}" for base in DENSE if base in arm["of_dense_rate"]]
    text = f"{cell['fastest']:<13}{_si(arm['flops_per_s']):>8}{of_roof:>8}{_si(arm['bytes_per_s']):>8}"
    text += f"{(rates or ['none'])[0]:>9}"
    for base in bases:
        triple = arm["speedup"].get(base)
        text += "  " + f"{'failed' if triple is None else _interval(triple):<23}"
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
    return f"{size / 2**20:>7.2f}"


def _plan_ms(arm: Mapping[str, Any] | None) -> str:
    return f"{'failed' if arm is None else format(arm['plan_ms'], '.1f'):>8}"


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
