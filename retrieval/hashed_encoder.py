"""The embedded default encoder: hashed, weighted word counts times one matrix. Nothing is downloaded.

    text ── stems ── hash ── counts ── saturated, * rarity^1 ──┐
                                                               ├── @ projection [num_buckets, dim] ── length 1
    query ─ stems ── hash ── 0 or 1 ────────── * rarity^2 ─────┘

The projection is fitted on a sample of the corpus. Its first columns are the sample's leading singular vectors, in which
related words share a direction. The other columns are a random projection of the remainder, so that rare names and words that
are not in the sample still count. retrieval/README.md has the figures for each choice.

Knows no language: a stem is a word's first letters. Scripts without spaces give pairs of adjacent characters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import CorruptIndexError, RetrievalError

STATE_FILE = "encoder.npz"
"""File name of this encoder's saved state in an index."""

STATE_VERSION = 1
"""Incremented when the same text would get another vector: stems, hash, weights."""

NUM_BUCKETS = 2**16
"""Twice as many double the state and gain 0.3 points of recall@5 (mean of three sets); four times as many gain 0.5."""

STEM_CHARS = 6
"""Letters of a word that count: `retrieve`, `retrieval` and `retrieves` are one stem."""

_UNSPACED = (
    "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
)
"""Thai, Lao, Burmese, Khmer, kana and Chinese characters: their words are not separated by spaces."""

STEM_PATTERN = rf"(?=([{_UNSPACED}]{{1,2}}|[^\W{_UNSPACED}]{{1,{STEM_CHARS}}}))(?:[{_UNSPACED}]|[^\W{_UNSPACED}]+)"
"""Consumes one unspaced character or a whole word; captures a pair of characters or the word's first letters."""

BM25_K1 = 1.2
BM25_B = 0.75
"""Saturation and length normalisation of a passage's counts: BM25's usual values (Robertson and Zaragoza 2009, 3.2)."""

PASSAGE_RARITY = 1.0
QUERY_RARITY = 2.0
"""Powers of the inverse document frequency."""

SINGULAR_SHARE = 0.25
"""Share of singular vectors in the dimensions. A larger one finds more among a few thousand passages, far less among many."""

RANDOM_SCALE = 0.35
"""Weight of the random part relative to the singular vectors."""

SVD_ITERATIONS = 2
"""Power iterations of the randomised decomposition; recall with 4 differs by 0.1 points."""

RANK_TOLERANCE = 1e-4
"""Singular values below this share of the largest are rounding errors, from a small or repetitive sample."""

BATCH = 4096
"""Passages counted and projected at a time, which bounds the memory."""


class HashedEncoder:
    """See the module. Immutable, so threads may share it.

    Args:
        rarity: [NUM_BUCKETS] float32, inverse document frequency in the sample.
        mean_len: mean number of stems of a passage in the sample.
        projection: [NUM_BUCKETS, dim] float16.
    """

    def __init__(self, *, rarity: NDArray[np.float32], mean_len: float, projection: NDArray[np.float16]) -> None:
        self.rarity = rarity
        self.mean_len = mean_len
        # float32 multiplies fast; the values are those of float16, so saving them loses nothing.
        self.projection = projection.astype(np.float32)

    @property
    def dim(self) -> int:
        """Columns of every vector."""
        return int(self.projection.shape[1])

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[n, dim] float32 of length 1, or 0 for a text without a word."""
        weigh = partial(weigh_passages, rarity=self.rarity, mean_len=self.mean_len)
        return self._project(texts, weigh)

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[n, dim] float32 of length 1, or 0 for a text without a word."""
        return self._project(texts, partial(weigh_queries, rarity=self.rarity))

    def spec(self) -> dict[str, Any]:
        """The settings that the index records; the state itself is in `STATE_FILE`."""
        return {"kind": "hashed", "version": STATE_VERSION, "dim": self.dim}

    def save(self, path: Path) -> None:
        """Write the state as one npz file, NUM_BUCKETS * (2 dim + 4) bytes."""
        with path.open("wb") as file:
            np.savez(
                file,
                version=np.int64(STATE_VERSION),
                mean_len=np.float64(self.mean_len),
                rarity=self.rarity,
                projection=self.projection.astype(np.float16),
            )

    @classmethod
    def load(cls, path: Path) -> HashedEncoder:
        """Read the file of `save`.

        Raises:
            CorruptIndexError: the file is missing, damaged, or of another version.
        """
        try:
            with np.load(path, allow_pickle=False) as state:
                version, mean_len = int(state["version"]), float(state["mean_len"])
                rarity, projection = state["rarity"], state["projection"]
        except Exception as err:  # numpy raises a different class for each kind of damage
            raise CorruptIndexError(f"{path}: not an encoder's state: {err!r}") from err
        if version != STATE_VERSION:
            raise CorruptIndexError(f"{path}: encoder state of version {version}, expected {STATE_VERSION}")
        if rarity.shape != (NUM_BUCKETS,) or projection.ndim != 2 or len(projection) != NUM_BUCKETS:
            raise CorruptIndexError(f"{path}: encoder state of shapes {rarity.shape} and {projection.shape}")
        return cls(rarity=rarity, mean_len=mean_len, projection=projection)

    def _project(self, texts: Sequence[str], weigh: Callable[[Any], Any]) -> NDArray[np.float32]:
        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        for first in range(0, len(texts), BATCH):
            vectors[first : first + BATCH] = weigh(count_stems(texts[first : first + BATCH])) @ self.projection
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        np.divide(vectors, lengths, out=vectors, where=lengths > 0)
        return vectors


