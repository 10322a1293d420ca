"""Exact chunk chains in host memory (CRAFT 4.1, 4.2): what has left the device is loaded, not
computed. A byte copy, so contract 1 stays as it is.

    host_nodes.py   the chains, and the slots of the pool     the two trees know each other by
    write_back.py   device ──► host memory                    `ChunkFacts.host` and `HostNode.node`
    load_back.py    host memory ──► device

Decisions follow from requests, counts and prices that the ranks agree on (pricing.py).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from radix_ext.costs import Phase, Work
from radix_ext.variant_index import VariantIndex
from radix_ext.write_back import MUCH_LARGER
from sglang_chunkcache.rank_metrics import NO_METRICS, RankMetrics
from sglang_chunkcache.scheduler.host_nodes import HostCounts, HostNodes
from sglang_chunkcache.scheduler.host_pool import HostPool
from sglang_chunkcache.scheduler.load_back import LoadBack
from sglang_chunkcache.scheduler.node import HostNode
from sglang_chunkcache.scheduler.pricing import Pricing
from sglang_chunkcache.scheduler.write_back import WriteBack

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import ScheduleBatch
    from sglang.srt.mem_cache.radix_cache import TreeNode

    from sglang_chunkcache.scheduler.chunk_tree import ChunkTree

logger = logging.getLogger(__name__)


class HostChains:
    """Of one rank.

    Args:
        index: empty, as large as the pool.
        keeps: False: no chain is kept here, and the pool is for captured variants alone.
        has_captured: the pool is for captured variants, too.
        num_ranks: of a tensor-parallel group. More than one: a copy that fails is raised, since the
            others' may not have.
        metrics: shown what `stats` says, with it and when due.
    """

    def __init__(
        self,
        tree: ChunkTree,
        pool: HostPool,
        pricing: Pricing,
        index: VariantIndex,
        *,
        keeps: bool = True,
        has_captured: bool = False,
        num_ranks: int = 1,
        metrics: RankMetrics = NO_METRICS,
    ) -> None:
        self.tree, self.pool, self.pricing, self.index = tree, pool, pricing, index
        self._num_ranks, self._metrics = num_ranks, metrics
        self.counts = HostCounts()
        self.nodes = HostNodes(tree, pool, index, self.counts)
        self.load_back = LoadBack(tree, self.nodes, pricing, self.counts, self._copy_failed)
        num_on_device = tree.token_to_kv_pool_allocator.size
        self.write_back = WriteBack(
            tree,
            self.nodes,
            self.counts,
            pricing,
            self._copy_failed,
            keeps=keeps,
            only_lost=has_captured and pool.num_slots < MUCH_LARGER * num_on_device,
        )

    @contextmanager
    def watch(self, batch: ScheduleBatch) -> Iterator[None]:
        """Learn what the batch's extend takes, where nobody else does."""
        with self.pricing.time_extend(batch):
            yield
        self.pricing.refresh()

    def after(self, *, first_tokens_wait: bool) -> Iterator[tuple[HostNode, TreeNode]]:
        """As `WriteBack.after`, once a forward."""
        yield from self.write_back.after(first_tokens_wait=first_tokens_wait)
        if self._metrics.is_due:
            self.stats()

    def reset(self) -> None:
        """The tree on the device is empty. Captured variants stay."""
        self.load_back.reset()
        self.write_back.reset()
        self.nodes.reset()

    @property
    def worth(self) -> float:
        """Of a token here, if one on the device is worth 1: what a load saves of computing it."""
        if not self.pool.num_slots:
            return 1.0
        costs, work = self.pricing.agreed, Work(0, 1000)
        load, extend = costs[Phase.LOAD].seconds(work), costs[Phase.EXTEND].seconds(work)
        return max(0.0, 1 - load / extend) if extend > 0 else 1.0

    def stats(self) -> dict[str, Any]:
        """For `/chunkcache/stats`; tokens, unless they say bytes."""
        costs = self.pricing.agreed
        num_held = self.pool.num_slots - self.pool.num_free
        found = {
            "nodes": len(self.nodes),
            "tokens": num_held,
            "bytes": num_held * self.pool.token_bytes,
            "max_bytes": self.pool.num_bytes,
            **asdict(self.counts),
            "waiting": self.write_back.num_waiting,
            "ms_per_1000_tokens": {
                phase.value: round(1e3 * costs[phase].seconds(Work(1, 1000)), 3)
                for phase in (Phase.LOAD, Phase.EXTEND)
            },
        }
        self._metrics.show(found)
        return found

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
