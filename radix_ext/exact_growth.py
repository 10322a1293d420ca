"""What a fused request computes although it could be moved, so that those who follow find it
exactly.

    exact prefix | I | U U | M M M | question   I: promoted, cached elsewhere. U: not cached. M:
                                                cached elsewhere

Moved KV ends the exact chain for everybody. So a fused request lets its chain grow before it moves
the rest: by I, one chunk, where that costs little, and by U, which it has to compute anyway and
which therefore stands before M. A request of ten known chunks is thus exact after ten repetitions
and not at once, as LZ78 lets its phrases grow by one symbol each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from radix_ext.access_table import AccessTable
from radix_ext.chunk import Chunk, ChunkId, Span, leading_area
from radix_ext.moved_plan import ReusePlan, seconds_saved

MAX_COST = 0.1
"""Of the time to the first token, for the sake of those who follow. Growing at any price costs more
than it brings where each token is dear, never growing where a pass takes long whatever it computes
(README)."""


def growing_tail(chunks: Sequence[Chunk], table: AccessTable, threshold: float) -> list[Chunk]:
    """The order after the cached chain: the chunk to grow by, those without an access, the others.

    Args:
        chunks: in retriever order, which each part keeps.
        table: before it counts this request.
        threshold: accesses within the window, this request's included, from which a chunk is
            promoted (CRAFT 4.2); infinite: it grows by none that could be moved.
    """
    # One more for this request, which is counted once its order is decided.
    promoted = [chunk for chunk in chunks if table.count(chunk.id) + 1 >= threshold]
    rest = [chunk for chunk in chunks if chunk not in promoted[:1]]
    # Stable: both parts keep their order.
    return [*promoted[:1], *sorted(rest, key=lambda chunk: table.count(chunk.id) > 0)]


def grown(
    plan: Callable[[frozenset[int]], ReusePlan], gaps: Callable[[], frozenset[int]]
) -> ReusePlan:
    """The plan that lets the exact chain grow, or the one that moves what it can.

    Args:
        plan: with the spans of these indices computed.
        gaps: what the chain may grow by.
    """
    moved = plan(frozenset())
    # Without an estimate nobody knows what it costs.
    if moved.estimate is None or not (exact := gaps()):
        return moved
    other = plan(exact)
    if not (moved.pieces or other.pieces):
        return moved  # it says why
    cost = seconds_saved(moved, instead_of=other) or 0.0
    return other if cost <= MAX_COST * moved.estimate.planned else moved


def exact_gaps(
    spans: Sequence[Span],
    *,
    start: int,
    limit: int,
    promoted_len: int,
    can_move: Callable[[ChunkId], bool],
) -> frozenset[int]:
    """Indices of the spans from `start` on that an exact chain may grow by: the run up to the first
    one that is moved.

    One that can be moved is among them if all spans up to it are promoted: only such a chain is
    asked for again.

    Args:
        start, limit: in tokens: end of the exact prefix, and how far a plan may go.
        promoted_len: leading spans over the threshold.
        can_move: whether there is a source; asked once for each span of the run and for the one
            that ends it.
    """
    run, has_grown = list[int](), False
    for index, span in enumerate(leading_area(spans)):
        # Within the prefix; `index` counts it, as `promoted_len` does.
        if span.start < start:
            continue
        if span.end > limit:
            break
        if can_move(span.chunk):
            if index >= promoted_len or has_grown:
                break
            has_grown = True
        run.append(index)
    return frozenset(run)
