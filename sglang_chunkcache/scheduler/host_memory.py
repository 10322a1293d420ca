"""What is taken of the host's memory where no flag says."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from sglang.srt.mem_cache.host_memory import available_host_memory_bytes
from sglang.srt.mem_cache.pool_host.base import HICACHE_HOST_MEMORY_RESERVE_BYTES, ranks_per_host

from sglang_chunkcache import compat


class Use(NamedTuple):
    """One use of host memory: how much it wants, and how much it gets at most."""

    ratio: float  # of the device's KV pool
    least: int  # bytes, however small that pool is
    share: float  # of the memory that is available, for all ranks together
    reserve: int  # bytes that are left
    copies: bool  # what is in the KV pool, which counts even if it is in the host's memory


EXACT_CHAINS = Use(2.0, 0, 0.25, HICACHE_HOST_MEMORY_RESERVE_BYTES, copies=True)
"""HiCache's ratio, and its reserve, without which it refuses a pool."""
STORE = Use(1.0, 1 << 30, 0.125, 0, copies=False)
"""1 GiB is 16 chunks of a Llama-3-8B."""


def default_bytes(use: Use, *, device_bytes: int, available: int, num_ranks: int) -> int:
    """Of one of so many ranks on the host: at least 1, which holds nothing."""
    room = min(use.share * available, available - use.reserve) / num_ranks
    return max(1, int(min(max(use.ratio * device_bytes, use.least), room)))


def machine_bytes(use: Use, ctx: Any, *, taken: int = 0) -> int:
    """`default_bytes` of this machine, where each rank has `taken` some; rank 0's for all ranks of
    a tensor-parallel group. `ctx`: SGLang's TreeCacheBuildContext."""
    allocator = ctx.params.token_to_kv_pool_allocator
    group = compat.parallel(ctx.tp_worker.model_runner, "tp_group")
    num_ranks = ranks_per_host() * ctx.server_args.dp_size
    counts = use.copies or has_own_memory(allocator)
    found = default_bytes(
        use,
        device_bytes=sum(allocator.get_kvcache().get_kv_size_bytes()) if counts else 0,
        available=available_host_memory_bytes() - num_ranks * taken,
        num_ranks=num_ranks,
    )
    return int(group.broadcast_object(found))


def has_own_memory(allocator: Any) -> bool:
    """False: it is the host's, and a larger KV pool does the same without copies."""
    return torch.device(allocator.device).type != "cpu"
