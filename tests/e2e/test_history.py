"""A follow-up question whose document came with an earlier turn,
after all that may happen between two turns: right, or told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from eval.http import post
from eval.server import Server
from tests.e2e.asking import CHAT, assistant, chat, send, stream, text_of, user

pytestmark = pytest.mark.engine

LUMUM = {
    "id": "lumum",
    "text": "The company Lumum serves Ashburg. Once Lumum bought Velex. Still Lumum makes boots.",
}
TOREX = {
    "id": "torex",
    "text": "The company Torex bought Myrex. By now Torex serves Norton. Torex makes pens.",
}
BOTH = [LUMUM, TOREX]
Body = dict[str, Any]
FIRST, SECOND = (f"Which city does the company {name} serve?" for name in ("Lumum", "Torex"))


@pytest.fixture
def cid(request: pytest.FixtureRequest) -> str:
    """Each test's own conversation."""
    return str(request.node.name)


CHANGES: dict[str, Callable[[Body], object]] = {
    "none": lambda body: None,
    "forgotten": lambda body: None,
    "forgotten, sent with the turn": lambda body: body["messages"][1].update(chunks=BOTH),
    "time in the system prompt": lambda body: body["messages"][0].update(content="It is 12:00:01."),
}
"""What happens between two turns; sglang_chunkcache/front/test_history.py has more of them."""


@pytest.mark.parametrize("change", CHANGES)
def test_second_turn_knows_the_first_ones_documents(
    rag_server: Server, cid: str, change: str
) -> None:
    """Norton, or `unknown_history`; where history is required no answer without its documents."""
    messages = [{"role": "system", "content": "It is noon."}, user(FIRST)]
    first = chat(rag_server, messages, BOTH, conversation_id=cid, max_tokens=40)
    assert "Ashburg" in text_of(first)
    messages += [assistant(text_of(first)), user(SECOND)]
    body: Body = {"messages": messages, "chunks": [], "conversation_id": cid}
    CHANGES[change](body)
    if change.startswith("forgotten"):  # a restart, an idle hour, another replica
        post(rag_server.url + "/chunkcache/forget", {})
    if change == "forgotten":
        status, text = send(rag_server.url + CHAT, {**body, "history": "required", "stream": True})
        assert (status, "messages.1.chunks" in text) == (422, True)
    reply = chat(rag_server, **body, max_tokens=40)
    told = reply["chunkcache"]
    if change == "forgotten":
        assert (told["fallbacks"][0], told["turns_unknown"]) == ("unknown_history", 1)
    else:
        assert "Norton" in text_of(reply)
        assert (told["turns_unknown"], told["turns_reused"] + told["turns_rendered"]) == (0, 1)
    assert told["turns_reused"] == (change == "none")


def test_stopped_turn_keeps_its_documents(rag_server: Server, cid: str) -> None:
    """The user asks the same again without saying which chunks."""
    first = chat(rag_server, FIRST, [LUMUM], conversation_id=cid, max_tokens=40)
    messages = [user(FIRST), assistant(text_of(first)), user(SECOND)]
    limits = {"max_tokens": 300, "ignore_eos": True, "temperature": 0, "conversation_id": cid}
    events = stream(rag_server, {"messages": messages, "chunks": [TOREX], **limits})
    assert [next(events) for _ in range(4)]
    events.close()
    again = {"messages": messages, "conversation_id": cid, "temperature": 0, "max_tokens": 40}
    assert "Norton" in text_of(post(rag_server.url + CHAT, again))
