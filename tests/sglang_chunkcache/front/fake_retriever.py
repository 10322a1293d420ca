"""A `retrieval.Retriever` without an index:
finds the passages that hold a word of the query, in their order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from retrieval.errors import RetrievalError
from retrieval.hits import Mode
from retrieval.passage import Passage
from tests.polling import DEADLINE_S

TEXTS = {"a": "alpha one", "b": "beta one", "c": "gamma one", "d": "delta two"}


class FakeRetriever:
    """Keeps what it was asked; `hold` makes searches wait, `fail` what a query raises."""

    modes: tuple[Mode, ...] = ("fusion", "dense", "bm25")

    def __init__(self) -> None:
        self.batches: list[tuple[list[str], int, str, int]] = []
        self.hold = threading.Event()
        self.hold.set()
        self.begun = threading.Event()
        self.fail: dict[str, Exception] = {}
        self.on_refresh: Callable[[], bool] = lambda: False
        self.num_refreshes = 0
        self.tokenizer = "words"
        self.damage: str | None = None

    def search(self, queries: Sequence[str], *, k: int, mode: str, nprobe: int) -> Any:
        self.batches.append((list(queries), k, mode, nprobe))
        self.begun.set()
        assert self.hold.wait(DEADLINE_S)
        for query in queries:
            if query in self.fail:
                raise self.fail[query]
            if query == "refuse me":
                raise RetrievalError("this query cannot be had")
        return SimpleNamespace(
            hits=[self._hits(query)[:k] for query in queries], ms={"encode": 2.0, "read": 1.0}
        )

    def refresh(self) -> bool:
        self.num_refreshes += 1
        return self.on_refresh()

    def info(self) -> dict[str, Any]:
        return {
            "passages": len(TEXTS),
            "generation": 1,
            "encoder": {"kind": "fake"},
            "tokenizer": self.tokenizer,
            "modes": list(self.modes),
        }

    def _hits(self, query: str) -> list[Any]:
        words = set(query.lower().split())
        found = [name for name, text in TEXTS.items() if words & set(text.split())]
        return [
            SimpleNamespace(
                passage=Passage(name, f"doc {name}", name.upper(), TEXTS[name], 0, 2, 2),
                score=1 / (rank + 1),
                mode="fusion",
            )
            for rank, name in enumerate(found)
        ]


class FakeReranker:
    """Ranks the last candidate first. `before` is called first, in its thread."""

    def __init__(self) -> None:
        self.before: Callable[[], object] = lambda: None
        self.asked: list[list[str]] = []

    def rerank(self, query: str, hits: Sequence[Any], *, k: int) -> list[Any]:
        self.before()
        self.asked.append([hit.passage.id for hit in hits])
        found = [SimpleNamespace(passage=hit.passage, score=9.0, mode="rerank") for hit in hits]
        return found[::-1][:k]
