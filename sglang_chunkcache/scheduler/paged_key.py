"""A `ChunkKey` whose slots come in pages: a node owns the pages that end in its segment.

    page size 4   0 1 2 3 4 5 6 7 8 9 . .
    tokens        h h a a a a b q q q q q     head, two chunks, question
    a owns        ───────                     its rest, under a page, lies in the first page of each
    b owns                                    child, and all of b in that of the question
    q owns                ─────── ───────

So no page has two owners, and a match is whole pages. What it lacks of its last chunk is copied
from the first page of another child (page_rests.py).

To SGLang, which walks, splits and counts by length, a key is as long as the slots that it owns. Our
code asks for tokens (`part`, `num_tokens`). Tokens between chunks belong to the next chunk's node
from their last page border on, so only chunk nodes end inside a page.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Any, Self

from sglang.srt.mem_cache.radix_cache import RadixKey

from radix_ext import ChunkId, Span
from sglang_chunkcache.scheduler.chunk_key import TAG, ChunkKey, Segment, token_segments


class PagedKey(ChunkKey):
    """`phase`: the place of its first token in a page."""

    __slots__ = ("page_size", "phase")

    def __init__(self, *key: Any, page_size: int, phase: int = 0, **namespace: Any) -> None:
        super().__init__(*key, **namespace)
        self.page_size, self.phase = page_size, phase

    @classmethod
    def of(
        cls,
        token_ids: array[int],
        spans: Sequence[Span],
        up_to: int,
        *,
        page_size: int,
        prompt: array[int],
        **namespace: Any,
    ) -> Self:
        """As `ChunkKey.cut`, with every chunk whose own pages lie in these tokens: what is left of
        it is taken from `prompt`. A key never ends with a part of a page between chunks."""
        end = min(up_to, len(token_ids))
        if cut := next((span for span in spans if span.start < end < span.end), None):
            is_owned = cut.end - cut.end % page_size <= end and cut.end <= len(prompt)
            token_ids, end = (prompt, cut.end) if is_owned else (token_ids, cut.start)
        kept = tuple(span for span in spans if span.end <= end)
        end = max(end - end % page_size, kept[-1].end if kept else 0)
        return cls(token_ids[:end], kept, page_size=page_size, **namespace)

    def segments(self, *extra_borders: int) -> Iterator[Segment]:
        """As a `ChunkKey`'s; a chunk's begins with the tokens of its page that precede it, and the
        tokens between end with a page."""
        position = 0
        for span in self.spans:
            if (border := self._floor(span.start)) > position:
                yield Segment(position, border, None)
                position = border
            yield Segment(position, span.end, span.chunk)
            position = span.end
        borders = map(self._floor, extra_borders)
        yield from token_segments(position, self._floor(self.num_tokens), tuple(borders))

    def __len__(self) -> int:
        return self.phase + self._floor(self.num_tokens)

    def __getitem__(self, index: slice) -> PagedKey:
        start, stop, _ = index.indices(len(self))
        stop = stop - self.phase if stop < len(self) else self.num_tokens
        return self.part(max(0, start - self.phase), stop)

    def part(self, start: int, stop: int) -> PagedKey:
        key = PagedKey(
            self.token_ids[start:stop],
            self._spans,
            extra_key=self.extra_key,
            cache_salt=self.cache_salt,
            page_size=self.page_size,
            phase=(self.phase + start) % self.page_size,
        )
        key._look_at(self._first, self._end, self._offset + start)
        return key

    def page_aligned(self, page_size: int) -> Self:
        return self  # its length is

    def child_key(self, page_size: int = 1) -> Any:
        num_tokens = min(self._leading_tokens_len(), self.page_size - self.phase)
        start = tuple(self.token_ids[:num_tokens]), self._leading_chunk()
        return (TAG, self.extra_key, self.cache_salt, *start)

    def match(self, other: RadixKey, page_size: int = 1) -> int:
        """Slots of this node's key whose pages lead `other`: all or none of a chunk's."""
        self._check_compatible(other)
        if not isinstance(other, PagedKey):
            return 0
        if self._leading_chunk() is not None or other._leading_chunk() is not None:
            return len(self) if self.child_key() == other.child_key() else 0
        limit = min(self._leading_tokens_len(), other._leading_tokens_len())
        return self.phase + self._floor(min(limit, int(RadixKey.match(self, other))))

    def _leading_chunk(self) -> ChunkId | None:
        """If it begins in the key's first page."""
        if self._first == self._end or self._leading_tokens_len() >= self.page_size - self.phase:
            return None
        return self._spans[self._first].chunk

    def _floor(self, position: int) -> int:
        """The last border of a page up to this token: before the key's own, if it is negative."""
        return position - (self.phase + position) % self.page_size
