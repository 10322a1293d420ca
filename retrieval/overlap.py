"""Overlap between requests: CRAFT's two measures, the hit rate of an unbounded cache, and repetition inside conversations.

The input is a ranked list of passage ids for each request, in order of arrival. A request is compared with earlier ones
only, because only KV that was computed before can be reused:

    R1 = [c1 c4 c5 c6 c7]   R2 = [c1 c2 c3 c4 c5]     prefix of R2: 1/5 (c1)   total of R2: 3/5 (c1 c4 c5)

Ids are anything hashable. An id that a list names twice counts twice in `prefix_share`, `hit_share` and `repeated_share`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

Ranked = Sequence[Sequence[Hashable]]


def prefix_share(requests: Ranked, *, k: int | None) -> float:
    """CRAFT 3.1's Prefix: the mean over all requests but the first of max_{j<i} LCP(R_i, R_j) / k.

    If all lists have the same length, the order of requests does not matter: each list adds k minus its LCP new nodes to a
    trie, and the trie's final size is the same.

    Args:
        k: divisor for every list; None: the list's own length, empty lists left out.

    Returns:
        Between 0 and 1; 0 for fewer than two requests.
    """
    trie: dict[Hashable, Any] = {}
    shares: list[float] = []
    for ids, length in _with_lengths(requests, k):
        node, depth = trie, 0
        for chunk in ids:
            depth += chunk in node  # a new node is empty: nothing after it counts
            node = node.setdefault(chunk, {})
        shares.append(depth / length)
    return _mean(shares[1:])


def total_share(requests: Ranked, *, k: int | None) -> float:
    """CRAFT 3.1's Total: the mean over all requests but the first of max_{j<i} |R_i ∩ R_j| / k. Depends on the order.

    Args and Returns: see `prefix_share`. Time: the retrievals of each list's ids by earlier requests, equal sets counted once.
    """
    retrieved_by: defaultdict[Hashable, list[int]] = defaultdict(list)
    sets: set[frozenset[Hashable]] = set()
    shares: list[float] = []
    for ids, length in _with_lengths(requests, k):
        chunks = frozenset(ids)
        if chunks in sets:
            shares.append(len(chunks) / length)
            continue
        shared = Counter[int]()
        for chunk in chunks:
            shared.update(retrieved_by[chunk])
            retrieved_by[chunk].append(len(sets))
        shares.append(max(shared.values(), default=0) / length)
        sets.add(chunks)
    return _mean(shares[1:])


def hit_share(requests: Ranked) -> float:
    """Share of all retrieved chunks, including the first request's, that an earlier request had retrieved."""
    seen: set[Hashable] = set()
    num_hits = num_retrieved = 0
    for ids in requests:
        num_hits += sum(chunk in seen for chunk in ids)
        num_retrieved += len(ids)
        seen.update(ids)
    return num_hits / max(1, num_retrieved)


def repeated_share(requests: Ranked, conversations: Sequence[Hashable]) -> float:
    """CRAFT 3.2: the share of a turn's chunks that an earlier turn of the same conversation had retrieved.

    The mean over turns, all with equal weight. First turns of conversations and turns that retrieved nothing are left out.

    Args:
        conversations: the conversation of each request; turns of other conversations may lie between its turns.

    Returns:
        Between 0 and 1; 0 if no turn counts.
    """
    seen: dict[Hashable, set[Hashable]] = {}
    shares: list[float] = []
    for ids, conversation in zip(requests, conversations, strict=True):
        if ids and conversation in seen:
            shares.append(sum(chunk in seen[conversation] for chunk in ids) / len(ids))
        seen.setdefault(conversation, set()).update(ids)
    return _mean(shares)


# Private, in order of use


def _with_lengths(requests: Ranked, k: int | None) -> Iterator[tuple[Sequence[Hashable], int]]:
    """Each list with its divisor: k, or where k is None its own length, empty lists left out."""
    for ids in requests:
        if k is not None or ids:
            yield ids, k or len(ids)


def _mean(shares: Sequence[float]) -> float:
    return sum(shares) / len(shares) if shares else 0.0
