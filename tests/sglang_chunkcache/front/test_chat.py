"""SGLang's chat serving with a planned request:
which outcome is counted, and what of the stream is read."""

from __future__ import annotations

import asyncio
import inspect
import json
import re
from collections.abc import AsyncIterator, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from fastapi.responses import ORJSONResponse
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.parser.template_detection import ReasoningToggleConfig

from sglang_chunkcache.errors import RequestError
from sglang_chunkcache.front.chat import (
    DONE,
    PROBLEMS,
    RagServingChat,
    _chunk,
    _delta,
    _report_cached,
)
from sglang_chunkcache.front.engine import Engine
from tests.kit.front_bench import A, Asked, Bench, make_output


def make_chat(bench: Bench, respond: Any) -> RagServingChat:
    """Serving whose `handle_request` is `respond(raw_request)`; nothing of SGLang is started."""
    chat = RagServingChat.__new__(RagServingChat)
    chat._bookkeeper = bench.bookkeeper

    async def handle_request(request: Any, raw_request: Any) -> Any:
        return respond(raw_request)

    chat.handle_request = handle_request
    return chat


def handed(rag: Any) -> Any:
    """An HTTP request that this planned one was handed over with."""
    raw_request: Any = SimpleNamespace(state=SimpleNamespace())
    raw_request.state.chunkcache = rag
    return raw_request


@pytest.mark.parametrize(
    ("status", "outcome"), [(400, "refused"), (422, "refused"), (500, "aborted")]
)
def test_request_that_never_reaches_the_engine_is_counted(status: int, outcome: str) -> None:
    """SGLang refuses while it converts the body: nothing was taken, so nothing is left."""
    bench = Bench()
    chat = make_chat(bench, lambda raw_request: ORJSONResponse({}, status_code=status))
    request, raw_request = SimpleNamespace(input_ids=None), SimpleNamespace(state=SimpleNamespace())
    response = asyncio.run(chat.serve(request, bench.plan("q", A), raw_request))  # type: ignore[arg-type]
    assert response.status_code == status
    assert bench.bookkeeper.metrics.totals()["requests"] == {outcome: 1}
    assert bench.bookkeeper.tables.num_entries == 0
    assert bench.is_idle()


MESSAGES = [{"role": "user", "content": "x"}]
TOO_LARGE = "max_completion_tokens is too large: 9.This model supports at most 5."


@pytest.mark.parametrize(
    ("complaint", "sent", "field"),
    [
        (TOO_LARGE, "max_tokens", "max_tokens"),
        (TOO_LARGE, "max_completion_tokens", "max_completion_tokens"),
        ("return_sampling_mask requires return_meta_info=true.", "n", "return_sampling_mask"),
        ("Tool 0 function has invalid 'parameters' schema: template", "n", "tools"),
        ("Messages cannot be empty.", "n", "messages"),
    ],
)
def test_complaint_of_sglangs_is_behind_the_field_that_was_sent(
    complaint: str, sent: str, field: str
) -> None:
    """By words that SGLang's own check has."""
    chat = make_chat(Bench(), None)
    chat._validate_request = lambda request: complaint
    body = {"messages": MESSAGES, "model": "m", sent: 1}
    with pytest.raises(RequestError, match=f"^{field}: {re.escape(complaint)}"):
        chat.check(ChatCompletionRequest(**body))
    source = inspect.getsource(OpenAIServingChat._validate_request)
    words = [word for word in PROBLEMS if word != "tool"]
    assert all(re.search(f'"(Request-supplied chat_)?{word}', source) for word in words)


