"""A trace of retrieved chunks through table, tree and order, against a cache of limited size. No
model, no server.

One rank serves the requests one after the other: order, count the hits, count the accesses, insert,
evict. The parts are the ones the server runs, so a hit rate found here is what the same traffic
finds cached, counting whole chunks and no questions. A later turn of a conversation follows its
history in the prompt: nothing is reordered before the history and no chunk of the turn is a prefix
hit, but what the conversation has shown can be dropped. A request may name its head, the text in
front of its chunks: behind different heads nothing is shared, a history neither. Access counts know
no heads, as on a server.

In pages a chunk has the pages that end in it, behind its chain, as in the server's tree
(sglang_chunkcache/scheduler/paged_key.py): tokens found are whole pages, and a chunk that lacks a
part of one counts as found.

With a host tier, what leaves the device stays there if host memory has a copy, and is loaded by the
next request whose chain goes on with it. Copies and loads take no time here.
"""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Literal, NamedTuple, get_args

from eval.errors import check_choice
from eval.replay.eviction_queue import (
    EVICTION_POLICIES,
    EvictionPolicy,
    EvictionQueue,
    is_device_leaf,
)
from eval.replay.host_tier import HostTier
from eval.replay.offloading import HOST_ADMISSIONS, HostAdmission
from eval.replay.ordering import TailPolicy, order_chunks
from radix_ext import (
    AccessTable,
    ChainNode,
    Chunk,
    ChunkId,
    ChunkPrefixTree,
    LimitError,
    OrderPolicy,
    Tier,
)
from radix_ext.errors import check_at_least

AdmissionPolicy = Literal["all", "promoted"]
ADMISSION_POLICIES: tuple[AdmissionPolicy, ...] = get_args(AdmissionPolicy)
DedupPolicy = Literal["shown", "off"]
DEDUP_POLICIES: tuple[DedupPolicy, ...] = get_args(DedupPolicy)

