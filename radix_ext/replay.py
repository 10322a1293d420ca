"""A trace of retrieved chunks through table, tree and order, against a cache of limited size. No model, no server.

One rank serves the requests one after the other: order, count the hits, access table, insert, evict. The parts are
the ones the server runs, so a hit rate found here is what the same traffic finds cached, counting whole chunks and no
questions. A later turn of a conversation stands behind its history: nothing is reordered in front of it and no chunk of it
is a prefix hit, but what the conversation has shown can be dropped.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import repeat
from time import perf_counter
from typing import Literal, NamedTuple, get_args

from radix_ext.access_table import AccessTable
from radix_ext.chain_node import ChainNode, Tier
from radix_ext.chunk import ChainId, Chunk, ChunkId
from radix_ext.errors import check_at_least, check_choice
from radix_ext.order import OrderPolicy, TailPolicy, order_chunks
from radix_ext.prefix_tree import ChunkPrefixTree

EvictionPolicy = Literal["lru", "promoted", "reused"]
AdmissionPolicy = Literal["all", "promoted"]
EVICTION_POLICIES: tuple[EvictionPolicy, ...] = get_args(EvictionPolicy)
ADMISSION_POLICIES: tuple[AdmissionPolicy, ...] = get_args(AdmissionPolicy)
DedupPolicy = Literal["shown", "off"]
DEDUP_POLICIES: tuple[DedupPolicy, ...] = get_args(DedupPolicy)

_Entry = tuple[tuple[int, int], ChainId]
_NAMESPACE = "replay"
_RANK = 0


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """One replay. `capacity` in nodes and `capacity_tokens` in tokens, None for unlimited; the others as in their modules.

    Raises:
        LimitError, PolicyError: a value out of range, an unknown policy.
    """

    order: OrderPolicy
    tail: TailPolicy
    eviction: EvictionPolicy
    admission: AdmissionPolicy
    dedup: DedupPolicy
    capacity: int | None
    capacity_tokens: int | None
    window: int
    threshold: int
    max_visits: int

    def __post_init__(self) -> None:
        check_choice("eviction", self.eviction, EVICTION_POLICIES)
        check_choice("admission", self.admission, ADMISSION_POLICIES)
        check_choice("dedup", self.dedup, DEDUP_POLICIES)
        check_at_least("capacity", 1 if self.capacity is None else self.capacity, 1)
        check_at_least("capacity_tokens", 1 if self.capacity_tokens is None else self.capacity_tokens, 1)


class RequestCount(NamedTuple):
    """Of one request's chunks (tokens): found cached as a prefix; dropped, since the conversation has shown them.

    `num_lost` are chunks of the history in front of it that are cached no more, and so computed once again.
    """

    num_chunks: int
    num_hits: int
    num_dropped: int
    num_lost: int
    num_tokens: int
    num_token_hits: int
    num_dropped_tokens: int
    num_lost_tokens: int


@dataclass(frozen=True, slots=True)
class ReplayResult:
    """What a replay counted; rates are shares of all chunks (tokens) in the trace, times are per order decision."""

    requests: tuple[RequestCount, ...]
    num_evicted: int
    peak_nodes: int
    order_us_p50: float
    order_us_p99: float

    @property
    def total(self) -> RequestCount:
        """Sums over all requests."""
        return RequestCount(*map(sum, zip(*self.requests, strict=True))) if self.requests else RequestCount(*[0] * 8)

    @property
    def chunk_hit_rate(self) -> float:
        """Chunks found cached / chunks."""
        total = self.total
        return total.num_hits / total.num_chunks if total.num_chunks else 0.0

    @property
    def token_hit_rate(self) -> float:
        """Tokens found cached / tokens; only tells something if the trace has lengths."""
        total = self.total
        return total.num_token_hits / total.num_tokens if total.num_tokens else 0.0


class EvictionQueue:
    """The leaves of a tree in the order in which they should go: a heap that is put right only when asked.

    Entries go stale when their node is used, marked, gets children or leaves; `pop` skips those, and whoever changes a
    leaf pushes it again, so both are O(log n) amortised. `policy` and `window` are those of `eviction_priority`.
    """

    def __init__(self, tree: ChunkPrefixTree, policy: EvictionPolicy, *, window: int) -> None:
        check_choice("eviction", policy, EVICTION_POLICIES)
        self._tree = tree
        self._policy = policy
        self._window = window
        self._heap: list[_Entry] = []

    def push(self, node: ChainNode) -> None:
        """A node was used or marked, or lost its last child. Inner nodes are ignored: they cannot go yet."""
        if node.children is None:
            heappush(self._heap, self._entry(node))
        if len(self._heap) > 4 * len(self._tree) + 64:
            self._heap = [entry for entry in set(self._heap) if self._current(entry)]
            heapify(self._heap)

    def pop(self) -> ChainNode | None:
        """The leaf to evict next, None if there is none. The caller evicts it and pushes its parent."""
        while self._heap:
            node = self._current(heappop(self._heap))
            if node is not None:
                return node
        return None

    def _entry(self, node: ChainNode) -> _Entry:
        priority = eviction_priority(
            self._policy,
            promoted=node.promoted,
            hits=node.hits,
            last_access=node.last_access,
            window=self._window,
        )
        return priority, node.chain

    def _current(self, entry: _Entry) -> ChainNode | None:
        """The leaf this entry was made for, None if anything about it has changed since."""
        node = self._tree.find(entry[1])
        return node if node is not None and node.children is None and self._entry(node) == entry else None


def eviction_priority(
    policy: EvictionPolicy, *, promoted: bool, hits: int, last_access: int, window: int
) -> tuple[int, int]:
    """What decides which leaf goes first: the smallest value. The scheduler's strategy can use the same function.

    `lru` goes by last access and `promoted` by (promoted, last access), as CRAFT's marks suggest. Under `reused` each
    doubling of its hits keeps a node one access window longer: last access + window * ceil(log2(1 + hits)), so a chain
    used once goes soon and one that was popular ages out in the end; ties go by last access.

    Args:
        last_access: number of the request that used the node last, not a time.
        window: requests, as of the access table.
    """
    if policy == "reused":
        return last_access + window * hits.bit_length(), last_access
    return int(policy == "promoted" and promoted), last_access


class _Conversation(NamedTuple):
    """What stands in front of a next turn, and which chunks it shows."""

    chain: tuple[Chunk, ...]
    seen: frozenset[ChunkId]


def replay_trace(
    requests: Iterable[Sequence[Chunk]],
    settings: ReplaySettings,
    *,
    conversations: Iterable[str | None] | None = None,
) -> ReplayResult:
    """Serve a trace: each request its distinct chunks in retriever order. Single-threaded, O(chunks log capacity).

    `conversations` names the conversation of each request, None for one that stands alone.
    """
    table = AccessTable(settings.window)
    tree = ChunkPrefixTree(max_nodes=sys.maxsize)
    queue = EvictionQueue(tree, settings.eviction, window=settings.window)
    capacity = sys.maxsize if settings.capacity is None else settings.capacity
    num_evicted = peak_nodes = 0
    counts: list[RequestCount] = []
    times_us: list[float] = []
    histories: dict[str, _Conversation] = {}
    for request, name in zip(requests, conversations or repeat(None), strict=False):
        history = histories.get(name) if name is not None else None
        num_tokens = sum(chunk.num_tokens for chunk in request)
        if history is None:
            start = perf_counter()
            ordering = order_chunks(
                settings.order,
                settings.tail,
                tree,
                table,
                _NAMESPACE,
                request,
                rank=_RANK,
                max_visits=settings.max_visits,
            )
            times_us.append((perf_counter() - start) * 1e6)
            chain = ordering.chunks
            counts.append(RequestCount(len(request), ordering.held_len, 0, 0, num_tokens, ordering.held_tokens, 0, 0))
        else:
            drops = settings.dedup == "shown"
            fresh = [chunk for chunk in request if not (drops and chunk.id in history.seen)]
            lost = history.chain[len(tree.match(_NAMESPACE, (chunk.id for chunk in history.chain))) :]
            fresh_tokens, lost_tokens = (sum(chunk.num_tokens for chunk in chunks) for chunks in (fresh, lost))
            num_dropped, dropped_tokens = len(request) - len(fresh), num_tokens - fresh_tokens
            counts.append(
                RequestCount(len(request), 0, num_dropped, len(lost), num_tokens, 0, dropped_tokens, lost_tokens)
            )
            # Question and answer stand between the turns, so nobody else's chain goes on here: ids of the conversation's own.
            chain = history.chain + tuple(Chunk(ChunkId(f"{name}\0{c.id}"), c.num_tokens) for c in fresh)
        ids = [chunk.id for chunk in request]
        if name is not None:
            histories[name] = _Conversation(chain, (history.seen if history else frozenset()) | frozenset(ids))
        table.observe(ids)
        promoted_len = table.promoted_run((chunk.id for chunk in chain), settings.threshold)
        admitted = chain if settings.admission == "all" else chain[:promoted_len]
        leaf = _insert(tree, admitted, promoted_len, counts_hits=history is None)
        if leaf is not None:
            queue.push(leaf)
        while _is_over(tree, capacity, settings.capacity_tokens) and (victim := queue.pop()) is not None:
            num_evicted += _evict(tree, queue, victim)
        peak_nodes = max(peak_nodes, len(tree))
    times_us.sort()
    return ReplayResult(
        requests=tuple(counts),
        num_evicted=num_evicted,
        peak_nodes=peak_nodes,
        order_us_p50=times_us[len(times_us) // 2] if times_us else 0.0,
        order_us_p99=times_us[len(times_us) * 99 // 100] if times_us else 0.0,
    )


def overlap(requests: Iterable[Sequence[ChunkId]]) -> tuple[float, float]:
    """CRAFT 3.1's two measures of a trace as retrieved: how much prefixes share, and how much sets share.

    Returns:
        Prefix, the mean over all requests but the first of max_{j<i} LCP(R_i, R_j) / len(R_i), and
        Total, that of max_{j<i} |R_i ∩ R_j| / len(R_i). Both 0 for fewer than two requests.
    """
    tree = ChunkPrefixTree(max_nodes=sys.maxsize)
    retrieved_by: dict[ChunkId, int] = {}  # bit j: request j has the chunk
    prefix = total = 0.0
    num_requests = 0
    for index, ids in enumerate(requests):
        if index and ids:
            prefix += len(tree.match(_NAMESPACE, ids)) / len(ids)
            total += _most_shared([retrieved_by.get(chunk, 0) for chunk in ids]) / len(ids)
        chunks = [Chunk(chunk, 1) for chunk in ids]
        tree.insert(_NAMESPACE, chunks, rank=_RANK, tier=Tier.DEVICE, promoted_len=0)
        for chunk in ids:
            retrieved_by[chunk] = retrieved_by.get(chunk, 0) | 1 << index
        num_requests += 1
    return prefix / max(1, num_requests - 1), total / max(1, num_requests - 1)


def seen_before(requests: Iterable[Sequence[Chunk]]) -> list[tuple[int, int]]:
    """For each request (chunks, tokens) that an earlier request retrieved too: what reuse at any position could find."""
    seen: set[ChunkId] = set()
    counts = []
    for request in requests:
        lengths = [chunk.num_tokens for chunk in request if chunk.id in seen]
        counts.append((len(lengths), sum(lengths)))
        seen.update(chunk.id for chunk in request)
    return counts


def _insert(tree: ChunkPrefixTree, chain: Sequence[Chunk], promoted_len: int, *, counts_hits: bool) -> ChainNode | None:
    """The chain's last node. A later turn counts no hits on its own history, as in the server."""
    held = [] if counts_hits else tree.match(_NAMESPACE, (chunk.id for chunk in chain))
    if not held:
        return tree.insert(_NAMESPACE, chain, rank=_RANK, tier=Tier.DEVICE, promoted_len=promoted_len)
    tree.mark_promoted(_NAMESPACE, (chunk.id for chunk in chain), promoted_len=promoted_len)
    rest_promoted_len = max(0, promoted_len - len(held))
    return tree.extend(held[-1].chain, chain[len(held) :], rank=_RANK, tier=Tier.DEVICE, promoted_len=rest_promoted_len)


def _is_over(tree: ChunkPrefixTree, capacity: int, capacity_tokens: int | None) -> bool:
    if len(tree) > capacity:
        return True
    return capacity_tokens is not None and sum(held.num_tokens for held in tree.stats.held) > capacity_tokens


def _evict(tree: ChunkPrefixTree, queue: EvictionQueue, victim: ChainNode) -> int:
    parent = victim.parent
    num_evicted = tree.evict(victim.chain, rank=_RANK)
    if parent is not None and parent.parent is not None:
        queue.push(parent)
    return num_evicted


def _most_shared(bit_sets: Sequence[int]) -> int:
    """The largest number of these bit sets that have one bit in common, by adding all bits up at once, column-wise."""
    columns: list[int] = []  # columns[n]: bit 2**n of every sum
    for carry in bit_sets:
        for n, column in enumerate(columns):
            columns[n], carry = column ^ carry, column & carry
        if carry:
            columns.append(carry)
    most, candidates = 0, -1
    for n in reversed(range(len(columns))):
        if candidates & columns[n]:
            candidates &= columns[n]
            most += 1 << n
    return most
