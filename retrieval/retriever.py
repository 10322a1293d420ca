"""Queries to ranked passages: encode, search vectors and words, merge by rank fusion, read the
texts.

    queries ── encoder ── FAISS ──┐
           └── BM25 ──────────────┴─ reciprocal ranks ── rows ── PassageStore ── passages
                                     or BM25's, then FAISS'

A retriever serves what an index directory held when it last looked: `refresh` switches in one
assignment, to a newer generation or to another index that was put in its place. A running search
finishes on what it started with. Knows no server, and no model except the encoder.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import faiss

from retrieval.encoder import Encoder, load_encoder
from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.hashed_encoder import STATE_FILE
from retrieval.index import Index
from retrieval.manifest import MANIFEST, FileState, state_of
from retrieval.passage import Passage
from retrieval.rank_fusion import reciprocal_rank_fusion

Mode = Literal["filled", "fusion", "dense", "bm25"]
"""`filled`: what BM25 finds; where that is fewer than k, then what `dense` finds besides,
with scores above 0."""

RRF_CONSTANT = 60
"""Cormack, Clarke and Büttcher, SIGIR 2009."""
RANK_FUSION_DEPTH = 100
"""Ranks of each list that take part in rank fusion, or k if that is more. It does not depend on k
up to this value, so the result for a smaller k is the beginning of the result for a larger one."""
ZERO = 2.0**-11
"""What float16 vectors of length 1 may give as the inner product where nothing is shared."""
QUERY_BATCH = 32
"""Queries that a model encodes at once."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Hit:
    """A passage and its score: inner product, BM25's, or the sum of reciprocal ranks, which of them
    `mode` says. Do not compare scores of two modes."""

    passage: Passage
    score: float
    mode: Literal["fusion", "dense", "bm25"]


@dataclass(frozen=True, slots=True)
class SearchResult:
    """Hits of each query, best first, and milliseconds of the whole batch by phase:
    encode, dense, bm25, read."""

    hits: list[list[Hit]]
    ms: dict[str, float]


_Found = tuple[int, float, Literal["fusion", "dense", "bm25"]]
"""Row, score, whose score it is."""


@dataclass(frozen=True, slots=True)
class _Serving:
    """Replaced as a whole, so that no search mixes two."""

    index: Index
    encoder: Encoder


