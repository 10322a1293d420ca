"""An index directory as a list of passages and a dict of documents: what retrieval/build.py must
equal.

Knows no file: what a build does to the stored rows (`read`), and what it then serves (`publish`),
are two steps, so that a crash between them is told here by leaving the second one out.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from retrieval.passage import Document, Passage

Encode = Callable[[Sequence[str]], NDArray[np.float32]]


@dataclass(frozen=True)
class Served:
    """One generation: passages by row, and which of them can be found."""

    passages: tuple[Passage, ...]
    live: frozenset[int]

    def search(self, query: str, encode: Encode, *, k: int) -> list[tuple[int, float]]:
        """(row, inner product) of the best k rows, best first, equal scores by row;
        vectors rounded to float16."""
        if not self.passages:
            return []
        stored = encode([passage.content for passage in self.passages]).astype(np.float16)
        scores = stored.astype(np.float32) @ encode([query])[0]
        best = sorted(self.live, key=lambda row: (-scores[row], row))[:k]
        return [(row, float(scores[row])) for row in best]

    def with_word(self, word: str) -> list[int]:
        """Rows of passages that hold the word."""
        return [row for row in sorted(self.live) if word in self.passages[row].content.split()]


@dataclass
class NaiveIndex:
    """Everything that was read, and what of it is served. `cut` makes a document's passages."""

    cut: Callable[[Document], Iterable[Passage]]
    documents: dict[str, Document] = field(default_factory=dict)
    passages: list[Passage] = field(default_factory=list)
    live: set[int] = field(default_factory=set)
    waiting: dict[str, Passage] = field(default_factory=dict)
    """Passages by id whose text another document's row holds already."""
    served: Served = Served((), frozenset())

    def read(self, documents: Iterable[Document]) -> dict[str, int]:
        """What a build's first stage does; its counts."""
        counts = {"documents": 0, "unchanged": 0, "added": 0, "duplicates": 0, "removed": 0}
        for document in documents:
            counts["documents"] += 1
            if self.documents.get(document.id) == document:
                counts["unchanged"] += 1
                self.documents[document.id] = document  # it may be in another file now
            else:
                for name, number in self._put(document).items():
                    counts[name] += number
        return counts

    def rows_of(self, name: str) -> list[int]:
        """Live rows of a passage or a document."""
        names = {row: (self.passages[row].id, self.passages[row].document_id) for row in self.live}
        return [row for row in sorted(names) if name in names[row]]

    def remove(self, rows: Iterable[int]) -> None:
        """Rows are not found any more, and their documents are read again when they come again."""
        for row in rows:
            self.documents.pop(self.passages[row].document_id, None)
            self._drop_waiting(self.passages[row].document_id)
            self._hide(row)

    def num_served(self) -> tuple[int, int]:
        """Documents and passages of them that are served and still there."""
        rows = [row for row in self.live if row < len(self.served.passages)]
        return len({self.passages[row].document_id for row in rows}), len(rows)

    def gone(self, corpus: Iterable[Document], unread: Collection[str]) -> dict[str, int]:
        """Documents that are not in the corpus, nor perhaps in a file that was not read,
        with numbers of passages served."""
        there = {*self.documents, *(self.passages[row].document_id for row in self.live)}
        gone: dict[str, int] = {}
        for name in there - {document.id for document in corpus}:
            file = self.documents[name].file if name in self.documents else None
            if not any(file is None or f"{file}/".startswith(f"{each}/") for each in unread):
                rows = self._rows_of_document(name)
                gone[name] = sum(row < len(self.served.passages) for row in rows)
        return gone

    def drop(self, names: Collection[str]) -> None:
        """Documents are there no more, nor do their passages wait."""
        for name in names:
            self.documents.pop(name, None)
            self._drop_waiting(name)
        for name in sorted(names):
            for row in self._rows_of_document(name):
                self._hide(row)

    def texts(self) -> set[str]:
        """What the documents that were read say, in any row."""
        return {each.content for document in self.documents.values() for each in self.cut(document)}

    def publish(self) -> None:
        """Serve what there is."""
        self.served = Served(tuple(self.passages), frozenset(self.live))

    def _put(self, document: Document) -> dict[str, int]:
        passages = list(self.cut(document))
        wanted = {(passage.id, passage.content) for passage in passages}
        old = {
            (self.passages[row].id, self.passages[row].content): row
            for row in self._rows_of_document(document.id)
        }
        gone = [row for key, row in old.items() if key not in wanted]
        num_rows = len(self.passages)
        self._drop_waiting(document.id)
        for row in gone:
            self._hide(row)
        counts = {"added": 0, "duplicates": 0, "removed": len(gone)}
        for passage in passages:
            if (passage.id, passage.content) in old:
                continue
            if passage.content in {self.passages[row].content for row in self.live}:
                self.waiting[passage.id] = passage
                counts["duplicates"] += 1
            else:
                self._add(passage)
        counts["added"] = len(self.passages) - num_rows
        self.documents[document.id] = document
        return counts

    def _rows_of_document(self, name: str) -> list[int]:
        return [row for row in sorted(self.live) if self.passages[row].document_id == name]

    def _hide(self, row: int) -> None:
        self.live.discard(row)
        text = self.passages[row].content
        if heirs := sorted(name for name, each in self.waiting.items() if each.content == text):
            self._add(self.waiting.pop(heirs[0]))

    def _add(self, passage: Passage) -> None:
        self.live.add(len(self.passages))
        self.passages.append(passage)

    def _drop_waiting(self, document: str) -> None:
        self.waiting = {p.id: p for p in self.waiting.values() if p.document_id != document}