_NAMESPACE = "replay"
_RANK = 0
_MAX_TIMES = 16_384
"""Order decisions whose times are kept: 163 of them are above the 99th percentile."""


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """One replay. `capacity` in nodes and `capacity_tokens` in tokens, None for unlimited; the
    others as in their modules.

    `host` is host memory's room, in the unit of the device's; 0: there is no such tier.
    `host_worth` is for the order. Pages mean something if the trace has lengths. `padded`: a chunk
    is filled up with one token of no meaning, so that it owns whole pages; those tokens take slots
    and are never counted as found. `copies_rests`: as our tree, what a match in pages lacks of its
    last chunk is copied from whatever follows it elsewhere.

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
    host: int = 0
    host_admission: HostAdmission = "either"
    host_worth: float = 1.0
    page_size: int = 1
    padded: bool = False
    copies_rests: bool = False

    def __post_init__(self) -> None:
        check_choice("eviction", self.eviction, EVICTION_POLICIES)
        check_choice("admission", self.admission, ADMISSION_POLICIES)
        check_choice("dedup", self.dedup, DEDUP_POLICIES)
        check_at_least("capacity", 1 if self.capacity is None else self.capacity, 1)
        check_at_least(
            "capacity_tokens", 1 if self.capacity_tokens is None else self.capacity_tokens, 1
        )
        check_at_least("host", self.host, 0)
        check_at_least("page_size", self.page_size, 1)
        check_choice("host_admission", self.host_admission, HOST_ADMISSIONS)
        if self.host and self.capacity is None and self.capacity_tokens is None:
            raise LimitError("host needs a limited capacity: nothing leaves an unlimited device")


class RequestCount(NamedTuple):
    """Of one request's chunks (tokens): found cached as a prefix; dropped, since the conversation
    has shown them.

    `num_lost` are chunks of the conversation's history that are no longer cached, and so computed
    once again. Of the hits, `num_host_hits` were loaded from host memory.
    """

    num_chunks: int
    num_hits: int
    num_dropped: int
    num_lost: int
    num_tokens: int
    num_token_hits: int
    num_dropped_tokens: int
    num_lost_tokens: int
    num_host_hits: int = 0
    num_host_token_hits: int = 0


class HostStats(NamedTuple):
    """What a replay's host memory did: chunks (tokens) copied to it and loaded from it,
    chunks that left it, tokens it has."""

    offloaded: int
    offloaded_tokens: int
    loaded: int
    loaded_tokens: int
    evicted: int
    num_tokens: int


def _namespace(head: str | None) -> str:
    return _NAMESPACE if head is None else f"{_NAMESPACE}\0{head}"


class _History(NamedTuple):
    """The chunks of a conversation in the order of its prompt: all that it has shown.
    `num_first` are of its first turn."""

    chunks: tuple[Chunk, ...]
    num_first: int

    def chain(self, conversation: str) -> tuple[Chunk, ...]:
        """As the tree knows it. Question and answer separate the turns,
        so later turns' ids are the conversation's own."""
        first, later = self.chunks[: self.num_first], self.chunks[self.num_first :]
        return first + tuple(
            Chunk(ChunkId(f"{conversation}\0{chunk.id}"), chunk.num_tokens) for chunk in later
        )


class Replay:
    """One rank and its cache: `step` serves the next request in O(chunks log capacity).
    Single-threaded.

    Its memory grows with the cache and with the conversations under way, not with the number of
    requests: per-request counts are returned and not kept, and of order decisions 8,192 to 16,384
    times, evenly spread, are.
    """

    def __init__(self, settings: ReplaySettings) -> None:
        self.num_evicted = self.peak_nodes = self.peak_tokens = 0
        self.found: tuple[Chunk, ...] = ()
        """Of the last request: found cached, or dropped, since its conversation has shown them."""
        self._num_loaded = self._loaded_tokens = 0
        self._settings = settings
        self._is_limited = settings.capacity is not None or settings.capacity_tokens is not None
        self._table = AccessTable(settings.window)
        self._tree = ChunkPrefixTree(max_nodes=sys.maxsize)
        self._queue = EvictionQueue(self._tree, settings.eviction, is_leaf=self._is_device_leaf)
        self._host: HostTier | None = None
        if settings.host:
            self._host = HostTier(
                self._tree,
                settings.eviction,
                settings.host_admission,
                capacity=settings.host if settings.capacity is not None else None,
                capacity_tokens=settings.host if settings.capacity is None else None,
            )
        self._histories: dict[str, _History] = {}
        self._order_us: list[float] = []
        self._num_orders, self._times_stride = 0, 1

    def beside(self) -> "Replay":
        """Another rank behind the same front: a cache of its own,
        the same counts and conversations."""
        other = Replay(self._settings)
        other._table, other._histories = self._table, self._histories
        return other

    def worth(
        self, request: Sequence[Chunk], conversation: str | None = None, *, head: str | None = None
    ) -> int:
        """Tokens that the cache has of the request's chunks, in the order that it would get; of a
        later turn those of the conversation's first one. What a router compares; changes
        nothing."""
        settings = self._settings
        history = self._histories.get(conversation) if conversation is not None else None
        return order_chunks(
            settings.order if history is None else "retriever",
            settings.tail,
            self._tree,
            self._table,
            _namespace(head),
            request if history is None else history.chunks[: history.num_first],
            rank=_RANK,
            max_visits=settings.max_visits,
            host_worth=settings.host_worth,
        ).worth(settings.host_worth)

    def step(
        self,
        request: Sequence[Chunk],
        conversation: str | None = None,
        *,
        is_last_turn: bool = False,
        head: str | None = None,
    ) -> RequestCount:
        """Serve one request: its distinct chunks in retriever order, and the name of its
        conversation, if any.

        `is_last_turn`: the conversation is forgotten afterwards; its chunks stay cached until they
        are evicted. `head` names the text before the first chunk.
        """
        namespace = _namespace(head)
        history = self._histories.pop(conversation, None) if conversation is not None else None
        if conversation is None or history is None:
            chain, count = self._first_turn(request, namespace)
            history, is_first = _History(chain, len(chain)), True
        else:
            history, count = self._later_turn(request, history, conversation, namespace)
            chain, is_first = history.chain(conversation), False
        if conversation is not None and not is_last_turn:
            self._histories[conversation] = history
        chain = _in_pages(chain, self._settings.page_size, self._settings.padded)
        self._table.observe([chunk.id for chunk in request])
        if self._host is not None:
            num_loaded, loaded_tokens = self._load(chain, namespace)
            if is_first:
                count = count._replace(num_host_hits=num_loaded, num_host_token_hits=loaded_tokens)
        leaf = self._insert(chain, namespace, counts_hits=is_first)
        if self._host is not None and leaf is not None:
            self._offload(self._host, leaf, None if is_first else history)
        if self._is_limited:
            self._make_room(leaf)
        num_nodes, num_tokens = self._tree.holdings.held(_RANK, Tier.DEVICE)
        self.peak_nodes = max(self.peak_nodes, num_nodes)
        self.peak_tokens = max(self.peak_tokens, num_tokens)
        return count

    def order_us(self, q: float) -> float:
        """The q-quantile of the times of order decisions, in microseconds; 0 without any."""
        times = sorted(self._order_us)
        return times[int(len(times) * q)] if times else 0.0

    @property
    def host_stats(self) -> HostStats | None:
        """Of the whole replay so far; None without a host tier."""
        if (host := self._host) is None:
            return None
        copied = host.num_offloaded, host.num_offloaded_tokens
        return HostStats(
            *copied, self._num_loaded, self._loaded_tokens, host.num_evicted, host.num_tokens
        )

    # Private, in order of use

    def _first_turn(
        self, request: Sequence[Chunk], namespace: str
    ) -> tuple[tuple[Chunk, ...], RequestCount]:
        """Order the chunks and count those held; returns the prompt's chain."""
        settings = self._settings
        start = perf_counter()
        ordering = order_chunks(
            settings.order,
            settings.tail,
            self._tree,
            self._table,
            namespace,
            request,
            rank=_RANK,
            max_visits=settings.max_visits,
            host_worth=settings.host_worth,
        )
        self._note_time((perf_counter() - start) * 1e6)
        held_len, held_tokens = ordering.held_len, ordering.held_tokens
        self.found = ordering.chunks[:held_len]
        if settings.page_size > 1 and held_len:
            held_tokens = self._num_found(self.found, namespace, held_tokens)
        return ordering.chunks, RequestCount(
            len(request), held_len, 0, 0, _tokens(request), held_tokens, 0, 0
        )

    def _num_found(self, chunks: Sequence[Chunk], namespace: str, num_slots: int) -> int:
        """Tokens of a held chain in pages, of which some may be copied."""
        if self._settings.padded:
            return _tokens(chunks)
        if not self._settings.copies_rests:
            return num_slots
        behind = list(self._held(chunks, namespace)[-1].child_nodes())
        while behind:
            node = behind.pop()
            if node.tier(_RANK) is None:
                continue
            if node.num_tokens:
                return _tokens(chunks)
            behind += node.child_nodes()
        return num_slots

    def _note_time(self, us: float) -> None:
        if self._num_orders % self._times_stride == 0:
            self._order_us.append(us)
            if len(self._order_us) == _MAX_TIMES:
                del self._order_us[1::2]
                self._times_stride *= 2
        self._num_orders += 1

    def _later_turn(
        self, request: Sequence[Chunk], history: _History, conversation: str, namespace: str
    ) -> tuple[_History, RequestCount]:
        """Count what is dropped and what of the history is lost;
        returns the history with the turn's own chunks."""
        shown = {chunk.id for chunk in history.chunks} if self._settings.dedup == "shown" else ()
        fresh = [chunk for chunk in request if chunk.id not in shown]
        self.found = tuple(chunk for chunk in request if chunk.id in shown)
        lost = history.chunks[len(self._held(history.chain(conversation), namespace)) :]
        num_tokens, num_dropped = _tokens(request), len(request) - len(fresh)
        dropped_tokens = num_tokens - _tokens(fresh)
        count = RequestCount(
            len(request), 0, num_dropped, len(lost), num_tokens, 0, dropped_tokens, _tokens(lost)
        )
        return _History((*history.chunks, *fresh), history.num_first), count

    def _load(self, chain: Iterable[Chunk], namespace: str) -> tuple[int, int]:
        """What of the chain only host memory has is on the device, too, from now on.
        Returns (chunks, tokens)."""
        loaded = [node for node in self._held(chain, namespace) if node.tier(_RANK) is Tier.HOST]
        for node in loaded:
            self._tree.move(node.chain, rank=_RANK, tier=Tier.DEVICE)
        # where the prompt is cached up to a promoted run only, the device's chain ends here
        if loaded:
            self._queue.push(loaded[-1])
        num_tokens = sum(node.num_tokens for node in loaded)
        self._num_loaded, self._loaded_tokens = (
            self._num_loaded + len(loaded),
            self._loaded_tokens + num_tokens,
        )
        return len(loaded), num_tokens

    def _insert(
        self, chain: Sequence[Chunk], namespace: str, *, counts_hits: bool
    ) -> ChainNode | None:
        """Cache the chain, or its promoted run.
        A later turn counts no hits on its own history, as in the server."""
        promoted_len = self._table.promoted_run(
            (chunk.id for chunk in chain), self._settings.threshold
        )
        if self._settings.admission == "promoted":
            chain = chain[:promoted_len]
        held = [] if counts_hits else self._held(chain, namespace)
        if not held:
            return self._tree.insert(
                namespace, chain, rank=_RANK, tier=Tier.DEVICE, promoted_len=promoted_len
            )
        self._tree.mark_promoted(
            namespace, (chunk.id for chunk in chain), promoted_len=promoted_len
        )
        rest, rest_promoted_len = chain[len(held) :], max(0, promoted_len - len(held))
        return self._tree.extend(
            held[-1].chain, rest, rank=_RANK, tier=Tier.DEVICE, promoted_len=rest_promoted_len
        )

    def _offload(self, host: HostTier, leaf: ChainNode, history: _History | None) -> None:
        """Copy what is worth it of the chain that ends in `leaf`. `history`: of a later turn."""
        for gone in host.offload(leaf.path(), is_later_turn=history is not None):
            if gone.tier(_RANK) is Tier.HOST:
                self._tree.evict(gone.chain, rank=_RANK)

    def _make_room(self, leaf: ChainNode | None) -> None:
        """Evict from the device until it has its size, after the insertion of a chain that ends in
        `leaf`."""
        # The server makes room before it inserts: what the request uses is as old as what has left
        # for it, and stays, unless it does not fit alone.
        self._evict_what_is_over()
        if leaf is not None:
            self._queue.push(leaf)
            self._evict_what_is_over()

    def _evict_what_is_over(self) -> None:
        tree, queue = self._tree, self._queue
        while self._is_over() and (victim := queue.pop()) is not None:
            parent = victim.parent
            queue.evicted(victim, tree.clock - 1)
            self.num_evicted += 1
            if self._host is not None and victim in self._host:
                tree.move(victim.chain, rank=_RANK, tier=Tier.HOST)
            else:
                tree.evict(victim.chain, rank=_RANK)
            if parent is not None and parent.parent is not None:
                queue.push(parent)

    def _held(self, chain: Iterable[Chunk], namespace: str) -> Sequence[ChainNode]:
        return self._tree.match(namespace, (chunk.id for chunk in chain))

    def _is_over(self) -> bool:
        max_nodes, max_tokens = self._settings.capacity, self._settings.capacity_tokens
        num_nodes, num_tokens = self._tree.holdings.held(_RANK, Tier.DEVICE)
        return (max_nodes is not None and num_nodes > max_nodes) or (
            max_tokens is not None and num_tokens > max_tokens
        )

    def _is_device_leaf(self, node: ChainNode) -> bool:
        if self._host is None:
            return node.children is None
        return is_device_leaf(node, _RANK)


def _in_pages(chain: tuple[Chunk, ...], page_size: int, padded: bool) -> tuple[Chunk, ...]:
    """The chunks with their slots in place of their tokens."""
    if page_size == 1:
        return chain
    if padded:
        return tuple(Chunk(each.id, -(-each.num_tokens // page_size) * page_size) for each in chain)
    end, slots = 0, list[Chunk]()
    for chunk in chain:
        start, end = end, end + chunk.num_tokens
        slots.append(Chunk(chunk.id, end - end % page_size - (start - start % page_size)))
    return tuple(slots)


def _tokens(chunks: Iterable[Chunk]) -> int:
    return sum(chunk.num_tokens for chunk in chunks)
