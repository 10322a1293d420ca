"""A cache simulator with nothing clever in it:
a dict of paths and two sets of them, searched and sorted afresh every time."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import log2

Path = tuple[str, ...]
Cache = dict[Path, tuple[bool, int, int, tuple[float, float]]]
"""Path -> promoted, last access, hits, and how old device and host were when it was used."""
NEW = 0.1, 0.25
DEVICE, HOST = 0, 1


@dataclass
class NaiveCounts:
    """Chunks found in each tier; chunks copied to the host, loaded from it, and evicted from it."""

    device_hits: int = 0
    host_hits: int = 0
    offloaded: int = 0
    host_evicted: int = 0


def naive_hits(
    requests: Sequence[Sequence[str]],
    *,
    order: str,
    tail: str,
    eviction: str,
    capacity: int | None,
    window: int,
    threshold: int,
    lengths: Mapping[str, int] | None = None,
    host: int = 0,
    host_admission: str = "either",
    host_worth: float = 1.0,
    page_size: int = 1,
) -> NaiveCounts:
    """Chunk hits of a trace; capacities in tokens, of which a chunk has one without `lengths`. In
    pages a path has those that its tokens fill.

    Requests must be short, since all their orders are tried.
    """
    cached: Cache = {}
    on_device, on_host = set[Path](), set[Path]()
    counted = NaiveCounts()
    ages = [0.0, 0.0]

    def filled(path: Path) -> int:
        return sum(lengths[name] if lengths else 1 for name in path) // page_size * page_size

    def size(paths: Iterable[Path]) -> int:
        return sum(filled(path) - filled(path[:-1]) for path in paths)

    def worth(order: Path) -> tuple[float, int]:
        held = [order[:end] for end in range(1, _depth(order, cached) + 1)]
        return sum(size([path]) * (1 if path in on_device else host_worth) for path in held), len(
            held
        )

    def first_to_leave(paths: set[Path], spared: Path, tier: int) -> Path | None:
        leaves = [path for path in paths if not any(other[:-1] == path for other in paths)]
        others = [path for path in leaves if path != spared[: len(path)]]
        victim = min(others, key=lambda path: _priority(cached[path], eviction, tier), default=None)
        if victim is not None:
            ages[tier] = max(ages[tier], _priority(cached[victim], eviction, tier)[0])
        return victim

    for now, request in enumerate(requests):
        counts = Counter(
            chunk for recent in requests[max(0, now - window) : now] for chunk in recent
        )
        by_count = tuple(sorted(request, key=lambda chunk: -counts[chunk]))
        ordered = tuple(request) if order == "retriever" else by_count
        if order == "tree":
            best = max(permutations(request), key=worth)  # the first of the best
            chain = best[: _depth(best, cached)]
            seen = sorted(request, key=lambda chunk: counts[chunk] == 0)
            tails = {"seen": seen, "rank": request, "frequency": by_count}
            ordered = chain + tuple(chunk for chunk in tails[tail] if chunk not in chain)
        found = [ordered[:end] for end in range(1, _depth(ordered, cached) + 1)]
        counted.device_hits += len(on_device & {*found})
        counted.host_hits += len({*found} - on_device)
        counts = Counter(
            chunk for recent in requests[max(0, now + 1 - window) : now + 1] for chunk in recent
        )
        promoted, is_worth_it, then = True, host > 0, (ages[DEVICE], ages[HOST])
        for end in range(1, len(ordered) + 1):
            path = ordered[:end]
            promoted = promoted and counts[path[-1]] >= threshold
            hits = cached[path][2] + 1 if path in cached else 0
            cached[path] = promoted, now, hits, then
            on_device.add(path)
        for end in range(1, len(ordered) + 1):
            path = ordered[:end]
            if path in on_host:
                continue
            promoted, _, hits, _ = cached[path]
            rules = {
                "reused": hits > 0,
                "promoted": promoted,
                "either": hits > 0 or promoted,
                "all": True,
            }
            is_worth_it = is_worth_it and rules[host_admission]
            while is_worth_it and size([*on_host, path]) > host:
                victim = first_to_leave(on_host, ordered, HOST)
                if victim is None:
                    is_worth_it = False
                else:
                    on_host.remove(victim)
                    counted.host_evicted += 1
                    if victim not in on_device:
                        del cached[victim]
            if is_worth_it:
                on_host.add(path)
                counted.offloaded += 1
        for spared in (ordered, ()):  # room is made before the request uses what it needs
            while capacity is not None and size(on_device) > capacity:
                victim = first_to_leave(on_device, spared, DEVICE)
                if victim is None:
                    break
                on_device.remove(victim)
                if victim not in on_host:
                    del cached[victim]
            for path in on_device & {ordered[:end] for end in range(1, len(ordered) + 1)}:
                cached[path] = *cached[path][:3], (ages[DEVICE], then[HOST])
    return counted


def _priority(
    entry: tuple[bool, int, int, tuple[float, float]], eviction: str, tier: int
) -> tuple[float, int]:
    promoted, last_access, times_hit, ages = entry
    if eviction == "reused":
        return ages[tier] + NEW[tier] + log2(1 + times_hit), last_access
    return eviction == "promoted" and promoted, last_access


def _depth(path: Path, cached: Cache) -> int:
    return max(end for end in range(len(path) + 1) if end == 0 or path[:end] in cached)
