"""What a client sees of its request: the `chunkcache` object of an answer, and a plan explained."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_chunkcache.front.reasons import fallbacks, missed
from sglang_chunkcache.front.request import Draft, Missed, Planned, RagRequest
from sglang_chunkcache.wire.report import Explanation, Report, Source


def answer(rag: RagRequest) -> dict[str, Any]:
    """The `chunkcache` object of an answer."""
    planned = rag.planned
    return {
        "order": planned.order,
        "dropped": planned.draft.dropped,
        "repeated": planned.draft.repeated,
        "empty": planned.draft.empty,
        "fates": rag.fates(),
        "loaded": rag.decoded.loaded if rag.decoded else 0,
        # hit_len starts at 0, which would say that nothing was found where nobody has told it
        "chunks_hit": rag.hit_len if rag.known else None,
        "chunks_planned": planned.planned_len,
        "head_tokens": planned.area[0].start if planned.area else 0,
        "predicted_exact": planned.predicted_exact,
        **_turns(planned.draft),
        "dp_rank": rag.served_by,
        "reuse": _fused(rag) if planned.fusion else None,
        "retrieval": planned.draft.options.retrieval,
        "fallbacks": rag.fallbacks,
        "missed": _missed(planned, rag.missed),
    }


def explained(planned: Planned, found: Explanation) -> dict[str, Any]:
    """A plan, for people: what the front would send, and `found`,
    what the rank would do with it."""
    labels = planned.labels
    # what is loaded back or read from the storage counts as exact, so it is not missed
    unfound = missed(planned, found.exact + found.loaded + found.stored)
    return {
        "order": planned.order,
        "dropped": planned.draft.dropped,
        "repeated": planned.draft.repeated,
        "empty": planned.draft.empty,
        "dp_rank": planned.rank,
        "prompt_tokens": len(planned.input_ids),
        "chunks_planned": planned.planned_len,
        "predicted_exact": planned.predicted_exact,
        **_turns(planned.draft),
        "spans": [
            {"chunk": label, "id": span.chunk, "start": span.start, "end": span.end}
            for label, span in zip(labels, planned.spans, strict=True)
        ],
        "reuse": _asked(planned),
        "retrieval": planned.draft.options.retrieval,
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


def _turns(draft: Draft) -> dict[str, int]:
    return {
        "turns_reused": draft.num_turns,
        "turns_rendered": draft.num_rendered,
        "turns_unknown": draft.num_unknown,
        "turns_departed": draft.num_departed,
    }


def _missed(planned: Planned, found: Sequence[Missed] | None) -> list[dict[str, Any]] | None:
    """None: not known, or the request has asked for moved KV."""
    labels = planned.labels
    if found is None:
        return None
    return [
        {
            "reason": each.reason.fallback,
            "chunks": [labels[i] for i in each.spans],
            "tokens": each.num_tokens,
            **(each.reason.parting._asdict() if each.reason.parting else {}),
        }
        for each in found
    ]


def _fused(rag: RagRequest) -> dict[str, Any]:
    fusion, report, labels = rag.planned.fusion, rag.report, rag.planned.labels
    assert fusion is not None
    focused = report.focused if report else None
    return {
        "mode": "fused",
        "selector": fusion.selector,
        "ratio": fusion.asked_ratio if fusion.quality is None else _taken(report),
        "quality": fusion.quality,
        "alpha": fusion.alpha,
        "tokens": fusion.tokens,
        "focus": fusion.focus,
        "sources": [_shown(labels, source) for source in report.sources] if report else [],
        "focused": None if focused is None else [labels[i] for i in focused],
        "gap": report.gap if report else 0,
        "fused_hit": report.fused_hit if report else 0,
        "ms": report.ms if report else {},
        "estimated_ms": report.estimated_ms if report else {},
        "selected_by": report.selector if report else None,
        "sampled": rag.is_sampled,
    }


def _asked(planned: Planned) -> dict[str, Any] | None:
    fusion = planned.fusion
    if fusion is None:
        return None
    return {
        "mode": "fused",
        "selector": fusion.selector,
        "ratio": fusion.asked_ratio,
        "quality": fusion.quality,
        "alpha": fusion.alpha,
        "tokens": fusion.tokens,
        "focus": fusion.focus,
        "recipe": fusion.recipe,
    }


def _taken(report: Report | None) -> float | None:
    """The share of the tokens moved for this request that was recomputed.
    None: nothing was moved for it."""
    # A fused hit counts as relocated, but an earlier request has moved it.
    moved = report.relocated + report.recomputed - report.fused_hit if report else 0
    return round(report.recomputed / moved, 4) if report and moved else None


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
