"""Documents, and the passages that they are cut into.

The encoder, BM25 and the served model all read the same text of a passage, its `content`. So the
same passage is the same chunk, token for token, wherever it is retrieved.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from typing import NamedTuple

HASH_BYTES = 16


@dataclass(frozen=True, slots=True)
class Document:
    """A text as it was read. `id` is stable: the path of its `file` (None: not from a file) in the
    source folder, or the row's own id."""

    id: str
    title: str
    text: str
    file: str | None = field(default=None, compare=False)


class Passage(NamedTuple):
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


def utf8(text: str) -> str:
    """The text with question marks for lone surrogates, which JSON and argv can hold."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def hash_of(content: str) -> bytes:
    """HASH_BYTES that identify equal contents."""
    data = content.encode("utf-8", "surrogatepass")
    return hashlib.blake2b(data, digest_size=HASH_BYTES).digest()
