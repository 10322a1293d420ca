"""Our two patches of SGLang: target, and why no registry does the job.

- AFTER `Scheduler.get_internal_state`: the only way from the HTTP process to a scheduler's state, and no registry adds to it.
- AROUND `TpModelWorker.forward_batch_generation`, with `--reuse fused` only: promised slots must be filled on the forward
  stream, after earlier forwards, which may still write KV that is moved, and before the batch's own extend.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

from sglang_chunkcache.wire.message import decode, encode
from sglang_chunkcache.wire.state import STATE_KEY, ExplainRequest

if TYPE_CHECKING:
    from sglang_chunkcache.scheduler.chunk_cache import ChunkRadixCache

GET_INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
FORWARD = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"


def register_hooks(*, reuse: str) -> None:
    """Register every hook; SGLang applies them when all plugins are loaded."""
    HookRegistry.register(GET_INTERNAL_STATE, _add_stats, HookType.AFTER)
    if reuse == "fused":
        HookRegistry.register(FORWARD, _fill_first, HookType.AROUND)


def missing_hooks(*, reuse: str) -> list[str]:
    """Targets that SGLang failed to patch: it logs such a failure and continues without the hook."""
    targets = [GET_INTERNAL_STATE, *([FORWARD] if reuse == "fused" else [])]
    return [target for target in targets if target not in HookRegistry._patched]


def _add_stats(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    cache = _ours(scheduler.tree_cache)
    if cache is not None:
        # `rid` is the only field of a state request that carries text. SGLang leaves it empty.
        text = args[0].rid if args else None
        asked = decode(text, ExplainRequest) if text else None
        # SGLang collects the ranks in the order of their replies, so each state names its rank.
        result.internal_state[STATE_KEY] = encode(cache.rank_state(get_parallel().dp_rank or 0, asked))
    return result


def _fill_first(forward: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    cache = _ours(None if batch is None else batch.tree_cache)
    if cache is None or cache.promiser is None:
        return forward(worker, batch, *args, **kwargs)
    cache.promiser.before(batch)
    result = forward(worker, batch, *args, **kwargs)
    cache.promiser.after()
    return result


def _ours(cache: Any) -> ChunkRadixCache | None:
    from sglang_chunkcache.scheduler.chunk_cache import ChunkRadixCache

    return cache if isinstance(cache, ChunkRadixCache) else None
