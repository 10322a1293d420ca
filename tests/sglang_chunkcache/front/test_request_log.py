"""What operators read of a request: one line when it is over, and the same facts in a trace."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.observability import trace

from sglang_chunkcache.front.engine import Engine
from sglang_chunkcache.front.request import Identity, Passage
from sglang_chunkcache.front.request_log import log_refusal
from tests.kit.front_bench import Asked, Bench, make_output

LOGGER = "sglang_chunkcache.front.request_log"
FOUND = {"query": "QUERY", "mode": "bm25", "k": 2, "batch": 1, "ms": {"bm25": 0.5}}
FOUND["passages"] = [{"id": "LABEL", "title": "TITLE"}]
SECRET_WORDS = ("TEXT", "LABEL", "TITLE", "QUERY", "SALT", "KEY", "CONVERSATION")


class Manager:
    """SGLang's, whose answer has one token, and which tells what headers it was given."""

    headers: Any = None

    def __init__(self, bench: Bench, asked: Asked) -> None:
        self.bench, self.asked, self.incremental_streaming_output = bench, asked, False

    async def generate_request(self, obj: GenerateReqInput, request: Any) -> AsyncIterator[Any]:
        obj.normalize_batch_and_arguments()
        self.headers = obj.external_trace_header
        asked, rank = self.asked, self.bench.ranks[0]
        cached = rank.found(asked.custom_params, asked.input_ids)
        entry = rank.serve(asked.custom_params, asked.input_ids)
        yield make_output([65], cached, "stop", 0, entry)


def serve(headers: dict[str, str] | None = None, *, stream: bool = True) -> tuple[Any, Manager]:
    """A request whose second chunk is cached; what SGLang was given, and the manager."""
    bench = Bench()
    who = Identity("KEY", cache_salt="SALT")
    new, old = Passage("LABEL new", "TEXT one"), Passage("LABEL old", "TEXT")
    bench.run("TEXT?", old, who=who)
    planned = bench.plan("TEXT?", new, old, who=who, to="CONVERSATION", retrieval=FOUND)
    asked, request = Asked(planned), SimpleNamespace(headers=headers or {})
    for step in ("read", "retrieve", "draft", "plan"):
        planned.draft.options.timeline.ended(step)
    manager = Manager(bench, asked)
    obj = GenerateReqInput(input_ids=planned.input_ids, sampling_params={}, stream=stream)

    async def collect() -> None:
        async for _ in Engine(manager, bench.bookkeeper).run(asked, obj, request):
            pass

    asyncio.run(collect())
    return obj, manager


@pytest.mark.parametrize("stream", [True, False])
def test_line_is_json_without_words_of_the_clients(
    stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, LOGGER):
        obj, _ = serve(stream=stream)
    line = caplog.messages[-1]
    assert [word for word in SECRET_WORDS if word in line] == []
    told = json.loads(line)
    ms = told.pop("ms")
    assert list(ms) == [
        *("read", "retrieve", "draft", "plan"),
        *(["first_token"] if stream else []),
        "total",
    ]
    expected = {"event": "chunkcache.request", "rid": obj.rid, "outcome": "finished", "rank": 0}
    expected |= {"tenant": Identity(cache_salt="SALT").tenant, "turns": 0, "chunks": 2}
    expected |= {"chunks_hit": 1, "order": [1, 0], "prompt_tokens": 25, "output_tokens": 1}
    expected |= {"exact": 8, "relocated": 0, "recomputed": 0, "computed": 17, "cached": 8}
    assert told == {**expected, "loaded": 0, "fallbacks": ["new_chunk"]}


def test_refused_request_has_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG, LOGGER):
        log_refusal("refused", 400)
    told = {"event": "chunkcache.request", "outcome": "refused", "status": 400}
    assert [json.loads(line) for line in caplog.messages] == [told]


def test_nothing_is_gathered_unless_it_is_read(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("request_log", "tracing"):
        monkeypatch.delattr(f"sglang_chunkcache.front.{module}.facts")
    with caplog.at_level(logging.INFO, LOGGER):
        _, manager = serve()
    assert caplog.messages == []
    assert manager.headers is None


def test_request_is_in_the_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under the client's span, SGLang's under ours, each step with its facts, and no word of the
    client's."""
    pytest.importorskip("opentelemetry.exporter.otlp")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    exported, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exported))
    monkeypatch.setattr(trace, "tracer", provider.get_tracer("test"))
    monkeypatch.setattr(trace, "opentelemetry_initialized", True)
    obj, manager = serve({"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
    spans = {span.name: span for span in exported.get_finished_spans()}
    root = spans[f"rag Req {obj.rid[:8]}"]
    assert f"{root.parent.trace_id:x} {root.parent.span_id:x}" == f"{'a' * 32} {'b' * 16}"
    context = root.context
    assert manager.headers == {"traceparent": f"00-{'a' * 32}-{context.span_id:016x}-01"}
    assert root.attributes["chunkcache.outcome"] == "finished"
    assert root.attributes["chunkcache.order"] == (1, 0)
    steps = [name for name in spans if name.startswith("chunkcache_")]
    assert steps == [f"chunkcache_{step}" for step in ("read", "retrieve", "draft", "plan")]
    assert dict(spans["chunkcache_retrieve"].attributes) == {
        "chunkcache.mode": "bm25",
        "chunkcache.k": 2,
        "chunkcache.batch": 1,
        "chunkcache.passages": 1,
        "chunkcache.bm25_ms": 0.5,
    }
    assert spans["chunkcache_plan"].attributes["chunkcache.planned"] == 1
    told = "".join(span.to_json() for span in spans.values())
    assert [word for word in SECRET_WORDS if word in told] == []
