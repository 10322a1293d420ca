"""Reciprocal rank fusion (Cormack, Clarke and Büttcher, SIGIR 2009): merges rankings by ranks
alone, because BM25 scores and inner products share no scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import fsum


def reciprocal_rank_fusion(
    rankings: Sequence[Sequence[int]], *, k: int, constant: int
) -> list[tuple[int, float]]:
    """The best `k` ids of all rankings with score = sum of 1 / (constant + rank), best first; equal
    scores by best rank, then by the first ranking that holds that rank.

    Args:
        rankings: different ids, best first; rank counts from 1.
        constant: the larger, the smaller the advantage of the first ranks; 60 in the paper.
    """
    ranks: dict[int, list[tuple[int, int]]] = {}  # id -> (rank, number of the ranking)
    for number, ranking in enumerate(rankings):
        for rank, item in enumerate(ranking, start=1):
            ranks.setdefault(item, []).append((rank, number))
    # fsum rounds once, so the order of the rankings cannot change a score.
    scores = {
        item: fsum(1.0 / (constant + rank) for rank, _ in places) for item, places in ranks.items()
    }
    return sorted(scores.items(), key=lambda pair: (-pair[1], min(ranks[pair[0]])))[:k]
