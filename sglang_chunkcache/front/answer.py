"""What a client sees of its request: the `chunkcache` object of an answer, and a plan explained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from radix_ext import FusionRequest
from sglang_chunkcache.front.reasons import fallbacks, missed
from sglang_chunkcache.front.request import Missed, Planned, RagRequest
from sglang_chunkcache.wire.report import Explanation, Report, Source

UNMOVED = Report(0, 0, 0, 0, 0, sources=(), focused=None, fallbacks=(), ms={})
"""What an answer shows where its rank has sent no report."""


def answer(rag: RagRequest) -> dict[str, Any]:
    """The `chunkcache` object of an answer."""
    planned = rag.planned
    return {
        **_planned(planned),
        "fates": rag.fates(),
        "loaded": rag.decoded.loaded if rag.decoded else 0,
        # hit_len starts at 0, which would say that nothing was found where nobody has told it
        "chunks_hit": rag.hit_len if rag.known else None,
        "head_tokens": planned.area[0].start if planned.area else 0,
        "dp_rank": rag.served_by,
        "reuse": planned.fusion and _fused(planned.fusion, rag),
        "fallbacks": rag.fallbacks,
        "missed": _missed(planned, rag.missed),
    }


def explained(planned: Planned, found: Explanation) -> dict[str, Any]:
    """A plan, for people: what the front would send, and `found`,
    what the rank would do with it."""
    labels, fusion = planned.labels, planned.fusion
    # what is loaded back or read from the storage counts as exact, so it is not missed
    unfound = missed(planned, found.exact + found.loaded + found.stored)
    return {
        **_planned(planned),
        "dp_rank": planned.rank,
        "prompt_tokens": len(planned.input_ids),
        "spans": [
            {"chunk": label, "id": span.chunk, "start": span.start, "end": span.end}
            for label, span in zip(labels, planned.spans, strict=True)
        ],
        "reuse": fusion
        and {**_asked(fusion), "ratio": fusion.asked_ratio, "recipe": fusion.recipe},
        "exact": found.exact,
        "loaded": found.loaded,
        "stored": found.stored,
        "end": found.end,
        "fused_hit": found.fused_hit,
        "estimated_ms": found.estimated_ms,
        "selected_by": found.selector,
        "sources": [
            {**_shown(labels, source), "start": source.start, "end": source.end}
            for source in found.sources
        ],
        "fallbacks": tuple(
            dict.fromkeys((*planned.fallbacks, *found.fallbacks, *fallbacks(planned, unfound)))
        ),
        "missed": _missed(planned, unfound),
    }


# Private, in order of use


def _planned(planned: Planned) -> dict[str, Any]:
    draft = planned.draft
    return {
        "order": planned.order,
        "dropped": draft.dropped,
        "repeated": draft.repeated,
        "empty": draft.empty,
        "chunks_planned": planned.planned_len,
        "predicted_exact": planned.predicted_exact,
        "turns_reused": draft.num_turns,
        "turns_rendered": draft.num_rendered,
        "turns_unknown": draft.num_unknown,
        "turns_departed": draft.num_departed,
        "retrieval": draft.options.retrieval,
    }


def _asked(fusion: FusionRequest) -> dict[str, Any]:
    return {
        "mode": "fused",
        "selector": fusion.selector,
        "quality": fusion.quality,
        "alpha": fusion.alpha,
        "tokens": fusion.tokens,
        "focus": fusion.focus,
    }


def _fused(fusion: FusionRequest, rag: RagRequest) -> dict[str, Any]:
    report, labels = rag.report or UNMOVED, rag.planned.labels
    # A fused hit counts as relocated, but an earlier request has moved it.
    moved = report.relocated + report.recomputed - report.fused_hit
    # None: nothing was moved for this request
    taken = round(report.recomputed / moved, 4) if moved else None
    return {
        **_asked(fusion),
        "ratio": fusion.asked_ratio if fusion.quality is None else taken,
        "sources": [_shown(labels, source) for source in report.sources],
        "focused": None if report.focused is None else [labels[i] for i in report.focused],
        "gap": report.gap,
        "fused_hit": report.fused_hit,
        "shared": report.shared,
        "ms": report.ms,
        "estimated_ms": report.estimated_ms,
        "selected_by": report.selector,
        "sampled": rag.is_sampled,
    }


def _shown(labels: Sequence[str], source: Source) -> dict[str, Any]:
    """`chunk` is None for text between chunks."""
    return {
        "chunk": None if source.span is None else labels[source.span],
        "from": source.where,
        "variant_prefix": source.num_before,
        "overlap": source.overlap,
        "cfo": source.cfo,
        "other_head": source.other_head,
    }


def _missed(planned: Planned, found: Sequence[Missed] | None) -> list[dict[str, Any]] | None:
    """None: not known, or the request has asked for moved KV."""
    labels = planned.labels
    return (
        None
        if found is None
        else [
            {
                "reason": each.reason.fallback,
                "chunks": [labels[i] for i in each.spans],
                "tokens": each.num_tokens,
                **(each.reason.parting._asdict() if each.reason.parting else {}),
            }
            for each in found
        ]
    )
