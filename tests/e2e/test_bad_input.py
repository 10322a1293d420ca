"""Whatever a client sends: a 4xx that names the field, and the next good request is answered.

What a body may hold is shown without a server, by tests/sglang_chunkcache/front/: test_parse.py,
test_bodies.py, test_routes.py. Here each way by which a refusal comes to the client has a case.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from eval.server import Server
from tests.e2e.asking import CHAT, GENERATE, PREPROCESS, chat, send, stats_of, user

pytestmark = [pytest.mark.engine, pytest.mark.matrix]

CHUNK = {"id": "a", "text": "The company Dravex makes clocks."}
BODY: dict[str, Any] = {"messages": [user("What does Dravex make?")], "chunks": [CHUNK]}
LONG = {"text": "clocks lamps " * 5000}
TEMPLATE = {"chat_template": "{{ raise_exception('rendered') }}"}


def deep(body: dict[str, Any]) -> bytes:
    """The body with 900 objects in one another in the place of "HERE";
    Python's own encoder would refuse to write it."""
    return json.dumps(body).replace('"HERE"', '{"a": ' * 900 + "1" + "}" * 900).encode()


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, b"{not json", "body"),
        (CHAT, {**BODY, "chunk": [CHUNK]}, "did you mean chunks"),
        (CHAT, {**BODY, "chunks": [LONG]}, "chunks"),
        (CHAT, {**BODY, "chat_template_kwargs": TEMPLATE}, "not allowed"),
        (CHAT, {**BODY, "temperature": -1}, "temperature"),
        (CHAT, {**BODY, "max_tokens": 10**6}, '"param":"max_tokens"'),
        (CHAT, {**BODY, "logit_bias": {"9999": 1}}, "logit_bias"),
        (CHAT, deep({**BODY, "custom_params": {"x": "HERE"}}), "custom_params"),
        (CHAT, {"messages": BODY["messages"], "retrieve": {"query": " \n"}}, "retrieve.query"),
        (PREPROCESS, {"chunk": CHUNK}, "--reuse fused"),
        (GENERATE, {"parts": ["a"], "sampling_params": {"no_such": 1}}, "no_such"),
        ("/rag/v1/retrieve", {"query": None}, "query"),
        ("/chunkcache/tree?depth=deep", "GET", "depth"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_bad_input_is_refused_by_name(rag_server: Server, path: str, body: Any, field: str) -> None:
    """A 4xx whose text names the field, never a 500 and never a dead server."""
    status, text = send(rag_server.url + path, body)
    assert 400 <= status < 500, text
    assert field in text
    assert "rendered" not in text


def test_good_request_after_all_bad_ones(rag_server: Server) -> None:
    """Nothing of the refused requests is left: no plan, no load."""
    assert chat(rag_server, "Who?", [CHUNK], max_tokens=4)["chunkcache"]["order"] == ["a"]
    stats = stats_of(rag_server)
    assert (stats["tree"]["open_plans"], stats["prompt_tokens_in_flight"]) == (0, [0])
