"""Exact chains that come back from host memory (CRAFT 4.2, Cache-Craft 3.5): the same tokens after
the same tokens at the same position are a byte copy.

Where a request's prefix on the device ends and goes on in host memory, the rest is in the tree from
its admission on, as nodes like any others, and is copied with the next forward, layer by layer
beside it (layer_loads.py). SGLang sees a longer prefix: no promise, no lock.

Invariant: `_loads` has the nodes of the tree whose slots hold nothing yet, and only between an
admission and the next forward.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING

import torch
from sglang.srt.mem_cache.base_prefix_cache import MatchResult

from radix_ext.costs import Phase, Work, explores
from radix_ext.loading import loading_pays, num_fitting
from sglang_chunkcache import compat
from sglang_chunkcache.scheduler.host_nodes import Found, HostCounts, HostNodes
from sglang_chunkcache.scheduler.layer_loads import copied_ahead
from sglang_chunkcache.scheduler.node import facts, joined, state, up_from
from sglang_chunkcache.scheduler.pricing import Pricing, prefill_work
from sglang_chunkcache.scheduler.stages import LOAD, traced

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.radix_cache import TreeNode
    from torch import Tensor

    from sglang_chunkcache.scheduler.chunk_key import ChunkKey
    from sglang_chunkcache.scheduler.chunk_tree import ChunkTree
    from sglang_chunkcache.scheduler.node import HostNode
    from sglang_chunkcache.wire.spans import RequestSpans


class LoadBack:
    """Of one rank. `copy_failed` is called with what a copy raised."""

    def __init__(
        self,
        tree: ChunkTree,
        nodes: HostNodes,
        pricing: Pricing,
        counts: HostCounts,
        copy_failed: Callable[[Exception], None],
    ) -> None:
        self._tree, self._nodes, self._pool = tree, nodes, nodes.pool
        self._pricing, self._counts, self._copy_failed = pricing, counts, copy_failed
        self._loads: dict[TreeNode, Tensor] = {}
        """Node of the device -> the slots that its KV is copied from with the next forward,
        as `HostPool.prepare` gives them."""
        self._filled: list[tuple[Tensor, Tensor]] = []
        """Of no node: slots as `HostPool.prepare` gives them, slots of the device."""
        self._held = ExitStack()  # slots that are read, until that forward is queued

    def load(
        self, key: ChunkKey, spans: RequestSpans, result: MatchResult, priority: int
    ) -> MatchResult:
        """Extend an exact match, at a request's admission, by what is in host memory and not on the
        device. The new nodes are in the tree, unlocked, and their KV is there for whoever reads it
        by the pool's getters in the next forward."""
        tree, allocator = self._tree, self._tree.token_to_kv_pool_allocator
        start, last = compat.num_matched(result), result.last_device_node
        stop = sum(each.key.num_tokens for each in up_from(last))  # in pages: more than its slots
        found = list(self._nodes.after(key, start, stop))
        if not (size := _num_slots(found)) or not self._pays(start, start + size):
            return result
        num_asked = len(found)
        tree.inc_lock_ref(last)
        try:
            del found[num_fitting((len(slots) for _, slots, _ in found), tree.num_idle()) :]
            self._counts.no_room += len(found) < num_asked
            size = _num_slots(found)
            tree.make_room(size)
            device_slots = allocator.alloc(size) if size else None
        finally:
            tree.dec_lock_ref(last)
        if device_slots is None:
            return result
        try:
            sources = self._pool.prepare(torch.cat([slots for _, slots, _ in found]))
        except Exception as error:
            allocator.free(device_slots)
            self._copy_failed(error)
            return result
        row = torch.cat([tree.path_device_indices(last), device_slots])
        _, path = tree.insert_segments(
            key.part(0, end := found[-1].end), row, spans.namespace, priority, inserted_len=end
        )
        parts = torch.split(sources, [len(slots) for _, slots, _ in found])
        for node, part in zip(path[-len(found) :], parts, strict=True):
            self._loads[node] = part
        for host, *_ in found:
            host.blob.hold()
            self._held.callback(host.blob.let_go)
        chunks = [node for node in path if facts(node).chunk is not None][: spans.area_len]
        for index, (copy, node) in enumerate(zip(self._nodes.of(chunks), chunks, strict=True)):
            if facts(node).chain is not None:
                continue
            if copy is None:
                break  # all from here on has its place when it is inserted
            is_promoted = index < spans.promoted_len
            tree.back_on_device(node, copy, spans.namespace, promoted=is_promoted)
            self._nodes.came_to_device(node)
        for (host, *_), node in zip(found, path[-len(found) :], strict=True):
            # of a later area: in no global tree
            if not host.is_text and len(host.prefix) >= spans.area_len:
                known = facts(node)
                known.host, known.scores, known.outward = host, host.scores, host.outward
                host.node = node
        self._nodes.loaded([host for host, *_ in found])
        self._counts.loads += 1
        self._counts.loaded_tokens += size
        return compat.rematched(tree, result, path[-1], len(row))

    def num_loadable(self, key: ChunkKey, start: int) -> int:
        """Slots that `load` would fill behind `start`."""
        return _num_slots(list(self._nodes.after(key, start)))

    def fill(self, host: HostNode, slots: Tensor, device_slots: Tensor) -> bool:
        """Copy some of a node's slots to slots of no node, with the next forward. False: its KV has
        left, or the copy could not be prepared."""
        if host.blob.is_given_back:
            return False
        try:
            self._filled.append((self._pool.prepare(slots), device_slots))
        except Exception as error:
            self._copy_failed(error)
            return False
        host.blob.hold()
        self._held.callback(host.blob.let_go)
        self._counts.loaded_tokens += len(slots)
        return True

    def is_empty(self, node: TreeNode) -> bool:
        """Whether the node's slots hold nothing before the next forward."""
        return node in self._loads

    def before(self, batch: ScheduleBatch) -> None:
        """A forward comes next: copy what it may read, in part beside it (Cache-Craft, eq. 16)."""
        loads = [(slots, node.value) for node, slots in self._loads.items()] + self._filled
        self._loads, self._filled = {}, []
        if not loads:
            return
        begun = time.perf_counter()
        slots, device_slots = map(joined, zip(*loads, strict=True))
        self._counts.layers_ahead = self._num_ahead(len(slots), batch)
        self._pool.load(
            slots, device_slots, num_ahead=self._counts.layers_ahead, clock=self._pricing
        )
        for req in batch.reqs:
            known = state(req)
            if known.loaded and not known.is_inserted:
                traced(req, LOAD, begun, tokens=known.loaded, layers=self._counts.layers_ahead)

    def queued(self) -> None:
        """The forward is queued: what comes behind it finds all that was loaded."""
        self._counts.failed += self._pool.finish()
        self._held.close()

    def cancel(self, node: TreeNode) -> None:
        """The node leaves the device: its slots may be given to others before the next forward."""
        self._loads.pop(node, None)

    def split(self, upper: TreeNode, lower: TreeNode) -> None:
        if (part := self._loads.get(lower)) is not None:
            self._loads[upper], self._loads[lower] = part[: len(upper.key)], part[len(upper.key) :]

    def reset(self) -> None:
        self._loads.clear()
        self._filled.clear()
        self._held.close()

    def _pays(self, start: int, end: int) -> bool:
        """Whether to load: it is estimated to take no longer than computing, or is tried."""
        computed, copied = self._pricing.times(start, end)
        if loading_pays(copied, computed):
            return True
        self._counts.skipped += 1
        return explores(self._counts.skipped)

    def _num_ahead(self, num_tokens: int, batch: ScheduleBatch) -> int:
        """Layers to copy before the forward: all where nothing would wait for the others."""
        # else attention may leave the cache alone
        is_asked = batch.forward_mode.is_extend() and any(batch.prefix_lens)
        if not (is_asked and self._pool.is_layered):
            return self._pool.num_layers
        load = self._pricing.agreed[Phase.LOAD].seconds(Work(1, num_tokens))
        compute = self._pricing.agreed[Phase.EXTEND].seconds(prefill_work(batch))
        return copied_ahead(self._pool.num_layers, load=load, compute=compute)


def _num_slots(found: Sequence[Found]) -> int:
    return sum(len(slots) for _, slots, _ in found)
