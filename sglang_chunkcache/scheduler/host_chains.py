"""Exact chunk chains in host memory (CRAFT 4.1, 4.2): what has left the device is loaded, not
computed. The same tokens after the same tokens at the same position are a byte copy, so contract 1
stays as it is.

    root ── head tokens ── C1 ── C2         what is worth it is saved after a forward, C1 before C2
                            └─── C3         a chain leaves from its end, the least reused one first

Where a request's prefix on the device ends and goes on here, the rest is in the tree from its
admission on, as nodes like any others, and is copied with the next forward, layer by layer beside
it (layer_loads.py). SGLang sees a longer prefix: no promise, no lock. The two trees know each other
by `ChunkFacts.host` and `HostNode.node`. Decisions follow from requests, counts and costs that the
ranks agree on, never from clocks.

The nodes are variants of `index`, in which a moved chunk finds its KV, whatever precedes it. Other
variants of the index, which are in no chain, are captured (fusion/capture.py) into the same pool.

Invariants:
- A node's parent is here, too.
- What is held, since somebody reads or writes its slots, stays, and its slots are given to nobody
  else.
- `_loads` has the nodes of the tree whose slots hold nothing yet, and only between an admission and
  the next forward.
- `chain_key` names all tokens up to the node's end, with extra_key and cache_salt, by hashes of the
  tokens themselves.
- A node with a chain is known to the front as long as it is here or on the device.
"""

from __future__ import annotations

import itertools
import logging
from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, Protocol

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, MatchResult
from sglang.srt.mem_cache.radix_cache import TreeNode
from torch import Tensor

from radix_ext import ChainId, ChunkId
from radix_ext.cfo import Prefix
from radix_ext.costs import EXPLORATION_PERIOD, Costs, Phase, Work, extend_work
from radix_ext.offloading import worth_offloading
from radix_ext.variant_index import VariantIndex
from radix_ext.variants import Identity, Variant
from sglang_chunkcache.rank_metrics import RankMetrics
from sglang_chunkcache.scheduler.chunk_key import ChunkKey
from sglang_chunkcache.scheduler.host_slots import HostSlots, SlotBook
from sglang_chunkcache.scheduler.layer_loads import Clock as LoadClock
from sglang_chunkcache.scheduler.layer_loads import copied_ahead
from sglang_chunkcache.scheduler.node import ChunkIdentity, HostNode, facts, joined
from sglang_chunkcache.scheduler.pricing import prefill_work
from sglang_chunkcache.wire.spans import RequestSpans

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch

logger = logging.getLogger(__name__)

KEY_BYTES = 16
"""Nobody finds two chains of one key."""
MAX_SAVED_TOKENS = 512
"""After one forward: the answers under way wait for them."""
MAX_WAITING = 1024
"""Nodes that wait to be saved. More are not taken: they come again with their next hit."""


class Tree(Protocol):
    """What `ChunkRadixCache` does."""

    clock: int
    device: Any
    root_node: TreeNode
    token_to_kv_pool_allocator: Any

    def inc_lock_ref(self, node: TreeNode) -> Any: ...
    def dec_lock_ref(self, node: TreeNode) -> Any: ...
    def evictable_size(self) -> int: ...
    def evict(self, params: EvictParams) -> Any: ...
    def insert_segments(
        self,
        key: ChunkKey,
        values: Tensor,
        head: str,
        priority: int | None,
        chunked: bool,
        *,
        are_filled: bool,
    ) -> tuple[int, list[TreeNode]]: ...
    def path(self, key: ChunkKey) -> list[TreeNode]: ...
    def fill(self, node: TreeNode) -> None: ...
    def back_on_device(
        self, node: TreeNode, host: HostNode, namespace: str, *, promoted: bool
    ) -> None: ...
    def on_host(
        self, chunk: ChunkId, num_tokens: int, parent: ChainId | None, namespace: str
    ) -> ChainId: ...
    def off_host(self, chain: ChainId) -> None: ...


