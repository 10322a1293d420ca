"""A cache simulator with nothing clever in it: a dict of paths, searched and sorted afresh every time."""

from collections import Counter
from collections.abc import Sequence
from itertools import permutations
from math import ceil, log2

Path = tuple[str, ...]
Cache = dict[Path, tuple[bool, int, int]]
"""Path -> promoted, last access, hits."""


def naive_hits(
    requests: Sequence[Sequence[str]],
    *,
    order: str,
    tail: str,
    eviction: str,
    capacity: int | None,
    window: int,
    threshold: int,
) -> int:
    """Chunk hits of a trace; every chunk has one token. Requests must be short, since all their orders are tried."""
    cached: Cache = {}
    hits = 0
    for now, request in enumerate(requests):
        counts = Counter(chunk for recent in requests[max(0, now - window) : now] for chunk in recent)
        ordered = _ordered(request, cached, counts, order, tail)
        hits += _depth(ordered, cached)
        counts = Counter(chunk for recent in requests[max(0, now + 1 - window) : now + 1] for chunk in recent)
        promoted = True
        for end in range(1, len(ordered) + 1):
            promoted = promoted and counts[ordered[end - 1]] >= threshold
            times_hit = cached[ordered[:end]][2] + 1 if ordered[:end] in cached else 0
            cached[ordered[:end]] = promoted, now, times_hit
        while capacity is not None and len(cached) > capacity:
            leaves = [path for path in cached if not any(other[:-1] == path for other in cached)]
            del cached[min(leaves, key=lambda path: _priority(cached[path], eviction, window))]
    return hits


def _priority(entry: tuple[bool, int, int], eviction: str, window: int) -> tuple[float, int]:
    promoted, last_access, times_hit = entry
    if eviction == "reused":
        return last_access + window * ceil(log2(1 + times_hit)), last_access
    return eviction == "promoted" and promoted, last_access


def _ordered(request: Sequence[str], cached: Cache, counts: Counter[str], order: str, tail: str) -> Path:
    by_count = tuple(sorted(request, key=lambda chunk: -counts[chunk]))
    if order != "tree":
        return tuple(request) if order == "retriever" else by_count
    best = max(permutations(request), key=lambda path: _depth(path, cached))  # the first of the deepest
    chain = best[: _depth(best, cached)]
    seen = [*(chunk for chunk in request if counts[chunk]), *(chunk for chunk in request if not counts[chunk])]
    tails = {"seen": seen, "rank": request, "frequency": by_count}
    return chain + tuple(chunk for chunk in tails[tail] if chunk not in chain)


def _depth(path: Path, cached: Cache) -> int:
    return max(end for end in range(len(path) + 1) if end == 0 or path[:end] in cached)
