"""The selectors' algorithms in their obvious form:
all pairs, all permutations, the papers' own lines."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import ceil, log
from typing import Any


def kendall_distance(old: Sequence[Any], new: Sequence[Any]) -> float:
    """Cache-Craft eq. 7: discordant pairs of the shared items over all their pairs.
    Items are unique."""
    shared = [item for item in old if item in new]
    pairs = list(combinations(shared, 2))
    return sum(new.index(a) > new.index(b) for a, b in pairs) / len(pairs) if pairs else 0.0


def joint_top(
    scores: Sequence[float],
    spans: Sequence[tuple[int, int]],
    ratio: float,
    above: float = -1.0,
    least: float = 0.0,
) -> list[list[int]]:
    """Offsets in each [start, end): the highest ceil(ratio * all tokens) over all spans, of those
    over `above` until ceil(least * all tokens) are found. Scores are at least 0."""
    tokens = [
        (span, position)
        for span, (start, end) in enumerate(spans)
        for position in range(start, end)
    ]
    k = ceil(round(ratio * len(tokens), 6))
    ranked = sorted(tokens, key=lambda token: -scores[token[1]])
    chosen: list[tuple[int, int]] = []
    num_above = sum(scores[position] > above for _, position in tokens)
    for token in ranked:
        if token not in chosen and len(chosen) < min(
            k, max(num_above, ceil(round(least * len(tokens), 6)))
        ):
            chosen.append(token)
    return [
        sorted(p - start for s, p in chosen if s == span) for span, (start, _) in enumerate(spans)
    ]


def mean_cfo(alpha: float, overheads: Sequence[float], lens: Sequence[int]) -> float:
    """Cache-Craft eq. 12 with CFO kept in [1 / n, 1], weighted by tokens."""
    return sum(
        n * min(1, max(1 / n, alpha * x)) for x, n in zip(overheads, lens, strict=True)
    ) / sum(lens)


def bisect_alpha(overheads: Sequence[float], lens: Sequence[int], ratio: float) -> float:
    """The least alpha with a mean CFO of at least `ratio`, or one far too large if there is
    none."""
    low, high = 0.0, 1e6
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (low, middle) if mean_cfo(middle, overheads, lens) >= ratio else (middle, high)
    return high


def predict_focused(inter: Sequence[Sequence[float]], w: int) -> tuple[set[int], int] | None:
    """Cache-Craft's algorithm 1, line by line, lists from index 1 on.
    At least 3 chunks, no layer of equal sums."""
    k = len(inter[0])
    f_all: list[set[int]] = []
    cinter = [0.0] * k
    for l, layer in enumerate(inter, start=1):  # noqa: E741
        cinter = [have + more for have, more in zip(cinter, layer, strict=True)]
        by_cinter = sorted(range(k), key=lambda i: -cinter[i])
        descending = [float("nan"), *(cinter[i] for i in by_cinter)]
        diff = [float("nan"), *(descending[i] - descending[i + 1] for i in range(1, k))]
        p = [0.0, *(diff[i] / sum(diff[1:]) for i in range(1, k))]
        h = [-sum(p[j] * log(p[j]) for j in range(i + 1) if p[j] > 0) for i in range(k)]
        i_star = max(range(1, k - 1), key=lambda i: round(h[i + 1] - h[i], 12))
        f = set(by_cinter[:i_star])
        f_all.append(f)
        if l >= w and all(other == f for other in f_all[l - w : l]):
            return f, l
    return None
