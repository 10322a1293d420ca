"""What requests of ours go through beside SGLang's stages, for SGLang's trace of a request.

    wait    it could have been admitted, and was not
    load    exact chains come back from host memory, as far as its forward does not hide that
    move    its moved KV is filled, with all others' of the batch

Times are the scheduler's: where a device works, what it was told may still be going on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from sglang.srt.observability.req_time_stats import RequestStageConfig

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

WAIT, LOAD, MOVE = (
    RequestStageConfig(f"chunkcache_{name}", level=1) for name in ("wait", "load", "move")
)


def is_traced(req: Req) -> bool:
    return bool(req.time_stats.trace_ctx.tracing_enable)


def traced(req: Req, stage: RequestStageConfig, begun: float, **facts: Any) -> None:
    """The request has been in this stage until now. `begun`: by `perf_counter`."""
    if is_traced(req):
        told = {f"chunkcache.{name}": fact for name, fact in facts.items()}
        req.time_stats.trace_slice(stage, begun, time.perf_counter(), told)