@pytest.mark.parametrize(
    ("defaults", "sent", "kwargs"),
    [
        ({}, {}, {}),
        ({}, {"reasoning_effort": "low"}, {"reasoning_effort": "low", "low_effort": True}),
        ({}, {"reasoning_effort": "high"}, {"reasoning_effort": "high"}),
        ({"reasoning_effort": "low"}, {}, {"reasoning_effort": "low", "low_effort": True}),
        ({"low_effort": False}, {"reasoning_effort": "low"}, {"reasoning_effort": "low"}),
    ],
)
def test_low_effort_is_the_templates_own_switch(defaults: Any, sent: Any, kwargs: Any) -> None:
    """Some templates know no `reasoning_effort`, but a keyword that SGLang has found in them."""
    chat: Any = make_chat(Bench(), None)
    chat.default_chat_template_kwargs, chat.reasoning_parser = defaults, None
    chat.template_manager = SimpleNamespace(
        reasoning_config=ReasoningToggleConfig(effort_kwarg="low_effort")
    )
    request = ChatCompletionRequest(messages=MESSAGES, model="m", **sent)
    found = chat.template_kwargs(request) or {}
    # those that SGLang's own validation adds to a request with an effort
    assert {**found, "thinking": 1, "enable_thinking": 1} == {
        **defaults,
        **kwargs,
        "thinking": 1,
        "enable_thinking": 1,
    }


@pytest.mark.parametrize(
    ("effort", "shown"), [(None, "high"), ("none", "no_think"), ("minimal", "low"), ("max", "high")]
)
def test_hunyuans_efforts_are_those_of_its_template(effort: str | None, shown: str) -> None:
    """SGLang translates them before it renders, and refuses others."""
    chat: Any = make_chat(Bench(), None)
    chat.default_chat_template_kwargs, chat.reasoning_parser = None, "hunyuan"
    config = ReasoningToggleConfig(special_case="hunyuan_effort")
    chat.template_manager = SimpleNamespace(reasoning_config=config)
    request = ChatCompletionRequest(messages=MESSAGES, model="m", reasoning_effort=effort)
    assert chat.template_kwargs(request)["reasoning_effort"] == shown
    request = ChatCompletionRequest(messages=MESSAGES, model="m", reasoning_effort=0.5)
    with pytest.raises(RequestError, match=r"^reasoning_effort: "):
        chat.template_kwargs(request)


