"""Our patches of SGLang: target, and why no registry does the job.

- AFTER `Scheduler.get_internal_state`: the only way from the HTTP process to a scheduler's state,
  and no registry adds to it.
- AROUND `TpModelWorker.forward_batch_generation`, as what follows in schedulers with our tree only:
  promised slots must be filled on the forward stream, after earlier forwards, which may still write
  KV that is copied, and before the batch's own extend. What goes to host memory is copied there,
  too.
- AFTER `Scheduler._add_request_to_queue`: what a request needs is loaded from a storage while it
  waits. SGLang asks a cache for a waiting request under some queue policies only.
- AROUND `PrefillAdder.add_one_req`, with `--reuse fused` or a storage only: a request waits
  (scheduler/waiting.py) and those behind it do not. A cache can put off a request itself (None for
  a load), and all behind it with it, but is only asked for what it has found already.
- AFTER `KVCacheConfigurator._build_token_to_kv_pool_allocator`, with one copy of a chunk only: the
  allocator of virtual slots. SGLang asks a platform for an allocator of pages only.
- AROUND `SchedulerInvariantChecker._check_full_pool`, likewise: it adds up slots, of which there
  are more than rows.
- AROUND `ModelRunner.load_model`, at a terminal only: its time is shown (start_steps.py), and which
  process is the first rank's is known from then on.
- BEFORE all of `SchedulerWeightUpdaterManager` that changes weights, with `--reuse fused` or a
  storage only: where the client asks for no flush, or an update fails half-way, nothing else tells
  that KV is of other weights, and what outlives the process is named by them.
- AROUND `TokenizerManager.generate_request`, in the main process only: the one place that every
  endpoint's request passes before it goes to the scheduler. Looks for `chunks` that nobody reads,
  and guards with `--chunkcache-guard on`.
- AROUND `decide_request_auth`, in the main process only: SGLang opens an endpoint without a key for
  probes alone, and refuses a tenant's key like none.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

from sglang_chunkcache import compat, start_steps
from sglang_chunkcache.wire.message import decode, encode
from sglang_chunkcache.wire.state import NOTHING, STATE_KEY, Asked

if TYPE_CHECKING:
    from sglang_chunkcache.config import ChunkCacheConfig
    from sglang_chunkcache.front.guard.lethal import Guard
    from sglang_chunkcache.front.misplaced import Misplaced
    from sglang_chunkcache.front.parts import Parts
    from sglang_chunkcache.scheduler.chunk_cache import ChunkRadixCache

GET_INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
FORWARD = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
ADD_TO_QUEUE = "sglang.srt.managers.scheduler.Scheduler._add_request_to_queue"
ADD_TO_BATCH = "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req"
BUILD_ALLOCATOR = (
    "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator"
    "._build_token_to_kv_pool_allocator"
)
CHECK_POOL = (
    "sglang.srt.managers.scheduler_components.invariant_checker.SchedulerInvariantChecker"
    "._check_full_pool"
)
LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
UPDATES = [
    *(f"{UPDATER}.update_weights_from_{each}" for each in ("disk", "distributed", "tensor", "ipc")),
    f"{UPDATER}.begin_weight_update",
]
CHECK_WEIGHTS = f"{UPDATER}.check_weights"
DECIDE_AUTH = "sglang.srt.utils.auth.decide_request_auth"
GENERATE_REQUEST = "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request"


def register_hooks(settings: ChunkCacheConfig | None, front: Parts | None) -> None:
    """Register every hook; SGLang applies them when all plugins are loaded.
    `front`: of the main process."""
    for target, hook, when in _hooks(settings):
        HookRegistry.register(target, hook, when)
    if front is not None:
        from sglang_chunkcache.front.page.access import decide

        guard = front.guard if front.config.guard == "on" else None
        HookRegistry.register(GENERATE_REQUEST, _watched(front.misplaced, guard), HookType.AROUND)
        HookRegistry.register(DECIDE_AUTH, decide, HookType.AROUND)


def missing_hooks(settings: ChunkCacheConfig, *, is_main: bool) -> list[str]:
    """Targets that SGLang failed to patch: it logs such a failure and continues without the
    hook."""
    targets = [target for target, _, _ in _hooks(settings)]
    targets += [GENERATE_REQUEST, DECIDE_AUTH] if is_main else []
    return [target for target in targets if target not in HookRegistry._patched]


def _hooks(settings: ChunkCacheConfig | None) -> Iterator[tuple[str, Callable[..., Any], HookType]]:
    """Of schedulers: target, hook and when it is called."""
    is_stock = settings is not None and settings.is_stock
    yield GET_INTERNAL_STATE, _add_stock_stats if is_stock else _add_stats, HookType.AFTER
    if settings is None:
        return
    if start_steps.FILE in os.environ:
        yield LOAD_MODEL, _tell_loading, HookType.AROUND
    if not is_stock:
        yield ADD_TO_QUEUE, _tell_arrival, HookType.AFTER
        yield FORWARD, _fill_first, HookType.AROUND
    if settings.one_copy == "on":
        yield BUILD_ALLOCATOR, _virtual_slots, HookType.AFTER
        yield CHECK_POOL, _add_up_slots, HookType.AROUND
    if settings.reuse == "fused" or settings.storage_backend is not None:
        yield ADD_TO_BATCH, _add_or_wait, HookType.AROUND
        for target in UPDATES:
            yield target, _tell_update, HookType.BEFORE
        yield CHECK_WEIGHTS, _tell_check, HookType.BEFORE


def _add_stats(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_chunkcache.scheduler.reporting import rank_state

    cache = _ours(scheduler.tree_cache)
    return result if cache is None else _with_state(result, scheduler, args, rank_state, cache)


def _add_stock_stats(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_chunkcache.scheduler.stock_rank import stock_state

    return _with_state(result, scheduler, args, stock_state, scheduler)


def _with_state(result: Any, scheduler: Any, args: Any, state_of: Any, of: Any) -> Any:
    # `rid` is the only field of a state request that carries text. SGLang leaves it empty.
    text = args[0].rid if args else None
    asked = decode(text, Asked) if text else NOTHING
    # A request between two chunks of its prefill is in no queue of SGLang's.
    num_waiting = len(scheduler.waiting_queue) + (scheduler.chunked_req is not None)
    # SGLang collects the ranks in the order of their replies, so each state names its rank.
    state = state_of(of, get_parallel().dp_rank or 0, asked, num_waiting=num_waiting)
    result.internal_state[STATE_KEY] = encode(state)
    return result


def _fill_first(forward: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    # SGLang may pass a ForwardBatch of its own making instead, which has no tree.
    cache = _ours(None if batch is None else batch.tree_cache)
    if cache is None or not cache.needs_forward:
        return forward(worker, batch, *args, **kwargs)
    with cache.around_forward(batch):
        return forward(worker, batch, *args, **kwargs)


def _virtual_slots(allocator: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_chunkcache.attention.slot_map import MappedPool

    pool = allocator.get_kvcache()
    if not isinstance(pool, MappedPool):  # refused by name where KV is moved (fusion/build.py)
        return allocator
    from sglang_chunkcache.cpu.one_copy import VirtualAllocator

    known = allocator.dtype, allocator.device, pool, allocator.need_sort
    return VirtualAllocator(allocator.size, *known)


def _add_up_slots(check: Any, checker: Any, stats: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_chunkcache.scheduler.one_copy import OneCopyRadixCache

    tree = checker.tree_cache
    if isinstance(tree, OneCopyRadixCache):
        stats = tree.in_slots(stats)
    return check(checker, stats, *args, **kwargs)


def _tell_loading(load: Any, runner: Any, *args: Any, **kwargs: Any) -> Any:
    ranks = [compat.parallel(runner, f"{kind}_rank") for kind in ("tp", "pp", "dp")]
    if any(ranks):  # the first rank's steps are shown
        os.environ.pop(start_steps.FILE, None)
    start_steps.step(start_steps.WEIGHTS)
    result = load(runner, *args, **kwargs)
    start_steps.step("")
    return result


def _tell_arrival(result: Any, scheduler: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    cache = _ours(scheduler.tree_cache)
    if cache is not None:
        cache.arrived(req)
    return result


def _add_or_wait(add: Any, adder: Any, req: Any, *args: Any, **kwargs: Any) -> Any:
    cache = _ours(adder.tree_cache)
    if cache is None:
        return add(adder, req, *args, **kwargs)
    from sglang.srt.managers.schedule_policy import AddReqResult

    def stock() -> Any:
        with cache.admitting(req):
            return add(adder, req, *args, **kwargs)

    result = cache.line.add(adder, req, stock, partial(req.init_next_round_input, cache))
    # For NO_TOKEN SGLang takes the running batch for full: where nothing runs, since copies alone
    # hold the slots, 0.5.21 would do so for ever.
    if result is AddReqResult.NO_TOKEN and cache.line.is_idle:
        return AddReqResult.OTHER
    return AddReqResult.CONTINUE if result is None else result


def _tell_check(updater: Any, recv_req: Any) -> None:
    if recv_req.action == "reset_tensors":  # overwrites them
        _tell_update(updater)


def _tell_update(updater: Any, *args: Any, **kwargs: Any) -> None:
    cache = _ours(None if updater.scheduler is None else updater.scheduler.tree_cache)
    if cache is not None:
        cache.doubt_weights()


def _watched(misplaced: Misplaced, guard: Guard | None) -> Any:
    from sglang.srt.managers.io_struct import GenerateReqInput

    def generate_request(
        generate: Any, manager: Any, obj: Any, request: Any = None, **kwargs: Any
    ) -> Any:
        misplaced.look(request)
        if guard is None or not isinstance(obj, GenerateReqInput):
            return generate(manager, obj, request, **kwargs)
        if error := guard.refusal(obj):
            return _raising(error)
        outputs = generate(manager, obj, request, **kwargs)
        return _forgotten(outputs, manager, obj) if _asks_for_several(obj) else outputs

    return generate_request


def _asks_for_several(obj: Any) -> bool:
    # A batch's first prompt answers for all: SGLang refuses different `n` in one batch.
    params = obj.sampling_params
    one = params[0] if params and isinstance(params, list) else params
    return isinstance(one, dict) and one.get("n", 1) != 1


async def _forgotten(
    outputs: AsyncGenerator[Any, None], manager: Any, obj: Any
) -> AsyncIterator[Any]:
    """The outputs for n answers. SGLang 0.5.21 keeps n - 1 entries of each prompt for ever, and
    waits for them after SIGTERM. They are taken out with the only output of a request that does not
    stream, else after the last one."""

    def forget() -> None:
        for rid in obj.rid:
            manager.rid_to_state.pop(rid, None)

    # Who leaves early closes this generator: SGLang's is closed with it, not by the collector.
    async with aclosing(outputs):
        async for output in outputs:
            if not obj.stream:
                forget()
            yield output
    forget()


async def _raising(error: Exception) -> AsyncIterator[Any]:
    """Raise with the first step, as `generate_request` does itself:
    some of its callers only look there."""
    raise error
    yield


def _ours(cache: Any) -> ChunkRadixCache | None:
    from sglang_chunkcache.scheduler.chunk_cache import ChunkRadixCache

    return cache if isinstance(cache, ChunkRadixCache) else None
