"""What is taken of the host's memory where no flag says."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import psutil
import torch
from sglang.srt.mem_cache.host_memory import available_host_memory_bytes
from sglang.srt.mem_cache.pool_host.base import HICACHE_HOST_MEMORY_RESERVE_BYTES, ranks_per_host

from sglang_chunkcache import compat

logger = logging.getLogger(__name__)

PINNED_BYTES_PER_S = 10**9
"""Pinning blocks other processes of the host that call CUDA, so ranks pin one after the other.
700 GB took 12 minutes (NVIDIA/TensorRT-LLM#17429), 33 GiB of an idle desktop 8 s
(ikawrakow/ik_llama.cpp#1517). The start prints what it takes here."""


class Use(NamedTuple):
    """One use of host memory: how much it wants, and how much it gets at most."""

    ratio: float  # of the device's KV pool
    least: int  # bytes, however small that pool is
    share: float  # of the memory that is available, for all ranks together
    reserve: int  # bytes that are left
    copies: bool  # what is in the KV pool, which counts even if it is in the host's memory
    pinning_s: float
    """Seconds of the start, for all ranks together, where it is pinned: with both uses a minute,
    about what weights and graphs take."""


EXACT_CHAINS = Use(2.0, 0, 0.25, HICACHE_HOST_MEMORY_RESERVE_BYTES, copies=True, pinning_s=40.0)
"""HiCache's ratio, and its reserve, without which it refuses a pool."""
STORE = Use(1.0, 1 << 30, 0.125, 0, copies=False, pinning_s=20.0)
"""1 GiB is 16 chunks of a Llama-3-8B."""


def default_bytes(
    use: Use, *, device_bytes: int, available: int, num_ranks: int, is_pinned: bool
) -> int:
    """Of one of so many ranks on the host: at least 1, which holds nothing."""
    room = min(use.share * available, available - use.reserve) / num_ranks
    wanted = int(min(max(use.ratio * device_bytes, use.least), room))
    bound = int(use.pinning_s * PINNED_BYTES_PER_S / num_ranks)
    if is_pinned and wanted > bound:
        logger.info(
            "chunk cache: %.0f MiB of host memory for each of %d rank(s), not %.0f: pinning takes"
            " %.0f s at 1 GB/s",
            bound / (1 << 20),
            num_ranks,
            wanted / (1 << 20),
            use.pinning_s,
        )
        wanted = bound
    return max(1, wanted)


def machine_bytes(use: Use, ctx: Any, *, taken: int = 0) -> int:
    """`default_bytes` of this machine, where each rank has `taken` some; rank 0's for all ranks of
    a tensor-parallel group. `ctx`: SGLang's TreeCacheBuildContext."""
    allocator = ctx.params.token_to_kv_pool_allocator
    group = compat.parallel(ctx.tp_worker.model_runner, "tp_group")
    num_ranks = ranks_per_host() * ctx.server_args.dp_size
    is_device = has_own_memory(allocator)
    device_bytes = 0
    if use.copies or is_device:
        sizes = allocator.get_kvcache().get_kv_size_bytes()
        device_bytes = sum(sizes) if isinstance(sizes, tuple) else sizes  # of MLA it is one
    found = default_bytes(
        use,
        device_bytes=device_bytes,
        available=available_host_memory_bytes() - num_ranks * taken,
        num_ranks=num_ranks,
        is_pinned=is_device,
    )
    return int(group.broadcast_object(found))


def rank_bytes(ctx: Any) -> int:
    """Of the memory that is available, one rank's share."""
    try:
        available = available_host_memory_bytes()
    except RuntimeError:  # no container's limit can be read: the machine's
        available = psutil.virtual_memory().available
    return int(available // (ranks_per_host() * ctx.server_args.dp_size))


def has_own_memory(allocator: Any) -> bool:
    """False: it is the host's, and a larger KV pool does the same without copies."""
    return torch.device(allocator.device).type != "cpu"
