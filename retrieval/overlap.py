"""How much requests share: CRAFT's two measures, an unbounded cache's hit rate, and repetition inside conversations.

Knows ranked lists of passage ids in the order of the requests, and nothing of how they came about. A request only ever
looks back, because only what was computed before can be reused:

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

    The order of requests changes nothing where all lists are equally long: each list adds k minus its LCP new nodes to a trie,
    whose size is the same in the end.

    Args:
        k: what every list is divided by; None: its own length, empty lists left out.

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
    """The share of all retrieved chunks, the first request's included, that some earlier request had retrieved."""
    seen: set[Hashable] = set()
    num_hits = num_retrieved = 0
    for ids in requests:
        num_hits += sum(chunk in seen for chunk in ids)
        num_retrieved += len(ids)
        seen.update(ids)
    return num_hits / max(1, num_retrieved)


def repeated_share(requests: Ranked, conversations: Sequence[Hashable]) -> float:
    """CRAFT 3.2: which share of a turn's chunks an earlier turn of the same conversation had retrieved.

    The mean over turns, whatever they retrieved; a conversation's first turn and turns that retrieved nothing are left out.

    Args:
        conversations: per request, what it belongs to; the turns of one may lie apart.

    Returns:
        Between 0 and 1; 0 where no such turn is.
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
    """Each list with what it is divided by; its own length, with lists that have none left out, where k is None."""
    for ids in requests:
        if k is not None or ids:
            yield ids, k or len(ids)


def _mean(shares: Sequence[float]) -> float:
    return sum(shares) / len(shares) if shares else 0.0
