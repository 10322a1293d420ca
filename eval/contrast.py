"""Two arms on the same requests: their contrasts, and a verdict where the interval is conclusive.

    samples of two arms -> contrast_arms() -> `stats.contrast` with "cell", "metric", "a", "b",
    failures -> sentences()

Ratios are a / b, for times, and b / a, for amounts a second: above 1, b is faster. Differences are
b - a, for everything else.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Literal

from eval.metrics import METRICS, MIN_BLOCKS, is_time, label, ranked
from eval.recorded import cell_name, grouped
from eval.stats import RATE_RATIO, RATIOS, Statistic, contrast

MAX_FAILED = 0.01
"""No verdict if an arm failed a larger share of its requests, and more than the other:
the answered ones may be the easy ones."""
OTHERS: tuple[Statistic, ...] = ("difference of means",)
"""Times and rates are compared by ratios; other metrics, which may be zero, by differences."""
PACES = (*RATIOS, RATE_RATIO)
"""Above 1, b takes less time."""
DOES = {
    "ttft_s": "reaches the first token",
    "itl_s": "gives each further token",
    "e2e_s": "finishes the answer",
    "requests_per_s": "answers requests",
    "output_tokens_per_s": "gives tokens",
}
"""Metric -> what an arm does "1.3 times faster"."""

Sample = Mapping[str, Any]
Contrast = dict[str, Any]


def contrast_arms(
    left: Iterable[Sample],
    right: Iterable[Sample],
    *,
    a: str,
    b: str,
    metrics: Collection[str] | None = None,
) -> list[Contrast]:
    """All contrasts of arm `b` (samples `right`) against arm `a` (`left`): cell by cell, metric by
    metric.

    Only requests that both have in a cell count; warm-up and failed requests do not. A request
    measured several times counts once, with its mean. `metrics` selects metrics; times get three
    contrasts: the mean ratio, and those of medians and p90. Each contrast has the numbers of
    requests of its cell that were sent to each arm and that failed: `asked_a`, `failed_a`,
    `asked_b`, `failed_b`.
    """
    found = []
    kept = [
        (side, sample)
        for side, arm in enumerate((left, right))
        for sample in arm
        if not sample.get("warm_up")
    ]
    for cell, rows in grouped(kept, lambda row: row[1]["cell"]):
        sides = [[sample for side, sample in rows if side == which] for which in (0, 1)]
        failures: dict[str, int] = {}
        for name, samples in zip("ab", sides, strict=True):
            failures |= {
                f"asked_{name}": len(samples),
                f"failed_{name}": sum(bool(one.get("error")) for one in samples),
            }
        # `serve` sends whole blocks to every arm, so a request's block is the same on both sides.
        block_of = {sample["request"]: sample.get("block") for sample in sides[0]}
        names = {name for sample in sides[0] for name in sample["metrics"]}
        for metric in ranked(names & set(names if metrics is None else metrics)):
            values, others = (_by_request(samples, metric) for samples in sides)
            pairs = {
                request: (value, others[request])
                for request, value in values.items()
                if request in others
            }
            blocks = [block_of[request] for request in pairs]
            # One value without a block: dependence is unknown, and single values are resampled.
            known = None if None in blocks else blocks
            for statistic in (RATIOS if is_time(metric) else OTHERS) if pairs else ():
                measured = contrast([*pairs.values()], statistic=statistic, blocks=known)
                found.append(
                    {"cell": cell, "metric": metric, "a": a, "b": b, **measured, **failures}
                )
    return found


def has_enough(contrast: Mapping[str, Any]) -> bool:
    """Whether the interval is reliable: at least 8 requests,
    and 8 blocks if requests come in blocks."""
    return bool(min(contrast["n"], contrast.get("num_blocks") or math.inf) >= MIN_BLOCKS)


def fails_more(contrast: Mapping[str, Any]) -> Literal["a", "b"] | None:
    """The side that failed more than `MAX_FAILED` of its requests, and more than the other side."""
    a, b = (
        (contrast.get(f"failed_{side}") or 0) / (contrast.get(f"asked_{side}") or 1)
        for side in "ab"
    )
    return None if a == b or max(a, b) <= MAX_FAILED else "a" if a > b else "b"


def direction(contrast: Mapping[str, Any]) -> Literal["better", "worse"] | None:
    """How b compares to a.

    None if the interval contains "no difference" or the t-test finds none (p >= 0.05), if there are
    fewer than 8 pairs or blocks, if one arm failed more than the other, or if the metric is
    unknown.
    """
    low, high, metric = contrast["low"], contrast["high"], contrast["metric"]
    is_ratio = contrast["statistic"] in PACES
    if low is None or not has_enough(contrast) or fails_more(contrast) is not None:
        return None
    # `is_ratio` is also the value of "no difference": 1 of a ratio, 0 of a difference.
    if (
        low <= is_ratio <= high
        or (contrast.get("p") or 0) >= 0.05
        or not (is_ratio or metric in METRICS)
    ):
        return None
    # of a ratio: b takes less time
    is_less = low > 1 if is_ratio else high < 0
    return "better" if is_less == (is_ratio or METRICS[metric].better == "lower") else "worse"


def sentences(contrasts: Sequence[Contrast]) -> list[str]:
    """Every verdict once, or one sentence that there is none;
    then the limits of the comparisons."""
    # Failures are of a cell, so each metric of the cell has the same sentence on them.
    said = list(dict.fromkeys(text for text in map(verdict, contrasts) if text))
    judged = [one for one in contrasts if has_enough(one) and fails_more(one) is None]
    if judged and not any(map(direction, judged)):
        said.append(
            f"No difference beyond chance in {len(judged)} of {len(contrasts)} comparisons."
        )
    return [*said, *limits(contrasts)]


def limits(contrasts: Sequence[Contrast]) -> list[str]:
    """What to know of verdicts: how many comparisons are too small for one,
    and how many would have one by chance."""
    said = []
    if few := [one for one in contrasts if not has_enough(one) and fails_more(one) is None]:
        count, what = min(
            (one["n"], "requests")
            if one["n"] < MIN_BLOCKS
            else (one["num_blocks"], "blocks of requests")
            for one in few
        )
        needed = max(
            MIN_BLOCKS * math.ceil(one["n"] / (one.get("num_blocks") or one["n"])) for one in few
        )
        said.append(
            f"No verdict in {len(few)} of {len(contrasts)} comparisons: too few {what}: {count}; "
            f"give --requests >= {needed} and the warm-up's."
        )
    # From here on at least one 95% interval is expected to exclude no difference by chance.
    if len(contrasts) >= 20:
        chance = round(0.05 * len(contrasts))
        said.append(
            f"Of {len(contrasts)} comparisons about {chance} would be beyond their intervals by"
            " chance."
        )
    return said


def verdict(contrast: Contrast) -> str | None:
    """One sentence that compares b with a, or says that one arm failed more;
    None without a verdict."""
    a, b, name = contrast["a"], contrast["b"], contrast["metric"]
    end = f" ({where})" if (where := cell_name(contrast["cell"])) else ""
    if (side := fails_more(contrast)) is not None:
        sides = [
            f"{contrast[x]} failed {contrast[f'failed_{x}']} of {contrast[f'asked_{x}']}"
            for x in "ab"
        ]
        return f"No verdict: {', '.join(sides if side == 'a' else sides[::-1])}{end}"
    way = direction(contrast)
    if way is None:
        return None
    value, low, high = contrast["value"], contrast["low"], contrast["high"]
    if contrast["statistic"] not in PACES:
        change = "higher" if value > 0 else "lower"
        low, high = sorted((abs(low), abs(high)))
        told = f"{abs(value):.3g} {METRICS[name].unit}".rstrip()
        return (
            f"{label(name)}: {b} is {told} {change} than {a} on average [{low:.3g}, {high:.3g}],"
            f" which is {way}{end}"
        )
    # Turned over, so that the sentence has a factor above 1: "1.30 times slower".
    if low < 1:
        value, low, high = 1 / value, 1 / high, 1 / low
    at = {
        "mean ratio": "on average",
        "ratio of medians": "at the median",
        RATE_RATIO: "under load",
    }.get(contrast["statistic"], "at the 90th percentile")
    pace = "faster" if way == "better" else "slower"
    does = DOES.get(name, f"({label(name)}) is")
    return f"{b} {does} {value:.2f} times {pace} than {a} {at} [{low:.2f}, {high:.2f}]{end}"


# Private


def _by_request(samples: Iterable[Sample], metric: str) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for sample in samples:
        value = sample["metrics"].get(metric)
        if not sample.get("error") and value is not None and math.isfinite(value):
            values.setdefault(sample["request"], []).append(float(value))
    # `fsum` does not depend on the order, so equal repetitions of two arms have equal means.
    return {request: math.fsum(taken) / len(taken) for request, taken in values.items()}
