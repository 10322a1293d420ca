"""A `RadixKey` that knows its chunks, so that SGLang's unchanged `RadixCache` walks a chunk per step.

    token ids   h h h | a a a a | b b | q q q        one letter per segment
    segments    [0,3)   [3,7)     [7,9) [9,12)       chunk segments carry a ChunkId, token segments None

Inside the chunk area `child_key()` is the chunk's id and `match()` one comparison; outside it, tokens as in SGLang.
Invariant: spans are whole (no key begins or ends inside one), sorted and disjoint; a node's key is one segment.

From the first moved chunk on, KV is approximate: there and below, child keys also carry the recipe that made it ("fused"),
which no exact key can form. So only requests that asked for approximate KV can match it.

Chunk-keyed and plain keys never share nodes: every child key of ours carries `_TAG`, also in front of the chunks, since
a plain node may run on into what is a chunk here and a match would end inside it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sglang.srt.mem_cache.radix_cache import RadixKey

from radix_ext import ChunkId, Span
from radix_ext.moved_plan import QUESTION

_TAG = "chunkcache"


class Segment(NamedTuple):
    """`[start, end)` of a key, in tokens: one chunk, or the tokens between chunks (`chunk` is None)."""

    start: int
    end: int
    chunk: ChunkId | None


class Fused(NamedTuple):
    """From where on a key's KV is approximate, in tokens of the key (always a segment's start), and by which recipe."""

    start: int
    recipe: str

    @property
    def serves_one(self) -> bool:
        """Whether the KV was made for one question, or one prompt: no other request asks for it."""
        return QUESTION in self.recipe


class ChunkKey(RadixKey):  # type: ignore[misc]
    """Token ids with the spans of their chunks, offsets relative to the key; `fused` None means exact throughout."""

    __slots__ = ("fused", "spans")

    def __init__(
        self,
        token_ids: array[int],
        spans: tuple[Span, ...],
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        fused: Fused | None = None,
    ) -> None:
        super().__init__(token_ids, extra_key, cache_salt=cache_salt)
        self.spans = spans
        self.fused = fused

    @classmethod
    def cut(
        cls,
        token_ids: array[int],
        spans: Sequence[Span],
        up_to: int,
        *,
        extra_key: str | None = None,
        cache_salt: str | None = None,
        fused: Fused | None = None,
    ) -> ChunkKey:
        """The first `up_to` tokens, or less: a key that would end inside a chunk ends where that chunk starts."""
        end = cut_at_chunk(spans, min(up_to, len(token_ids)))
        kept = tuple(span for span in spans if span.end <= end)
        if fused is not None and fused.start >= end:
            fused = None
        return cls(token_ids[:end], kept, extra_key=extra_key, cache_salt=cache_salt, fused=fused)

    def fused_by(self, recipe: str) -> ChunkKey:
        """The same tokens, approximate throughout."""
        return ChunkKey(
            self.token_ids, self.spans, extra_key=self.extra_key, cache_salt=self.cache_salt, fused=Fused(0, recipe)
        )

    def segments(self, *extra_borders: int) -> Iterator[Segment]:
        """The key's segments in order; token segments are also cut at `extra_borders`."""
        position = 0
        for span in self.spans:
            yield from _token_segments(position, span.start, extra_borders)
            yield Segment(*span)
            position = span.end
        yield from _token_segments(position, len(self), extra_borders)

    def __getitem__(self, index: int | slice) -> ChunkKey:
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"index {index} out of range for {len(self)} tokens")
            index = slice(index % len(self), index % len(self) + 1)
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise ValueError(f"slice step must be 1, got {step}")
        spans = tuple(Span(s - start, e - start, c) for s, e, c in self.spans if s >= start and e <= stop)
        fused = self.fused
        if fused is not None:
            fused = Fused(max(0, fused.start - start), fused.recipe) if fused.start < stop else None
        return ChunkKey(
            self.token_ids[start:stop], spans, extra_key=self.extra_key, cache_salt=self.cache_salt, fused=fused
        )

    def child_key(self, page_size: int = 1) -> Any:
        head = self._leading_chunk()
        exact = (_TAG, self.extra_key, self.cache_salt, self.token_ids[0] if head is None else head.chunk)
        return exact if self.fused is None or self.fused.start else (*exact, "fused", self.fused.recipe)

    def match(self, other: RadixKey, page_size: int = 1) -> int:
        """Tokens of this node's key that lead `other`: all or none of a chunk, token by token elsewhere."""
        self._check_compatible(other)
        if not isinstance(other, ChunkKey):
            return 0
        mine, theirs = self._leading_chunk(), other._leading_chunk()
        if mine is not None or theirs is not None:
            return len(self) if mine is not None and theirs is not None and mine.chunk == theirs.chunk else 0
        limit = min(self._leading_tokens_len(), other._leading_tokens_len())
        return min(limit, int(super().match(other)))

    def _leading_chunk(self) -> Span | None:
        return self.spans[0] if self.spans and self.spans[0].start == 0 else None

    def _leading_tokens_len(self) -> int:
        return self.spans[0].start if self.spans else len(self)


def cut_at_chunk(spans: Sequence[Span], end: int) -> int:
    """`end`, or the start of the span that `end` lies inside."""
    return next((span.start for span in spans if span.start < end < span.end), end)


def _token_segments(start: int, end: int, borders: Sequence[int]) -> Iterator[Segment]:
    for border in (*sorted(b for b in borders if start < b < end), end):
        if start < border:
            yield Segment(start, border, None)
            start = border
