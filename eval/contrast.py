"""Two arms on the same requests: their contrasts, and a verdict where the interval is conclusive.

    samples of two arms -> contrast_arms() -> `stats.contrast` with "cell", "metric", "a", "b", failures -> sentences()

Ratios are a / b, for times: above 1, b is faster. Differences are b - a, for everything else.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from eval.metrics import METRICS, is_time, label, ranked
from eval.recorded import cell_name
from eval.stats import MIN_BLOCKS, QUANTILES, Statistic, contrast

MIN_PAIRS = 8
"""With fewer pairs or blocks a bootstrap interval is too narrow to be reliable: no verdict."""
MAX_FAILED = 0.01
"""No verdict if an arm failed a larger share of its requests, and more than the other: the answered ones may be the easy ones."""
TIMES: tuple[Statistic, ...] = ("ratio of medians", "ratio of p90")
OTHERS: tuple[Statistic, ...] = ("difference of means",)
"""Times are compared by ratios; other metrics, which may be zero, by differences."""
DOES = {
    "ttft_s": "reaches the first token",
    "itl_s": "gives each further token",
    "e2e_s": "finishes the answer",
}
"""Metric -> what an arm does "1.3 times faster"."""

Sample = Mapping[str, Any]
Contrast = dict[str, Any]


def contrast_arms(
    left: Iterable[Sample], right: Iterable[Sample], *, a: str, b: str, metrics: Collection[str] | None = None
) -> list[Contrast]:
    """All contrasts of arm `b` (samples `right`) against arm `a` (`left`): cell by cell, metric by metric.

    Only requests that both have in a cell count; warm-up and failed requests do not. A request measured several times counts
    once, with its mean. `metrics` selects metrics; times get two contrasts, of medians and of p90. Each contrast has the
    numbers of requests of its cell that were sent to each arm and that failed: `asked_a`, `failed_a`, `asked_b`, `failed_b`.
    """
    ours, theirs = _by_cell(right), _by_cell(left)
    found = []
    for cell in (cell for cell in theirs if cell in ours):
        failures = {**_failures("a", theirs[cell]), **_failures("b", ours[cell])}
        block_of = {sample["request"]: sample.get("block") for sample in theirs[cell]}
        names = {name for sample in theirs[cell] for name in sample["metrics"]}
        for metric in ranked(names & set(names if metrics is None else metrics)):
            values, others = _by_request(theirs[cell], metric), _by_request(ours[cell], metric)
            both = [request for request in values if request in others]
            pairs = [(values[request], others[request]) for request in both]
            blocks = [block_of[request] for request in both]
            known = None if None in blocks else blocks
            for statistic in (TIMES if is_time(metric) else OTHERS) if both else ():
                measured = contrast(pairs, statistic=statistic, blocks=known)
                found.append({"cell": json.loads(cell), "metric": metric, "a": a, "b": b, **measured, **failures})
    return found


def has_enough(contrast: Mapping[str, Any]) -> bool:
    """Whether the interval is reliable: at least 8 requests, and 8 blocks if requests come in blocks."""
    blocks = contrast.get("num_blocks")
    return contrast["n"] >= MIN_PAIRS and (blocks is None or blocks >= MIN_BLOCKS)


def fails_more(contrast: Mapping[str, Any]) -> Literal["a", "b"] | None:
    """The side that failed more than `MAX_FAILED` of its requests, and more than the other side."""
    a, b = ((contrast.get(f"failed_{side}") or 0) / (contrast.get(f"asked_{side}") or 1) for side in "ab")
    return None if a == b or max(a, b) <= MAX_FAILED else "a" if a > b else "b"


def direction(contrast: Mapping[str, Any]) -> Literal["better", "worse", "different"] | None:
    """How b compares to a.

    None if the interval contains "no difference" or the t-test finds none (p >= 0.05), if there are fewer than 8 pairs or
    blocks, or if one arm failed more than the other.
    """
    low, high = contrast["low"], contrast["high"]
    is_ratio = contrast["statistic"] in QUANTILES
    if low is None or not has_enough(contrast) or fails_more(contrast) is not None:
        return None
    if low <= (1 if is_ratio else 0) <= high or (contrast.get("p") or 0) >= 0.05:
        return None
    metric = METRICS.get(contrast["metric"])
    if metric is None and not is_ratio:
        return "different"
    # A ratio is a / b: above 1, b has less.
    b_has_less = low > 1 if is_ratio else high < 0
    return "better" if b_has_less == (metric is None or metric.better == "lower") else "worse"


def sentences(contrasts: Sequence[Contrast]) -> list[str]:
    """Every verdict once, or one sentence that there is none; then the number of comparisons that are too small for one."""
    said = list(dict.fromkeys(text for text in map(verdict, contrasts) if text))
    judged = [one for one in contrasts if has_enough(one) and fails_more(one) is None]
    if judged and not any(map(direction, judged)):
        said.append(f"No difference beyond chance in {len(judged)} of {len(contrasts)} comparisons.")
    return [*said, *shortage(contrasts)]


def shortage(contrasts: Sequence[Contrast]) -> list[str]:
    """One sentence if contrasts have too few requests or blocks (failures aside): how many, and how many requests they need."""
    few = [one for one in contrasts if not has_enough(one) and fails_more(one) is None]
    if not few:
        return []
    count, what = min(
        (one["n"], "requests") if one["n"] < MIN_PAIRS else (one["num_blocks"], "blocks of requests") for one in few
    )
    needed = max(MIN_BLOCKS * math.ceil(one["n"] / (one.get("num_blocks") or one["n"])) for one in few)
    return [
        f"No verdict in {len(few)} of {len(contrasts)} comparisons: too few {what}: {count}; "
        f"give --requests >= {needed} and the warm-up's."
    ]


def verdict(contrast: Contrast) -> str | None:
    """One sentence that compares b with a, or says that one arm failed more; None without a verdict."""
    a, b, name = contrast["a"], contrast["b"], contrast["metric"]
    where = cell_name(contrast["cell"])
    end = f" ({where})" if where else ""
    if (side := fails_more(contrast)) is not None:
        first, second = (f"{contrast[x]} failed {contrast[f'failed_{x}']} of {contrast[f'asked_{x}']}" for x in "ab")
        return f"No verdict: {first}, {second}{end}" if side == "a" else f"No verdict: {second}, {first}{end}"
    way = direction(contrast)
    if way is None:
        return None
    value, low, high = contrast["value"], contrast["low"], contrast["high"]
    if contrast["statistic"] not in QUANTILES:
        change = "higher" if value > 0 else "lower"
        low, high = sorted((abs(low), abs(high)))
        judged = "" if way == "different" else f", which is {way}"
        told = f"{shown(name, abs(value))} {change} than {a} on average [{low:.3g}, {high:.3g}]"
        return f"{label(name)}: {b} is {told}{judged}{end}"
    if low < 1:
        value, low, high = 1 / value, 1 / high, 1 / low
    at = "at the median" if contrast["statistic"] == "ratio of medians" else "at the 90th percentile"
    pace = "faster" if way == "better" else "slower"
    does = DOES.get(name, f"({label(name)}) is")
    return f"{b} {does} {value:.2f} times {pace} than {a} {at} [{low:.2f}, {high:.2f}]{end}"


def shown(metric: str, value: float | None) -> str:
    """A value with three digits and its unit."""
    unit = METRICS[metric].unit if metric in METRICS else ""
    return "none" if value is None or not math.isfinite(value) else f"{value:.3g} {unit}".rstrip()


# Private, in order of use


def _by_cell(samples: Iterable[Sample]) -> dict[str, list[Sample]]:
    cells: dict[str, list[Sample]] = {}
    for sample in samples:
        if not sample.get("warm_up"):
            cells.setdefault(json.dumps(sample["cell"], sort_keys=True), []).append(sample)
    return cells


def _failures(side: str, samples: Sequence[Sample]) -> dict[str, int]:
    return {f"asked_{side}": len(samples), f"failed_{side}": sum(bool(sample.get("error")) for sample in samples)}


def _by_request(samples: Iterable[Sample], metric: str) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for sample in samples:
        value = sample["metrics"].get(metric)
        if not sample.get("error") and value is not None and math.isfinite(value):
            values.setdefault(sample["request"], []).append(float(value))
    return {request: math.fsum(taken) / len(taken) for request, taken in values.items()}
