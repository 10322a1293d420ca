"""`--days`: a trace three times, each time another day, and what a cache finds in each part of
them.

    documents   every day's chunks are new ones, as after a nightly re-import
    prompt      every day's head is a new one, as after an edit of the system prompt
    topics      half of the topics leave and others come, all day long (with --generate)

What was popular yesterday is dead, and fills the cache. A mean over the days hides how long it
stays, so each cell is compared window by window with stock SGLang and with LRU in its own order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, Literal, get_args

from eval.replay.trace import TraceRequest
from radix_ext import Chunk, ChunkId

Change = Literal["documents", "prompt", "topics"]
CHANGES: tuple[Change, ...] = get_args(Change)
NUM_DAYS = 3
WINDOW = 1500
"""Requests: about a third of a day of RAGPulse."""
COLUMNS = {"stock": "worst below stock", "lru": "worst below LRU"}
Sample = Mapping[str, Any]
Share = Callable[..., dict[str, float]]


class Days:
    """The requests of every day; equal ids of a day are one `Chunk` object."""

    def __init__(self, trace: Iterable[TraceRequest], change: Change) -> None:
        self._trace, self._change = trace, change
        self._chunks: dict[tuple[int, ChunkId], Chunk] = {}

    def __iter__(self) -> Iterator[TraceRequest]:
        for day in range(NUM_DAYS):
            for request in self._trace:
                if self._change == "documents" and day:
                    chunks = tuple(self._renamed(day, chunk) for chunk in request.chunks)
                    request = request._replace(chunks=chunks)
                elif self._change == "prompt":
                    request = request._replace(head=f"{day} {request.head or ''}")
                # conversations end with their day
                if request.conversation is not None:
                    request = request._replace(conversation=f"{day} {request.conversation}")
                yield request._replace(timestamp=None)

    def _renamed(self, day: int, chunk: Chunk) -> Chunk:
        known = self._chunks.get((day, chunk.id))
        if known is None:
            known = Chunk(ChunkId(f"{day}:{chunk.id}"), chunk.num_tokens)
            self._chunks[day, chunk.id] = known
        return known


def windows(samples: Sequence[Sample], share: Share) -> list[dict[str, Any]]:
    """An entry of `results["days"]` for each cell: the share of tokens that need not be computed
    (of chunks, if the trace has no lengths), by window and by day; and the window in which the cell
    is furthest below stock SGLang and below LRU in its own order, with the interval of their
    difference.

    Args:
        share: (sample, counts, unit) -> share of the unit with its interval.
    """
    found = []
    for sample in samples:
        unit, parts = _parts(sample)
        entry = {
            "cell": sample.get("cell") or sample["fused"],
            "is_fused": "fused" in sample,
            "days": [_value(part, sample, unit, at) for part, at in _cut(parts, NUM_DAYS)],
            "windows": [
                _value(part, sample, unit, at)
                for part, at in _cut(parts, max(1, sample["num_requests"] // WINDOW))
            ],
        }
        for name, other in (("stock", _stock(sample, samples)), ("lru", _lru(sample, samples))):
            if other is not None and other is not sample:
                entry[name] = _worst(sample, other, share)
        found.append(entry)
    return found


def table(entries: Sequence[Mapping[str, Any]], settings: Callable[..., dict[str, str]]) -> Any:
    """One row per cell."""
    rows = []
    for entry in entries:
        row = settings(entry["cell"]) | {"KV": "fused" if entry["is_fused"] else "exact"}
        row |= {f"day {day}": f"{value:.3f}" for day, value in enumerate(entry["days"], 1)}
        row["mean"] = f"{sum(entry['days']) / NUM_DAYS:.3f}"
        for name, column in COLUMNS.items():
            worst = entry.get(name)
            row[column] = (
                "-"
                if worst is None
                else f"{worst['value']:+.3f} [{worst['low']:.3f}, {worst['high']:.3f}]"
                f" in {worst['window']}"
            )
        rows.append(row)
    note = (
        f"Shares of tokens that are not computed. Worst: of windows of about {WINDOW} requests that"
        " in which the difference is lowest, with its interval."
    )
    return {"title": "Day by day", "rows": rows, "note": note}


# Private, in order of use


def _parts(sample: Sample) -> tuple[str, list[int]]:
    """(unit, how much of it need not be computed in each bin)."""
    if "fused" in sample:
        return "tokens", [a - b for a, b in zip(sample["tokens"], sample["computed"], strict=True)]
    unit, names = (
        ("tokens", ("token_hits", "dropped_tokens", "lost_tokens"))
        if sample["tokens"]
        else ("chunks", ("hits", "dropped", "lost"))
    )
    counts = zip(*(sample[name] for name in names), strict=True)
    return unit, [hits + dropped - lost for hits, dropped, lost in counts]


def _cut(parts: list[int], num: int) -> Iterator[tuple[list[int], slice]]:
    bounds = [len(parts) * index // num for index in range(num + 1)]
    for start, end in pairwise(bounds):
        yield parts[start:end], slice(start, end)


def _value(part: Sequence[int], sample: Sample, unit: str, at: slice) -> float:
    whole: int = sum(sample[unit][at])
    return round(sum(part) / max(1, whole), 4)


def _stock(sample: Sample, samples: Sequence[Sample]) -> Sample | None:
    """Stock SGLang with the same room."""
    return _like(sample, samples, order="retriever", eviction="lru", is_fused=False)


def _lru(sample: Sample, samples: Sequence[Sample]) -> Sample | None:
    """LRU in the same order."""
    label = sample.get("cell") or sample["fused"]
    return _like(sample, samples, order=label["order"], eviction="lru", is_fused="fused" in sample)


def _like(
    sample: Sample, samples: Sequence[Sample], *, order: str, eviction: str, is_fused: bool
) -> Sample | None:
    label = sample.get("cell") or sample["fused"]
    room = {name: label[name] for name in ("capacity", "capacity_tokens", "host")}
    wanted = (room | {"order": order, "eviction": eviction}).items()
    kind = "fused" if is_fused else "cell"
    return next((other for other in samples if wanted <= other.get(kind, {}).items()), None)


def _worst(sample: Sample, other: Sample, share: Share) -> dict[str, Any]:
    (unit, mine), (_, theirs) = _parts(sample), _parts(other)
    differences = [a - b for a, b in zip(mine, theirs, strict=True)]
    num = max(1, sample["num_requests"] // WINDOW)
    number, (part, at) = min(
        enumerate(_cut(differences, num), 1),
        key=lambda found: sum(found[1][0]) / max(1, sum(sample[unit][found[1][1]])),
    )
    return share({**sample, unit: sample[unit][at]}, part, unit) | {"window": number}
