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

import os
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import faiss

from retrieval.encoder import QUERY_BATCH, Encoder, load_encoder
from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.hashed_encoder import STATE_FILE
from retrieval.hits import Hit, Mode, SearchResult, timed
from retrieval.index import Index
from retrieval.manifest import MANIFEST, PASSAGES, State, state_of
from retrieval.rank_fusion import reciprocal_rank_fusion

RRF_CONSTANT = 60
RANK_FUSION_DEPTH = 100
"""Ranks of each list that take part in rank fusion, or k if that is more. It does not depend on k
up to this value, so the result for a smaller k is the beginning of the result for a larger one."""
ZERO = 2.0**-11
"""What float16 vectors of length 1 may give as the inner product where nothing is shared."""

_Ranked = list[tuple[int, float, Literal["fusion", "dense", "bm25"]]]
"""Row, score, whose score it is; best first."""


class Retriever:
    """An index directory and the encoder that it was built with. Safe to call from any thread.

    Args:
        load: loads the encoder of an index that is put in this one's place, from its spec; None:
            `encoder` stays.
    Attributes:
        damage: why nothing is searched: the served generation's own files were written over, and
            are not whole.
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
        # Replaced as a whole, so that no search mixes two.
        self._serving = index, encoder
        self._verify, self._threads, self._load = verify, threads, load
        self._refreshing = threading.Lock()
        self._seen = index.state
        self._refused: Exception | None = None
        self.damage: str | None = None
        self._held = self._hold()

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
        return self._serving[0]

    @property
    def modes(self) -> tuple[Mode, ...]:
        """The modes of this index, the default one first. On real questions BM25 finds more than
        the embedded encoder and than both fused, but not where no word is shared; with a model as
        encoder rank fusion finds most (eval/LOG.md)."""
        if not self.index.bm25:
            return ("dense",)
        if self.index.settings.encoder["kind"] == "hashed":
            return ("filled", "bm25", "fusion", "dense")
        return ("fusion", "dense", "bm25", "filled")

    def search(self, queries: Sequence[str], *, k: int, mode: Mode, nprobe: int) -> SearchResult:
        """The k best passages of each query; fewer if fewer are there, share a word or are near.

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
        if self.damage:
            raise CorruptIndexError(self.damage)
        # Read once: `refresh` may replace it during the search.
        (index, encoder), ms = self._serving, dict[str, float]()
        depth = max(k, RANK_FUSION_DEPTH) if mode == "fusion" else k
        if not queries:
            return SearchResult([], ms)
        found: list[_Ranked] = [[] for _ in queries]
        if mode != "dense" and (bm25 := index.bm25):
            with timed(ms, "bm25"):
                found = [_ranked(*bm25.search(query, k=depth), "bm25") for query in queries]
        # Of `filled` what BM25 leaves short.
        asked = [at for at, best in enumerate(found) if mode != "filled" or len(best) < k]
        if mode != "bm25" and asked:
            with timed(ms, "encode"):
                vectors = encoder.encode_queries([queries[at] for at in asked])
            with timed(ms, "dense"):
                near = self._search_dense(index, vectors, k=depth, nprobe=nprobe)
            merge = _fused if mode == "fusion" else _filled
            for at, nearest in zip(asked, near, strict=True):
                found[at] = nearest if mode == "dense" else merge(found[at], nearest, k)
        with timed(ms, "read"):
            hits = _read(index, found)
        return SearchResult(hits, ms)

    def refresh(self) -> bool:
        """Serve what the directory holds now, if a file of it has changed, whatever its generation:
        an older copy may replace an index. Returns whether something else is served now.

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
            if state == self.index.state and not self.damage:
                return False  # put back as it was
            try:
                self._serving = self._open_again(state)
            except (RetrievalError, OSError) as error:
                self._refused = error
                if _is_written_over(self.index.state, state):
                    self.damage = str(error)
                raise
            # Of the files that were opened, which may be newer than `state`.
            self._seen, self.damage = self.index.state, None
            self._held()
            self._held = self._hold()
            return True

    def info(self) -> dict[str, Any]:
        """A description of the served generation, for people."""
        index, spec = self.index, self.index.settings.encoder
        return {
            "passages": index.num_live,
            "generation": index.manifest.generation,
            "modes": list(self.modes),
            "factory": [segment.factory for segment in index.manifest.segments],
            "dim": index.settings.dim,
            "encoder": {key: spec[key] for key in spec if key != "dim"},
            "tokenizer": index.settings.tokens_name,
        }

    # Private, in order of use

    def _hold(self) -> weakref.finalize[[], Retriever]:
        """Open the served files until the result is called: the inode of a file that is open is no
        other file's."""
        held = ExitStack()
        # Not what SQLite has open: closing a file ends all locks that the process has on it.
        for name in self.index.state.keys() - {PASSAGES}:
            with suppress(OSError):
                held.callback(os.close, os.open(self.index.folder / name, os.O_RDONLY))
        return weakref.finalize(self, held.close)

    def _open_again(self, state: State) -> tuple[Index, Encoder]:
        was, encoder = self._serving
        # All files that both have are the same ones: the same index, with rows added or removed.
        both = state.keys() & was.state.keys() - {MANIFEST}
        extends = all(state[name] == was.state[name] for name in both)
        index = Index.open(was.folder, verify=self._verify, earlier=was if extends else None)
        if not extends:
            is_same = index.settings.encoder == was.settings.encoder
            is_same = is_same and index.state.get(STATE_FILE) == was.state.get(STATE_FILE)
            if self._load and not is_same:
                encoder = self._load(index.settings.encoder)
            index.check_encoder(encoder)
        return index, encoder

    def _search_dense(self, index: Index, vectors: Any, *, k: int, nprobe: int) -> list[_Ranked]:
        if self._threads is not None:
            # applies to the calling thread only, so set each time
            faiss.omp_set_num_threads(self._threads)
        # FAISS allocates k places a query, however few rows there are.
        scores, rows = index.search_dense(vectors, k=min(k, max(1, index.num_rows)), nprobe=nprobe)
        # The embedded encoder maps a query without words to the zero vector, to which all rows are
        # equally similar.
        rows[~vectors.any(axis=1)] = -1
        return [_ranked(*both, "dense") for both in zip(scores, rows, strict=True)]


