"""Requests as the live page shows them: sums of the last hour, and the last requests one by one.

Kept at a request's end, O(its chunks). No text of a prompt or a chunk is among it.
"""

from __future__ import annotations

import time
import uuid
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from sglang_chunkcache.front.request import RagRequest

BUCKET_S = 10
NUM_BUCKETS = 360
"""An hour."""
MAX_TIMES = 256
"""First tokens whose time a bucket keeps for its median, of each kind."""
NUM_RECENT = 50
MAX_LABEL = 80
"""Characters of a chunk's label."""


@dataclass(slots=True)
class Bucket:
    """Sums over `BUCKET_S` seconds."""

    index: int
    requests: int = 0
    retrieved: int = 0
    hit: int = 0
    fates: dict[str, int] = field(default_factory=dict)
    times: dict[str, array[float]] = field(default_factory=dict)
    """Milliseconds to the first token, `exact` and `moved`: of requests that stream, as others have
    none of their own."""
    closed: dict[str, tuple[float, int]] | None = None

    def close(self) -> None:
        """`times` are given up."""
        self.closed, self.times = self.ttft_ms(), {}

    def ttft_ms(self) -> dict[str, tuple[float, int]]:
        """Median and number."""
        return self.closed or {kind: (median(all_), len(all_)) for kind, all_ in self.times.items()}


class History:
    """`clock` is in seconds and never goes back."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._buckets: deque[Bucket] = deque(maxlen=NUM_BUCKETS)
        self._recent: deque[dict[str, Any]] = deque(maxlen=NUM_RECENT)
        self._num = 0
        self.start = uuid.uuid4().hex
        """Names it: another has other requests by the same numbers."""

    def add(self, rag: RagRequest) -> None:
        """A request is over, however it ended."""
        now, planned = self._clock(), rag.planned
        if planned.draft.is_preprocessing:
            return
        index = int(now // BUCKET_S)
        if not self._buckets or self._buckets[-1].index != index:
            if self._buckets:
                self._buckets[-1].close()
            self._buckets.append(Bucket(index))
        bucket, fates = self._buckets[-1], rag.fates()
        bucket.requests += 1
        if fates is not None:
            bucket.retrieved += len(planned.area)
            bucket.hit += rag.hit_len
        for fate, num_tokens in (fates or {}).items():
            bucket.fates[fate] = bucket.fates.get(fate, 0) + num_tokens
        if rag.first_token_s is not None and fates is not None:
            kind = "moved" if fates["relocated"] else "exact"
            times = bucket.times.setdefault(kind, array("d"))
            if len(times) < MAX_TIMES:
                times.append(rag.first_token_s * 1000)
        self._num += 1
        self._recent.append({"number": self._num, "ended_s": now, **_picture(rag)})

    def buckets(self) -> list[dict[str, Any]]:
        """Oldest first; `t` is in seconds since 1970. Seconds without a request have no bucket."""
        now = self._clock()
        since, oldest = time.time() - now, now // BUCKET_S - NUM_BUCKETS
        return [
            {
                "t": each.index * BUCKET_S + since,
                "requests": each.requests,
                "retrieved": each.retrieved,
                "hit": each.hit,
                "fates": each.fates,
                "ttft_ms": each.ttft_ms(),
            }
            for each in self._buckets
            if each.index > oldest
        ]

    def recent(self) -> list[dict[str, Any]]:
        """Newest first, without their chunks; `ago_s`: since they ended."""
        return [
            {name: value for name, value in self._aged(each).items() if name not in _CHUNKS}
            for each in reversed(self._recent)
        ]

    def request(self, number: int) -> dict[str, Any] | None:
        """One of `recent` with its chunks. None: it is not among the last any more."""
        found = next((each for each in self._recent if each["number"] == number), None)
        if found is None:
            return None
        labels = self.labels()
        prompt = [
            {**each, "label": each["label"] or labels.get(each["chunk"], each["chunk"][:8])}
            for each in found["prompt"]
        ]
        return {**self._aged(found), "prompt": prompt}

    def labels(self) -> dict[str, str]:
        """What clients called the chunks of the last requests, by the chunks' ids."""
        return {
            each["chunk"]: each["label"]
            for request in self._recent
            for each in request["prompt"]
            if each["label"]
        }

    def _aged(self, shown: dict[str, Any]) -> dict[str, Any]:
        rest = {name: value for name, value in shown.items() if name != "ended_s"}
        return {**rest, "ago_s": round(self._clock() - shown["ended_s"], 1)}


_CHUNKS = ("retrieved", "prompt")


def _picture(rag: RagRequest) -> dict[str, Any]:
    """One request: what was retrieved in which order, and what the prompt has from where."""
    planned, draft = rag.planned, rag.planned.draft
    num_earlier = len(planned.spans) - len(planned.order)
    took, first = time.perf_counter() - draft.options.timeline.came, rag.first_token_s
    return {
        "mode": "exact" if planned.fusion is None else "fused",
        "outcome": "refused" if rag.is_refused else (rag.finish_reason or "aborted"),
        "rank": planned.rank if rag.served_by is None else rag.served_by,
        "is_conversation": draft.turn is not None,
        "ms": round(took * 1000, 1),
        "ttft_ms": None if first is None else round(first * 1000, 1),
        "prompt_tokens": len(planned.input_ids),
        "fates": rag.fates(),
        "fallbacks": sorted(set(rag.fallbacks)),
        "dropped": len(draft.dropped) + len(draft.repeated) + len(draft.empty),
        "retrieved": [
            {"chunk": each.chunk.id, "label": draft.labels[each.chunk.id][:MAX_LABEL]}
            for each in draft.chunks
        ],
        "prompt": [
            {
                "chunk": span.chunk,
                # earlier turns' are not kept
                "label": label[:MAX_LABEL] if index >= num_earlier else None,
                "start": span.start,
                "end": span.end,
                "from": origin,
            }
            for index, (span, label, origin) in enumerate(
                zip(planned.spans, planned.labels, _origins(rag), strict=True)
            )
        ],
    }


def _origins(rag: RagRequest) -> Iterator[str]:
    """Where each span's KV came from: `exact`, `loaded` (exact, from host memory or beyond),
    `moved` and the source's tier, `computed`, or `unknown`."""
    found = None if rag.known is None else rag.known["exact"]
    loaded = rag.decoded.loaded if rag.decoded else 0
    sources = {} if rag.report is None else {each.span: each.where for each in rag.report.sources}
    # behind what is exact, before what was moved for this request
    fused_end = (found or 0) + (rag.report.fused_hit if rag.report else 0)
    for index, span in enumerate(rag.planned.spans):
        if found is None:
            yield "unknown"
        elif rag.planned.is_found(span, found):
            yield "loaded" if span.start >= found - loaded else "exact"
        elif sources.get(index, "gap") != "gap":
            yield f"moved {sources[index]}"
        else:
            yield "moved device" if rag.report and span.end <= fused_end else "computed"
