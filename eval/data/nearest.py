"""The passages that are nearest to a text by words."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eval.task import TextChunk


def ranker(corpus: Sequence[TextChunk]) -> Callable[[str, int], list[TextChunk]]:
    """(text, n) -> the n passages that share most words with it, rare words counting more;
    ties in the corpus' order."""
    bags = [set(chunk.text.lower().split()) for chunk in corpus]
    frequency = Counter(word for bag in bags for word in bag)
    weight = {word: math.log(len(corpus) / count) for word, count in frequency.items()}

    def nearest(text: str, n: int) -> list[TextChunk]:
        words = set(text.lower().split())
        # Sorted: sums of floats depend on the order, which for sets of strings differs by process.
        scores = [sum(sorted(weight[word] for word in words & bag)) for bag in bags]
        return [corpus[i] for i in sorted(range(len(corpus)), key=lambda i: -scores[i])[:n]]

    return nearest
