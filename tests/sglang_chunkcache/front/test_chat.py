"""What is taken from outputs on their way, and that a stream nobody reads gives its plan and load back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("sglang")

from sglang_chunkcache.front.chat import DONE, TappedManager, _delta, _sse


class Service:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.observed: list[tuple[Any, int, bool]] = []
        self.released: list[Any] = []

    def observe(self, request: Any, output: Any, *, index: int, incremental: bool) -> None:
        self.observed.append((output["text"], index, incremental))

    def release(self, request: Any) -> None:
        self.released.append(request)


class Manager:
    """SGLang's manager: some outputs, and attributes of its own."""

    incremental_streaming_output = True
    name = "manager"

    def __init__(self, *outputs: Any) -> None:
        self.outputs = outputs

    async def generate_request(self, obj: Any, request: Any) -> AsyncIterator[Any]:
        for output in self.outputs:
            yield output


def make_request(rag: Any = "rag") -> Any:
    return SimpleNamespace(state=SimpleNamespace(chunkcache=rag) if rag else SimpleNamespace())


def run(manager: Manager, request: Any, *, stream: bool = True) -> tuple[Service, list[Any]]:
    service = Service()

    async def collect() -> list[Any]:
        tapped = TappedManager(manager, service)  # type: ignore[arg-type]
        return [output async for output in tapped.generate_request(SimpleNamespace(stream=stream), request)]

    return service, asyncio.run(collect())


def test_outputs_pass_and_are_observed() -> None:
    """Single outputs, which in a stream say whose they are, and lists of all n, which do not."""
    sent = [{"text": "a", "index": 1}, [{"text": "b"}, {"text": "c"}]]
    service, outputs = run(Manager(*sent), make_request())
    assert outputs == sent
    assert service.observed == [("a", 1, True), ("b", 0, True), ("c", 1, True)]


def test_whole_answers_are_not_incremental() -> None:
    """Only streams are."""
    service, _ = run(Manager({"text": "a"}), make_request(), stream=False)
    assert service.observed == [("a", 0, False)]


def test_requests_of_others_pass_unobserved() -> None:
    """Health checks come without a request or a plan."""
    for request in (None, make_request(None)):
        service, outputs = run(Manager(1), request)
        assert (service.observed, outputs) == ([], [1])


def test_manager_shows_through() -> None:
    """SGLang's serving classes read attributes of it."""
    assert TappedManager(Manager(), Service()).name == "manager"  # type: ignore[arg-type]


def test_stream_that_is_never_read_on_is_released() -> None:
    """A client gone between the engine's first output and HTTP 200: Starlette never iterates the body, so the body's own
    `finally` never runs; closing the engine's stream must be enough, or load and plan count for ever."""
    service = Service()

    async def abandon() -> None:
        tapped = TappedManager(Manager({"text": "a"}, {"text": "b"}), service)  # type: ignore[arg-type]
        outputs: Any = tapped.generate_request(SimpleNamespace(stream=True), make_request())
        await outputs.__anext__()
        await outputs.aclose()

    asyncio.run(abandon())
    assert service.released == ["rag"]


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
