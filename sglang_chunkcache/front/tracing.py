"""A RAG request in SGLang's trace, with `--enable-trace`. SGLang's own span begins when the engine
is asked: ours is around it, from the request's arrival on.

    rag Req 1a2b3c4d      a child of the client's span; at its end request_log.py's facts
      Tokenizer             chunkcache_read, _retrieve, _draft, _plan
      Req 1a2b3c4d          SGLang's
        Scheduler             SGLang's, with those of scheduler/stages.py

Made with SGLang's classes, so `--trace-modules` and `SGLANG_TRACE_LEVEL` hold for it, too.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.observability.req_time_stats import convert_time_to_realtime_ns as realtime_ns
from sglang.srt.observability.trace import (
    TraceReqContext,
    TraceSliceContext,
    extract_trace_headers,
)

from sglang_chunkcache.front.request import Planned, RagRequest
from sglang_chunkcache.front.request_log import facts


@contextmanager
def traced(rag: RagRequest, obj: Any, raw_request: Any) -> Iterator[None]:
    """The request's span, until the block is left; SGLang's, made in it from `obj`, are below."""
    obj.rid = obj.rid or uuid.uuid4().hex  # as SGLang would name it
    headers = extract_trace_headers(raw_request.headers)
    context = TraceReqContext(
        obj.rid, role="rag", module_name="request", external_trace_header=headers
    )
    if not context.tracing_enable:
        yield
        return
    # SGLang reads this format, whatever others OTEL_PROPAGATORS names. Here, since without
    # tracing it need not be installed.
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    timeline = rag.planned.draft.options.timeline
    context.trace_req_start(realtime_ns(timeline.came))
    for step, begun, ended in timeline.steps():
        attrs = _named(_facts_of(step, rag.planned))
        times = realtime_ns(begun), realtime_ns(ended)
        context.trace_slice(TraceSliceContext(f"chunkcache_{step}", *times, attrs=attrs))
    obj.external_trace_header = {}
    TraceContextTextMapPropagator().inject(obj.external_trace_header, context.root_span_context)
    try:
        yield
    finally:
        context.trace_req_finish(attrs=_named(facts(rag)))


def _facts_of(step: str, planned: Planned) -> dict[str, Any]:
    if step == "retrieve" and (found := planned.draft.options.retrieval):
        ms = {f"{phase}_ms": took for phase, took in found["ms"].items()}
        told = {name: found[name] for name in ("mode", "k", "batch")}
        return {**told, "passages": len(found["passages"]), **ms}
    if step == "plan":
        return {"planned": planned.planned_len, "predicted_exact": planned.predicted_exact}
    return {}


def _named(told: dict[str, Any]) -> dict[str, Any]:
    # OpenTelemetry has no null
    return {f"chunkcache.{name}": value for name, value in told.items() if value is not None}
