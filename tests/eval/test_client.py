"""One request against a streaming server: what is sent and timed, and what each failure becomes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from eval.serve.arms import Arm
from eval.serve.client import Answer, open_session, send
from eval.task import Request, TextChunk
from tests.eval.fake_endpoint import FakeEndpoint, serving

CHAT = Arm("a", "", route="chat")
RAG = Arm("b", "", route="rag")
CHUNKS = (TextChunk("x", "first"), TextChunk("y", "second"))
NOBODY = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[FakeEndpoint]:
    """One for all tests of this file."""
    with serving(FakeEndpoint(delay_s=0.05, chunk_cache=True)) as fake:
        yield fake


def ask(
    url: str, question: str, arm: Arm = CHAT, *, timeout_s: float = 5.0, **options: Any
) -> Answer:
    """Send one request with two chunks."""
    request = Request("t:1", question, CHUNKS, system="Be brief.", conversation="c")
    history = [{"role": "user", "content": "earlier"}, {"role": "assistant", "content": "so"}]

    async def run() -> Answer:
        async with open_session(timeout_s=timeout_s) as session:
            return await send(session, url, arm, request, history, max_new_tokens=7, **options)

    return asyncio.run(run())


def test_chat_puts_chunks_into_the_user_message(endpoint: FakeEndpoint) -> None:
    extra = {"model": "m", "ignore_eos": True}
    answer = ask(endpoint.url, "why?", body=extra)
    body = endpoint.received[-1]
    assert body["path"] == "/v1/chat/completions"
    roles = [message["role"] for message in body["messages"]]
    assert roles == ["system", "user", "assistant", "user"]
    assert body["messages"][-1] == answer.message
    assert answer.message == {"role": "user", "content": "first\n\nsecond\n\nwhy?"}
    assert body.items() >= {"max_tokens": 7, "temperature": 0, **extra}.items()
    assert "chunks" not in body


def test_rag_sends_chunks_beside_the_messages(endpoint: FakeEndpoint) -> None:
    answer = ask(endpoint.url, "why?", RAG, body={"conversation_id": "s/c"})
    body = endpoint.received[-1]
    assert body["path"] == "/rag/v1/chat/completions"
    assert body["chunks"] == [{"id": "x", "text": "first"}, {"id": "y", "text": "second"}]
    assert body["messages"][-1] == answer.message == {"role": "user", "content": "why?"}
    assert body["conversation_id"] == "s/c"
    assert answer.fates is not None
    assert sum(answer.fates.values()) == answer.prompt_tokens


def test_times_are_those_of_the_stream(endpoint: FakeEndpoint) -> None:
    """The role's event is the first token's; the empty text in it is none."""
    answer = ask(endpoint.url, "why?")
    assert (answer.error, answer.text, answer.fates) == (None, "an answer", None)
    times = [answer.ttft_s, answer.first_text_s, answer.last_text_s, answer.e2e_s]
    told = [each for each in times if each is not None]
    assert len(told) == 4
    assert endpoint.delay_s <= told[0]
    assert told == sorted(told)
    assert (answer.completion_tokens, answer.cached_tokens) == (3, (answer.prompt_tokens or 0) // 2)


class Reorderer:
    """Turns the chunks around, as `order` allows."""

    def __init__(self, pause: Callable[[], object]) -> None:
        self._pause = pause

    def order(self, request: Request) -> list[TextChunk]:
        self._pause()
        return list(request.chunks)[::-1]


def test_reordering_is_sent_and_counted_in_all_times(endpoint: FakeEndpoint) -> None:
    answer = ask(endpoint.url, "why?", reorderer=Reorderer(lambda: time.sleep(0.2)))
    assert endpoint.questions[-1] == "second\n\nfirst\n\nwhy?"
    assert answer.reorder_s is not None
    assert answer.ttft_s is not None
    assert 0.2 <= answer.reorder_s < answer.ttft_s


def test_adapter_that_fails_is_an_error() -> None:
    assert "ValueError" in str(ask(NOBODY, "why?", reorderer=Reorderer(lambda: int("x"))).error)


@pytest.mark.parametrize(
    "event",
    [
        {"choices": ["no object"]},
        {"choices": 5},
        {"choices": [{"delta": {"content": ["a"]}}]},
        {"usage": "none"},
    ],
)
def test_odd_answers_are_errors(event: dict[str, Any]) -> None:
    with serving(FakeEndpoint(odd_event=event)) as odd:
        assert ask(odd.url, "why?").error is not None


@pytest.mark.parametrize(
    ("mishap", "told"),
    [
        ("refused", "HTTP 400: too long"),
        ("broken", "HTTP 500: no JSON"),
        ("cut off", "HTTP 503"),
        ("dropped", "Client"),
        ("unfinished", "broke off before [DONE]"),
        ("empty", "without a token"),
        ("garbage", "JSONDecodeError: Expecting"),
        ("complaint", "out of memory"),
        ("mute", "Timeout"),
        ("nobody", "onnect"),
    ],
)
def test_every_failure_is_an_error_and_no_exception(
    endpoint: FakeEndpoint, mishap: str, told: str
) -> None:
    url = NOBODY if mishap == "nobody" else endpoint.url
    answer = ask(url, mishap, timeout_s=0.3 if mishap == "mute" else 5)
    assert answer.error is not None
    assert told in answer.error
    assert "\n" not in answer.error
    assert answer.e2e_s < 5
