"""Slots of a request's own where it may not write: FusionRAG 4.3's exclusive pages, with a token for a page.

    promised   h h h | S S S S S | g g        S: the source's slots at the very positions, to be read only
    critical               ^   ^
    filled     h h h | S S x S x | g g        x: from the reserve that was taken with the promise

The scheduler reads the same rows and nodes as the pass, in a stream that does not wait for the pass's: what both see is
changed in the scheduler's stream, and the pass's waits for that. The promise's own row is read by the pass alone: old ones live
as long as the request, since queued work may still read them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.radix_cache import TreeNode
from torch import Tensor

from sglang_chunkcache.scheduler.shared_cache import holding_of

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_chunkcache.scheduler.shared_cache import SharingRadixCache


class ExclusiveRows:
    """What one promise shares with its sources. Made in the scheduler's stream, where `reserve` was allocated.

    Args:
        nodes: the promise's chunk nodes whose slots are all their source's, ascending by `start`.
        reserve: slots that critical tokens may take; counted in `cache.num_reserved` from now on.
    """

    def __init__(self, cache: SharingRadixCache, nodes: Sequence[TreeNode], reserve: Tensor) -> None:
        self.cache, self.nodes, self.reserve = cache, nodes, reserve
        cache.num_reserved += len(reserve)
        self.reqs: Sequence[Req] = ()
        """The batch: whoever matched these nodes while they were promised has their slots in his row."""
        self._device = torch.get_device_module(cache.device)
        self._stream = self._device.current_stream()
        self._rows: list[Tensor] = []
        """Those that `own` has replaced: probes queued in the pass's stream may still read them."""

    @property
    def num_shared(self) -> int:
        """Tokens whose slots are the source's."""
        return sum(int(held.offsets.sum()) for node in self.nodes if (held := holding_of(node)) is not None)

    def own(self, row: Tensor, positions: Sequence[int], *, evicts: bool = False) -> tuple[Tensor, list[int]]:
        """Give shared positions slots of their own, whose content is undefined; the others are not touched.

        Args:
            row: [end] int64, the request's slots; not written.
            positions: ascending, any of the request's.
            evicts: take more than the reserve where there is room.
        Returns:
            (the row with the new slots, the positions that got none).
        """
        wanted = np.asarray(positions, dtype=np.int64)
        shared = [(node, offsets) for node in self.nodes if len(offsets := self._shared_at(node, wanted))]
        if not shared:
            return row, []
        missing = sum(len(offsets) for _, offsets in shared) - len(self.reserve)
        refused: list[int] = []
        changed: set[TreeNode] = set()
        with self._scheduling():
            if evicts and missing > 0:
                self._reserve_more(missing)
            self._rows.append(row)
            row = row.clone()
            for node, offsets in shared:
                granted, left = offsets[: len(self.reserve)], offsets[len(self.reserve) :]
                refused += (node.start + left).tolist()
                if not len(granted):
                    continue
                slots, self.reserve = self.reserve[: len(granted)], self.reserve[len(granted) :]
                self.cache.unshare(node, granted, slots)
                row[node.start : node.start + len(node.key)] = node.value
                changed.add(node)
            self._rewrite(changed)
        return row, refused

    def close(self) -> None:
        """Give back what was reserved and not taken."""
        with self._scheduling():
            self.cache.token_to_kv_pool_allocator.free(self.reserve)
        self.cache.num_reserved -= len(self.reserve)
        self.reserve = self.reserve[:0]
        self.reqs = ()

    # Private, in order of use

    @staticmethod
    def _shared_at(node: TreeNode, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Offsets of the node that are among `positions` and shared."""
        held = holding_of(node)
        if held is None:
            return np.empty(0, dtype=np.int64)
        offsets: NDArray[np.int64] = (
            positions[(positions >= node.start) & (positions < node.start + len(node.key))] - node.start
        )
        shared: NDArray[np.int64] = offsets[held.offsets[offsets]]
        return shared

    @contextmanager
    def _scheduling(self) -> Iterator[None]:
        with self._device.stream(self._stream):
            yield
        self._device.current_stream().wait_stream(self._stream)

    def _reserve_more(self, num: int) -> None:
        allocator = self.cache.token_to_kv_pool_allocator
        if (short := num - allocator.available_size()) > 0:
            self.cache.evict(EvictParams(num_tokens=short))
        slots = allocator.alloc(min(num, allocator.available_size()))
        self.cache.num_reserved += len(slots)
        self.reserve = torch.cat([self.reserve, slots])

    def _rewrite(self, changed: set[TreeNode]) -> None:
        """Rows of the batch's requests that stand on nodes with other slots now."""
        if not changed:
            return
        for req in self.reqs:
            node = req.last_node
            while node is not None:
                if node in changed:
                    span = slice(node.start, node.start + len(node.key))
                    req.prefix_indices[span] = node.value
                    self.cache.req_to_token_pool.write((req.kv.req_pool_idx, span), node.value.to(torch.int32))
                node = node.parent