def _is_written_over(served: State, now: State) -> bool:
    """Whether a served file, which is mapped into memory or held open, has other content now.
    Files that were replaced are still whole."""
    both = served.keys() & now.keys() - {MANIFEST}
    return any(served[name].inode == now[name].inode and served[name] != now[name] for name in both)


def _ranked(scores: Any, rows: Any, whose: Literal["dense", "bm25"]) -> _Ranked:
    pairs = zip(rows.tolist(), scores.tolist(), strict=True)
    return [(row, score, whose) for row, score in pairs if row >= 0]


def _filled(words: _Ranked, near: _Ranked, k: int) -> _Ranked:
    """What BM25 has found, then what the vectors have found besides, with scores above 0."""
    known = {row for row, _, _ in words}
    return [*words, *(one for one in near if one[1] > ZERO and one[0] not in known)][:k]


def _fused(words: _Ranked, near: _Ranked, k: int) -> _Ranked:
    """Both by their ranks."""
    rankings = [[row for row, *_ in found] for found in (near, words)]
    ranked = reciprocal_rank_fusion(rankings, k=k, constant=RRF_CONSTANT)
    return [(row, score, "fusion") for row, score in ranked]


def _read(index: Index, ranked: Sequence[_Ranked]) -> list[list[Hit]]:
    # Queries of a batch share passages, each of which is read once.
    rows = sorted({row for found in ranked for row, *_ in found})
    passages = dict(zip(rows, index.store.get(rows), strict=True))
    return [[Hit(passages[row], score, mode) for row, score, mode in found] for found in ranked]
