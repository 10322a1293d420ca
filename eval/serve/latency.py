"""Results of a load's samples: times, throughput, fates and errors of each arm in each cell. Pure functions of the samples.

Throughput is over the time under load: of each block, from its first request's due time to its last answer. Warm-up is left
out; failed requests are counted as errors and have no times.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from eval.contrast import MIN_BLOCKS, contrast_arms, has_enough, sentences
from eval.intervals import block_bootstrap, quantile
from eval.metrics import METRICS

Sample = Mapping[str, Any]
TIMES = ("ttft_s", "e2e_s")
CONTRASTED = (*TIMES, "cached_share", "prefill_tokens")
DRAWS = 1000


def summarize(samples: Sequence[Sample], *, facts: Mapping[str, Any], against: str) -> dict[str, Any]:
    """`results` of a serve run.

    Args:
        samples: of `eval.serve.runner.measure`.
        facts: `servers`, `skipped`, `adapters`, `resumed_at`, of `measure`.
        against: the arm to compare all others with, cell by cell.
    """
    arms = list(dict.fromkeys(sample["arm"] for sample in samples))
    by_arm = {arm: [sample for sample in samples if sample["arm"] == arm] for arm in arms}
    contrasts = [
        row
        for arm in arms
        if arm != against and against in by_arm
        for row in contrast_arms(by_arm[against], by_arm[arm], a=against, b=arm, metrics=CONTRASTED)
    ]
    return {
        "cells": cells(samples),
        "contrasts": contrasts,
        "verdict": sentences(contrasts),
        "num_warm_up": sum(bool(sample["warm_up"]) for sample in samples),
        **facts,
    }


def cells(samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """One row for each arm in each cell, in the order of their first samples."""
    groups: dict[tuple[str, str], list[Sample]] = {}
    for sample in samples:
        group = groups.setdefault((json.dumps(sample["cell"]), sample["arm"]), [])
        if not sample["warm_up"]:
            group.append(sample)
    return [
        {
            "arm": group[0]["arm"],
            "cell": group[0]["cell"],
            "n": len(group) - (errors := sum("error" in sample for sample in group)),
            "errors": errors,
            "metrics": {name: figures for name in METRICS if (figures := _figures(name, group))},
            "fates": _fates(group),
            "cached_share": _share(group),
            "throughput": throughput(group),
        }
        for group in groups.values()
        if group
    ]


def throughput(samples: Sequence[Sample]) -> dict[str, float | None]:
    """Throughput of one arm in one cell per second of load; None if the server does not count tokens, or without answers."""
    loaded = loaded_s(samples)
    answered = [sample for sample in samples if "error" not in sample]

    def rate(amounts: Sequence[float | None]) -> float | None:
        known = [amount for amount in amounts if amount is not None]
        return sum(known) / loaded if known and len(known) == len(amounts) and loaded > 0 else None

    return {
        "requests_per_s": rate([1.0 for _ in answered]),
        "output_tokens_per_s": rate([sample["completion_tokens"] for sample in answered]),
        "prompt_tokens_per_s": rate([sample["prompt_tokens"] for sample in answered]),
    }


def loaded_s(samples: Sequence[Sample]) -> float:
    """Seconds under load: over the arm's blocks, first due to last done."""
    spans: dict[int, tuple[float, float]] = {}
    for sample in samples:
        first, last = spans.get(sample["block"], (sample["due_s"], sample["done_s"]))
        spans[sample["block"]] = min(first, sample["due_s"]), max(last, sample["done_s"])
    return sum(last - first for first, last in spans.values())


def cached_tokens(fates: Mapping[str, int] | None, reported: int | None) -> int | None:
    """Tokens that were not computed: by fates if there are any, because SGLang's count includes recomputed tokens."""
    return fates["exact"] + fates["relocated"] if fates else reported


def table(results: Mapping[str, Any]) -> str:
    """The results of `summarize` as text: times in seconds, and contrasts of times only; the verdict has the others."""
    header = ("arm", "cell", "n", "errors", "ttft p50", "p90", "p99", "itl", "e2e p50", "req/s", "out tok/s", "cached")
    rows = [header, *(_row(cell) for cell in results["cells"])]
    widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
    lines = [
        "  ".join(
            text.ljust(width) if i < 2 else text.rjust(width)
            for i, (text, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    for row in results["contrasts"]:
        if row["metric"] in TIMES and row["value"] is not None:
            where = " ".join(f"{name}={value}" for name, value in row["cell"].items())
            interval = f"[{row['low']:.2f}, {row['high']:.2f}]" if has_enough(row) else "too few"
            lines.append(
                f"{row['metric']} {row['a']} / {row['b']}, {row['statistic']}: {row['value']:.2f} "
                f"{interval} n={row['n']} {where}".rstrip()
            )
    return "\n".join(lines)


# Private, in order of use


def _row(cell: Mapping[str, Any]) -> tuple[str, ...]:
    metrics, rates = cell["metrics"], cell["throughput"]

    def time(name: str, figure: str) -> str:
        return f"{metrics[name][figure]:.3f}" if name in metrics else "-"

    def number(value: float | None, digits: int) -> str:
        return "-" if value is None else f"{value:.{digits}f}"

    return (
        cell["arm"],
        " ".join(f"{name}={value}" for name, value in cell["cell"].items()),
        str(cell["n"]),
        str(cell["errors"]),
        *(time("ttft_s", figure) for figure in ("p50", "p90", "p99")),
        time("itl_s", "mean"),
        time("e2e_s", "p50"),
        number(rates["requests_per_s"], 2),
        number(rates["output_tokens_per_s"], 1),
        number(cell["cached_share"], 3),
    )


def _figures(name: str, samples: Sequence[Sample]) -> dict[str, float] | None:
    blocks: dict[int, list[float]] = {}
    for sample in samples:
        if name in sample["metrics"]:
            blocks.setdefault(sample["block"], []).append(sample["metrics"][name])
    values = [value for block in blocks.values() for value in block]
    if not values:
        return None
    # Requests of a block were sent together, so their times are correlated; with too few blocks single requests are resampled.
    drawn = list(blocks.values()) if len(blocks) >= MIN_BLOCKS else [[value] for value in values]
    _, low, high = block_bootstrap(drawn, _median if METRICS[name].unit == "s" else _mean, draws=DRAWS)
    quantiles = {f"p{q}": quantile(values, q / 100) for q in (50, 90, 99)}
    return {"mean": _mean(values), **quantiles, "low": low, "high": high}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def _fates(samples: Sequence[Sample]) -> dict[str, int] | None:
    total: Counter[str] = Counter()
    for sample in samples:
        total.update(sample["fates"] or {})
    return dict(total) or None


def _share(samples: Sequence[Sample]) -> float | None:
    """Share of all prompt tokens that the server took from its cache."""
    told = [
        (cached, s["prompt_tokens"])
        for s in samples
        if s["prompt_tokens"] and (cached := cached_tokens(s["fates"], s["cached_tokens"])) is not None
    ]
    return sum(cached for cached, _ in told) / sum(tokens for _, tokens in told) if told else None
