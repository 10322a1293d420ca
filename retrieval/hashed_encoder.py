"""The embedded default encoder: hashed, weighted word counts times one matrix.

    text ── stems ── hash ── counts ── saturated, * rarity^1 ──┐
                                                               ├── @ projection ── length 1
    query ─ stems ── hash ── 0 or 1 ────────── * rarity^2 ─────┘

The projection, [num_buckets, dim], is fitted on a sample of the corpus. Its first columns are the
sample's leading singular vectors, in which related words share a direction. The other
columns are random signs, projected on the remainder, so that rare names and words that are not in
the sample still count. The saved state has the singular vectors of the words in the sample and the
seed of the signs, so that a small corpus has a small file.

Knows no language: a stem is a word's first letters. Scripts without spaces give pairs of adjacent
characters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.scripts import UNSPACED

STATE_FILE = "encoder.npz"
"""File name of this encoder's saved state in an index."""
STATE_VERSION = 2
"""Incremented when the same text would get another vector (stems, hash, weights,
random part) or the file changes."""
NUM_BUCKETS = 2**16
"""Twice as many double the state and gain 0.3 points of recall@5 (mean of three sets);
four times as many gain 0.5."""
STEM_CHARS = 6
"""Letters of a word that count: `retrieve`, `retrieval` and `retrieves` are one stem."""
STEM_PATTERN = (
    rf"(?=([{UNSPACED}]{{1,2}}|[^\W{UNSPACED}]{{1,{STEM_CHARS}}}))(?:[{UNSPACED}]|[^\W{UNSPACED}]+)"
)
"""Consumes one unspaced character or a whole word;
captures a pair of characters or the word's first letters."""
BM25_K1 = 1.2
BM25_B = 0.75
"""Saturation and length normalisation of a passage's counts:
BM25's usual values (Robertson and Zaragoza 2009, 3.2)."""
PASSAGE_RARITY = 1.0
QUERY_RARITY = 2.0
"""Powers of the inverse document frequency."""
SINGULAR_SHARE = 0.25
"""Share of singular vectors in the dimensions.
A larger one finds more among a few thousand passages, far less among many."""
RANDOM_SCALE = 0.35
"""Weight of the random part relative to the singular vectors."""
SVD_ITERATIONS = 2
"""Power iterations of the randomised decomposition; recall with 4 differs by 0.1 points."""
RANK_TOLERANCE = 1e-4
"""Singular values below this share of the largest are rounding errors,
from a small or repetitive sample."""
BATCH = 4096
"""Passages counted and projected at a time, which bounds the memory."""