class Slots(Protocol):
    """What `HostPool` does."""

    num_slots: int
    num_layers: int
    token_bytes: int
    is_layered: bool

    @property
    def num_free(self) -> int: ...
    def follow(self) -> None: ...
    def alloc(self, num_tokens: int) -> Tensor | None: ...
    def free(self, slots: Tensor) -> None: ...
    def fence(self) -> Callable[[], None]: ...
    def read(self, slots: Tensor) -> tuple[Tensor, Tensor]: ...
    def write(self, slots: Tensor, keys: Tensor, values: Tensor) -> None: ...
    def save(self, device_slots: Tensor, slots: Tensor) -> None: ...
    def prepare(self, slots: Tensor) -> Tensor: ...
    def load(
        self, slots: Tensor, device_slots: Tensor, *, num_ahead: int, clock: LoadClock
    ) -> None: ...
    def copy(self, slots: Tensor, device_slots: Tensor, layers: range) -> None: ...
    def finish(self) -> bool: ...
    def close(self) -> None: ...


class Clock(LoadClock, Protocol):
    """What `Pricing` does."""

    @property
    def agreed(self) -> Costs: ...
    def time_extend(self, batch: ScheduleBatch) -> AbstractContextManager[Any]: ...
    def refresh(self) -> None: ...


@dataclass
class HostCounts:
    """Since the start."""

    saved_tokens: int = 0
    loaded_tokens: int = 0
    evicted_tokens: int = 0
    loads: int = 0
    skipped: int = 0
    """Loads that were estimated to take longer than computing, and not made,
    but for one in `EXPLORATION_PERIOD`."""
    no_room: int = 0
    """Loads that were cut short, or not made, because the device had no room."""
    missed: int = 0
    """Nodes that left the device before they were saved, or did not fit, or whose copy failed."""
    failed: int = 0
    """Copies that raised, in either direction, and loads that could not be prepared."""
    layers_ahead: int = 0
    """Layers of the last load that were copied before its forward began; the rest was beside it."""