class Retriever:
    """An index directory and the encoder that it was built with. Safe to call from any thread.

    Args:
        load: loads the encoder of an index that is put in this one's place, from its spec; None:
            `encoder` stays.
    """

    def __init__(
        self,
        index: Index,
        encoder: Encoder,
        *,
        verify: bool,
        threads: int | None,
        load: Callable[[Mapping[str, Any]], Encoder] | None = None,
    ) -> None:
        self._serving = _Serving(index, encoder)
        self._verify, self._threads, self._load = verify, threads, load
        self._refreshing = threading.Lock()
        self._seen = index.state
        self._refused: Exception | None = None
        self._damage: str | None = None

    @classmethod
    def open(
        cls,
        folder: Path,
        *,
        encoder: str | None,
        device: str | None,
        verify: bool,
        threads: int | None,
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
        load = partial(
            load_encoder, folder=folder, override=encoder, device=device, batch_size=QUERY_BATCH
        )
        index = Index.open(folder, verify=verify)
        loaded = load(index.settings.encoder)
        index.check_encoder(loaded)
        return cls(index, loaded, verify=verify, threads=threads, load=load)

    @property
    def index(self) -> Index:
        """The generation that is served now."""
        return self._serving.index

    @property
    def damage(self) -> str | None:
        """Why nothing is searched: the served generation's own files were written over,
        and are not whole."""
        return self._damage

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes of this index, the default one first. On real questions BM25 finds more than
        the embedded encoder and more than rank fusion of the two, but not where no word is shared;
        with a model as encoder rank fusion finds most (eval/LOG.md)."""
        if not self.index.bm25:
            return ("dense",)
        is_embedded = self.index.settings.encoder["kind"] == "hashed"
        return (
            ("filled", "bm25", "fusion", "dense")
            if is_embedded
            else ("fusion", "dense", "bm25", "filled")
        )

    @property
    def notice(self) -> str | None:
        """What the index's owner should know about the served generation."""
        if not self.index.manifest.is_outdated:
            return None
        return (
            f"{self.index.folder}: its words were cut by an earlier version, which finds no word of"
            " a script without spaces; run `python -m retrieval build` again"
        )

    def search(self, queries: Sequence[str], *, k: int, mode: Mode, nprobe: int) -> SearchResult:
        """The k best passages of each query. Fewer if the index holds fewer, or if fewer share a
        word or are near.

        Args:
            nprobe: lists visited in an IVF index, or candidates kept (at least k) in HNSW.
        Raises:
            RetrievalError: k or nprobe is below 1, or this index does not have the mode.
            CorruptIndexError: a file of the index is damaged.
        """
        for name, number in (("k", k), ("nprobe", nprobe)):
            if number < 1:
                raise RetrievalError(f"{name} must be at least 1, got {number}")
        if mode not in self.modes:
            raise RetrievalError(f"mode {mode!r}: this index has {', '.join(self.modes)}")
        if self._damage:
            raise CorruptIndexError(self._damage)
        # Read once: `refresh` may replace it during the search.
        serving, ms = self._serving, dict[str, float]()
        index, encoder = serving.index, serving.encoder
        if not queries:
            return SearchResult([], ms)
        depth = k if mode != "fusion" else max(k, RANK_FUSION_DEPTH)
        lists: list[list[list[_Found]]] = []
        if mode != "dense":
            lists.append(
                _timed(
                    ms, "bm25", lambda: [_search_words(index, query, k=depth) for query in queries]
                )
            )
        if mode == "filled":
            short = [place for place, found in enumerate(lists[0]) if len(found) < k]
            if short:
                vectors = _timed(
                    ms,
                    "encode",
                    lambda: encoder.encode_queries([queries[place] for place in short]),
                )
                near_them = _timed(
                    ms, "dense", lambda: self._search_dense(index, vectors, k=k, nprobe=nprobe)
                )
                for place, found in zip(short, near_them, strict=True):
                    lists[0][place] = _filled(lists[0][place], found, k)
        elif mode != "bm25":
            vectors = _timed(ms, "encode", lambda: encoder.encode_queries(queries))

            def near() -> list[list[_Found]]:
                return self._search_dense(index, vectors, k=depth, nprobe=nprobe)

            lists.insert(0, _timed(ms, "dense", near))
        return SearchResult(_timed(ms, "read", lambda: _read(index, _merged(lists, k))), ms)

    def refresh(self) -> bool:
        """Serve what the directory holds now, if a file of it has changed. Returns whether
        something else is served now.

        Generation numbers do not matter: an index may be replaced by an older copy, or mended in
        place.

        Raises:
            RetrievalError: what is there is damaged, missing, or needs an encoder that cannot be
                loaded. The retriever keeps serving what it has, unless that is damaged itself, and
                looks again when a file changes.
        """
        with self._refreshing:
            state = state_of(self.index.folder)
            if state == self._seen:
                if self._refused:
                    # otherwise it would grow with every call
                    raise self._refused.with_traceback(None)
                return False
            # Before opening: what is refused is not opened again until a file changes.
            self._seen, self._refused = state, None
            if state == self.index.state and not self._damage:
                return False  # put back as it was
            try:
                self._serving = self._open_again(state)
            except (RetrievalError, OSError) as error:
                self._refused = error
                if _is_written_over(self.index.state, state):
                    self._damage = str(error)
                raise
            # Of the files that were opened, which may be newer than `state`.
            self._seen, self._damage = self.index.state, None
            return True

    def info(self) -> dict[str, Any]:
        """A description of the served generation, for people."""
        index = self.index
        return {
            "passages": index.num_live,
            "generation": index.generation,
            "modes": list(self.modes),
            "factory": [segment.factory for segment in index.manifest.segments],
            "dim": index.dim,
            "encoder": {
                key: value for key, value in index.settings.encoder.items() if key != "dim"
            },
            "tokenizer": index.settings.tokens_name,
        }

    # Private, in order of use

    def _open_again(self, state: Mapping[str, FileState]) -> _Serving:
        was, encoder = self.index, self._serving.encoder
        # All files that both have are the same ones: the same index, with rows added or removed.
        extends = all(
            state[name] == was.state[name] for name in state.keys() & was.state.keys() - {MANIFEST}
        )
        index = Index.open(was.folder, verify=self._verify, earlier=was if extends else None)
        if not extends:
            is_same = index.settings.encoder == was.settings.encoder
            is_same = is_same and index.state.get(STATE_FILE) == was.state.get(STATE_FILE)
            if self._load and not is_same:
                encoder = self._load(index.settings.encoder)
            index.check_encoder(encoder)
        return _Serving(index, encoder)

    def _search_dense(
        self, index: Index, vectors: Any, *, k: int, nprobe: int
    ) -> list[list[_Found]]:
        if self._threads is not None:
            # applies to the calling thread only, so set each time
            faiss.omp_set_num_threads(self._threads)
        # FAISS allocates k places a query, however few rows there are.
        scores, rows = index.search_dense(vectors, k=min(k, max(1, index.num_rows)), nprobe=nprobe)
        # The embedded encoder maps a query without words to the zero vector, to which all rows are
        # equally similar.
        rows[~vectors.any(axis=1)] = -1
        return [
            [(row, score, "dense") for row, score in zip(*pair, strict=True) if row >= 0]
            for pair in zip(rows.tolist(), scores.tolist(), strict=True)
        ]


def _is_written_over(served: Mapping[str, FileState], now: Mapping[str, FileState]) -> bool:
    """Whether a served file, which is mapped into memory, has other content now.
    Files that were replaced are still whole."""
    both = served.keys() & now.keys() - {MANIFEST}
    return any(served[name].inode == now[name].inode and served[name] != now[name] for name in both)


def _timed(ms: dict[str, float], phase: str, work: Callable[[], T]) -> T:
    start = time.perf_counter()
    result = work()
    ms[phase] = round(1000 * (time.perf_counter() - start), 3)
    return result


def _search_words(index: Index, query: str, *, k: int) -> list[_Found]:
    assert index.bm25 is not None
    scores, rows = index.bm25.search(query, k=k)
    return [(int(row), float(score), "bm25") for row, score in zip(rows, scores, strict=True)]


def _filled(words: list[_Found], near: list[_Found], k: int) -> list[_Found]:
    """What BM25 has found, then what the vectors have found besides, with scores above 0."""
    known = {row for row, _, _ in words}
    return [*words, *(found for found in near if found[1] > ZERO and found[0] not in known)][:k]


def _merged(lists: Sequence[list[list[_Found]]], k: int) -> list[list[_Found]]:
    """One list, or both by their ranks."""
    if len(lists) == 1:
        return lists[0]
    merged: list[list[_Found]] = []
    for both in zip(*lists, strict=True):
        ranked = reciprocal_rank_fusion(
            [[row for row, *_ in found] for found in both], k=k, constant=RRF_CONSTANT
        )
        merged.append([(row, score, "fusion") for row, score in ranked])
    return merged


def _read(index: Index, ranked: Sequence[Sequence[_Found]]) -> list[list[Hit]]:
    # Queries of a batch share passages, each of which is read once.
    rows = sorted({row for found in ranked for row, *_ in found})
    passages = dict(zip(rows, index.store.get(rows), strict=True))
    return [[Hit(passages[row], score, mode) for row, score, mode in found] for found in ranked]