@dataclass(kw_only=True, eq=False)
class HashedEncoder:
    """See the module. Not changed after it was made, so threads may share it.

    Attributes:
        num_passages, mean_len: passages of the sample that have a word, and their mean number of
            stems.
        used, num_with: [u] int64: the buckets that the sample fills, ascending, and its passages in
            each of them.
        leading: [u, rank] float16, singular vectors; 0 in all other buckets. rank is less than dim.
        dim: columns of every vector; `seed` is the random ones'.
        rarity, projection: see the module; made from the others.
    """

    num_passages: int
    mean_len: float
    used: NDArray[np.int64]
    num_with: NDArray[np.int64]
    leading: NDArray[np.float16]
    dim: int
    seed: int
    rarity: NDArray[np.float32] = field(init=False)
    projection: NDArray[np.float32] = field(init=False)

    def __post_init__(self) -> None:
        self.rarity = _rarity(self.used, self.num_with, self.num_passages)
        leading = self.leading.astype(np.float32)
        self.projection = _projection(self.used, leading, dim=self.dim, seed=self.seed)

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[n, dim] float32 of length 1, or 0 for a text without a word."""
        weigh = partial(_weigh_passages, rarity=self.rarity, mean_len=self.mean_len)
        return self._project(texts, weigh)

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        """[n, dim] float32 of length 1, or 0 for a text without a word.
        How often a query repeats a word does not matter."""

        def weigh(counts: Any) -> Any:
            return _with_data(counts, self.rarity[counts.indices] ** QUERY_RARITY)

        return self._project(texts, weigh)

    def spec(self) -> dict[str, Any]:
        """The settings that the index records; the state itself is in `STATE_FILE`."""
        return {"kind": "hashed", "version": STATE_VERSION, "dim": self.dim}

    def save(self, path: Path) -> None:
        """Write the state as one npz file, at most NUM_BUCKETS * (2 rank + 16) bytes."""
        state = {one.name: getattr(self, one.name) for one in fields(self) if one.init}
        with path.open("wb") as file:
            np.savez_compressed(file, version=STATE_VERSION, **state)

    @classmethod
    def load(cls, path: Path) -> HashedEncoder:
        """Read the file of `save`. Raises CorruptIndexError: missing, damaged, or of another
        version."""
        try:
            with np.load(path, allow_pickle=False) as file:  # a pickle may run code
                state = {name: file[name] for name in file.files}
            version = int(state.pop("version"))
            if version == STATE_VERSION:
                used, num_with, leading = state["used"], state["num_with"], state["leading"]
                if leading.ndim != 2 or not used.shape == num_with.shape == leading.shape[:1]:
                    raise ValueError(f"of shapes {used.shape}, {num_with.shape}, {leading.shape}")
                return cls(**{key: one if one.ndim else one.item() for key, one in state.items()})
        except Exception as err:  # numpy raises a different class for each kind of damage
            raise CorruptIndexError(f"{path}: not an encoder's state: {err!r}") from err
        what = f"encoder state of version {version}, this release reads {STATE_VERSION}"
        raise CorruptIndexError(f"{path}: {what}; build the index anew")

    def _project(self, texts: Sequence[str], weigh: Callable[[Any], Any]) -> NDArray[np.float32]:
        vectors = np.zeros((len(texts), self.dim), dtype=np.float32)
        for first in range(0, len(texts), BATCH):
            some = slice(first, first + BATCH)
            vectors[some] = weigh(_count(texts[some])) @ self.projection
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        vectors /= np.where(lengths > 0, lengths, 1)  # a text without a word stays 0, not NaN
        return vectors


def fit_default(sample: Sequence[str], *, dim: int, seed: int) -> HashedEncoder:
    """Fit the default encoder.

    Args:
        sample: contents of passages of the corpus; 100,000 take 12 s of one core and 0.9 GB.
        dim: columns of every vector, at least 2.
        seed: of all that is random; the same sample and seed give the same encoder.
    Raises:
        RetrievalError: `sample` has no word, or `dim` is too small.
    """
    from scipy.sparse import diags_array
    from sklearn.utils.extmath import randomized_svd

    if dim < 2:
        raise RetrievalError(f"an encoder needs at least 2 dimensions but got {dim}")
    counts = _count(sample or [""])
    counts = counts[np.diff(counts.indptr) > 0]
    if not counts.shape[0]:
        raise RetrievalError("cannot fit the default encoder: no passage of the sample has a word")
    num_passages = counts.shape[0]
    used, num_with = np.unique(counts.indices, return_counts=True)
    mean_len = float(counts.sum() / num_passages)
    passages = _weigh_passages(counts, _rarity(used, num_with, num_passages), mean_len)
    lengths = np.sqrt(passages.multiply(passages).sum(axis=1)).astype(np.float32)
    # Buckets that the sample does not fill have no part in its singular vectors.
    passages = (diags_array(1 / lengths) @ passages)[:, used]
    size = min(max(1, int(dim * SINGULAR_SHARE)), *passages.shape)
    _, values, leading = randomized_svd(
        passages, n_components=size, n_iter=SVD_ITERATIONS, random_state=seed
    )
    # a repetitive sample has fewer directions
    rank = int((values > RANK_TOLERANCE * values[0]).sum())
    return HashedEncoder(
        num_passages=num_passages,
        mean_len=mean_len,
        used=used.astype(np.int64),
        num_with=num_with,
        leading=np.asarray(leading[:rank].T, np.float32).astype(np.float16),
        dim=dim,
        seed=seed,
    )


# Private, in order of use


def _count(texts: Sequence[str]) -> Any:
    """Occurrences of each bucket: scipy csr_array [n, NUM_BUCKETS] float32, n > 0."""
    from scipy.sparse import csr_array
    from sklearn.feature_extraction.text import HashingVectorizer

    vectorizer = HashingVectorizer(
        token_pattern=STEM_PATTERN,
        n_features=NUM_BUCKETS,
        alternate_sign=False,  # with signs counts could cancel, or be negative under saturation
        norm=None,
        dtype=np.float32,
    )
    return csr_array(vectorizer.transform(texts))


def _rarity(
    used: NDArray[np.int64], num_with: NDArray[np.int64], num_passages: int
) -> NDArray[np.float32]:
    """[NUM_BUCKETS] float32, BM25's: positive, and largest for a bucket that is in no passage."""
    counts = np.zeros(NUM_BUCKETS, dtype=np.int64)
    counts[used] = num_with
    rarity: NDArray[np.float64] = np.log1p((num_passages - counts + 0.5) / (counts + 0.5))
    return rarity.astype(np.float32)


def _weigh_passages(counts: Any, rarity: NDArray[np.float32], mean_len: float) -> Any:
    """BM25's saturated counts, times rarity ** PASSAGE_RARITY."""
    relative_len = counts.sum(axis=1) / mean_len
    offsets = np.repeat(BM25_K1 * (1 - BM25_B + BM25_B * relative_len), np.diff(counts.indptr))
    saturated = counts.data / (counts.data + offsets)
    return _with_data(counts, saturated * rarity[counts.indices] ** PASSAGE_RARITY)


def _with_data(counts: Any, data: NDArray[np.float32]) -> Any:
    weighted = counts.copy()
    weighted.data = data
    return weighted


def _projection(
    used: NDArray[np.int64], leading: NDArray[np.float32], *, dim: int, seed: int
) -> NDArray[np.float32]:
    """[NUM_BUCKETS, dim] float32: `leading` in the rows `used`, then random columns without what
    the first ones hold."""
    rank = leading.shape[1]
    num_bits = NUM_BUCKETS * (dim - rank)
    # A bit generator's stream is the same in every version of numpy; that of
    # `Generator.standard_normal` may change.
    raw = np.random.PCG64(seed).random_raw(-(-num_bits // 64)).astype("<u8").view(np.uint8)
    signs = np.unpackbits(raw, count=num_bits).reshape(NUM_BUCKETS, dim - rank)
    projection = np.zeros((NUM_BUCKETS, dim), dtype=np.float32)
    projection[used, :rank] = leading
    projection[:, rank:] = 2 * signs.astype(np.float32) - 1
    projection[used, rank:] -= leading @ (leading.T @ projection[used, rank:])
    # A row of n signs has length sqrt(n).
    projection[:, rank:] *= RANDOM_SCALE / np.sqrt(dim - rank)
    return projection
