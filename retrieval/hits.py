"""What a search returns, and what every retriever offers, whatever engine holds the vectors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, Literal, NamedTuple, Protocol

from retrieval.passage import Passage

Mode = Literal["filled", "fusion", "dense", "bm25"]
"""`filled`: what BM25 finds; where that is fewer than k, then what `dense` finds besides,
with scores above 0."""


class Hit(NamedTuple):
    """A passage and its score: inner product, BM25's, the sum of reciprocal ranks, or the
    reranker's, as `mode` says. Scores of two modes do not compare."""

    passage: Passage
    score: float
    mode: Literal["fusion", "dense", "bm25", "rerank"]


class SearchResult(NamedTuple):
    """Hits of each query, best first, and milliseconds of the whole batch by phase:
    encode, dense, bm25, read."""

    hits: list[list[Hit]]
    ms: dict[str, float]


class Searcher(Protocol):
    """A retriever as the server uses it. Safe to call from any thread."""

    @property
    def damage(self) -> str | None:
        """Why nothing can be searched now."""

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes that it offers, the default one first."""

    def search(self, queries: Sequence[str], *, k: int, mode: Mode, nprobe: int) -> SearchResult:
        """The k best passages of each query. Raises RetrievalError."""

    def refresh(self) -> bool:
        """Look whether something else is to be served; whether it is served now.
        Raises RetrievalError."""

    def info(self) -> dict[str, Any]:
        """A description for people. Waits for nothing."""


@contextmanager
def timed(ms: dict[str, float], phase: str) -> Iterator[None]:
    """Enter the milliseconds of the block as `phase`."""
    start = perf_counter()
    yield
    ms[phase] = round(1000 * (perf_counter() - start), 3)
