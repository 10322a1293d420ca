"""A server with SGLang's tracing: its spans, as a collector gets them, and the debug lines beside.

launch/test.sh -m nightly tests/e2e/test_trace.py
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("opentelemetry.exporter.otlp")

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

from eval.errors import CommandError
from eval.http import post
from eval.server import Server
from eval.world.world import World
from sglang_chunkcache.front.request_log import EVENT
from tests.e2e.asking import CHAT, UNHURRIED, chunks_of, fused, user
from tests.e2e.conftest import STRICT, TIGHT
from tests.e2e.crowding import crowd_out
from tests.polling import until

pytestmark = [pytest.mark.engine, pytest.mark.nightly]

PASSAGES = World(77, 20).passages[:4]
CHUNKS = chunks_of(PASSAGES)
FLAGS = [
    *(*TIGHT, *UNHURRIED, "--reuse", "fused", "--chunkcache-move", "always"),
    *("--enable-trace", "--log-level", "debug", "--log-level-http", "warning"),
]


@contextmanager
def collector() -> Iterator[tuple[str, list[Any]]]:
    """Its URL, and the spans that have come."""
    spans = list[Any]()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            told = trace_service_pb2.ExportTraceServiceRequest.FromString(body)
            for resource in told.resource_spans:
                for scope in resource.scope_spans:
                    spans.extend(scope.spans)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", spans
        server.shutdown()


def test_trace_and_log_have_every_step(index: Path, tmp_path: Path) -> None:
    """Retrieval, a chain from host memory, moved chunks: each request is one trace, below its
    client's span. Neither trace nor line has a word of the chunks."""
    env = {**STRICT, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    env |= {"SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS": "100", "OTEL_BSP_SCHEDULE_DELAY": "100"}
    with collector() as (url, spans):
        flags = [*FLAGS, "--otlp-traces-endpoint", url, "--index", str(index)]
        with Server(flags, log=tmp_path / "log", env=env) as server:

            def send(number: int, **fields: Any) -> None:
                fields = {"messages": [user("Which passage comes first?")], **fields}
                headers = {"traceparent": f"00-{number:032x}-{number:016x}-01"}
                post(server.url + CHAT, {"max_tokens": 4, **fields}, headers=headers)

            send(1, retrieve={"k": 2})
            for number in (2, 3):
                send(number, chunks=CHUNKS, cache_salt="host")
            crowd_out(server, "crowd")
            send(4, chunks=CHUNKS, cache_salt="host")
            send(5, chunks=CHUNKS[::-1], cache_salt="host", order="retriever", reuse=fused())
            with pytest.raises(CommandError):
                send(6, chunks="none")
            until(lambda: all(roots(spans, number) for number in range(1, 6)))
        lines = (tmp_path / "log").read_text().splitlines()
    told = [json.loads(line.partition("] ")[2]) for line in lines if EVENT in line]
    assert told.pop() == {"event": EVENT, "outcome": "refused", "status": 400}
    by_rid = {each["rid"]: each for each in told}
    for number in range(1, 6):
        (root,) = roots(spans, number)
        (stock,) = [span for span in of(spans, number) if span.name.strip().startswith("Req ")]
        assert int.from_bytes(root.parent_span_id) == number
        assert stock.parent_span_id == root.span_id
        values = {each.key: each.value for each in root.attributes}
        line = by_rid[values["rid"].string_value]
        fates = ("exact", "relocated", "recomputed", "computed")
        told_by_span = [values[f"chunkcache.{fate}"].int_value for fate in fates]
        assert told_by_span == [line[fate] for fate in fates]
        assert sum(line[fate] for fate in fates) == line["prompt_tokens"]
    steps = [{span.name for span in of(spans, number)} for number in range(1, 6)]
    assert all(f"chunkcache_{step}" in names for step in ("read", "plan") for names in steps)
    for number, step in ((1, "retrieve"), (4, "load"), (5, "move")):
        has = [f"chunkcache_{step}" in names for names in steps]
        assert has == [other == number for other in range(1, 6)], step
    word = PASSAGES[0].text[:20]
    assert [span.name for span in spans if word in str(span)] == []
    assert [line for line in lines if EVENT in line and word in line] == []


def of(spans: list[Any], number: int) -> list[Any]:
    """Those of one trace."""
    return [span for span in spans if int.from_bytes(span.trace_id) == number]


def roots(spans: list[Any], number: int) -> list[Any]:
    return [span for span in of(spans, number) if span.name.startswith("rag Req ")]
