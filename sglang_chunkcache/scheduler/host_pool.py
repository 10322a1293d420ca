"""KV in host memory: HiCache's host pool without HiCache. Copies keep the forward stream's order.

A slot that is copied from, or to, was given out before and may be given out again once the forward
is queued: what reads or writes it later does so on the same stream, which has waited by then for
copies beside it (layer_loads.py). So a copy needs no lock.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.mem_cache.pool_host.base import host_memory_budget_scope
from sglang.srt.model_executor.cuda_graph_config import Backend, check_cuda_graph_backend
from sglang.srt.model_executor.cuda_graph_config import Phase as GraphPhase
from torch import Tensor

from radix_ext.costs import Phase, Work
from sglang_chunkcache import compat
from sglang_chunkcache.attention.slot_map import MappedPool, rows_of
from sglang_chunkcache.attention.upload import upload
from sglang_chunkcache.config import ChunkCacheConfig, flag_name
from sglang_chunkcache.scheduler.host_memory import (
    EXACT_CHAINS,
    STORE,
    has_own_memory,
    machine_bytes,
    rank_bytes,
)
from sglang_chunkcache.scheduler.layer_loads import LayerLoads
from sglang_chunkcache.scheduler.pricing import Pricing
from sglang_chunkcache.start_steps import step
from sglang_chunkcache.storage.codec import NONE, Codec

logger = logging.getLogger(__name__)

POST_CAPTURE = "SGLANG_ENABLE_POST_CAPTURE_KV_SIZING"


class HostPool:
    """Slots of `token_bytes` each. On CUDA memory is pinned and SGLang's kernels copy, else torch.

    Args:
        device_pool: SGLang's, one that `refusal` takes.
        is_layered: prefills ask the getters for each layer, so loads may go on beside them.
        loads_into: the pool whose getters wait for loads from now on. None: `device_pool`.

    Raises:
        ValueError: so much host memory is not there.
    """

    codec: Codec = NONE
    saved_token_bytes = 0
    """How many fewer a token takes than in the device pool's dtype."""

    def __init__(
        self, device_pool: Any, num_bytes: int, *, is_layered: bool = True, loads_into: Any = None
    ) -> None:
        self._device_pool, self._loads_into = device_pool, loads_into or device_pool
        self._is_cuda = torch.device(device_pool.device).type == "cuda"
        self._pool = compat.create_host_pool(
            device_pool, num_bytes, pin_memory=self._is_cuda, label="chunk cache"
        )
        self.token_bytes: int = self._pool.size_per_token
        self.num_slots: int = self._pool.size
        self._bytes: list[Any] = [
            each.view(torch.uint8).numpy() for each in (self._pool.k_buffer, self._pool.v_buffer)
        ]
        self._stream: Any = None  # the forward stream, known with the first forward
        self.num_layers: int = self._pool.layer_num
        self.is_layered = is_layered
        self.loads = LayerLoads.of(self._loads_into)

    @property
    def num_free(self) -> int:
        return int(self._pool.available_size())

    def alloc(self, num_tokens: int) -> Tensor | None:
        """[num_tokens] int64, CPU. None: so many are not free."""
        return self._pool.alloc(num_tokens)  # type: ignore[no-any-return]

    def free(self, slots: Tensor) -> None:
        self._pool.free(slots)

    def fence(self) -> Callable[[], None]:
        """Waits, on any thread, until the copies that are queued by now are done."""
        if self._stream is None:
            return lambda: None
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return lambda: event.synchronize()

    def read(self, slots: Tensor) -> tuple[Tensor, ...]:
        """Keys and values, [num_layers, num_tokens, num_kv_heads, head_dim] each, copied; on any
        thread, behind a `fence`. By numpy, on one core, as all that runs beside a forward: torch
        would take all cores from it."""
        taken = (each.take(slots.numpy(), axis=1) for each in self._bytes)
        # in pages a chunk may have no slot, and numpy gives such an array no strides
        keys, values = (
            torch.from_numpy(each) if each.size else torch.empty(each.shape, dtype=torch.uint8)
            for each in taken
        )
        return keys.view(self._pool.dtype), values.view(self._pool.dtype)

    def write(self, slots: Tensor, *kv: Tensor) -> None:
        """What `read` gives. Nothing else may read or write these slots until it returns."""
        for each, given in zip(self._bytes, kv, strict=True):
            each[:, slots.numpy()] = given.view(torch.uint8).numpy()

    def close(self) -> None:
        """Else memory that is still pinned may hold up the process's end for tens of seconds."""
        self._pool.destroy()

    def follow(self) -> None:
        """The current stream is that of forwards."""
        if self._is_cuda:
            self._stream = torch.cuda.current_stream()

    def save(self, device_slots: Tensor, slots: Tensor) -> list[Tensor]:
        """Copy KV from the device, [num_tokens] int64 each, behind a forward, on its stream.
        Returns [] bool each, on the device: whether the codec can keep it."""
        pool, device_slots = self._pool, rows_of(self._device_pool)(device_slots)
        if self._is_cuda:
            device_slots.record_stream(self._stream)  # made on another one
            slots = upload(slots, device_slots.device)
            pool.backup_from_device_all_layer(self._device_pool, slots, device_slots, "kernel")
            return []
        for layer in range(pool.layer_num):
            pool.k_buffer[layer, slots] = self._device_pool.k_buffer[layer][device_slots]
            pool.v_buffer[layer, slots] = self._device_pool.v_buffer[layer][device_slots]
        return []

    def prepare(self, slots: Tensor) -> Tensor:
        """`slots` as `load` takes them. Waits for nothing."""
        return upload(slots, self._device_pool.device)

    def load(self, slots: Tensor, device_slots: Tensor, *, num_ahead: int, clock: Pricing) -> None:
        """Copy KV to the device, [num_tokens] int64 each, on the forward stream before a forward:
        `num_ahead` layers at once, the rest beside it until `finish`. Whoever reads a layer by the
        device pool's getters waits for it."""
        rows = rows_of(self._loads_into)(device_slots)
        copy, work = partial(self.copy, slots, rows), Work(1, len(slots))
        self.loads.start(copy, Phase.LOAD, work, num_ahead=num_ahead, clock=clock)

    def copy(self, slots: Tensor, rows: Tensor, layers: range) -> None:
        """Copy these layers to the device pool's rows, on the current stream. `slots` as of
        `prepare`."""
        for layer in layers:
            if self._is_cuda:
                self._pool.load_to_device_per_layer(
                    self._device_pool, slots, rows, layer, "kernel"
                )
                continue
            sides = (self._device_pool.k_buffer[layer], self._device_pool.v_buffer[layer])
            for held, side in zip(self._bytes, sides, strict=True):
                taken = held[layer].take(slots.numpy(), axis=0)
                side.view(torch.uint8).numpy()[rows.numpy()] = taken

    def finish(self) -> bool:
        """As `LayerLoads.finish`, once the forward is queued on the current stream."""
        self.follow()
        return self.loads.finish()


