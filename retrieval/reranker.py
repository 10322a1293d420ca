"""A cross-encoder as the last stage of a search: it reads query and passage together, and ranks
what the first stage found.

    Retriever.search, k x depth candidates ── Reranker.rerank ── the best k
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from math import isfinite
from typing import Any

from retrieval.errors import RetrievalError
from retrieval.hits import Hit
from retrieval.model_path import find_model
from retrieval.passage import utf8
from retrieval.sentence_encoder import load_model

PAIR_BATCH = 32
"""Pairs of query and passage that the model reads at once."""


class Reranker:
    """See the module. One call at a time: a tokenizer's truncation settings are not thread-safe.

    Args:
        path_or_name: of a sentence-transformers CrossEncoder, a folder or a name on the hub.
        device: torch's name; None selects CUDA if available.
    Raises:
        RetrievalError: sentence-transformers is not installed, cannot load `path_or_name`, or it
            is no model that gives a pair one score.
    """

    def __init__(self, path_or_name: str, *, device: str | None) -> None:
        found = find_model(path_or_name, file="config.json")
        self._model: Any = load_model(found, device, kind="CrossEncoder")
        self._lock = threading.Lock()
        kind = (self._model.config.architectures or ["none"])[0]
        # with a head of random weights, which an encoder's folder gets, any order comes out
        if len(self._model) == 1 and not kind.endswith("ForSequenceClassification"):
            raise RetrievalError(f"{path_or_name} is no cross-encoder: its architecture is {kind}")
        if (count := self._model.num_labels) != 1:
            raise RetrievalError(f"{path_or_name} gives {count} scores a pair; a reranker gives 1")

    def rerank(self, query: str, hits: Sequence[Hit], *, k: int) -> list[Hit]:
        """The best `k` of the hits by the model's scores; equal ones keep their order.
        Texts are cut to the model's limit."""
        if not hits:
            return []
        # a tokenizer refuses lone surrogates
        pairs = [(utf8(query), utf8(hit.passage.content)) for hit in hits]
        with self._lock:
            scores = self._model.predict(pairs, batch_size=PAIR_BATCH, show_progress_bar=False)
        if not all(map(isfinite, scores.tolist())):
            raise RetrievalError("the reranker gives scores that are no numbers")
        scored = [
            Hit(hit.passage, score, "rerank")
            for hit, score in zip(hits, scores.tolist(), strict=True)
        ]
        return sorted(scored, key=lambda hit: -hit.score)[:k]
