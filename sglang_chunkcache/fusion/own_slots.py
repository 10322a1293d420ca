"""A request's own slots for critical tokens of shared chunks: FusionRAG 4.3's exclusive pages, with a token for a page.

    promised   h h h | S S S S S | g g        S: the source's slots at the very positions, to be read only
    critical               ^   ^
    filled     h h h | S S x S x | g g        x: from the reserve that was allocated with the promise

The scheduler and the pass read the same nodes and request rows, each on a stream of its own. Nodes and rows are updated on the
scheduler's stream, and the pass's stream waits for it. The pass also reads the promise's row, so replaced rows stay alive until
the request ends.
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

from sglang_chunkcache.scheduler.node import facts

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_chunkcache.scheduler.shared_cache import SharingRadixCache


class OwnSlots:
    """What one promise shares with its sources. Made in the scheduler's stream, where `reserve` was allocated.

    Args:
        nodes: the promise's chunk nodes whose slots are all their source's, ascending by `start`.
        reserve: slots that critical tokens may take; counted in `cache.num_reserved` from now on.
    """

    def __init__(self, cache: SharingRadixCache, nodes: Sequence[TreeNode], reserve: Tensor) -> None:
        self.cache, self.nodes, self.reserve = cache, nodes, reserve
        cache.num_reserved += len(reserve)
        self.reqs: Sequence[Req] = ()
        """Requests of the batch. One that matched these nodes before they were filled has their old slots in its row."""
        self._device = torch.get_device_module(cache.device)
        self._stream = self._device.current_stream()
        self._rows: list[Tensor] = []
        """Those that `own` has replaced: probes queued in the pass's stream may still read them."""

    @property
    def num_shared(self) -> int:
        """Tokens whose slots are the source's."""
        return sum(int(held.offsets.sum()) for node in self.nodes if (held := facts(node).holding) is not None)

    def own(self, row: Tensor, positions: Sequence[int], *, evicts: bool = False) -> tuple[Tensor, list[int]]:
        """Give shared positions slots of their own, whose content is undefined; the others are not touched.

        Args:
            row: [end] int64, the request's slots; not written.
            positions: ascending, any of the request's.
            evicts: allocate more than the reserve, evicting for it.
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
                refused += (facts(node).start + left).tolist()
                if not len(granted):
                    continue
                slots, self.reserve = self.reserve[: len(granted)], self.reserve[len(granted) :]
                self.cache.unshare(node, granted, slots)
                row[facts(node).start : facts(node).start + len(node.key)] = node.value
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
        held = facts(node).holding
        if held is None:
            return np.empty(0, dtype=np.int64)
        offsets: NDArray[np.int64] = (
            positions[(positions >= facts(node).start) & (positions < facts(node).start + len(node.key))]
            - facts(node).start
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
        """Update the rows of the batch's requests on whose paths a node has other slots now."""
        if not changed:
            return
        for req in self.reqs:
            node = req.last_node
            while node is not None:
                if node in changed:
                    span = slice(facts(node).start, facts(node).start + len(node.key))
                    req.prefix_indices[span] = node.value
                    self.cache.req_to_token_pool.write((req.kv.req_pool_idx, span), node.value.to(torch.int32))
                node = node.parent