@pytest.mark.parametrize("num_events", [0, 1, 2])
def test_stream_left_early_is_released(num_events: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client may leave before the first event, between two, or stay."""
    bench = Bench()

    class Manager:
        incremental_streaming_output = False

        async def generate_request(self, obj: Any, request: Any) -> AsyncIterator[Any]:
            for ids in ([65], [65, 66], [65, 66, 67]):
                yield make_output(ids, 0, None, 0, None)

    async def stream(self: Any, obj: Any, request: Any, raw_request: Any) -> AsyncIterator[str]:
        async for output in self.tokenizer_manager.generate_request(obj, raw_request):
            yield f"data: {len(output['output_ids'])}"

    monkeypatch.setattr(OpenAIServingChat, "_generate_chat_stream", stream)
    chat: Any = make_chat(bench, None)
    chat.tokenizer_manager = Engine(Manager(), bench.bookkeeper)
    obj = SimpleNamespace(stream=True, sampling_params={})

    async def leave() -> None:
        raw_request = handed(Asked(bench.plan("q", A)))
        events = chat._generate_chat_stream(obj, SimpleNamespace(model="m"), raw_request)
        for _ in range(num_events):
            await anext(events)
        assert bench.is_idle() is (num_events == 0)
        del events
        # Python closes the generators that nothing refers to, one turn of the loop each
        for _ in range(10):
            await asyncio.sleep(0)
        assert bench.is_idle()

    asyncio.run(leave())


# The end of a stream


def event(**choice: Any) -> dict[str, Any]:
    """A chunk, as SGLang makes it."""
    choice = {"index": 0, "delta": {}, "finish_reason": None, **choice}
    return {"id": "x", "created": 1, "choices": [choice]}


def said(text: str, index: int = 0) -> dict[str, Any]:
    return event(index=index, delta={"content": text})


def ended(index: int = 0, reason: str = "stop") -> dict[str, Any]:
    return event(index=index, finish_reason=reason)


HIDDEN = event(delta={"hidden_states": [[0.5]]})
TOKENS = {"prompt_tokens": 9, "prompt_tokens_details": None}
USAGE = {"id": "x", "created": 1, "choices": [], "usage": TOKENS}
ERROR = {"error": {"message": "aborted"}}


@pytest.mark.parametrize("event", [DONE, ": keep-alive\n\n", 'data: {"usage": {}}\n\n'])
def test_event_without_a_delta(event: str) -> None:
    assert _delta(_chunk(event)) == {}


def test_delta_is_the_first_choices() -> None:
    """The conversation keeps choice 0."""
    assert [_delta(said("x", index)) for index in (0, 1)] == [{"content": "x"}, {}]
    assert _delta(event(delta=None)) == {}


def streaming(
    monkeypatch: pytest.MonkeyPatch, chunks: Iterable[Any], rag: Any, bench: Bench
) -> AsyncIterator[str]:
    """What a client gets of SGLang's events."""

    async def stream(self: Any, obj: Any, request: Any, raw_request: Any) -> AsyncIterator[str]:
        for chunk in chunks:
            yield chunk if isinstance(chunk, str) else f"data: {json.dumps(chunk)}\n\n"
        yield DONE

    monkeypatch.setattr(OpenAIServingChat, "_generate_chat_stream", stream)
    chat: Any = make_chat(bench, None)
    events: AsyncIterator[str] = chat._generate_chat_stream(None, None, handed(rag))
    return events


@pytest.mark.parametrize(
    ("events", "place"),
    [
        ([said("a"), ended()], 1),
        ([said("a"), ended(), USAGE], 1),
        ([said("a"), said("b", 1), ended(1), ended(0)], 3),
        ([said("a"), ended(0), ended(1), HIDDEN, USAGE], 3),
        ([said("a"), ended(reason="abort")], 1),
        ([said("a"), ended(), "event: sglext_ids\ndata: {}\n\n", USAGE], 1),
        ([said("a"), ERROR], None),
        ([said("a"), ERROR, ended(1)], 2),
    ],
)
def test_chunkcache_is_in_the_last_event_with_choices(
    monkeypatch: pytest.MonkeyPatch, events: list[Any], place: int | None
) -> None:
    """No event is added, none loses its place."""
    bench = Bench()
    rag = bench.reply(bench.ask("q", A), cached=3)

    async def read() -> list[Any]:
        got = [each async for each in streaming(monkeypatch, events, rag, bench)]
        assert got.pop() == DONE
        return [_chunk(each) or each for each in got]

    got = asyncio.run(read())
    assert len(got) == len(events)
    told = [i for i, each in enumerate(got) if "chunkcache" in each]
    assert told == ([] if place is None else [place])
    for each, sent in zip(got, events, strict=True):
        if isinstance(sent, dict) and "usage" not in sent:
            assert {name: each[name] for name in sent} == sent
        elif isinstance(sent, dict):
            assert each["usage"] == TOKENS | {"prompt_tokens_details": {"cached_tokens": 3}}
    if place is not None:
        assert got[place]["chunkcache"]["order"] == ["a"]


def test_text_is_not_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token reaches its client before the next one is there."""
    bench = Bench()
    rag = bench.reply(bench.ask("q", A))

    def chunks() -> Iterator[Any]:
        yield said("a")
        pytest.fail("asked for more before the text was handed on")

    async def read_one() -> dict[str, Any]:
        events: Any = streaming(monkeypatch, chunks(), rag, bench)
        first = await anext(events)
        await events.aclose()
        return _chunk(first)

    assert asyncio.run(read_one()) == said("a")


@pytest.mark.parametrize(
    ("known", "details"),
    [
        ({"exact": 3, "relocated": 2, "recomputed": 1}, {"cached_tokens": 5}),
        ({"exact": 0, "relocated": 0, "recomputed": 0}, {"cached_tokens": 0}),
        (None, None),
    ],
)
def test_cached_tokens_are_those_not_computed(known: Any, details: Any) -> None:
    """In place or moved; what was moved and computed anew was computed."""
    bench = Bench()
    rag = bench.ask("q", A)
    rag.known = known
    body: dict[str, Any] = {"usage": {"prompt_tokens": 9, "prompt_tokens_details": None}}
    _report_cached(body, rag)
    assert body["usage"]["prompt_tokens_details"] == details
