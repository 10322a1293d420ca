"""Every patch of ours into SGLang: its target, and why no registry does the job.

One so far. `Scheduler.get_internal_state` is the only way from the HTTP process to a scheduler's state, and no registry
adds to it. Any-position reuse will add one around `TpModelWorker.forward_batch_generation`.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang.srt.runtime_context import get_parallel

GET_INTERNAL_STATE = "sglang.srt.managers.scheduler.Scheduler.get_internal_state"
STATE_KEY = "chunkcache"
"""Where our stats stand in SGLang's internal state."""


def register_hooks() -> None:
    """Register every hook; SGLang applies them when all plugins are loaded."""
    HookRegistry.register(GET_INTERNAL_STATE, _add_stats, HookType.AFTER)


def missing_hooks() -> list[str]:
    """Targets that SGLang failed to patch: it logs such a failure and goes on without us."""
    return [target for target in (GET_INTERNAL_STATE,) if target not in HookRegistry._patched]


def _add_stats(result: Any, scheduler: Any, *args: Any, **kwargs: Any) -> Any:
    stats = getattr(scheduler.tree_cache, "stats", None)
    if stats is not None:
        # SGLang collects the ranks in the order of their replies, so each says who it is.
        result.internal_state[STATE_KEY] = {"dp_rank": get_parallel().dp_rank or 0, **stats()}
    return result