def fit_default(sample: Sequence[str], *, dim: int, seed: int) -> HashedEncoder:
    """Fit the default encoder.

    Args:
        sample: contents of one or more passages of the corpus; 100,000 take 12 s of one core and 0.9 GB.
        dim: columns of every vector, at least 2.
        seed: of the random part and of the randomised singular vectors; the same sample and seed give the same encoder.
    Raises:
        RetrievalError: `sample` has no word, or `dim` is too small.
    """
    from scipy.sparse import diags_array

    if dim < 2:
        raise RetrievalError(f"an encoder needs at least 2 dimensions but got {dim}")
    counts = count_stems(sample)
    counts = counts[np.diff(counts.indptr) > 0]
    if counts.shape[0] == 0:
        raise RetrievalError("cannot fit the default encoder: no passage of the sample has a word")
    rarity = inverse_document_frequency(counts)
    mean_len = float(counts.sum() / counts.shape[0])
    passages = weigh_passages(counts, rarity=rarity, mean_len=mean_len)
    passages = diags_array(1 / np.sqrt(passages.multiply(passages).sum(axis=1)).astype(np.float32)) @ passages
    leading = singular_vectors(passages, num_vectors=max(1, int(dim * SINGULAR_SHARE)), seed=seed)
    random = np.random.default_rng(seed).standard_normal((NUM_BUCKETS, dim - leading.shape[1]), dtype=np.float32)
    random -= leading @ (leading.T @ random)
    random *= RANDOM_SCALE / np.sqrt(random.shape[1])
    return HashedEncoder(rarity=rarity, mean_len=mean_len, projection=np.hstack([leading, random]).astype(np.float16))


def singular_vectors(matrix: Any, *, num_vectors: int, seed: int) -> NDArray[np.float32]:
    """Leading right singular vectors of a sparse [n, m] matrix.

    Returns:
        [m, num_vectors] float32, orthonormal columns; fewer where the rank is lower.
    """
    from sklearn.utils.extmath import randomized_svd

    used = np.unique(matrix.indices)  # a small sample leaves most buckets empty
    matrix_used = matrix[:, used]
    _, values, rows = randomized_svd(
        matrix_used, n_components=min(num_vectors, *matrix_used.shape), n_iter=SVD_ITERATIONS, random_state=seed
    )
    rank = int((values > RANK_TOLERANCE * values[0]).sum())
    vectors = np.zeros((matrix.shape[1], rank), dtype=np.float32)
    vectors[used] = rows[:rank].T
    return vectors


def count_stems(texts: Sequence[str]) -> Any:
    """Occurrences of each bucket: scipy csr_array [n, NUM_BUCKETS] float32."""
    from scipy.sparse import csr_array
    from sklearn.feature_extraction.text import HashingVectorizer

    vectorizer = HashingVectorizer(
        token_pattern=STEM_PATTERN, n_features=NUM_BUCKETS, alternate_sign=False, norm=None, dtype=np.float32
    )
    return csr_array(vectorizer.transform(texts)) if texts else csr_array((0, NUM_BUCKETS), dtype=np.float32)


def inverse_document_frequency(counts: Any) -> NDArray[np.float32]:
    """[NUM_BUCKETS] float32, BM25's formula: positive, and largest for a bucket that is in no passage."""
    num_with = np.bincount(counts.indices, minlength=NUM_BUCKETS)
    rarity: NDArray[np.float64] = np.log1p((counts.shape[0] - num_with + 0.5) / (num_with + 0.5))
    return rarity.astype(np.float32)


def weigh_passages(counts: Any, *, rarity: NDArray[np.float32], mean_len: float) -> Any:
    """BM25's saturated counts, times rarity ** PASSAGE_RARITY."""
    relative_len = counts.sum(axis=1) / mean_len
    offsets = np.repeat(BM25_K1 * (1 - BM25_B + BM25_B * relative_len), np.diff(counts.indptr))
    weighted = counts.copy()
    weighted.data = counts.data / (counts.data + offsets) * rarity[counts.indices] ** PASSAGE_RARITY
    return weighted


def weigh_queries(counts: Any, *, rarity: NDArray[np.float32]) -> Any:
    """rarity ** QUERY_RARITY, regardless of how often the query repeats the word."""
    weighted = counts.copy()
    weighted.data = rarity[counts.indices] ** QUERY_RARITY
    return weighted