class NoSlots(HostPool):
    """No host memory: nothing fits, so nothing is ever copied."""

    num_slots = num_layers = num_free = 0
    token_bytes, is_layered = 1, False

    def __init__(self, codec: Codec = NONE) -> None:
        self.codec = codec

    def alloc(self, num_tokens: int) -> None: ...
    def follow(self) -> None: ...
    def close(self) -> None: ...
    def finish(self) -> bool:
        return False


def create_host_pool(ctx: Any, config: ChunkCacheConfig) -> HostPool | None:
    """The pool of one rank, of one size on all ranks of a tensor-parallel group, for exact chains
    and chunks that are moved. `ctx` is SGLang's TreeCacheBuildContext. None: not wanted, or by
    default not possible, which is logged. Raises ValueError, naming the flag: as much as was
    asked for cannot be had."""
    has_moved, has_chains = has_captured(config), keeps_chains(ctx, config)
    if not (has_chains or has_moved):
        return None

    def size() -> int:
        num_bytes = 0
        if has_chains:
            num_bytes = (config.host_mib or 0) << 20 or machine_bytes(EXACT_CHAINS, ctx)
        if has_moved:
            num_bytes += store_bytes(ctx, config, taken=(config.host_mib or 0) << 20)
        return num_bytes

    asked = ["host_mib"] if has_chains else []
    asked += ["store_mib"] if has_moved else []
    return pool_of_all_ranks(ctx, config, HostPool, size, asked)


