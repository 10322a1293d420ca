"""The difference of two arms on the same requests, with an interval; a verdict only if the interval is conclusive.

    pairs (a, b) of one request -> contrast() -> {"statistic", "a_value", "b_value", "value", "low", "high", "n", "p"}
    samples of two arms -> contrast_arms() -> the same with "cell", "metric", "a", "b", failures -> sentences()

Ratios are a / b, for times: above 1, b is faster. Differences are b - a, for everything else. Pure functions, seeded.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np
from scipy import stats

from eval.metrics import METRICS
from eval.recorded import cell_name

Statistic = Literal["ratio of medians", "ratio of p90", "difference of means"]
QUANTILES = {"ratio of medians": 0.5, "ratio of p90": 0.9}
MIN_PAIRS = 8
"""With fewer pairs a bootstrap interval is too narrow to be reliable: no verdict."""
MIN_BLOCKS = 8
"""With fewer blocks single pairs are resampled, which gives too narrow intervals: no verdict."""
MAX_FAILED = 0.01
"""No verdict if an arm failed a larger share of its requests, and more than the other: the answered ones may be the easy ones."""
_BATCH = 2_000_000  # Counts drawn at once: 16 MB.

DOES = {
    "ttft_s": "reaches the first token",
    "itl_s": "gives each further token",
    "e2e_s": "finishes the answer",
}
"""Metric -> what an arm does "1.3 times faster"."""

Sample = Mapping[str, Any]
Contrast = dict[str, Any]


def contrast(
    pairs: Sequence[tuple[float, float]],
    *,
    better: Literal["lower", "higher"],
    blocks: Sequence[Hashable] | None = None,
    statistic: Statistic | None = None,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> Contrast:
    """The contrast of b against a, with a percentile bootstrap interval over pairs, or over whole blocks if there are at least 8.

    Args:
        pairs: (a, b) of the same request, finite.
        better: selects the statistic if none is given: the ratio of medians for "lower", else the difference of means.
        blocks: the block of each pair. Pairs of a block were measured one after the other, so their errors are correlated.
    Returns:
        A dict with
        - statistic;
        - a_value and b_value: the median, p90 or mean of each arm;
        - value, low, high: None for a ratio over zero;
        - n, and num_blocks if blocks are given;
        - p of the paired t-test for differences (over the blocks' means if blocks are resampled). None for ratios, for fewer
          than two units, and if all differences are equal.
    Raises:
        ValueError: no pairs, a value that is not finite, or the numbers of blocks and pairs differ.
    """
    values = np.asarray(pairs, dtype=float).reshape(-1, 2)
    if not len(values) or not np.isfinite(values).all():
        raise ValueError("a contrast needs at least one pair, and finite values")
    if blocks is not None and len(blocks) != len(pairs):
        raise ValueError(f"{len(pairs)} pairs but {len(blocks)} blocks")
    chosen = statistic or ("ratio of medians" if better == "lower" else "difference of means")
    units = _units(len(values), blocks)
    once = np.ones((1, int(units.max()) + 1), dtype=np.int64)
    arms = _arms(values, units, once, chosen)
    counts = _draw_counts(once.shape[1], len(values), draws, seed)
    spread = np.concatenate([_distance(_arms(values, units, drawn, chosen), chosen) for drawn in counts])
    ends = np.quantile(spread, [(1 - level) / 2, (1 + level) / 2])
    found = [float(_distance(arms, chosen)[0]), *map(float, ends)]
    value, low, high = found if all(map(math.isfinite, found)) else (None, None, None)
    return {
        "statistic": chosen,
        "a_value": float(arms[0, 0]),
        "b_value": float(arms[1, 0]),
        "value": value,
        "low": low,
        "high": high,
        "n": len(values),
        "num_blocks": None if blocks is None else len(set(blocks)),
        "p": _p_value(values, units) if chosen == "difference of means" else None,
    }


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
        names = {name for sample in theirs[cell] for name in sample["metrics"]}
        for metric in sorted(names & set(names if metrics is None else metrics), key=_rank):
            values, others = _by_request(theirs[cell], metric), _by_request(ours[cell], metric)
            both = [request for request in values if request in others]
            if not both:
                continue
            block_of = {sample["request"]: sample.get("block") for sample in theirs[cell]}
            blocks = [block_of[request] for request in both]
            for statistic in statistics_of(metric):
                measured = contrast(
                    [(values[request], others[request]) for request in both],
                    better=METRICS[metric].better if metric in METRICS else "higher",
                    blocks=None if None in blocks else blocks,
                    statistic=statistic,
                )
                found.append({"cell": json.loads(cell), "metric": metric, "a": a, "b": b, **measured, **failures})
    return found


def statistics_of(metric: str) -> tuple[Statistic, ...]:
    """Times are compared by ratios; other metrics, which may be zero, by differences."""
    return ("ratio of medians", "ratio of p90") if metric.endswith("_s") else ("difference of means",)


def has_enough(contrast: Contrast) -> bool:
    """Whether the interval is reliable: at least 8 requests, and 8 blocks if requests come in blocks."""
    blocks = contrast.get("num_blocks")
    return contrast["n"] >= MIN_PAIRS and (blocks is None or blocks >= MIN_BLOCKS)


def fails_more(contrast: Contrast) -> Literal["a", "b"] | None:
    """The side that failed more than `MAX_FAILED` of its requests, and more than the other side."""
    a, b = ((contrast.get(f"failed_{side}") or 0) / (contrast.get(f"asked_{side}") or 1) for side in "ab")
    return None if a == b or max(a, b) <= MAX_FAILED else "a" if a > b else "b"


def direction(contrast: Contrast) -> Literal["better", "worse", "different"] | None:
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
        told = (first, second) if side == "a" else (second, first)
        return f"No verdict: {', '.join(told)}{end}"
    way = direction(contrast)
    if way is None:
        return None
    value, low, high = contrast["value"], contrast["low"], contrast["high"]
    label = METRICS[name].label if name in METRICS else name
    if contrast["statistic"] not in QUANTILES:
        change = "higher" if value > 0 else "lower"
        low, high = sorted((abs(low), abs(high)))
        judged = "" if way == "different" else f", which is {way}"
        return f"{label}: {b} is {shown(name, abs(value))} {change} than {a} on average [{low:.3g}, {high:.3g}]{judged}{end}"
    if low < 1:
        value, low, high = 1 / value, 1 / high, 1 / low
    at = "at the median" if contrast["statistic"] == "ratio of medians" else "at the 90th percentile"
    pace = "faster" if way == "better" else "slower"
    does = DOES.get(name, f"({label}) is")
    return f"{b} {does} {value:.2f} times {pace} than {a} {at} [{low:.2f}, {high:.2f}]{end}"


def shown(metric: str, value: float | None) -> str:
    """A value with three digits and its unit."""
    unit = METRICS[metric].unit if metric in METRICS else ""
    return "none" if value is None or not math.isfinite(value) else f"{value:.3g} {unit}".rstrip()


# Private, in order of use


def _units(num_pairs: int, blocks: Sequence[Hashable] | None) -> np.ndarray:
    """[num_pairs] the unit of resampling of each pair: its block, or the pair itself."""
    number: dict[Hashable, int] = {}
    for block in blocks or ():
        number.setdefault(block, len(number))
    if blocks is None or len(number) < MIN_BLOCKS:
        return np.arange(num_pairs)
    return np.array([number[block] for block in blocks])


def _draw_counts(num_units: int, num_pairs: int, draws: int, seed: int) -> Iterable[np.ndarray]:
    """[batch of draws, num_units] how often each unit was drawn, in batches that fit in memory."""
    rng = np.random.default_rng(seed)
    batch = max(1, _BATCH // num_pairs)
    for start in range(0, draws, batch):
        yield rng.multinomial(num_units, np.full(num_units, 1 / num_units), size=min(batch, draws - start))


def _arms(values: np.ndarray, units: np.ndarray, counts: np.ndarray, statistic: Statistic) -> np.ndarray:
    """[2, draws] each arm's own figure. values: [num_pairs, 2]; units: [num_pairs]; counts: [draws, num_units]."""
    weights = counts[:, units]
    if statistic == "difference of means":
        return np.asarray((weights @ values / weights.sum(axis=1, keepdims=True)).T)
    return np.stack([_quantiles(values[:, arm], weights, QUANTILES[statistic]) for arm in (0, 1)])


def _distance(arms: np.ndarray, statistic: Statistic) -> np.ndarray:
    """[draws] a / b, NaN where b is zero; or b - a. arms: [2, draws]."""
    a, b = arms
    if statistic == "difference of means":
        return np.asarray(b - a)
    return np.asarray(np.divide(a, b, out=np.full(len(a), math.nan), where=b > 0))


def _quantiles(values: np.ndarray, weights: np.ndarray, q: float) -> np.ndarray:
    """[draws] quantiles of values repeated weights[draw] times, as np.quantile interpolates, without expanding them."""
    order = np.argsort(values)
    ordered, upto = values[order], np.cumsum(weights[:, order], axis=1)
    position = q * (upto[:, -1] - 1)
    below = np.floor(position)
    at = [ordered[(upto <= np.minimum(rank, upto[:, -1] - 1)[:, None]).sum(axis=1)] for rank in (below, below + 1)]
    return np.asarray(at[0] + (at[1] - at[0]) * (position - below))


def _p_value(values: np.ndarray, units: np.ndarray) -> float | None:
    sizes = np.bincount(units)
    a, b = (np.bincount(units, weights=values[:, arm]) / sizes for arm in (0, 1))
    return None if np.ptp(b - a) <= 1e-12 else float(stats.ttest_rel(b, a).pvalue)


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


def _rank(metric: str) -> tuple[int, str]:
    known = list(METRICS)
    return (known.index(metric) if metric in METRICS else len(known)), metric
