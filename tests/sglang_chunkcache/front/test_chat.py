"""SGLang's chat serving with a planned request: which outcome is counted, and what of the stream is read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from fastapi.responses import ORJSONResponse
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

from sglang_chunkcache.front.chat import DONE, RagServingChat, _delta, _sse
from sglang_chunkcache.front.engine import Engine, hand_over
from tests.sglang_chunkcache.front.front_bench import A, Asked, Bench, make_output

# FastAPI would have us return plain objects, SGLang returns ORJSONResponse.
pytestmark = pytest.mark.filterwarnings("ignore:ORJSONResponse is deprecated")


def make_chat(bench: Bench, respond: Any) -> RagServingChat:
    """Serving whose `handle_request` is `respond(raw_request)`; nothing of SGLang is started."""
    chat = RagServingChat.__new__(RagServingChat)
    chat._books = bench.books

    async def handle_request(request: Any, raw_request: Any) -> Any:
        return respond(raw_request)

    chat.handle_request = handle_request
    return chat


@pytest.mark.parametrize(("status", "outcome"), [(400, "refused"), (422, "refused"), (500, "aborted")])
def test_request_that_never_reaches_the_engine_is_counted(status: int, outcome: str) -> None:
    """SGLang refuses while it converts the body: nothing was taken, so nothing is left."""
    bench = Bench()
    chat = make_chat(bench, lambda raw_request: ORJSONResponse({}, status_code=status))
    request, raw_request = SimpleNamespace(input_ids=None), SimpleNamespace(state=SimpleNamespace())
    response = asyncio.run(chat.serve(request, bench.plan("q", A), raw_request))  # type: ignore[arg-type]
    assert response.status_code == status
    assert bench.books.metrics.totals()["requests"] == {outcome: 1}
    assert bench.books.table.num_requests == 0
    assert bench.is_idle()


@pytest.mark.parametrize("num_events", [0, 1, 2])
def test_stream_left_early_is_released(num_events: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may leave before the first event, between two, or stay; SGLang closes nothing by itself."""
    bench = Bench()
    rag = Asked(bench.plan("q", A))

    class Manager:
        incremental_streaming_output = False

        async def generate_request(self, obj: Any, request: Any) -> AsyncIterator[Any]:
            for ids in ([65], [65, 66], [65, 66, 67]):
                yield make_output(ids, 0, None, 0, None)

    async def stream(self: Any, adapted_request: Any, request: Any, raw_request: Any) -> AsyncIterator[str]:
        async for output in self.tokenizer_manager.generate_request(adapted_request, raw_request):
            yield f"data: {len(output['output_ids'])}"

    monkeypatch.setattr(OpenAIServingChat, "_generate_chat_stream", stream)
    chat = make_chat(bench, None)
    chat.tokenizer_manager = Engine(Manager(), bench.books)
    raw_request = SimpleNamespace(state=SimpleNamespace())
    hand_over(raw_request, rag)  # type: ignore[arg-type]

    async def leave() -> None:
        obj = SimpleNamespace(stream=True, sampling_params={})
        events = chat._generate_chat_stream(obj, SimpleNamespace(model="m"), raw_request)  # type: ignore[arg-type]
        for _ in range(num_events):
            await anext(events)
        assert bench.is_idle() is (num_events == 0)
        del events
        for _ in range(10):  # Python closes the generators that nothing refers to, one turn of the loop each
            await asyncio.sleep(0)
        assert bench.is_idle()

    asyncio.run(leave())


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (DONE, {}),
        (": keep-alive\n\n", {}),
        ('data: {"choices": []}\n\n', {}),
        ('data: {"usage": {}}\n\n', {}),
        ('data: {"choices": [{"index": 0, "delta": {"content": "x"}}]}\n\n', {"content": "x"}),
        ('data: {"choices": [{"index": 1, "delta": {"content": "x"}}]}\n\n', {}),
        ('data: {"choices": [{"index": 0, "delta": null}]}\n\n', {}),
    ],
)
def test_delta_is_the_first_choices(event: str, expected: dict[str, Any]) -> None:
    """The conversation keeps choice 0."""
    assert _delta(event) == expected


def test_sse_is_a_chunk_every_client_parses() -> None:
    """OpenAI's clients validate the shape."""
    body = _delta(_sse({"choices": [{"index": 0, "delta": {"content": "x"}}]}, "m"))
    assert body == {"content": "x"}
