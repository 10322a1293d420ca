"""Documents, and the passages that they are cut into.

Knows no tokenizer, no index and no model. The encoder, BM25 and the served model all read the same
text of a passage, its `content`. So the same passage is the same chunk, token for token, wherever
it is retrieved.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class Document:
    """A text as it was read. `id` is stable: the path relative to the source folder, or the row's
    own id.

    Attributes:
        file: the path, relative to the source folder, of the file that it was read from; None: not
            from a file.
    """

    id: str
    title: str
    text: str
    file: str | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Passage:
    """A unit of retrieval.

    Attributes:
        id: stable; `document_id#offset` in characters, or the document's own id where documents are
            passages.
        start, end: `[start, end)` in tokens of the document's text.
        num_tokens: of `text` tokenised alone; may differ from `end - start` by a token at a border.
    """

    id: str
    document_id: str
    title: str
    text: str
    start: int
    end: int
    num_tokens: int

    @property
    def content(self) -> str:
        """The text for encoder, BM25 and model: title as a line of its own (CRAFT section 5) unless
        it is the first, and text."""
        # A Markdown file's title is one of its headings, so often its first line.
        first_line = self.text.partition("\n")[0].lstrip("#").strip()
        return self.text if self.title in ("", first_line) else f"{self.title}\n{self.text}"

    def content_hash(self) -> bytes:
        """16 bytes that identify equal contents."""
        return hash_of(self.content)


def hash_of(content: str) -> bytes:
    """`Passage.content_hash` of a content alone."""
    return hashlib.blake2b(
        content.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES
    ).digest()
