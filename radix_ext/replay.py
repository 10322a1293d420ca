"""A trace of retrieved chunks through table, tree and order, against a cache of limited size. No model, no server.

One rank serves the requests one after the other: order, count the hits, count the accesses, insert, evict. The parts are
the ones the server runs, so a hit rate found here is what the same traffic finds cached, counting whole chunks and no
questions. A later turn of a conversation follows its history in the prompt: nothing is reordered before the history and no
chunk of the turn is a prefix hit, but what the conversation has shown can be dropped.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import repeat
from time import perf_counter
from typing import Literal, NamedTuple, get_args

from radix_ext.access_table import AccessTable
from radix_ext.chain_node import ChainNode, Tier
from radix_ext.chunk import Chunk, ChunkId
from radix_ext.errors import check_at_least, check_choice
from radix_ext.eviction import EVICTION_POLICIES, EvictionPolicy, EvictionQueue
from radix_ext.order import OrderPolicy, TailPolicy, order_chunks
from radix_ext.prefix_tree import ChunkPrefixTree

AdmissionPolicy = Literal["all", "promoted"]
ADMISSION_POLICIES: tuple[AdmissionPolicy, ...] = get_args(AdmissionPolicy)
DedupPolicy = Literal["shown", "off"]
DEDUP_POLICIES: tuple[DedupPolicy, ...] = get_args(DedupPolicy)

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

    `num_lost` are chunks of the conversation's history that are no longer cached, and so computed once again.
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


class _Conversation(NamedTuple):
    """The chunks that precede the next turn, and all that the conversation has shown."""

    chain: tuple[Chunk, ...]
    seen: frozenset[ChunkId]


def replay_trace(
    requests: Iterable[Sequence[Chunk]],
    settings: ReplaySettings,
    *,
    conversations: Iterable[str | None] | None = None,
) -> ReplayResult:
    """Serve a trace: each request its distinct chunks in retriever order. Single-threaded, O(chunks log capacity).

    `conversations` names the conversation of each request, None for a request without one.
    """
    replay = Replay(settings)
    for request, conversation in zip(requests, conversations or repeat(None), strict=False):
        replay.step(request, conversation)
    return replay.result


class Replay:
    """One rank and its cache: `step` serves the next request, `result` is what the requests so far found."""

    def __init__(self, settings: ReplaySettings) -> None:
        self._settings = settings
        self._table = AccessTable(settings.window)
        self._tree = ChunkPrefixTree(max_nodes=sys.maxsize)
        self._queue = EvictionQueue(self._tree, settings.eviction, window=settings.window)
        self._conversations: dict[str, _Conversation] = {}
        self._counts: list[RequestCount] = []
        self._order_us: list[float] = []
        self._num_evicted = self._peak_nodes = 0

    def step(self, request: Sequence[Chunk], conversation: str | None = None) -> None:
        """Serve one request: its distinct chunks in retriever order, and the name of its conversation, if any."""
        history = self._conversations.get(conversation) if conversation is not None else None
        chain = self._first_turn(request) if history is None else self._later_turn(request, history, conversation)
        ids = [chunk.id for chunk in request]
        if conversation is not None:
            seen = history.seen if history else frozenset()
            self._conversations[conversation] = _Conversation(chain, seen.union(ids))
        self._table.observe(ids)
        self._insert(chain, counts_hits=history is None)
        while self._is_over() and (victim := self._queue.pop()) is not None:
            self._evict(victim)
        self._peak_nodes = max(self._peak_nodes, len(self._tree))

    @property
    def result(self) -> ReplayResult:
        """Counts of all requests served, and times over all order decisions."""
        times = sorted(self._order_us)
        return ReplayResult(
            requests=tuple(self._counts),
            num_evicted=self._num_evicted,
            peak_nodes=self._peak_nodes,
            order_us_p50=times[len(times) // 2] if times else 0.0,
            order_us_p99=times[len(times) * 99 // 100] if times else 0.0,
        )

    def _first_turn(self, request: Sequence[Chunk]) -> tuple[Chunk, ...]:
        """Order the chunks and count those held; returns the prompt's chain."""
        start = perf_counter()
        ordering = order_chunks(
            self._settings.order,
            self._settings.tail,
            self._tree,
            self._table,
            _NAMESPACE,
            request,
            rank=_RANK,
            max_visits=self._settings.max_visits,
        )
        self._order_us.append((perf_counter() - start) * 1e6)
        num_tokens = _tokens(request)
        self._counts.append(RequestCount(len(request), ordering.held_len, 0, 0, num_tokens, ordering.held_tokens, 0, 0))
        return ordering.chunks

    def _later_turn(
        self, request: Sequence[Chunk], history: _Conversation, conversation: str | None
    ) -> tuple[Chunk, ...]:
        """Count what is dropped and what of the history is lost; returns the history's chain and the turn's own chunks."""
        drops = self._settings.dedup == "shown"
        fresh = [chunk for chunk in request if not (drops and chunk.id in history.seen)]
        lost = history.chain[len(self._held(history.chain)) :]
        num_tokens, num_dropped = _tokens(request), len(request) - len(fresh)
        dropped_tokens = num_tokens - _tokens(fresh)
        self._counts.append(
            RequestCount(len(request), 0, num_dropped, len(lost), num_tokens, 0, dropped_tokens, _tokens(lost))
        )
        # Question and answer separate the turns, so no other chain continues here: the ids are the conversation's own.
        return history.chain + tuple(Chunk(ChunkId(f"{conversation}\0{c.id}"), c.num_tokens) for c in fresh)

    def _insert(self, chain: Sequence[Chunk], *, counts_hits: bool) -> None:
        """Cache the chain, or its promoted run. A later turn counts no hits on its own history, as in the server."""
        promoted_len = self._table.promoted_run((chunk.id for chunk in chain), self._settings.threshold)
        if self._settings.admission == "promoted":
            chain = chain[:promoted_len]
        held = [] if counts_hits else self._held(chain)
        if held:
            self._tree.mark_promoted(_NAMESPACE, (chunk.id for chunk in chain), promoted_len=promoted_len)
            rest, rest_promoted_len = chain[len(held) :], max(0, promoted_len - len(held))
            leaf = self._tree.extend(held[-1].chain, rest, rank=_RANK, tier=Tier.DEVICE, promoted_len=rest_promoted_len)
        else:
            leaf = self._tree.insert(_NAMESPACE, chain, rank=_RANK, tier=Tier.DEVICE, promoted_len=promoted_len)
        if leaf is not None:
            self._queue.push(leaf)

    def _held(self, chain: Sequence[Chunk]) -> Sequence[ChainNode]:
        return self._tree.match(_NAMESPACE, (chunk.id for chunk in chain))

    def _is_over(self) -> bool:
        nodes, tokens = self._settings.capacity, self._settings.capacity_tokens
        if nodes is not None and len(self._tree) > nodes:
            return True
        return tokens is not None and sum(held.num_tokens for held in self._tree.stats.held) > tokens

    def _evict(self, victim: ChainNode) -> None:
        parent = victim.parent
        self._num_evicted += self._tree.evict(victim.chain, rank=_RANK)
        if parent is not None and parent.parent is not None:
            self._queue.push(parent)


def _tokens(chunks: Iterable[Chunk]) -> int:
    return sum(chunk.num_tokens for chunk in chunks)
