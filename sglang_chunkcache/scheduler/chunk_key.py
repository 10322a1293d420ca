"""A `RadixKey` that knows its chunks, so that SGLang's own `RadixCache` walks a chunk per step.

    token ids   h h h | a a a a | b b | q q q    one letter per segment
    segments    [0,3)   [3,7)     [7,9) [9,12)   chunk segments carry a ChunkId, token segments None

Inside the chunk area `child_key()` is the chunk's id and `match()` one comparison; outside it,
tokens as in SGLang. Invariant: spans are whole (no key begins or ends inside one), sorted and
disjoint; a node's key is one segment.

From the first moved chunk on, KV is approximate: there and below, child keys also carry the recipe
that made it ("fused"), which no exact key can form: only who asked for approximate KV matches it.

Chunk-keyed and plain keys never share nodes: every child key of ours carries `TAG`, also in front
of the chunks. Else a plain node might run on into a chunk, and a match would end inside it.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from sglang.srt.mem_cache.radix_cache import RadixKey

from radix_ext import ChunkId, Span
from radix_ext.fusion_request import QUESTION

TAG = "chunkcache"


class Segment(NamedTuple):
    """`[start, end)` of a key, in tokens: one chunk, or the tokens between (`chunk` is None)."""

    start: int
    end: int
    chunk: ChunkId | None


class Fused(NamedTuple):
    """From which token of a key on, a segment's start, its KV is approximate; by which recipe."""

    start: int
    recipe: str

    @property
    def serves_one(self) -> bool:
        """Whether the KV was made for one question, or one prompt: no other request asks for it."""
        return QUESTION in self.recipe


class ChunkKey(RadixKey):  # type: ignore[misc]
    """Token ids with their chunks' spans, relative to the key; `fused` None: all exact."""

    __slots__ = ("_end", "_first", "_offset", "_spans", "fused")
    # A match slices its key once a chunk. So a slice that has several spans looks at those of the
    # key it was cut from:
    # `_spans[_first:_end]`, which are `_offset` tokens too far to the right.

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
        self._spans, self._first, self._end, self._offset = spans, 0, len(spans), 0
        self.fused = fused

    @property
    def spans(self) -> tuple[Span, ...]:
        # Only when they are read: most slices of a match are compared by their first chunk alone.
        if self._end - self._first < len(self._spans) or self._offset:
            seen = self._spans[self._first : self._end]
            self._spans = tuple(Span(s - self._offset, e - self._offset, c) for s, e, c in seen)
            self._first, self._end, self._offset = 0, len(seen), 0
        return self._spans

    @classmethod
    def cut(
        cls,
        token_ids: array[int],
        spans: Sequence[Span],
        up_to: int,
        *,
        fused: Fused | None = None,
        **tenant: str | None,
    ) -> ChunkKey:
        """The first `up_to` tokens, or less: a key ends before a chunk that it would end inside."""
        end = cut_at_chunk(spans, min(up_to, len(token_ids)))
        kept = tuple(span for span in spans if span.end <= end)
        # What is left is exact, and eviction takes a key with a recipe for approximate.
        if fused is not None and fused.start >= end:
            fused = None
        return cls(token_ids[:end], kept, fused=fused, **tenant)

    def fused_by(self, recipe: str) -> ChunkKey:
        """The same tokens, approximate throughout."""
        key = self[:]
        key.fused = Fused(0, recipe)
        return key

    def segments(self, *extra_borders: int) -> Iterator[Segment]:
        """The key's segments in order; token segments are also cut at `extra_borders`."""
        position = 0
        for span in self.spans:
            yield from token_segments(position, span.start, extra_borders)
            yield Segment(*span)
            position = span.end
        yield from token_segments(position, len(self.token_ids), extra_borders)

    def __len__(self) -> int:
        # It has no limit and is no bigram view, and a match asks four times a chunk.
        # The slots that its node owns: fewer than tokens where they come in pages (paged_key.py).
        return len(self.token_ids)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    def __getitem__(self, index: slice) -> ChunkKey:
        start, stop, _ = index.indices(len(self))
        fused = self.fused
        if fused is not None:
            fused = Fused(max(0, fused.start - start), fused.recipe) if fused.start < stop else None
        key = ChunkKey(
            self.token_ids[start:stop],
            # Uncut, see `__slots__`: cutting them at each step is quadratic in a prompt's chunks.
            self._spans,
            extra_key=self.extra_key,
            cache_salt=self.cache_salt,
            fused=fused,
        )
        key._look_at(self._first, self._end, self._offset + start)
        return key

    def part(self, start: int, stop: int) -> ChunkKey:
        """Its tokens `[start, stop)`."""
        return self[start:stop]

    def child_key(self, page_size: int = 1) -> Any:
        head = self._leading_chunk()
        exact = (TAG, self.extra_key, self.cache_salt, self.token_ids[0] if head is None else head)
        # Where the recipe begins later, the first segment is exact, and shared with exact requests.
        if self.fused is None or self.fused.start:
            return exact
        return (*exact, "fused", self.fused.recipe)

    def match(self, other: RadixKey, page_size: int = 1) -> int:
        """Tokens that lead `other`: all or none of a chunk, token by token elsewhere."""
        # Raises an error, as SGLang's match: child keys have the namespace, so it is a bug.
        self._check_compatible(other)
        if not isinstance(other, ChunkKey):
            return 0
        mine, theirs = self._leading_chunk(), other._leading_chunk()
        if mine is not None or theirs is not None:
            # A node's key is one segment, so this is all of the chunk.
            return len(self) if mine == theirs else 0
        # A match must end where either key's first chunk starts, even if the tokens go on alike.
        limit = min(self._leading_tokens_len(), other._leading_tokens_len())
        return min(limit, int(super().match(other)))

    def _look_at(self, first: int, end: int, offset: int) -> None:
        """Of `_spans[first:end]` those whole in this key, which begins at `offset` among them."""
        spans, stop = self._spans, offset + len(self.token_ids)
        # A tuple that is shorter sorts first: the first span that starts at `offset` or behind it.
        first = bisect_left(spans, (offset,), first, end)
        end = bisect_left(spans, (stop,), first, end)
        # Spans are sorted and disjoint, so only the last one can reach over the end.
        if first < end and spans[end - 1].end > stop:
            end -= 1
        self._first, self._end, self._offset = first, end, offset
        if end - first <= 1:  # a node's key holds one span, not its whole prompt's
            _ = self.spans

    def _leading_chunk(self) -> ChunkId | None:
        if self._first == self._end:
            return None
        start, _, chunk = self._spans[self._first]
        return chunk if start == self._offset else None

    def _leading_tokens_len(self) -> int:
        if self._first == self._end:
            return len(self.token_ids)
        return self._spans[self._first].start - self._offset


def cut_at_chunk(spans: Sequence[Span], end: int) -> int:
    """`end`, or the start of the span that `end` lies inside."""
    return next((span.start for span in spans if span.start < end < span.end), end)


def token_segments(start: int, end: int, borders: Sequence[int]) -> Iterator[Segment]:
    for border in (*sorted(b for b in borders if start < b < end), end):
        if start < border:
            yield Segment(start, border, None)
            start = border
