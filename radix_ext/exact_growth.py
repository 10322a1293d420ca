"""What a fused request computes although it could be moved, so that those who follow find it
exactly.

    exact prefix | I | U U | M M M | question   I: promoted, cached elsewhere. U: not cached. M:
                                                cached elsewhere

Moved KV ends the exact chain for everybody. So a fused request lets its chain grow before it moves
the rest: by I, at most `ExactGrowth.num_chunks` a request, and by U, which it has to compute anyway
and which therefore stands before M. A request of ten known chunks is thus exact after ten
repetitions and not at once, as LZ78 lets its phrases grow by one symbol each time. What is given up
is known: a chunk of n tokens costs n instead of ratio x n through the model, once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from radix_ext.access_table import AccessTable
from radix_ext.chunk import Chunk, ChunkId, Span, leading_area


class ExactGrowth(NamedTuple):
    """How the exact chains of fused requests grow."""

    num_chunks: int  # per request, of the chunks that could be moved; 0: none
    threshold: int
    """Accesses within the window, this request's included, from which a chunk is promoted (CRAFT
    4.2)."""

    def tail(self, chunks: Sequence[Chunk], table: AccessTable) -> list[Chunk]:
        """The order after the cached chain: the chunks to grow by, those without an access, the
        others.

        Args:
            chunks: in retriever order, which each part keeps.
            table: before it counts this request.
        """
        # One more for this request, which is counted once its order is decided.
        promoted = [chunk for chunk in chunks if table.count(chunk.id) + 1 >= self.threshold]
        leading = promoted[: self.num_chunks]
        taken = {chunk.id for chunk in leading}
        rest = [chunk for chunk in chunks if chunk.id not in taken]
        # Stable: both parts keep their order.
        return [*leading, *sorted(rest, key=lambda chunk: table.count(chunk.id) > 0)]


def exact_gaps(
    spans: Sequence[Span],
    *,
    start: int,
    limit: int,
    promoted_len: int,
    num_chunks: int,
    can_move: Callable[[ChunkId], bool],
) -> frozenset[int]:
    """Indices of the spans from `start` on that are computed exactly: the run up to the first one
    that is moved.

    A span that can be moved is one of them if all spans up to it are promoted: only such a chain is
    asked for again.

    Args:
        start, limit: in tokens: end of the exact prefix, and how far a plan may go.
        promoted_len: leading spans over the threshold.
        num_chunks: how many that can be moved there may be; 0: there are no exact gaps.
        can_move: whether there is a source; asked once for each span of the run and for the one
            that ends it.
    """
    run, num_grown = list[int](), 0
    for index, span in enumerate(leading_area(spans) if num_chunks else ()):
        # Within the prefix; `index` counts it, as `promoted_len` does.
        if span.start < start:
            continue
        if span.end > limit:
            break
        if can_move(span.chunk):
            if index >= promoted_len or num_grown == num_chunks:
                break
            num_grown += 1
        run.append(index)
    return frozenset(run)
