"""Queries to ranked passages: encode, search vectors and words, merge by rank fusion, read the texts.

    queries ── encoder ── FAISS ──┐
           └── BM25 ──────────────┴─ reciprocal ranks ── rows ── PassageStore ── passages

A retriever serves one generation of an index directory at a time. `refresh` switches to a newer one in one assignment; a
running search finishes on the generation it started with. Knows no server, and no model except the encoder.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import faiss

from retrieval.encoder import Encoder, load_encoder
from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.index import VECTORS, Index, Manifest, check_encoder, read_manifest
from retrieval.passage import Passage
from retrieval.rank_fusion import reciprocal_rank_fusion
from retrieval.vectors import VectorFile

Mode = Literal["fusion", "dense", "bm25"]

RRF_CONSTANT = 60
"""Cormack, Clarke and Büttcher, SIGIR 2009."""
RANK_FUSION_DEPTH = 100
"""Ranks of each list that take part in rank fusion, or k if that is more. It does not depend on k up to this value, so the
result for a smaller k is the beginning of the result for a larger one."""
QUERY_BATCH = 32
"""Queries that a model encodes at once."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage and its score: inner product, BM25's, or the sum of reciprocal ranks. Do not compare scores of two modes."""

    passage: Passage
    score: float


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Hits of each query, best first, and milliseconds of the whole batch by phase: encode, dense, bm25, read."""

    hits: list[list[Hit]]
    ms: dict[str, float]


class Retriever:
    """An index directory and the encoder that it was built with. Safe to call from any thread."""

    def __init__(self, index: Index, encoder: Encoder, *, verify: bool, threads: int | None) -> None:
        self._index, self._encoder, self._verify, self._threads = index, encoder, verify, threads
        self._refreshing = threading.Lock()
        self._refused: tuple[Manifest, CorruptIndexError] | None = None

    @classmethod
    def open(
        cls, folder: Path, *, encoder: str | None, device: str | None, verify: bool, threads: int | None
    ) -> Retriever:
        """Open a directory that `build_index` made.

        Args:
            encoder: path of the encoder's model now, if it has moved since the build.
            device: of the encoder, "cpu" or "cuda"; None: the GPU if there is one.
            verify: see `Index.open`.
            threads: FAISS' threads for a batch; None: all cores.
        Raises:
            CorruptIndexError: no index, a damaged one, or one that was built with another encoder.
            RetrievalError: the encoder cannot be loaded.
        """
        index = Index.open(folder, verify=verify)
        loaded = load_encoder(
            index.settings.encoder, folder=folder, override=encoder, device=device, batch_size=QUERY_BATCH
        )
        check_encoder(index.store, VectorFile(folder / VECTORS, dim=index.dim), loaded)
        return cls(index, loaded, verify=verify, threads=threads)

    @property
    def index(self) -> Index:
        """The generation that is served now."""
        return self._index

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes of this index, the default one first. On real questions BM25 alone finds more than the embedded encoder
        and more than rank fusion of the two; with a model as encoder rank fusion finds most (retrieval/README.md)."""
        if not self._index.bm25:
            return ("dense",)
        is_embedded = self._index.settings.encoder["kind"] == "hashed"
        return ("bm25", "fusion", "dense") if is_embedded else ("fusion", "dense", "bm25")

    def search(self, queries: Sequence[str], *, k: int, mode: Mode, nprobe: int) -> SearchResult:
        """The k best passages of each query. Fewer if the index holds fewer, or if BM25 matches fewer.

        Args:
            nprobe: lists visited in an IVF index, or candidates kept (at least k) in HNSW.
        Raises:
            RetrievalError: k or nprobe is below 1, or this index does not have the mode.
        """
        for name, number in (("k", k), ("nprobe", nprobe)):
            if number < 1:
                raise RetrievalError(f"{name} must be at least 1, got {number}")
        if mode not in self.modes:
            raise RetrievalError(f"mode {mode!r}: this index has {', '.join(self.modes)}")
        index, ms = self._index, dict[str, float]()
        if not queries:
            return SearchResult([], ms)
        depth = k if mode != "fusion" else max(k, RANK_FUSION_DEPTH)
        lists: list[list[list[tuple[int, float]]]] = []
        if mode != "bm25":
            vectors = _timed(ms, "encode", lambda: self._encoder.encode_queries(queries))
            lists.append(_timed(ms, "dense", lambda: self._search_dense(index, vectors, k=depth, nprobe=nprobe)))
        if mode != "dense":
            lists.append(_timed(ms, "bm25", lambda: [_search_words(index, query, k=depth) for query in queries]))
        if mode == "fusion":
            ranked = [
                reciprocal_rank_fusion([[row for row, _ in found] for found in both], k=k, constant=RRF_CONSTANT)
                for both in zip(*lists, strict=True)
            ]
        else:
            ranked = lists[0]
        return SearchResult(_timed(ms, "read", lambda: _read(index, ranked)), ms)

    def refresh(self) -> bool:
        """Serve the directory's newest generation. Returns whether there was a newer one.

        Raises:
            CorruptIndexError: the new generation is damaged or belongs to another index. The retriever keeps serving the old
                one and does not read this one again.
        """
        with self._refreshing:
            index = self._index
            manifest = read_manifest(index.folder)
            if manifest == index.manifest:
                return False
            if self._refused and self._refused[0] == manifest:
                raise self._refused[1].with_traceback(None)  # otherwise it would grow with every call
            try:
                if index.store.is_replaced():
                    raise CorruptIndexError(f"{index.folder}: is another index now; open it anew")
                newer = Index.open(index.folder, verify=self._verify, earlier=index)
                if newer.settings != index.settings:
                    raise CorruptIndexError(f"{index.folder}: is another index now; open it anew")
            except CorruptIndexError as error:
                self._refused = (manifest, error)
                raise
            self._index, self._refused = newer, None
            return True

    def info(self) -> dict[str, Any]:
        """A description of the served generation, for people."""
        index = self._index
        return {
            "passages": index.num_live,
            "generation": index.generation,
            "modes": list(self.modes),
            "factory": [segment.factory for segment in index.manifest.segments],
            "dim": index.dim,
            "encoder": {key: value for key, value in index.settings.encoder.items() if key != "dim"},
            "tokenizer": index.settings.tokens_name,
        }

    # Private, in order of use

    def _search_dense(self, index: Index, vectors: Any, *, k: int, nprobe: int) -> list[list[tuple[int, float]]]:
        if self._threads is not None:
            faiss.omp_set_num_threads(self._threads)  # applies to the calling thread only, so set each time
        scores, rows = index.search_dense(vectors, k=min(k, max(1, index.num_rows)), nprobe=nprobe)
        # The embedded encoder maps a query without words to the zero vector, to which all rows are equally similar.
        rows[~vectors.any(axis=1)] = -1
        return [
            [(row, score) for row, score in zip(*pair, strict=True) if row >= 0]
            for pair in zip(rows.tolist(), scores.tolist(), strict=True)
        ]


def _timed(ms: dict[str, float], phase: str, work: Callable[[], T]) -> T:
    start = time.perf_counter()
    result = work()
    ms[phase] = round(1000 * (time.perf_counter() - start), 3)
    return result


def _search_words(index: Index, query: str, *, k: int) -> list[tuple[int, float]]:
    assert index.bm25 is not None
    scores, rows = index.bm25.search(query, k=k)
    return [(int(row), float(score)) for row, score in zip(rows, scores, strict=True)]


def _read(index: Index, ranked: Sequence[Sequence[tuple[int, float]]]) -> list[list[Hit]]:
    rows = sorted({row for found in ranked for row, _ in found})
    passages = dict(zip(rows, index.store.get(rows), strict=True))
    return [[Hit(passages[row], score) for row, score in found] for found in ranked]
