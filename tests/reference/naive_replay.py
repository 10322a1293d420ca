"""A cache simulator with nothing clever in it: a dict of paths, searched and sorted afresh every time."""

from collections import Counter
from collections.abc import Sequence
from itertools import permutations

Path = tuple[str, ...]


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
    cached: dict[Path, tuple[bool, int]] = {}  # path -> promoted, last access
    hits = 0
    for now, request in enumerate(requests):
        counts = Counter(chunk for recent in requests[max(0, now - window) : now] for chunk in recent)
        ordered = _ordered(request, cached, counts, order, tail)
        hits += _depth(ordered, cached)
        counts = Counter(chunk for recent in requests[max(0, now + 1 - window) : now + 1] for chunk in recent)
        promoted = True
        for end in range(1, len(ordered) + 1):
            promoted = promoted and counts[ordered[end - 1]] >= threshold
            cached[ordered[:end]] = promoted, now
        while capacity is not None and len(cached) > capacity:
            leaves = [path for path in cached if not any(other[:-1] == path for other in cached)]
            del cached[min(leaves, key=lambda path: (eviction == "promoted" and cached[path][0], cached[path][1]))]
    return hits


def _ordered(
    request: Sequence[str], cached: dict[Path, tuple[bool, int]], counts: Counter[str], order: str, tail: str
) -> Path:
    by_count = tuple(sorted(request, key=lambda chunk: -counts[chunk]))
    if order != "tree":
        return tuple(request) if order == "retriever" else by_count
    best = max(permutations(request), key=lambda path: _depth(path, cached))  # the first of the deepest
    chain = best[: _depth(best, cached)]
    return chain + tuple(chunk for chunk in (request if tail == "rank" else by_count) if chunk not in chain)


def _depth(path: Path, cached: dict[Path, tuple[bool, int]]) -> int:
    return max(end for end in range(len(path) + 1) if end == 0 or path[:end] in cached)