def pool_of_all_ranks(
    ctx: Any,
    config: ChunkCacheConfig,
    create: Callable[..., HostPool],
    size: Callable[[], int],
    flags: Sequence[str],
) -> HostPool | None:
    """What `create` makes of the device pool and `size` bytes on each rank of a tensor-parallel
    group. None: not possible on all of them, which is logged. Raises ValueError if one of `flags`,
    which say how large it is to be, asked for it."""
    runner = ctx.tp_worker.model_runner
    device_pool = ctx.params.token_to_kv_pool_allocator.get_kvcache()
    group = compat.parallel(runner, "tp_group")
    pool, problem = None, refusal(device_pool, ctx.server_args)
    started = time.perf_counter()
    try:
        if problem is None:
            # A graph of whole prefills replays attention without asking for layers.
            is_replayed = check_cuda_graph_backend(GraphPhase.PREFILL, Backend.FULL)
            is_layered = not is_replayed and _attends_in_all(runner.model, device_pool.layer_num)
            num_bytes = size()
            step("KV pool in host memory")
            # HiCache leaves 10 GiB of any machine; host_memory.py says what is left here
            with host_memory_budget_scope(rank_bytes(ctx)):
                pool = create(device_pool, num_bytes, is_layered=is_layered)
    except (ValueError, RuntimeError, OSError, MemoryError) as error:
        problem = str(error)
    if group.world_size > 1:
        problem = next(filter(None, group.all_gather_object(problem)), None)
    if problem is not None or pool is None:
        if pool is not None:
            pool.close()
        sizes = {flag_name(name): vars(config)[name] for name in flags}
        if asked := [f"{flag} {size}" for flag, size in sizes.items() if size]:
            raise ValueError(f"{', '.join(asked)}: {problem}")
        logger.warning("chunk cache: no KV pool in host memory: %s", problem)
        return None
    mib = pool.num_slots * pool.token_bytes / (1 << 20)
    logger.info(
        "chunk cache: KV pool in host memory: %.0f MiB, %d tokens, made in %.1f s",
        mib,
        pool.num_slots,
        time.perf_counter() - started,
    )
    return pool


def has_captured(config: ChunkCacheConfig) -> bool:
    """Whether captured variants are in the pool: in a codec they have a store of their own."""
    return config.reuse == "fused" and config.store_codec == NONE.name


def keeps_chains(ctx: Any, config: ChunkCacheConfig) -> bool:
    """Whether exact chains that leave the device stay in host memory."""
    is_needed = config.storage_backend is not None and config.reuse == "exact"
    has_use = is_needed or has_own_memory(ctx.params.token_to_kv_pool_allocator)
    return config.host_mib != 0 and (config.host_mib is not None or has_use)


def store_bytes(ctx: Any, config: ChunkCacheConfig, *, taken: int = 0) -> int:
    """Host memory of one rank for chunks that are moved, where so much will be taken besides."""
    return (config.store_mib or 0) << 20 or machine_bytes(STORE, ctx, taken=taken)


def refusal(device_pool: Any, args: Any) -> str | None:
    """Why KV of this pool is not kept in host memory. None: it can be."""
    if args.enable_dp_attention or args.enable_pdmux or args.pp_size > 1:
        return "--enable-dp-attention, --enable-pdmux and --pp-size are not supported"
    if type(device_pool) is not MHATokenToKVPool and not isinstance(device_pool, MappedPool):
        return f"KV in a {type(device_pool).__name__} is not supported"
    if device_pool.post_capture_active:
        return f"{POST_CAPTURE} is not supported: the device pool's size is not known yet"
    if device_pool.head_dim != device_pool.v_head_dim or device_pool.layer_shard_enabled:
        return (
            "keys and values of different sizes, or layers that are shared out, are not supported"
        )
    return None


def _attends_in_all(model: Any, num_layers: int) -> bool:
    """Some models have layers without attention, which are not asked for (DeciLM)."""
    attention = [each for each in model.modules() if isinstance(each, RadixAttention)]
    return len({each.layer_id for each in attention}) == num_layers
