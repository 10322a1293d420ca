"""The splitter as slowly as it can be said: every rule a scan over all characters and all tokens.
For texts of one block."""

from __future__ import annotations

from retrieval.passage import Document, Passage
from retrieval.sentences import find_borders
from retrieval.tokens import Tokens


class NaiveSplitter:
    """`Splitter` without search trees, blocks or positions kept."""

    def __init__(self, tokens: Tokens, *, max_tokens: int, overlap_tokens: int) -> None:
        self.tokens, self.max_tokens, self.overlap_tokens = tokens, max_tokens, overlap_tokens

    def split(self, document: Document) -> list[Passage]:
        """All passages of the document."""
        text = self.text = document.text
        self.spans = self.tokens.offsets(text)
        self.borders = find_borders(text)
        passages: list[Passage] = []
        start = fresh = self.skip_space(0)
        while fresh < len(text):
            end = self.end_of_passage(start, fresh)
            if end is None:
                assert start < fresh, "a character with more than max_tokens tokens"
                start = fresh
                continue
            passages.append(
                Passage(
                    id=f"{document.id}#{start}",
                    document_id=document.id,
                    title=document.title,
                    text=text[start:end],
                    start=sum(span_end <= start for _, span_end in self.spans),
                    end=sum(span_start < end for span_start, _ in self.spans),
                    num_tokens=len(self.tokens.offsets(text[start:end])),
                )
            )
            fresh = self.skip_space(end)
            start = self.next_start(start, end, fresh)
        return passages

    def num_tokens(self, start: int, end: int) -> int:
        """Tokens of the whole text that touch `[start, end)`."""
        return sum(span_end > start and span_start < end for span_start, span_end in self.spans)

    def end_of_passage(self, start: int, fresh: int) -> int | None:
        """The best end; with fewer tokens while the text alone proves too long."""
        limit = self.max_tokens
        while (end := self.best_end(start, fresh, limit)) is not None:
            excess = len(self.tokens.offsets(self.text[start:end])) - self.max_tokens
            if excess <= 0:
                return end
            if end == fresh + 1:
                return None
            limit -= excess
        return None

    def best_end(self, start: int, fresh: int, limit: int) -> int | None:
        """The document's end, a paragraph's if half full, a sentence's, a line's, a word's,
        a token's."""
        later = [border for border in self.borders if border.end > fresh]
        fitting = [border for border in later if self.num_tokens(start, border.end) <= limit]
        if fitting and fitting[-1] == self.borders[-1]:
            return fitting[-1].end
        paragraphs = [border.end for border in fitting if border.paragraph]
        if paragraphs and self.half_full(start, paragraphs[-1]):
            return paragraphs[-1]
        if fitting:
            return fitting[-1].end
        if start < fresh and self.begins_sentence(fresh):
            return None
        places = range(fresh + 1, len(self.text))
        cuts = [place for place in places if self.num_tokens(start, place) <= limit]
        if not cuts:
            return None if start < fresh else fresh + 1
        lines = [cut for cut in cuts if self.text[cut] == "\n" and self.half_full(start, cut)]
        words = [cut for cut in cuts if self.text[cut].isspace() or self.text[cut - 1].isspace()]
        cut = (lines or words or cuts)[-1]
        return len(self.text[:cut].rstrip())

    def next_start(self, start: int, end: int, fresh: int) -> int:
        """The earliest sentence within the overlap;
        the earliest word where the sentence was cut."""
        if self.overlap_tokens == 0 or fresh == len(self.text):
            return fresh
        places = range(start + 1, fresh)
        within = [place for place in places if self.num_tokens(place, end) <= self.overlap_tokens]
        sentences = [place for place in within if self.begins_sentence(place)]
        space = [char.isspace() for char in self.text]
        words = [place for place in within if space[place - 1] and not space[place]]
        if sentences or self.begins_sentence(fresh):
            return [*sentences, fresh][0]
        return [*words, fresh][0]

    def half_full(self, start: int, end: int) -> bool:
        """Whether `[start, end)` has half the tokens allowed."""
        return 2 * self.num_tokens(start, end) >= self.max_tokens

    def begins_sentence(self, place: int) -> bool:
        """Whether a border lies right before."""
        return any(border.start == place for border in self.borders)

    def skip_space(self, place: int) -> int:
        """The next character that is not whitespace."""
        while place < len(self.text) and self.text[place].isspace():
            place += 1
        return place
