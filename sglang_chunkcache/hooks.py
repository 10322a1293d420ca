"""Every patch of ours into SGLang: its target, and why no registry does the job. Two, no more.

- AFTER `Scheduler.get_internal_state`: the only way from the HTTP process to a scheduler's state, and no registry adds to it.
- AROUND `TpModelWorker.forward_batch_generation`, with `--reuse fused` only: promised slots must be filled on the forward
  stream behind earlier forwards, which may still write what is moved, and before the batch's own extend.
"""

from __future__ import annotations

import json
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

GET_INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
FORWARD = "sglang.srt.managers.tp_worker.TpModelWorker.forward_batch_generation"
STATE_KEY = "chunkcache"
"""Where our stats stand in SGLang's internal state."""
EXPLAIN_KEY = "chunkcache_explain"
"""Marks a state request whose `rid` is a JSON object with a request to explain: the struct has no other free field."""


def register_hooks(*, reuse: str) -> None:
    """Register every hook; SGLang applies them when all plugins are loaded."""
    HookRegistry.register(GET_INTERNAL_STATE, _add_stats, HookType.AFTER)
    if reuse == "fused":
        HookRegistry.register(FORWARD, _fill_first, HookType.AROUND)


def missing_hooks(*, reuse: str) -> list[str]:
    """Targets that SGLang failed to patch: it logs such a failure and goes on without us."""
    targets = [GET_INTERNAL_STATE, *([FORWARD] if reuse == "fused" else [])]
    return [target for target in targets if target not in HookRegistry._patched]


def _add_stats(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    stats = getattr(scheduler.tree_cache, "stats", None)
    if stats is not None:
        # SGLang collects the ranks in the order of their replies, so each says who it is.
        state = {"dp_rank": get_parallel().dp_rank or 0, **stats()}
        asked = getattr(args[0], "rid", None) if args else None
        if asked and EXPLAIN_KEY in asked:
            state["explain"] = scheduler.tree_cache.explain(json.loads(asked)[EXPLAIN_KEY])
        result.internal_state[STATE_KEY] = state
    return result


def _fill_first(forward: Any, worker: Any, batch: Any, *args: Any, **kwargs: Any) -> Any:
    fuser = getattr(getattr(batch, "tree_cache", None), "fuser", None)
    if fuser is None:
        return forward(worker, batch, *args, **kwargs)
    fuser.before(batch)
    result = forward(worker, batch, *args, **kwargs)
    fuser.after()
    return result
