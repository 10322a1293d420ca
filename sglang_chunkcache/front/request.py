"""A RAG request: what a client sends, whose it is, and what becomes of it in the front process.

Data only; `service` does the work, and `answer()` is everything the client may see of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from radix_ext import Plan, Span
from sglang_chunkcache.wire.spans import ReuseRequest

FATES = ("exact", "relocated", "recomputed")
"""The fates that the scheduler tells of; `computed` is the rest of the prompt."""


@dataclass(frozen=True, slots=True)
class Passage:
    """A retrieved chunk as the client sent it. `label` is only shown back: identity is the token ids."""

    label: str
    text: str


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose request it is; keeps caches and conversations of different tenants apart."""

    api_key: str = ""
    cache_salt: str | None = None
    extra_key: str | None = None
    lora: str | None = None


@dataclass
class RagRequest:
    """One request under way. Everything the client may see is in `answer()`."""

    input_ids: list[int]
    rank: int
    namespace: str
    spans: tuple[Span, ...]
    area: tuple[Span, ...]
    order: list[str]
    planned_len: int
    reuse: ReuseRequest | None
    custom_params: dict[str, Any] = field(default_factory=dict)
    plan: Plan | None = None
    """What the tree knows of the request; None before it is booked, and for one that only asks."""
    dropped: list[str] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    num_turns: int = 0
    num_departed: int = 0
    remember: Callable[[Sequence[int], str], None] | None = None
    output_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    is_cut: bool = False
    """The answer ended at a stop string: the client does not see all of its tokens, so they cannot be its history."""
    is_answered: bool = False
    """The first token is there, and with it all that the scheduler tells."""
    known: dict[str, int] | None = None
    """Prompt tokens by the fates of `FATES`; None where they are not known."""
    report: Mapping[str, Any] | None = None
    """What the scheduler did for a fused request."""
    retrieval: dict[str, Any] | None = None
    """What was searched for and found; None where the client sent its chunks."""
    hit_len: int = 0
    served_by: int | None = None
    fallbacks: list[str] = field(default_factory=list)
    is_parallel: bool = False
    """More than one answer: SGLang fills its cache with a request of its own first, so what was cached is not reported."""
    is_preprocessing: bool = False
    """Nobody retrieved its chunks: they count neither as accesses nor as hits."""
    is_refused: bool = False
    released: bool = False

    @property
    def labels(self) -> list[str]:
        """One per span. Those of earlier turns are not kept: such chunks are named by the front of their hash."""
        earlier = self.spans[: len(self.spans) - len(self.order)]
        return [*(span.chunk[:8] for span in earlier), *self.order]

    @property
    def exact(self) -> int | None:
        """Prompt tokens found under the very same prefix; None before the first token, or where that is not known."""
        return self.known["exact"] if self.known else None

    @property
    def predicted_exact(self) -> int:
        """Prompt tokens up to the end of the chunks that the tree expects to be cached."""
        return self.area[self.planned_len - 1].end if self.planned_len else 0

    def params_with(self, theirs: Mapping[str, Any] | None) -> dict[str, Any]:
        """The engine's `custom_params`: the client's, and ours. Ours stand beside the server's secret mark and are believed,
        so a client's key that could be taken for one of them is left out."""
        others = {key: value for key, value in (theirs or {}).items() if not key.startswith("chunkcache_")}
        return {**others, **self.custom_params}

    def fates(self) -> dict[str, int] | None:
        """Prompt tokens by fate; they sum to the prompt's length. None where the scheduler does not tell."""
        if self.known is None:
            return None
        return {**self.known, "computed": len(self.input_ids) - sum(self.known.values())}

    def answer(self) -> dict[str, Any]:
        """The `chunkcache` object of an answer."""
        return {
            "order": self.order,
            "dropped": self.dropped,
            "repeated": self.repeated,
            "fates": self.fates(),
            "chunks_hit": self.hit_len if self.known else None,
            "chunks_planned": self.planned_len,
            "head_tokens": self.area[0].start if self.area else 0,
            "predicted_exact": self.predicted_exact,
            "turns_reused": self.num_turns,
            "turns_departed": self.num_departed,
            "dp_rank": self.served_by,
            "reuse": self._fused() if self.reuse else None,
            "retrieval": self.retrieval,
            "fallbacks": self.fallbacks,
        }

    def explained(self, found: Mapping[str, Any]) -> dict[str, Any]:
        """The plan, for people: what the front would send, and `found`, what the rank would do with it."""
        labels = self.labels
        return {
            "order": self.order,
            "dropped": self.dropped,
            "repeated": self.repeated,
            "dp_rank": self.rank,
            "prompt_tokens": len(self.input_ids),
            "chunks_planned": self.planned_len,
            "predicted_exact": self.predicted_exact,
            "turns_reused": self.num_turns,
            "turns_departed": self.num_departed,
            "spans": [
                {"chunk": label, "id": span.chunk, "start": span.start, "end": span.end}
                for label, span in zip(labels, self.spans, strict=True)
            ],
            "reuse": None
            if self.reuse is None
            else {
                "mode": "fused",
                "selector": self.reuse.selector,
                "ratio": self.reuse.ratio,
                "alpha": self.reuse.alpha,
                "focus": self.reuse.focus,
                "without": sorted(self.reuse.without),
                "recipe": self.reuse.recipe,
            },
            "retrieval": self.retrieval,
            "exact": found["exact"],
            "end": found["end"],
            "fused_hit": found.get("fused_hit", 0),
            "sources": [{**_source(labels, row), "start": start, "end": end} for *row, start, end in found["sources"]],
            "fallbacks": list(found["fallbacks"]),
        }

    def _fused(self) -> dict[str, Any]:
        assert self.reuse is not None
        report, labels = self.report or {}, self.labels
        focused = report.get("focused")
        return {
            "mode": "fused",
            "selector": report.get("selector", self.reuse.selector),
            "ratio": report.get("ratio", self.reuse.ratio),
            "sources": [_source(labels, row) for row in report.get("sources", ())],
            "focused": None if focused is None else [labels[i] for i in focused],
            "gap": report.get("gap", 0),
            "shared": report.get("shared", 0),
            "fused_hit": report.get("fused_hit", 0),
            "fallbacks": list(report.get("fallbacks", ())),
            "ms": dict(report.get("ms", {})),
        }


def _source(labels: Sequence[str], row: Sequence[Any]) -> dict[str, Any]:
    """A piece's source as the scheduler names it, for a reader. `chunk` is None for text between chunks."""
    span, source, variant_prefix, overlap, cfo = row
    return {
        "chunk": None if span is None else labels[span],
        "from": source,
        "variant_prefix": variant_prefix,
        "overlap": overlap,
        "cfo": cfo,
    }
