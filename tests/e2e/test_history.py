"""A follow-up question whose document came with an earlier turn,
after all that may happen between two turns: right, or told."""

from __future__ import annotations

import http.client
import json
import urllib.parse
from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

import pytest

from eval.http import post
from eval.server import Server
from tests.e2e.test_bad_input import send

pytestmark = pytest.mark.engine

CHAT = "/rag/v1/chat/completions"
LUMUM = {
    "id": "lumum",
    "text": "The company Lumum serves Ashburg. Once Lumum bought Velex. Still Lumum makes boots.",
}
TOREX = {
    "id": "torex",
    "text": "The company Torex bought Myrex. By now Torex serves Norton. Torex makes pens.",
}
FIRST, SECOND = (
    "Which city does the company Lumum serve?",
    "Which city does the company Torex serve?",
)
TOOL = {
    "type": "function",
    "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
}
Body = dict[str, Any]


def user(text: str, *chunks: Any) -> Body:
    return {"role": "user", "content": text, **({"chunks": list(chunks)} if chunks else {})}


def ask(server: Server, messages: list[Body], **fields: Any) -> Body:
    reply: Body = post(
        server.url + CHAT, {"temperature": 0, "max_tokens": 40, "messages": messages, **fields}
    )
    return reply


def words(reply: Body) -> str:
    return str(reply["choices"][0]["message"]["content"])


@pytest.fixture
def cid(request: pytest.FixtureRequest) -> str:
    """Each test's own conversation."""
    return str(request.node.name)


def same(server: Server, body: Body) -> None:
    """Nothing."""


def forgotten(server: Server, body: Body) -> None:
    """A restart, an idle hour, another replica: to the conversation all one."""
    post(server.url + "/chunkcache/forget", {})


def forgotten_with_chunks(server: Server, body: Body) -> None:
    """The client sends what the turn has shown."""
    forgotten(server, body)
    body["messages"][1]["chunks"] = [LUMUM, TOREX]


def echoed_with_reasoning(server: Server, body: Body) -> None:
    body["messages"][2]["reasoning_content"] = "I look for Lumum."


def white_space(server: Server, body: Body) -> None:
    body["messages"][2]["content"] += " \n"


def time_in_the_system_prompt(server: Server, body: Body) -> None:
    body["messages"][0]["content"] = "It is 12:00:01."


def time_and_chunks(server: Server, body: Body) -> None:
    time_in_the_system_prompt(server, body)
    body["chunks"] = [LUMUM, TOREX]


def thinking_switched(server: Server, body: Body) -> None:
    body["chat_template_kwargs"] = {"enable_thinking": False}


def effort(server: Server, body: Body) -> None:
    body["reasoning_effort"] = "low"


def tool_added(server: Server, body: Body) -> None:
    body["tools"] = [TOOL]


CHANGES = [
    same,
    forgotten,
    forgotten_with_chunks,
    echoed_with_reasoning,
    white_space,
    time_in_the_system_prompt,
    time_and_chunks,
    thinking_switched,
    effort,
    tool_added,
]


@pytest.mark.parametrize("change", CHANGES)
def test_second_turn_knows_the_first_ones_documents(
    rag_server: Server, cid: str, change: Callable[[Server, Body], None]
) -> None:
    """Norton, or `unknown_history`; with `"history":
    "required"` no answer without its documents."""
    messages = [{"role": "system", "content": "It is noon."}, user(FIRST)]
    first = ask(rag_server, messages, chunks=[LUMUM, TOREX], conversation_id=cid)
    assert "Ashburg" in words(first)
    messages += [{"role": "assistant", "content": words(first)}, user(SECOND)]
    body: Body = {"messages": messages, "chunks": [], "conversation_id": cid}
    change(rag_server, body)
    if change is forgotten:
        status, text = send(rag_server.url + CHAT, {**body, "history": "required", "stream": True})
        assert (status, "messages.1.chunks" in text) == (422, True)
    reply = ask(rag_server, **body)
    told = reply["chunkcache"]
    if change is forgotten:
        assert (told["fallbacks"][0], told["turns_unknown"]) == ("unknown_history", 1)
    else:
        assert "Norton" in words(reply)
        assert (told["turns_unknown"], told["turns_reused"] + told["turns_rendered"]) == (0, 1)
    is_known = change in (same, echoed_with_reasoning, white_space)
    assert told["turns_reused"] == is_known


def test_turn_that_ended_at_a_stop_string_keeps_its_documents(rag_server: Server, cid: str) -> None:
    """As agents send them."""
    messages = [user(FIRST)]
    first = ask(rag_server, messages, chunks=[LUMUM, TOREX], conversation_id=cid, stop=["."])
    messages += [{"role": "assistant", "content": words(first)}, user(SECOND)]
    assert "Norton" in words(ask(rag_server, messages, chunks=[], conversation_id=cid, stop=["."]))


def streamed(server: Server, body: Body) -> Generator[str]:
    """The words of a stream as they come; the connection ends with the generator."""
    address = urllib.parse.urlparse(server.url)
    with closing(
        http.client.HTTPConnection(str(address.hostname), address.port, timeout=60)
    ) as connection:
        connection.request(
            "POST", CHAT, json.dumps({**body, "stream": True}), {"Content-Type": "application/json"}
        )
        for line in connection.getresponse():
            if line.startswith(b"data: {"):
                yield json.loads(line[len(b"data: ") :])["choices"][0]["delta"].get("content") or ""


@pytest.mark.parametrize("keeps", [True, False])
def test_stopped_turn_keeps_its_documents(rag_server: Server, cid: str, keeps: bool) -> None:
    """The user stops the second answer.
    Then goes on from its words, or asks the same again without saying which chunks."""
    messages = [user(FIRST)]
    first = ask(rag_server, messages, chunks=[LUMUM], conversation_id=cid)
    messages += [{"role": "assistant", "content": words(first)}, user(SECOND)]
    limits = {"max_tokens": 300, "ignore_eos": True, "temperature": 0}
    stream = streamed(
        rag_server, {"messages": messages, "chunks": [TOREX], "conversation_id": cid, **limits}
    )
    begun = "".join(next(stream) for _ in range(4))
    stream.close()
    if keeps:
        messages += [{"role": "assistant", "content": begun}, user(SECOND)]
    assert "Norton" in words(ask(rag_server, messages, conversation_id=cid))


def test_rendered_history_is_found_cached(rag_server: Server, cid: str) -> None:
    """A replica that never saw the conversation:
    its second turn shares all before the first answer with what is cached."""
    first = ask(rag_server, [user(FIRST, LUMUM, TOREX)], conversation_id=cid)
    order = [{"lumum": LUMUM, "torex": TOREX}[name] for name in first["chunkcache"]["order"]]
    post(rag_server.url + "/chunkcache/forget", {})
    history = [user(FIRST, *order), {"role": "assistant", "content": words(first)}]
    second = ask(rag_server, [*history, user(SECOND)], conversation_id=cid)
    assert second["chunkcache"]["fates"]["exact"] >= first["usage"]["prompt_tokens"]
    stateless = ask(rag_server, [*history, user(SECOND)])
    assert words(stateless) == words(second)
    assert stateless["usage"]["prompt_tokens"] == second["usage"]["prompt_tokens"]
