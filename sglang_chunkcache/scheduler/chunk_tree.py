"""SGLang's `RadixCache` with one node per chunk, and what the front knows of it. It owns KV slots,
decides no order, and knows no slower tier.

    root ── head tokens ── C1 ── C2 ── question ── answer   chunk nodes: `chunk`, `chain`,
                                                            `promoted`
                            └─── C3 ── question             token nodes: as in SGLang

Invariants in addition to SGLang's own:
- A node of ours is one segment of its key: a chunk, or tokens between chunks.
- No inserted key ends inside a chunk. Otherwise two chunks that begin alike would give one slot two
  owners.
- What is booked is what the tree holds: chains in `log`, sources in `copies`, the counts.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams, InsertResult
from sglang.srt.mem_cache.evict_policy import EvictionStrategy
from sglang.srt.mem_cache.radix_cache import TreeNode

from radix_ext import ChunkId, Tier, fused_chunk, text_before
from radix_ext.sources import ChunkCopies
from sglang_chunkcache import compat
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.scheduler.chunk_events import ChunkEvents
from sglang_chunkcache.scheduler.chunk_key import ChunkKey
from sglang_chunkcache.scheduler.event_log import EventLog
from sglang_chunkcache.scheduler.eviction import PromotedFirst, ReusedLonger
from sglang_chunkcache.scheduler.node import HostNode, facts, identity_of, paths, up_from
from sglang_chunkcache.scheduler.waiting import WaitingLine, unranked
from sglang_chunkcache.wire.events import Evicted, Inserted, Moved
from sglang_chunkcache.wire.spans import RequestSpans

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams

MAX_UNREAD_EVENTS = 65_536
"""Kept for the front, 150 bytes each; a rank that is not asked for longer tells all nodes again."""


class ChunkTree(compat.Tree):  # type: ignore[misc]
    """CRAFT 4.1's GPU-local chunk-prefix tree."""

    def __init__(
        self,
        params: CacheInitParams,
        config: ChunkCacheConfig,
        rank_of: Callable[[Req], float] = unranked,
    ) -> None:
        """`rank_of`: as of `WaitingLine`. Raises ValueError for speculative decoding."""
        if params.is_eagle:
            raise ValueError(
                "the chunk cache does not support speculative decoding (--speculative-algorithm)"
            )
        self.log = EventLog(MAX_UNREAD_EVENTS)
        self.copies: ChunkCopies = ChunkCopies(identity_of, facts, self._credit)
        """Chunks whose computed KV may be moved to another place."""
        self.clock = 0  # requests so far
        self.line = WaitingLine(self.num_idle, rank_of)
        self.num_inserted_chunks = self.num_evicted_chunks = 0
        self.num_chunk_tokens = self.num_promoted = 0
        super().__init__(params)
        self.kv_events: ChunkEvents = ChunkEvents(self.kv_events)
        self.eviction_strategy: EvictionStrategy
        if config.eviction == "promoted":
            self.eviction_strategy = PromotedFirst(self.eviction_strategy)
        elif config.eviction == "reused":
            self.eviction_strategy = ReusedLonger(self.eviction_strategy)

    def num_idle(self) -> int:
        """Slots that are free or evictable."""
        return int(self.token_to_kv_pool_allocator.available_size() + self.evictable_size())

    def num_missing(self, num_slots: int, num_rows: int) -> int:
        """How many are neither free nor evictable; below 1: all can be had. Slots have their own
        rows, except with one copy of a chunk (one_copy.py)."""
        return num_slots - self.num_idle()

    def fits_alone(self, held: Iterable[TreeNode], num_slots: int, num_rows: int) -> bool:
        """Whether so many can be had once nothing else runs than who holds these nodes."""
        num_held = sum(len(node.key) for node in paths(held))
        return num_slots + num_held <= int(self.token_to_kv_pool_allocator.size)

    def make_room(self, num_slots: int, num_rows: int | None = None) -> None:
        """Evict until so many slots, and rows, are free, or nothing is left to evict."""
        if (missing := num_slots - self.token_to_kv_pool_allocator.available_size()) > 0:
            self.evict(EvictParams(num_tokens=missing))

    def insert(self, params: InsertParams) -> InsertResult:
        """SGLang's, of plain keys."""
        result = super().insert(params)
        self.touch(result.last_device_node)
        return result

    def insert_segments(
        self,
        key: ChunkKey,
        values: torch.Tensor,
        head: str,
        priority: int | None,
        inserted_len: int,
        borders: tuple[int, ...] = (),
        *,
        moved: Collection[int] = (),
    ) -> tuple[int, list[TreeNode]]:
        """Insert `key`, a node per segment. Returns (slots already there, last node of each).
        `head` names the tokens before the first chunk. What ends within `inserted_len` counts no
        hit. `moved`: where chunks begin whose KV was computed at another place."""
        node, matched, path, page = self.root_node, 0, [], self.page_size
        before: list[ChunkId] = []
        spans = zip(key.spans, text_before(head, key.spans, key.token_ids), strict=True)
        for start, end, chunk in key.segments(*borders):
            first, is_hit = start - start % page, end > inserted_len
            slots = values[first : end - end % page]
            found, node = compat.add_segment(
                self, node, key.part(start, end), slots, priority or 0, is_hit=is_hit
            )
            if matched == first:
                matched += found
            path.append(node)
            if chunk is None:
                continue
            span, text = next(spans)
            if (known := facts(node)).chunk is None:  # a new node
                known.chunk, known.start, known.is_moved = chunk, span.start, span.start in moved
                known.head, known.prefix = text, tuple(before)
                if not known.is_moved:
                    self.copies.add(node)
            before.append(chunk)
        self.touch(node)
        return matched, path

    def path(self, key: ChunkKey) -> list[TreeNode]:
        """The nodes that the key goes through, as far as it has them whole. A look, no use."""
        node, found, start = self.root_node, list[TreeNode](), 0
        while start < key.num_tokens:
            rest = key.part(start, key.num_tokens)
            node = node.children.get(rest.child_key())
            if node is None or node.key.match(rest) < len(node.key):
                break
            found.append(node)
            start += node.key.num_tokens
        return found

    def touch(self, node: TreeNode | None) -> None:
        """This node and all above it are used now."""
        while node is not None:
            facts(node).used = self.clock
            node = node.parent

    def reset(self) -> None:
        """Empty tree, new epoch: the front drops this rank's mirror with the next answer."""
        super().reset()
        self.log.restart()
        self.num_chunk_tokens = self.num_promoted = 0
        self.copies.clear()

    def mark(
        self,
        area: Sequence[TreeNode],
        spans: RequestSpans,
        copies: Sequence[HostNode | None],
        *,
        counts_hits: bool,
    ) -> None:
        """Give the chunk nodes of a prompt's first chunk area their place in the global tree and
        this request's promotion marks.

        Fused chunks have theirs below the exact chain they hang on, named by their recipe. Promoted
        or with hits they would push exact chains out of the pool (eval/LOG.md).

        Args:
            copies: in host memory, of the first of them.
            counts_hits: every exact chunk that was there before counts one.
        """
        parent = None
        for index, node in enumerate(area):
            known, fused = facts(node), node.key.fused
            promoted = fused is None and index < spans.promoted_len
            assert known.chunk is not None
            copy = copies[index] if index < len(copies) else None
            if known.chain is None and copy is not None:
                self.back_on_device(node, copy, spans.namespace, promoted=promoted)
            elif known.chain is None:
                chunk = known.chunk if fused is None else fused_chunk(fused.recipe, known.chunk)
                self._tell(
                    node, Inserted(chunk, chunk_len(node), parent, spans.namespace, promoted)
                )
                self.num_inserted_chunks += 1
            elif counts_hits and fused is None:
                known.hits += 1
            self.num_promoted += promoted - known.promoted
            known.promoted, parent = promoted, known.chain

    def back_on_device(
        self, node: TreeNode, host: HostNode, namespace: str, *, promoted: bool
    ) -> None:
        """The node has a place in the global tree, and is in host memory."""
        known, parent = facts(node), facts(node.parent).chain
        assert known.chunk is not None
        self._tell(node, Inserted(known.chunk, chunk_len(node), parent, namespace, promoted))
        known.host, known.hits, host.node, host.chain = host, host.hits, node, known.chain
        known.scores, known.outward, known.promoted = host.scores, host.outward, promoted
        self.num_promoted += promoted

    def _split_node(self, key: Any, child: TreeNode, split_len: int) -> TreeNode:
        node = super()._split_node(key, child, split_len)
        # SGLang splits a node that is being used, and counts both halves as used
        facts(node).used = facts(child).used = self.clock
        return node

    def _delete_leaf(self, node: TreeNode) -> None:
        if isinstance(self.eviction_strategy, ReusedLonger):
            self.eviction_strategy.evicted(node, self.clock)
        super()._delete_leaf(node)
        self.copies.drop(node)
        known = facts(node)
        if known.host is not None:
            known.host.node = None
        if known.chain is None:
            return
        self.num_chunk_tokens -= chunk_len(node)
        self.num_promoted -= known.promoted
        self.num_evicted_chunks += 1
        if known.host is not None:
            self.log.append(Moved(known.chain, Tier.HOST))
        else:
            self.log.append(Evicted(known.chain))

    def _tell(self, node: TreeNode, inserted: Inserted) -> None:
        facts(node).chain = inserted.chain
        self.num_chunk_tokens += inserted.num_tokens
        self.log.append(inserted)

    def _credit(self, node: TreeNode) -> None:
        """As a source; no hit, or sources would push exact chains out (eval/LOG.md)."""
        self.touch(node)
        now = time.monotonic()
        for above in up_from(node):
            above.last_access_time = now


def chunk_len(node: TreeNode) -> int:
    ((start, end, _),) = node.key.spans
    return int(end - start)


def area_of(path: Sequence[TreeNode], area_len: int) -> list[TreeNode]:
    """The chunk nodes of a prompt's first chunk area. What is fused for one question is not among
    them: no other request asks for it."""
    shared = itertools.takewhile(
        lambda node: node.key.fused is None or not node.key.fused.serves_one, path
    )
    return [node for node in shared if facts(node).chunk is not None][:area_len]
