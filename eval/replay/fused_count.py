"""What became of a request's tokens in a fused replay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from radix_ext import Chunk, Span
from radix_ext.moved_plan import ReusePlan


class FusedCount(NamedTuple):
    """Of one request: chunks, then tokens of chunks.
    exact + relocated + recomputed + computed + dropped = tokens."""

    num_chunks: int
    tokens: int
    exact: int
    relocated: int
    """Moved and not recomputed, also by an earlier request with the same recipe (`fused_hit`)."""
    recomputed: int
    computed: int
    """Of these `behind` are keyed as fused, though no KV was moved there:
    exact requests compute them again."""
    dropped: int
    """Not sent, since the conversation has shown them."""
    behind: int
    fused_hit: int
    from_device: int
    from_host: int
    lost: int
    """Of the conversation's history, in addition: neither found nor moved."""
    ended: int
    """1 if moved KV ends the prompt's exact chain."""
    opted_tokens: int
    """`tokens`, if the request opted into moved KV; likewise the next two."""
    opted_exact: int
    opted_computed: int
    exact_from_host: int
    """Of `exact`, the history left out."""


def count_of(
    request: Sequence[Chunk],
    spans: Sequence[Span],
    plan: ReusePlan,
    num_exact: int,
    num_found: int,
    fused_from: int,
    *,
    first: int,
) -> FusedCount:
    """The fates of the request's chunks: the prompt's from index `first` on,
    before which is history."""
    lens = [span.end - span.start for span in spans]
    moved = Counter[str]()
    for piece in plan.pieces:
        if piece.source is not None and piece.span is not None:
            moved[piece.source.where if piece.span >= first else "history"] += (
                piece.end - piece.start
            )
    num_moved = moved["device"] + moved["host"]
    recomputed = round(plan.recomputed_len * num_moved / plan.moved_len) if plan.pieces else 0
    sent, exact = sum(lens[first:]), sum(lens[first:num_exact])
    fused_hit = sum(lens[max(first, num_exact) : num_found])
    computed = sent - exact - fused_hit - num_moved
    tokens = sum(chunk.num_tokens for chunk in request)
    return FusedCount(
        num_chunks=len(request),
        tokens=tokens,
        exact=exact,
        relocated=fused_hit + num_moved - recomputed,
        recomputed=recomputed,
        computed=computed,
        dropped=tokens - sent,
        behind=computed - sum(lens[max(first, num_exact) : fused_from]),
        fused_hit=fused_hit,
        from_device=moved["device"],
        from_host=moved["host"],
        lost=sum(lens[num_found:first]) - moved["history"],
        ended=fused_from < len(spans),
        opted_tokens=0,
        opted_exact=0,
        opted_computed=0,
        exact_from_host=0,
    )
