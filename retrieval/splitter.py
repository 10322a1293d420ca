"""Splits documents into passages: whole sentences up to a number of tokens, with overlap.

    sentences   |  a  | b |    c    |  d  |    max_tokens holds three of them, overlap_tokens one
    passages    [  a    b      c    ]
                              [c       d  ]    overlap begins with a sentence

A passage ends at the first of these that is possible:

1. the end of the document;
2. the end of a paragraph that leaves the passage at least half full (retrieval finds a passage on
   one topic more easily than a full one on two);
3. the end of a sentence.

Only a sentence longer than a passage is cut: between lines, also only if half full, else between
words, else between tokens. Every character that is not whitespace is in a passage; without overlap,
in exactly one.

Not a library's: `semantic-text-splitter` 0.33 cuts after "Dr.", leaves a heading at a passage's
end, and takes 40 to 50 times as long for eight times the text without spaces (eval/LOG.md).

Time and memory: the document is processed in blocks of BLOCK_CHARS, which no passage crosses. Each
block is tokenised once as a whole and once in passages, because a passage tokenised alone may count
differently at its borders.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterator

from retrieval.errors import RetrievalError
from retrieval.passage import Document, Passage
from retrieval.sentences import end_before, find_borders
from retrieval.tokens import Tokens

BLOCK_CHARS = 1 << 18
"""Bounds the memory for tokens and borders to tens of MB.
About one in 250 passages of 256 tokens ends early because of it."""
MIN_TOKENS = 8
"""A smaller passage might not hold even one character: some take several tokens."""
_NOT_SPACE = re.compile(r"\S")
_WORD_START = re.compile(r"(?<=\s)\S")


class Splitter:
    """Cuts documents. Stateless, so threads may share one if they may share `tokens`."""

    def __init__(self, tokens: Tokens, *, max_tokens: int, overlap_tokens: int) -> None:
        """
        Args:
            max_tokens: of a passage tokenised alone; at least MIN_TOKENS.
            overlap_tokens: the most repeated from the previous passage; less than half of that.
        Raises:
            RetrievalError: a value is out of its range.
        """
        if max_tokens < MIN_TOKENS:
            raise RetrievalError(
                f"the limit for a passage must be at least {MIN_TOKENS} tokens, got {max_tokens}"
            )
        if not 0 <= overlap_tokens < max_tokens / 2:
            limit = f"0 or more and less than half of {max_tokens} tokens"
            raise RetrievalError(f"the overlap must be {limit}, got {overlap_tokens}")
        self.tokens, self.max_tokens, self.overlap_tokens = tokens, max_tokens, overlap_tokens

    def split(self, document: Document) -> Iterator[Passage]:
        """The document's passages in order; none for a text of whitespace.

        A passage's `text` begins at the offset in its `id` in `document.text`, without whitespace
        around it. The overlap begins at the start of a sentence (of a word, if the sentence itself
        was cut). It is left out if a whole sentence would no longer fit after it.

        Raises:
            RetrievalError: one character alone has more than `max_tokens` tokens.
        """
        num_tokens = 0
        for first, last in _blocks(document.text):
            block = _Block(document.text[first:last], self)
            for start, end, size in block.pack(document.id):
                name, text = f"{document.id}#{first + start}", block.text[start:end]
                begin = num_tokens + block.tokens_before(start)
                stop = num_tokens + block.tokens_until(end)
                yield Passage(name, document.id, document.title, text, begin, stop, size)
            num_tokens += len(block.token_starts)


class _Block:
    """A part of a document with the positions, in its characters, of tokens and borders."""

    def __init__(self, text: str, splitter: Splitter) -> None:
        self.text, self._offsets = text, splitter.tokens.offsets
        self._max_tokens, self._overlap_tokens = splitter.max_tokens, splitter.overlap_tokens
        offsets = self._offsets(text)
        self.token_starts = [start for start, _ in offsets]
        self._token_ends = [end for _, end in offsets]
        borders = find_borders(text)
        self._sentence_ends = [border.end for border in borders]
        self._sentence_starts = [border.start for border in borders]
        self._paragraph_ends = [border.end for border in borders if border.paragraph]

    def pack(self, document_id: str) -> Iterator[tuple[int, int, int]]:
        """`(start, end, tokens)` of each passage, without whitespace around it."""
        start = fresh = self._next_start(0)  # `fresh`: first character that no passage holds yet
        while fresh < len(self.text):
            passage = self._take(start, fresh)
            if passage is None:
                if start == fresh:
                    what = f"the character {self.text[start]!r} has more than"
                    much = f"{what} {self._max_tokens} tokens"
                    raise RetrievalError(f"document {document_id!r}: {much}")
                start = fresh  # without the overlap
                continue
            end, size = passage
            yield start, end, size
            fresh = self._next_start(end)
            start = self._overlap_start(start, end, fresh)

    def tokens_before(self, position: int) -> int:
        """Number of tokens that end at or before a position."""
        return bisect_right(self._token_ends, position)

    def tokens_until(self, position: int) -> int:
        """Number of tokens that begin before a position."""
        return bisect_left(self.token_starts, position)

    def _take(self, start: int, fresh: int) -> tuple[int, int] | None:
        """End and size of the passage from `start`;
        None if it cannot both extend past `fresh` and respect the limit."""
        budget = self._max_tokens
        while True:
            end = self._choose_end(start, fresh, budget)
            if end is None:
                return None
            size = len(self._offsets(self.text[start:end]))
            if size <= self._max_tokens:
                return end, size
            # Not even one more character fits.
            if end == fresh + 1:
                return None
            # one or two tokens more at the borders: try again with fewer
            budget -= size - self._max_tokens

    def _choose_end(self, start: int, fresh: int, budget: int) -> int | None:
        """The best end, after `fresh`, of a passage of at most `budget` tokens from `start`."""
        after = self.tokens_before(start) + budget
        starts = self.token_starts
        limit = starts[max(after, 0)] if after < len(starts) else len(self.text)
        end = _last_in(self._sentence_ends, fresh, limit)
        # The last border is the end of the text.
        if end == self._sentence_ends[-1]:
            return end
        paragraph = _last_in(self._paragraph_ends, fresh, limit)
        if paragraph is not None and self._half_full(start, paragraph):
            return paragraph
        if end is None and start < fresh and self._begins_sentence(fresh):
            return None  # leave the overlap out rather than cut a sentence for it
        return end or self._cut(start, fresh, limit)

    def _cut(self, start: int, fresh: int, limit: int) -> int | None:
        """Where to cut a sentence beyond `fresh` and not beyond `limit`:
        a line if half full, else a space, else `limit`."""
        if limit <= fresh:
            return None if start < fresh else fresh + 1
        line = self.text.rfind("\n", fresh, limit + 1)
        if line > fresh and self._half_full(start, line):
            return end_before(self.text, line)
        space = limit
        while space > fresh and not (self.text[space - 1].isspace() or self.text[space].isspace()):
            space -= 1
        return end_before(self.text, space if space > fresh else limit)

    def _overlap_start(self, start: int, end: int, fresh: int) -> int:
        """Where the passage after `[start, end)` begins:
        as far back as the overlap and the start of a sentence allow."""
        allowed = self.tokens_until(end) - self._overlap_tokens
        if self._overlap_tokens == 0 or fresh >= len(self.text):
            return fresh
        # Past the last passage's start: one shorter than the overlap is not repeated whole.
        earliest = max(start + 1, self._token_ends[allowed - 1] if allowed > 0 else 0)
        # Always found: the last border starts at the text's length.
        sentence = self._sentence_starts[bisect_left(self._sentence_starts, earliest)]
        if sentence >= fresh and not self._begins_sentence(fresh):
            word = _WORD_START.search(self.text, earliest, fresh)
            return word.start() if word else fresh
        return min(sentence, fresh)

    def _half_full(self, start: int, end: int) -> bool:
        return 2 * (self.tokens_until(end) - self.tokens_before(start)) >= self._max_tokens

    def _begins_sentence(self, position: int) -> bool:
        index = bisect_left(self._sentence_starts, position)
        return self._sentence_starts[index] == position

    def _next_start(self, position: int) -> int:
        match = _NOT_SPACE.search(self.text, position)
        return match.start() if match else len(self.text)


def _blocks(text: str) -> Iterator[tuple[int, int]]:
    """`[first, last)` of stretches of at most BLOCK_CHARS that end with a paragraph, else a line,
    sentence, word, anywhere."""
    first = 0
    while len(text) - first > BLOCK_CHARS:
        # In its second half, so that no block ends after a few characters.
        late, last = first + BLOCK_CHARS // 2, first + BLOCK_CHARS
        found = (text.rfind(mark, late, last) for mark in ("\n\n", "\n", ". ", " "))
        cut = next((place + 1 for place in found if place >= 0), last)
        yield first, cut
        first = cut
    yield first, len(text)


def _last_in(places: list[int], after: int, limit: int) -> int | None:
    """The greatest of ascending `places` in `(after, limit]`."""
    index = bisect_right(places, limit) - 1
    return places[index] if index >= 0 and places[index] > after else None
