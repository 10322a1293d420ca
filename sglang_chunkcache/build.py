"""The tiers of one rank, from its configuration and the loaded model."""

from __future__ import annotations

from typing import Any

from sglang_chunkcache import compat
from sglang_chunkcache.config import ChunkCacheConfig, flag_name
from sglang_chunkcache.rank_metrics import NO_METRICS, RankMetrics
from sglang_chunkcache.scheduler import host_metrics, waiting
from sglang_chunkcache.scheduler.chunk_tree import ChunkTree
from sglang_chunkcache.scheduler.host_chains import HostChains
from sglang_chunkcache.scheduler.host_memory import HostMemory
from sglang_chunkcache.scheduler.pricing import Pricing
from sglang_chunkcache.scheduler.stored_chains import create_stored_chains
from sglang_chunkcache.scheduler.tiers import Tiers
from sglang_chunkcache.start_steps import step
from sglang_chunkcache.storage.opening import create_index, create_storage


def create_tiers(tree: ChunkTree, ctx: Any, config: ChunkCacheConfig) -> Tiers:
    """What is behind the tree. `ctx` is SGLang's TreeCacheBuildContext.

    Raises:
        ValueError: the model or a flag is not supported, or a storage has no host memory to load
            into; names it.
    """
    runner = ctx.tp_worker.model_runner
    pricing, memory = Pricing(runner), HostMemory(ctx, config)
    pool = memory.create_pool()
    # what is on its way to or from the storage holds slots of the pool that has what is moved
    in_codec = config.reuse == "fused" and not memory.has_captured
    host_bytes = 0 if in_codec else pool.num_bytes
    storage = create_storage(ctx, config, lambda: host_bytes or memory.store_bytes())
    keeps = pool.num_slots > 0 and memory.keeps_chains
    if storage is not None and not keeps and config.reuse == "exact":
        raise ValueError(
            f"{flag_name('storage_backend')}: exact chains are loaded into host memory, and there"
            " is none"
        )
    # Ranks of one tensor-parallel group do the same, and Prometheus would add them up.
    is_shown = ctx.server_args.enable_metrics and ctx.tp_rank == 0
    told = "chunkcache:host_", host_metrics.GAUGES, host_metrics.COUNTERS
    host = HostChains(
        tree,
        pool,
        pricing,
        create_index(config, max(1, pool.num_bytes)),
        keeps=keeps,
        has_captured=memory.has_captured,
        num_ranks=compat.parallel(runner, "tp_group").world_size,
        metrics=RankMetrics(*told) if is_shown and pool.num_slots else NO_METRICS,
    )
    fuser = None
    if config.reuse == "fused":
        from sglang_chunkcache.fusion.build import create_fuser

        fuser = create_fuser(ctx, config, memory, host, storage)
    stored = None
    if storage is not None and keeps:
        # behind the fuser, which starts the storage
        stored = create_stored_chains(host, storage, ctx, config)
    metrics = RankMetrics("chunkcache:", {}, waiting.COUNTERS) if is_shown else NO_METRICS
    step("")
    return Tiers(host, storage=storage, stored=stored, fuser=fuser, metrics=metrics)