class HostChains:
    """Of one rank's `cache`.

    Args:
        index: empty, as large as the pool.
        keeps: False: no chain is kept here, and the pool is for captured variants alone.
        num_ranks: of a tensor-parallel group. More than one: a copy that fails is raised, since the
            others' may not have.
        metrics: told what `stats` says, with it and when it is due while there are requests. None:
            nobody is.
    """

    def __init__(
        self,
        cache: Tree,
        pool: Slots,
        pricing: Clock,
        index: VariantIndex,
        *,
        keeps: bool = True,
        num_ranks: int = 1,
        metrics: RankMetrics | None = None,
    ) -> None:
        self.cache, self.pool, self.pricing, self.index = cache, pool, pricing, index
        self._keeps, self._num_ranks, self._metrics = keeps, num_ranks, metrics
        self.counts = HostCounts()
        self._nodes: dict[bytes, HostNode] = {}
        self._num_below = Counter[bytes]()
        self._slots = SlotBook()
        index.held.stay_if(self._stays)
        index.watchers.append(self._changed)
        self._waiting: OrderedDict[TreeNode, None] = OrderedDict()
        self._was_put_off = False
        self._loads: dict[TreeNode, Tensor] = {}
        """Node of the device -> the slots that its KV is copied from with the next forward,
        as `Slots.prepare` gives them."""
        self._being_loaded: list[HostSlots] = []
        """Held until that forward is queued."""
        self.saved: Callable[[HostNode, TreeNode], None] = lambda host, node: None
        """Told of each chunk that was copied here, with all above it here, too."""

    # A request's life

    def load(
        self, key: ChunkKey, spans: RequestSpans, result: MatchResult, priority: int
    ) -> MatchResult:
        """Extend an exact match, at a request's admission, by what is here and not on the device.
        The new nodes are in the tree, unlocked, and their KV is there for whoever reads it by the
        pool's getters in the next forward."""
        cache, allocator = self.cache, self.cache.token_to_kv_pool_allocator
        start, last = len(result.device_indices), result.last_device_node
        found = list(self._after(key, spans.area_len, start))
        if not found or not self._pays(start, start + _num_tokens(found)):
            return result
        num_asked = len(found)
        cache.inc_lock_ref(last)
        try:
            room = allocator.available_size() + cache.evictable_size()
            while _num_tokens(found) > room:
                found.pop()
            self.counts.no_room += len(found) < num_asked
            num_tokens = _num_tokens(found)
            if (missing := num_tokens - allocator.available_size()) > 0:
                cache.evict(EvictParams(num_tokens=missing))
            device_slots = allocator.alloc(num_tokens) if found else None
        finally:
            cache.dec_lock_ref(last)
        if device_slots is None:
            return result
        try:
            sources = self.pool.prepare(torch.cat([slots for _, slots in found]))
        except Exception as error:
            allocator.free(device_slots)
            self._copy_failed(error)
            return result
        row = torch.cat([result.device_indices, device_slots])
        _, path = cache.insert_segments(
            key[: len(row)], row, spans.namespace, priority, True, are_filled=False
        )
        parts = torch.split(sources, [len(slots) for _, slots in found])
        for node, part in zip(path[-len(found) :], parts, strict=True):
            cache.fill(node)  # what is above may be promised to another request, and not filled yet
            self._loads[node] = part
        for host, _ in found:
            host.blob.hold()
            self._being_loaded.append(host.blob)
        chunks = [node for node in path if facts(node).chunk is not None]
        for index, (host, node) in enumerate(zip(self.of(chunks), chunks, strict=True)):
            if facts(node).chain is None:  # the new ones, and what is above and not filled yet
                cache.back_on_device(
                    node, host, spans.namespace, promoted=index < spans.promoted_len
                )
        self.counts.loads += 1
        self.counts.loaded_tokens += num_tokens
        return result._replace(
            device_indices=row,
            last_device_node=path[-1],
            last_host_node=path[-1],
            best_match_node=path[-1],
        )

    def before(self, batch: ScheduleBatch) -> None:
        """A forward comes next: copy what it may read, as much of it beside as costs no wait
        (Cache-Craft, eq. 16)."""
        loads, self._loads = self._loads, {}
        if not loads:
            return
        slots, device_slots = joined(list(loads.values())), joined([node.value for node in loads])
        self.counts.layers_ahead = self._num_ahead(len(slots), batch)
        self.pool.load(slots, device_slots, num_ahead=self.counts.layers_ahead, clock=self.pricing)

    def loaded(self) -> None:
        """The forward is queued: what comes behind it finds all that was loaded."""
        self.counts.failed += self.pool.finish()
        self.pool.follow()
        self._let_go()

    def num_loadable(self, key: ChunkKey, spans: RequestSpans, start: int) -> int:
        """Tokens that `load` would find behind `start`."""
        return _num_tokens(list(self._after(key, spans.area_len, start)))

    def of(self, chunks: Sequence[TreeNode]) -> list[HostNode]:
        """The copies of a prompt's nodes, from its first chunk on, as far as they are here."""
        found: list[HostNode] = []
        host = self._nodes.get(self._head(chunks[0])[0]) if self._nodes and chunks else None
        for node in chunks:
            host = (
                self._nodes.get(below(host.chain_key, facts(node).chunk))
                if host and node.key.fused is None
                else None
            )
            if host is None or not host.is_here:
                break
            found.append(host)
        return found

    def offer(self, chunks: Sequence[TreeNode]) -> None:
        """A request has used these nodes, from its first chunk on:
        note those that are worth keeping.

        The end first: of nodes that were used alike the index loses the one that was used least
        recently."""
        for node in reversed(chunks):
            if (host := facts(node).host) is not None:
                self._count_hits(host, facts(node).hits)
        if not self._keeps:
            return
        for node in chunks:
            known = facts(node)
            is_worth_it = worth_offloading("either", hits=known.hits, promoted=known.promoted)
            if node.key.fused is not None or not is_worth_it:
                return
            if known.host is None and len(self._waiting) < MAX_WAITING:
                self._waiting[node] = None

    def takes(self, node: TreeNode) -> bool:
        """Whether the node is here with its chain, or is about to be."""
        return facts(node).host is not None or node in self._waiting

    @contextmanager
    def watch(self, batch: ScheduleBatch) -> Iterator[None]:
        """Learn what the batch's extend takes, where nobody else does."""
        # a decoding batch still has the lengths of its prefill
        if not batch.forward_mode.is_extend():
            yield
            return
        with self.pricing.time_extend(batch):
            yield
        self.pricing.refresh()

    def after(self, *, first_tokens_wait: bool) -> None:
        """Save some of what waits: after decoding, and after a prefill only if the forward before
        was one, too."""
        self._was_put_off = first_tokens_wait and not self._was_put_off
        num_saved = 0
        while not self._was_put_off and self._waiting and num_saved < MAX_SAVED_TOKENS:
            num_saved += self._save(self._waiting.popitem(last=False)[0])
        if self._metrics is not None and self._metrics.is_due:
            self.stats()

    def left(self, node: TreeNode) -> None:
        """The node leaves the device: its slots may be given to others before the next forward."""
        self._loads.pop(node, None)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        """What was `lower` begins with `upper` now."""
        if (part := self._loads.get(lower)) is not None:
            self._loads[upper], self._loads[lower] = part[: len(upper.key)], part[len(upper.key) :]

    def off_device(self, node: TreeNode, host: HostNode) -> None:
        """The node leaves the device, and is here."""
        host.node = None

    def reset(self) -> None:
        """No chain is here, as none is in the tree. Captured variants stay."""
        self._loads.clear()
        self._let_go()
        self._waiting.clear()
        nodes, self._nodes = list(self._nodes.values()), {}
        self._num_below.clear()
        for host in nodes:
            host.node = host.chain = None  # the front drops all by itself
            self._remove(host)

    def room(self, num_tokens: int) -> HostSlots | None:
        """Slots that hold nothing yet; what is to leave next leaves for them. None: there are not
        so many, beside what is held or reserved."""
        num_kept = self._slots.num_held + self.index.held.reserved_bytes // self.pool.token_bytes
        # else all others would leave in vain
        if self.pool.num_free < num_tokens > self.pool.num_slots - num_kept:
            return None
        while self.pool.num_free < num_tokens:
            before = self.pool.num_free
            if not self.index.evict():
                return None
            self.counts.evicted_tokens += self.pool.num_free - before
        slots = self.pool.alloc(num_tokens)
        if slots is None:
            return None
        return HostSlots(self.pool, slots, self._slots)

    # The storage's, below

    def get(self, chain_key: bytes) -> HostNode | None:
        """The node of that key, or what is to become it."""
        return self._nodes.get(chain_key)

    def claim(
        self,
        chain_key: bytes,
        above: bytes | None,
        num_tokens: int,
        identity: ChunkIdentity,
        head: str,
        prefix: Prefix,
    ) -> HostNode | None:
        """A node whose slots are held, of which `came` or `drop` will be told. Without tokens it is
        here at once. None: it does not fit, or what is above it is not here."""
        parent = None if above is None else self._nodes.get(above)
        if above is not None and parent is None:
            return None
        host = self._new(chain_key, parent, num_tokens, identity, head, prefix)
        if host is None:
            return None
        if num_tokens:
            host.is_here = False
            host.blob.hold()
        elif not self._keep(host):
            return None
        return host

    def came(self, host: HostNode, namespace: str, node: TreeNode | None) -> bool:
        """It holds its KV. `node` is the same on the device. False: there is no room for it."""
        host.is_here, host.hits, host.num_uses = True, 1, 1
        if not self._keep(host):
            return False
        if not host.identity.chunk:
            return True
        if node is not None and facts(node).chain is not None:
            facts(node).host, host.chain, host.node = host, facts(node).chain, node
            self.index.held.learn(host, facts(node).scores, facts(node).outward)
        else:
            above = host.parent.chain if host.parent is not None else None
            host.chain = self.cache.on_host(
                host.identity.chunk, host.blob.num_tokens, above, namespace
            )
        return True

    def released(self, host: HostNode) -> bool:
        """No other thread reads or writes its slots any more. Whether it is still here."""
        host.blob.let_go()
        return self._nodes.get(host.chain_key) is host

    def drop(self, host: HostNode) -> None:
        """Take it out, with all that is below it."""
        for below_it in (
            [each for each in self._nodes.values() if each.parent is host]
            if self._num_below[host.chain_key]
            else []
        ):
            self.drop(below_it)
        self._remove(host)

    # Operators

    @property
    def worth(self) -> float:
        """Of a token here, if one on the device is worth 1: what a load saves of computing it."""
        load, extend = (
            self.pricing.agreed[phase].seconds(Work(0, 1000))
            for phase in (Phase.LOAD, Phase.EXTEND)
        )
        return max(0.0, 1 - load / extend) if extend > 0 else 1.0

    def stats(self) -> dict[str, Any]:
        """For `/chunkcache/stats`; tokens, unless they say bytes."""
        costs = self.pricing.agreed
        num_held = self.pool.num_slots - self.pool.num_free
        found = {
            "nodes": len(self._nodes),
            "tokens": num_held,
            "bytes": num_held * self.pool.token_bytes,
            "max_bytes": self.pool.num_slots * self.pool.token_bytes,
            **asdict(self.counts),
            "waiting": len(self._waiting),
            "ms_per_1000_tokens": {
                phase.value: round(1e3 * costs[phase].seconds(Work(1, 1000)), 3)
                for phase in (Phase.LOAD, Phase.EXTEND)
            },
        }
        if self._metrics is not None:
            self._metrics.show(found)
        return found

    def violations(self) -> Iterator[str]:
        """What is wrong, for tests and idle moments. Walks all nodes."""
        below = Counter(
            host.parent.chain_key for host in self._nodes.values() if host.parent is not None
        )
        if self._num_below != below:
            yield "host nodes have other children than were booked"
        for key, host in self._nodes.items():
            if host.chain_key != key or (
                host.parent is not None
                and self._nodes.get(host.parent.chain_key) is not host.parent
            ):
                yield f"host node {key.hex()} has another chain key, or no parent"
            if host.chain is not None and not host.is_here:
                yield f"host node {key.hex()} is known before it is here"
            if host.node is not None and facts(host.node).host is not host:
                yield f"host node {key.hex()} and its node on the device do not know each other"
            if (self.index.get(host.identity, host.head, host.prefix) is host) != host.is_here:
                yield f"host node {key.hex()} is in the index although it is not here, or not"
        blobs = {each.blob for each in self.index.held}
        blobs |= {host.blob for host in self._nodes.values()}
        if not blobs <= self._slots.out or any(blob.is_given_back for blob in blobs):
            yield "slots on the host are read that were given back"
        if not all(blob.is_held for blob in self._slots.out if blob.is_given_back):
            yield "slots on the host are kept for nobody"
        num_booked = sum(blob.num_tokens for blob in self._slots.out)
        num_held = sum(blob.num_tokens for blob in self._slots.out if blob.is_held)
        if num_held != self._slots.num_held:
            yield f"{num_held} slots on the host are held, {self._slots.num_held} were counted"
        for node, part in self._loads.items():
            if (
                len(part) != len(node.value)
                or node.parent.children.get(node.key.child_key()) is not node
            ):
                yield f"node {node.id} is to be loaded into other slots than its own"
        if num_booked != (num_out := self.pool.num_slots - self.pool.num_free):
            yield f"{num_booked} slots on the host are booked, {num_out} are given out"

    @property
    def chains_not_on_device(self) -> list[ChainId]:
        """Chains that are here alone."""
        return [
            host.chain
            for host in self._nodes.values()
            if host.chain is not None and host.node is None
        ]

    # Private, in order of use

    def _after(self, key: ChunkKey, area_len: int, start: int) -> Iterator[tuple[HostNode, Tensor]]:
        """(node, its slots from `start` on) of what is here of the key's first chunk area and
        before it, without a gap."""
        area = key.spans[:area_len]
        if not self._nodes or not area or start >= area[-1].end:
            return
        head_len = area[0].start
        if start > head_len and all(span.start != start for span in area):
            return
        host = self._nodes.get(root(key.token_ids[:head_len], key.extra_key, key.cache_salt))
        if host is None or not host.is_here:
            return
        if start < head_len:
            yield host, host.blob.slots[start:]
        for span in area:
            host = self._nodes.get(below(host.chain_key, span.chunk))
            if host is None or not host.is_here:
                return
            if span.start >= start:
                yield host, host.blob.slots

    def _pays(self, start: int, end: int) -> bool:
        """Whether a load is estimated to take no longer than computing.
        What was never observed is tried."""
        load, extend = self.pricing.agreed[Phase.LOAD], self.pricing.agreed[Phase.EXTEND]
        work = extend_work(start, end)._replace(calls=0)  # there is an extend either way
        if (
            not any(load)
            or not (extend.each or extend.attended)
            or load.seconds(Work(1, end - start)) <= extend.seconds(work)
        ):
            return True
        self.counts.skipped += 1
        return self.counts.skipped % EXPLORATION_PERIOD == 0

    def _num_ahead(self, num_tokens: int, batch: ScheduleBatch) -> int:
        """Layers to copy before the forward: all of them where nothing would wait for the
        others."""
        # else attention may leave the cache alone
        is_asked = batch.forward_mode.is_extend() and any(batch.prefix_lens)
        if not (is_asked and self.pool.is_layered):
            return self.pool.num_layers
        load = self.pricing.agreed[Phase.LOAD].seconds(Work(1, num_tokens))
        compute = self.pricing.agreed[Phase.EXTEND].seconds(prefill_work(batch))
        return copied_ahead(self.pool.num_layers, load=load, compute=compute)

    def _let_go(self) -> None:
        """Nothing is being loaded any more."""
        loaded, self._being_loaded = self._being_loaded, []
        for blob in loaded:
            blob.let_go()

    def _save(self, node: TreeNode) -> int:
        """How many tokens were copied."""
        known = facts(node)
        if known.host is not None:
            return 0
        before = self.counts.saved_tokens
        parent = (
            self._parent(node) if node.parent.children.get(node.key.child_key()) is node else None
        )
        if parent is not None:
            assert known.chunk is not None
            key = below(parent.chain_key, known.chunk)
            identity = ChunkIdentity(known.chunk, node.key.extra_key, node.key.cache_salt)
            host = self._nodes.get(key) or self._add(
                key, parent, node.value, identity, known.head, known.prefix
            )
            known.host = host if host is not None and host.is_here else None
        if (host := known.host) is None:
            self.counts.missed += 1
        else:
            host.chain, host.node = known.chain, node
            self._count_hits(host, known.hits)
            self.index.held.learn(host, known.scores, known.outward)
            self.saved(host, node)
        return self.counts.saved_tokens - before

    def _parent(self, node: TreeNode) -> HostNode | None:
        """What is here of all before the node; the tokens before a first chunk are saved if need
        be."""
        if facts(node.parent).chunk is not None:
            return facts(node.parent).host
        chain_key, above = self._head(node)
        host = self._nodes.get(chain_key)
        if host is None:
            nothing = torch.empty((0,), dtype=torch.int64, device=self.cache.device)
            slots = joined([nothing, *(each.value for each in above)])
            identity = ChunkIdentity(ChunkId(""), node.key.extra_key, node.key.cache_salt)
            host = self._add(chain_key, None, slots, identity, chain_key.hex(), ())
        return host if host is not None and host.is_here else None

    def _head(self, node: TreeNode) -> tuple[bytes, list[TreeNode]]:
        """(chain key, nodes on the device) of the tokens before a first chunk."""
        above: list[TreeNode] = []
        key, node = node.key, node.parent
        while node is not self.cache.root_node:
            above.insert(0, node)
            node = node.parent
        token_ids = array("q", itertools.chain.from_iterable(each.key.token_ids for each in above))
        return root(token_ids, key.extra_key, key.cache_salt), above

    def _add(
        self,
        chain_key: bytes,
        parent: HostNode | None,
        device_slots: Tensor,
        identity: ChunkIdentity,
        head: str,
        prefix: Prefix,
    ) -> HostNode | None:
        """A new node with a copy of the slots' KV. None: it does not fit, or the copy failed."""
        host = self._new(chain_key, parent, len(device_slots), identity, head, prefix)
        if host is None:
            return None
        try:
            self.pool.save(device_slots, host.blob.slots)
        except Exception as error:
            self.drop(host)
            self._copy_failed(error)
            return None
        if not self._keep(host):
            return None
        self.counts.saved_tokens += host.blob.num_tokens
        return host

    def _new(
        self,
        chain_key: bytes,
        parent: HostNode | None,
        num_tokens: int,
        identity: ChunkIdentity,
        head: str,
        prefix: Prefix,
    ) -> HostNode | None:
        """With slots that hold nothing yet, in no index. None: it does not fit, or another chain of
        the same name is here."""
        old = self.index.get(identity, head, prefix)
        if old is not None and old.is_exact:
            return None
        if parent is not None:
            self._num_below[parent.chain_key] += 1  # it does not leave for its child
        blob = self.room(num_tokens)
        if blob is None:
            self._lost_child(parent)
            return None
        start = 0 if parent is None else parent.start + parent.blob.num_tokens
        host = self._nodes[chain_key] = HostNode(
            prefix=prefix,
            blob=blob,
            head=head,
            start=start,
            identity=identity,
            chain_key=chain_key,
            parent=parent,
        )
        return host

    def _keep(self, host: HostNode) -> bool:
        """It holds its KV. False: there is no room for it, and it is dropped."""
        is_kept = self.index.insert(host.identity, host)
        if not is_kept:
            self.drop(host)
        return is_kept

    def _count_hits(self, host: HostNode, hits: int) -> None:
        """It was used on the device: so many requests have found it."""
        host.num_uses += max(0, hits - host.hits)
        host.hits = hits
        self.index.held.touch(host)
        # No request hits the tokens before a first chunk, which have been used as often.
        if host.parent is not None and not host.parent.identity.chunk:
            host.parent.num_uses = max(host.parent.num_uses, host.num_uses)
            self.index.held.touch(host.parent)

    def _remove(self, host: HostNode) -> None:
        """A node without any below it."""
        if self.index.get(host.identity, host.head, host.prefix) is host:
            self.index.drop(host)
        else:
            self._left(host)
            host.blob.give_back()

    def _stays(self, variant: Variant) -> bool:
        is_inner = isinstance(variant, HostNode) and self._num_below[variant.chain_key] > 0
        is_held: bool = variant.blob.is_held
        return is_held or is_inner

    def _changed(self, identity: Identity, variant: Variant, is_here: bool) -> None:
        """As `VariantIndex.watchers`."""
        if not is_here:
            if isinstance(variant, HostNode):
                self._left(variant)
            variant.blob.give_back()

    def _left(self, host: HostNode) -> None:
        self._nodes.pop(host.chain_key, None)
        self._lost_child(host.parent)
        if host.node is not None:
            facts(host.node).host = None
        elif host.chain is not None:
            self.cache.off_host(host.chain)

    def _lost_child(self, parent: HostNode | None) -> None:
        if parent is None or not self._num_below[parent.chain_key]:
            return
        self._num_below[parent.chain_key] -= 1
        if not self._num_below[parent.chain_key]:
            del self._num_below[parent.chain_key]

    def _copy_failed(self, error: Exception) -> None:
        if self._num_ranks > 1:
            raise error
        if not self.counts.failed:
            logger.warning(
                "chunk cache: a copy from or to host memory failed, what it was for is computed"
                " (further ones are counted)",
                exc_info=error,
            )
        self.counts.failed += 1


def _num_tokens(found: Sequence[tuple[HostNode, Tensor]]) -> int:
    return sum(len(slots) for _, slots in found)


def root(token_ids: array[int], extra_key: str | None, cache_salt: str | None) -> bytes:
    """The chain key of the tokens before a first chunk. They may be none."""
    tenant = "".join(
        "-" if each is None else f"{len(each)}:{each}" for each in (extra_key, cache_salt)
    )
    data = tenant.encode("utf-8", "surrogatepass") + b"\0" + token_ids.tobytes()
    return blake2b(data, digest_size=KEY_BYTES, person=b"head").digest()


def below(chain_key: bytes, chunk: ChunkId | None) -> bytes:
    """The chain key of a chunk that follows `chain_key`."""
    assert chunk is not None
    return blake2b(chain_key + chunk.encode(), digest_size=KEY_BYTES, person=b"chunk").digest()
