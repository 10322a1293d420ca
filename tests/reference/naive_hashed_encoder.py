"""HashedEncoder one text, one word and one column at a time, with dicts.
The projection is by a full decomposition."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray


def naive_stems(text: str, *, stem_chars: int, unspaced: str) -> list[str]:
    """First letters of every word; each unspaced character with the unspaced one after it,
    if there is one."""
    text = text.lower()
    stems, position = [], 0
    while position < len(text):
        end = position
        if text[position] in unspaced:
            pair = text[position : position + 2]
            stems.append(pair if len(pair) == 2 and pair[1] in unspaced else pair[0])
            end += 1
        else:
            while (
                end < len(text)
                and (text[end].isalnum() or text[end] == "_")
                and text[end] not in unspaced
            ):
                end += 1
            if end > position:
                stems.append(text[position : min(end, position + stem_chars)])
        position = max(end, position + 1)
    return stems


def naive_bucket(stem: str, num_buckets: int) -> int:
    """As scikit-learn's hashing: the 32-bit hash's absolute value, modulo."""
    from sklearn.utils import murmurhash3_32

    return abs(int(murmurhash3_32(stem.encode(), seed=0))) % num_buckets


class NaiveHashedEncoder:
    """Weights from a sample, as the module's docstrings have them."""

    def __init__(
        self, sample: Sequence[str], *, num_buckets: int, stem_chars: int, unspaced: str
    ) -> None:
        self.num_buckets, self.stem_chars, self.unspaced = num_buckets, stem_chars, unspaced
        counts = [c for c in map(self.counts, sample) if c]
        self.num_texts = len(counts)
        self.num_with = Counter(bucket for c in counts for bucket in c)
        self.mean_len = sum(sum(c.values()) for c in counts) / len(counts)
        self.sample = sample

    def counts(self, text: str) -> Counter[int]:
        stems = naive_stems(text, stem_chars=self.stem_chars, unspaced=self.unspaced)
        return Counter(naive_bucket(stem, self.num_buckets) for stem in stems)

    def rarity(self, bucket: int) -> float:
        num_with = self.num_with[bucket]
        return math.log(1 + (self.num_texts - num_with + 0.5) / (num_with + 0.5))

    def passage_weights(self, text: str, *, k1: float, b: float, power: float) -> dict[int, float]:
        counts = self.counts(text)
        offset = k1 * (1 - b + b * sum(counts.values()) / self.mean_len)
        return {at: n / (n + offset) * self.rarity(at) ** power for at, n in counts.items()}

    def query_weights(self, text: str, *, power: float) -> dict[int, float]:
        return {bucket: self.rarity(bucket) ** power for bucket in self.counts(text)}


def naive_project(weights: dict[int, float], projection: NDArray[np.float32]) -> list[float]:
    """The weighted sum of the buckets' rows, at length 1 unless it is 0."""
    vector = [0.0] * projection.shape[1]
    for bucket, weight in weights.items():
        for column, value in enumerate(projection[bucket]):
            vector[column] += weight * float(value)
    length = math.sqrt(sum(value * value for value in vector))
    return [value / length for value in vector] if length else vector


def naive_leading_subspace(
    rows: list[dict[int, float]], num_vectors: int, num_buckets: int
) -> NDArray[np.float64]:
    """[num_buckets, num_vectors]: leading right singular vectors of the rows at length 1,
    by LAPACK."""
    used = sorted(set().union(*rows))
    matrix = np.array([[weights.get(bucket, 0.0) for bucket in used] for weights in rows])
    matrix /= np.linalg.norm(matrix, axis=1, keepdims=True)
    leading = np.zeros((num_buckets, num_vectors))
    leading[used] = np.linalg.svd(matrix, full_matrices=False)[2][:num_vectors].T
    return leading
