"""The scheduler with moved KV on a real model: what a rank computes, without a server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from radix_ext.moved_plan import Limits
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.fusion.promise import Fuser
from sglang_chunkcache.fusion.recompute import run_extend
from sglang_chunkcache.fusion.sharing import Sharing
from sglang_chunkcache.scheduler.codec_pool import CodecPool
from sglang_chunkcache.scheduler.host_chains import HostChains
from sglang_chunkcache.scheduler.host_nodes import HostCounts, HostNodes
from sglang_chunkcache.scheduler.host_pool import HostPool
from sglang_chunkcache.scheduler.tiers import Tiers
from sglang_chunkcache.storage.codec import CODECS, Quantized
from sglang_chunkcache.storage.fingerprint import fingerprint
from sglang_chunkcache.storage.opening import create_index
from tests.kit.tensors import MASKED, TOLERANCES, make_pass, table_of
from tests.reference.scheduler import FakeReq, Scheduler


class Unwatched(Fuser):
    """Its requests run one after another, so each is watched alone."""

    hidden: Any = None
    """What the pass has computed of the batch at hand."""

    @contextmanager
    def watch(self, batch: Any, hidden: Any) -> Iterator[None]:
        self.hidden = hidden
        yield


class ModelScheduler(Scheduler):
    """`Scheduler` over a `tests.models.runner` and its pool, of which it uses `capacity` slots."""

    def __init__(
        self,
        runner: Any,
        capacity: int,
        config: ChunkCacheConfig,
        *,
        store_bytes: int = 1 << 25,
        prefill_budget: int,
        attention: Any = None,
        allocator: Any = None,
        host_pool: Any = None,
    ) -> None:
        """`attention`: as of `FusionPass`; None: the mask. `host_pool`: what is stored is there."""
        rows = runner.req_to_token_pool
        self._runner = runner

        def create_tiers(host: HostChains) -> Tiers:
            nodes = host.nodes
            if host_pool is None:
                pool = HostPool(runner.token_to_kv_pool, store_bytes)
                codec = CODECS[config.store_codec]
                if isinstance(codec, Quantized):
                    pool = CodecPool(runner.token_to_kv_pool, store_bytes, codec=codec)
                nodes = HostNodes(host.tree, pool, create_index(config, store_bytes), HostCounts())
            self.store = nodes.index
            make_room = partial(host.tree.make_room, 0)
            sharing = Sharing.of(runner.token_to_kv_pool, table_of(runner), make_room)
            self.fuser = Unwatched(
                host.tree,
                make_pass(runner, config, nodes, attention or MASKED, sharing),
                Limits(prefill_budget, config.max_gap_tokens),
                fingerprint=partial(fingerprint, runner.model),
                in_host_memory=None if host_pool is None else host.write_back.takes,
            )
            return Tiers(host, fuser=self.fuser)

        super().__init__(
            capacity,
            config,
            prefill_budget=prefill_budget,
            rows=rows,
            allocator=allocator,
            host_pool=host_pool,
            create_tiers=create_tiers,
        )

    def _compute(self, batch: Sequence[tuple[FakeReq, int, int]]) -> None:
        found = []
        for req, start, end in batch:
            told: Any = SimpleNamespace(reqs=[req], prefix_lens=[start], extend_lens=[end - start])
            with self.fuser.outward.watch(told):
                row = req.kv.req_pool_idx
                found.append(run_extend(self._runner, row, req.all_ids[:end], start))
        if self.fuser.hidden is not None:
            hidden = torch.cat(found)
            atol = TOLERANCES[hidden.dtype]
            torch.testing.assert_close(self.fuser.hidden, hidden, rtol=0, atol=atol)
