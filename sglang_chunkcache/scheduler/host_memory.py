"""The pools of KV that a rank has in the host's memory, and what they take where no flag says."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import psutil
import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.host_memory import available_host_memory_bytes
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import (
    HICACHE_HOST_MEMORY_RESERVE_BYTES,
    host_memory_budget_scope,
    ranks_per_host,
)
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend

from sglang_chunkcache import compat
from sglang_chunkcache.attention.slot_map import MappedPool
from sglang_chunkcache.config import ChunkCacheConfig, flag_name
from sglang_chunkcache.scheduler.codec_pool import CodecPool
from sglang_chunkcache.scheduler.host_pool import HostPool, NoSlots
from sglang_chunkcache.start_steps import step
from sglang_chunkcache.storage.codec import NONE, Quantized

logger = logging.getLogger(__name__)

POST_CAPTURE = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"

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


class HostMemory:
    """Of one rank: makes its pools, each of one size on all ranks of a tensor-parallel group.
    Where a pool is not wanted, or by default not possible, which is logged, it is `NoSlots`.

    Args:
        ctx: SGLang's TreeCacheBuildContext.
    """

    def __init__(self, ctx: Any, config: ChunkCacheConfig) -> None:
        allocator = ctx.params.token_to_kv_pool_allocator
        self._config, self._args = config, ctx.server_args
        self._device_pool, self._runner = allocator.get_kvcache(), ctx.tp_worker.model_runner
        self._group = compat.parallel(self._runner, "tp_group")
        # else it is the host's, and a larger KV pool does the same without copies
        self._is_device = torch.device(allocator.device).type != "cpu"
        is_needed = config.storage_backend is not None and config.reuse == "exact"
        has_use = is_needed or self._is_device
        self.keeps_chains = config.host_mib != 0 and (config.host_mib is not None or has_use)
        """Whether exact chains that leave the device stay in host memory."""
        self.has_captured = config.reuse == "fused" and config.store_codec == NONE.name
        """Whether captured variants are with them: in a codec they have a store of their own."""

    def create_pool(self) -> HostPool:
        """For exact chains and chunks that are moved. Raises ValueError, naming the flag: as much
        as was asked for cannot be had."""
        asked = (self._config.host_mib or 0) << 20

        def size() -> int:
            num_bytes = 0
            if self.keeps_chains:
                num_bytes = asked or self._machine_bytes(EXACT_CHAINS)
            if self.has_captured:
                num_bytes += self.store_bytes(taken=asked)
            return num_bytes

        flags = ["host_mib"] if self.keeps_chains else []
        flags += ["store_mib"] if self.has_captured else []
        return (self._created(HostPool, size, flags) if flags else None) or NoSlots()

    def create_store(self, codec: Quantized) -> HostPool:
        """For chunks that are moved, in a codec. Raises ValueError as `create_pool`."""
        create = partial(CodecPool, codec=codec)
        return self._created(create, self.store_bytes, ["store_mib"]) or NoSlots(codec)

    def store_bytes(self, *, taken: int = 0) -> int:
        """For chunks that are moved, where so much will be taken besides."""
        return (self._config.store_mib or 0) << 20 or self._machine_bytes(STORE, taken=taken)

    # Private, in order of use

    def _created(
        self, create: Callable[..., HostPool], size: Callable[[], int], flags: list[str]
    ) -> HostPool | None:
        """What `create` makes of the device pool and `size` bytes on each rank. None: not possible
        on all of them, unless one of `flags`, which say how large it is to be, asked for it."""
        pool, problem = None, self._refusal()
        started = time.perf_counter()
        try:
            if problem is None:
                # A graph of whole prefills replays attention without asking for layers.
                is_replayed = check_cuda_graph_backend(Phase.PREFILL, Backend.FULL)
                is_layered = not is_replayed and self._attends_in_all()
                num_bytes = size()
                step("KV pool in host memory")
                # HiCache leaves 10 GiB of any machine; `Use` says what is left here
                with host_memory_budget_scope(self._share()):
                    pool = create(self._device_pool, num_bytes, is_layered=is_layered)
        except (ValueError, RuntimeError, OSError, MemoryError) as error:
            problem = str(error)
        if self._group.world_size > 1:
            problem = next(filter(None, self._group.all_gather_object(problem)), None)
        if problem is not None or pool is None:
            if pool is not None:
                pool.close()
            sizes = {flag_name(name): vars(self._config)[name] for name in flags}
            if asked := [f"{flag} {size}" for flag, size in sizes.items() if size]:
                raise ValueError(f"{', '.join(asked)}: {problem}")
            logger.warning("chunk cache: no KV pool in host memory: %s", problem)
            return None
        logger.info(
            "chunk cache: KV pool in host memory: %.0f MiB, %d tokens, made in %.1f s",
            pool.num_bytes / (1 << 20),
            pool.num_slots,
            time.perf_counter() - started,
        )
        return pool

    def _refusal(self) -> str | None:
        """Why KV of the device pool is not kept in host memory. None: it can be."""
        args, pool = self._args, self._device_pool
        if args.enable_dp_attention or args.enable_pdmux or args.pp_size > 1:
            return "--enable-dp-attention, --enable-pdmux and --pp-size are not supported"
        if type(pool) is not MHATokenToKVPool and not isinstance(pool, MappedPool):
            return f"KV in a {type(pool).__name__} is not supported"
        if pool.post_capture_active:
            return f"{POST_CAPTURE} is not supported: the device pool's size is not known yet"
        if pool.head_dim != pool.v_head_dim or pool.layer_shard_enabled:
            return (
                "keys and values of different sizes, or layers that are shared out, are not"
                " supported"
            )
        return None

    def _attends_in_all(self) -> bool:
        """Some models have layers without attention, which are not asked for (DeciLM)."""
        modules = self._runner.model.modules()
        attention = [each for each in modules if isinstance(each, RadixAttention)]
        return bool(len({each.layer_id for each in attention}) == self._device_pool.layer_num)

    def _machine_bytes(self, use: Use, *, taken: int = 0) -> int:
        """`default_bytes` of this machine, where each rank has `taken` some; rank 0's for all."""
        num_ranks = self._num_ranks()
        device_bytes = 0
        if use.copies or self._is_device:
            sizes = self._device_pool.get_kv_size_bytes()
            device_bytes = sum(sizes) if isinstance(sizes, tuple) else sizes  # of MLA it is one
        found = default_bytes(
            use,
            device_bytes=device_bytes,
            available=available_host_memory_bytes() - num_ranks * taken,
            num_ranks=num_ranks,
            is_pinned=self._is_device,
        )
        return int(self._group.broadcast_object(found))

    def _share(self) -> int:
        """Of the memory that is available, one rank's."""
        try:
            available = available_host_memory_bytes()
        except RuntimeError:  # no container's limit can be read: the machine's
            available = psutil.virtual_memory().available
        return int(available // self._num_ranks())

    def _num_ranks(self) -> int:
        """On this host, of all replicas."""
        return int(ranks_per_host() * self._args.dp_size)


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
