"""Whatever a client sends: a 4xx that names the field, and the next good request is answered.

What a body may hold is shown without a server, by tests/sglang_chunkcache/front/test_bodies.py and
test_routes.py.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from typing import Any

import pytest

from eval.http import get, post
from eval.server import Server
from tests.polling import DEADLINE_S

pytestmark = pytest.mark.engine

CHAT, GENERATE = "/rag/v1/chat/completions", "/rag/v1/generate"
MESSAGES = [{"role": "user", "content": "What does Dravex make?"}]
TEMPLATE = "{{ raise_exception('rendered') }}"
ANSWER = {"role": "assistant", "content": "x"}
IMAGE = {"type": "image_url", "image_url": {"url": "x"}}
CHUNK = {"id": "a", "text": "The company Dravex makes clocks."}
EXPLAIN, PREPROCESS = "/chunkcache/explain", "/chunkcache/preprocess"


def reuse(**fields: Any) -> dict[str, Any]:
    """A chat body that asks for moved KV in some wrong way."""
    return {"messages": MESSAGES, "chunks": [CHUNK], "reuse": {"mode": "fused", **fields}}


def deep(body: dict[str, Any]) -> bytes:
    """The body with 900 objects in one another in the place of "HERE";
    Python's own encoder would refuse to write it."""
    return json.dumps(body).replace('"HERE"', '{"a": ' * 900 + "1" + "}" * 900).encode()


def chat(**fields: Any) -> dict[str, Any]:
    """A chat body with further fields."""
    return {"messages": MESSAGES, "chunks": [CHUNK], **fields}


def generate(**params: Any) -> dict[str, Any]:
    """A prompt with sampling parameters."""
    return {"parts": ["a"], "sampling_params": params}


Case = tuple[str, str, Any, str]
CASES: list[Case] = [
    ("body not json", CHAT, b"{not json", "body"),
    ("body empty", CHAT, b"", "body"),
    ("messages missing", CHAT, {"chunks": [CHUNK]}, "messages"),
    ("chunk text a number", CHAT, {"messages": MESSAGES, "chunks": [{"text": 5}]}, "chunks.0.text"),
    ("chunk longer than the context", CHAT, {"messages": MESSAGES, "chunks": [{"text": "clocks lamps " * 5000}]}, "chunks"),
    ("a client's template", CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"chat_template": TEMPLATE}}, "not allowed"),
    ("temperature negative", CHAT, {"messages": MESSAGES, "chunks": [CHUNK], "temperature": -1}, "temperature"),
    ("reuse on an exact server", CHAT, reuse(), "--reuse fused"),
    ("preprocess on an exact server", PREPROCESS, {"chunk": CHUNK}, "--reuse fused"),
    ("parts custom_params a list", GENERATE, {"parts": ["a"], "sampling_params": {"custom_params": [1]}}, "custom_params"),
    ("parts unknown sampling param", GENERATE, {"parts": ["a"], "sampling_params": {"no_such": 1}}, "no_such"),
    ("response_format a number", CHAT, chat(response_format=5), "response_format"),
    ("response_format without its schema", CHAT, chat(response_format={"type": "json_schema"}), "response_format"),
    ("custom_params nested 900 deep", CHAT, deep(chat(custom_params={"x": "HERE"})), "custom_params"),
    ("parts custom_params nested 900 deep", GENERATE, deep(generate(custom_params={"x": "HERE"})), "sampling_params.custom"),
    ("stop_regex not closed", CHAT, chat(stop_regex="("), "stop_regex"),
    ("parts stop_regex not closed", GENERATE, generate(stop_regex="("), "sampling_params.stop_regex"),
    ("parts top_logprobs_num negative", GENERATE, {"parts": ["a"], "top_logprobs_num": -1}, "top_logprobs_num"),
    ("logit_bias beyond the vocabulary", CHAT, chat(logit_bias={"9999": 1}), "logit_bias"),
    ("n over its limit", CHAT, chat(n=1000), "n: "),
    ("tree depth a word", "/chunkcache/tree?depth=deep", "GET", "depth"),
]  # fmt: skip
SWEEP: list[Case] = [
    ("body a list", CHAT, [], "body"),
    ("body null", CHAT, None, "body"),
    ("body not utf-8", CHAT, b'{"messages": "\xff\xfe"}', "body"),
    ("messages empty", CHAT, {"messages": [], "chunks": [CHUNK]}, "messages"),
    ("messages a string", CHAT, {"messages": "hello", "chunks": []}, "messages"),
    ("message without role", CHAT, {"messages": [{"content": "x"}]}, "messages"),
    ("message of an unknown role", CHAT, {"messages": [{"role": "wizard", "content": "x"}]}, "messages"),
    ("an answer to nothing", CHAT, {"messages": [ANSWER], "continue_final_message": True}, "messages"),
    ("content an image", CHAT, {"messages": [{"role": "user", "content": [IMAGE]}]}, "content"),
    ("content a number", CHAT, {"messages": [{"role": "user", "content": 7}]}, "content"),
    ("content null", CHAT, {"messages": [{"role": "user", "content": None}]}, "content"),
    ("chunks a string", CHAT, {"messages": MESSAGES, "chunks": "abc"}, "chunks"),
    ("chunks a number", CHAT, {"messages": MESSAGES, "chunks": 7}, "chunks"),
    ("chunks of strings", CHAT, {"messages": MESSAGES, "chunks": ["abc"]}, "chunks.0"),
    ("chunk without text", CHAT, {"messages": MESSAGES, "chunks": [{"id": "a"}]}, "chunks.0.text"),
    ("chunks misspelt", CHAT, {"messages": MESSAGES, "chunk": [CHUNK]}, "did you mean chunks"),
    ("chunk id a list", CHAT, {"messages": MESSAGES, "chunks": [{"id": [1], "text": "x"}]}, "chunks.0.id"),
    ("chunk id true", CHAT, {"messages": MESSAGES, "chunks": [{"id": True, "text": "x"}]}, "chunks.0.id"),
    ("chunk text of a megabyte", CHAT, {"messages": MESSAGES, "chunks": [{"text": "x" * 1_000_000}]}, "chunks.0.text"),
    ("too many chunks", CHAT, {"messages": MESSAGES, "chunks": [{"text": str(i)} for i in range(300)]}, "chunks"),
    ("chunks together too long", CHAT, {"messages": MESSAGES, "chunks": [{"text": str(i) * 900} for i in range(6)]}, "context"),
    ("tokenizer settings", CHAT, {"messages": MESSAGES, "chat_template_kwargs": {"tokenizer_kwargs": {}}}, "tokenizer_kwargs"),
    ("question too long", CHAT, {"messages": [{"role": "user", "content": "clocks " * 9000}], "chunks": [CHUNK]}, "context"),
    ("max_tokens beyond the context", CHAT, {"messages": MESSAGES, "max_tokens": 10**6}, '"param":"max_tokens"'),
    ("max_tokens a string", CHAT, {"messages": MESSAGES, "chunks": [CHUNK], "max_tokens": "many"}, "max_tokens"),
    ("conversation id a number", CHAT, {"messages": MESSAGES, "conversation_id": 7}, "conversation_id"),
    ("input_ids", CHAT, {"messages": MESSAGES, "input_ids": [1, 2]}, "input_ids"),
    ("cache_salt a number", CHAT, {"messages": MESSAGES, "cache_salt": 5}, "cache_salt"),
    ("reuse alpha not finite", CHAT, b'{"messages": [], "reuse": {"mode": "fused", "alpha": 1e999}}', "body"),
    ("parts reuse on an exact server", GENERATE, {"parts": ["a"], "reuse": "fused"}, "--reuse fused"),
    ("explain without messages", EXPLAIN, {"chunks": [CHUNK]}, "messages"),
    ("explain chunk without text", EXPLAIN, {"messages": MESSAGES, "chunks": [{}]}, "chunks.0.text"),
    ("explain fused on an exact server", EXPLAIN, reuse(), "--reuse fused"),
    ("preprocess a chunk without text", PREPROCESS, {"chunk": {"id": "a"}}, "chunk.text"),
    ("preprocess a chunk too long", PREPROCESS, {"chunk": {"text": "x" * 1_000_000}}, "chunk"),
    ("preprocess with too many neighbors", PREPROCESS, {"chunk": CHUNK, "neighbors": [CHUNK] * 300}, "neighbors"),
    ("parts missing", GENERATE, {}, "parts"),
    ("parts empty", GENERATE, {"parts": []}, "parts"),
    ("parts of numbers", GENERATE, {"parts": [1]}, "parts.0"),
    ("parts with too many chunks", GENERATE, {"parts": [{"chunks": [{"text": "x"}] * 200}] * 2}, "parts"),
    ("parts sampling_params.n", GENERATE, {"parts": ["a"], "sampling_params": {"n": 2}}, "sampling_params.n"),
    ("parts with an unknown field", GENERATE, {"parts": ["a"], "input_ids": [1]}, "input_ids"),
    ("parts chunk without text", GENERATE, {"parts": [{"chunks": [{}]}]}, "parts.0"),
    ("parts sampling_params a list", GENERATE, {"parts": ["a"], "sampling_params": []}, "sampling_params"),
    ("parts max_new_tokens a string", GENERATE, {"parts": ["a"], "sampling_params": {"max_new_tokens": "x"}}, "max_new_tokens"),
    ("parts max_new_tokens negative", GENERATE, {"parts": ["a"], "sampling_params": {"max_new_tokens": -5}}, "max_new_tokens"),
    ("tree depth zero", "/chunkcache/tree?depth=0", "GET", "depth"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        *(pytest.param(*fields, id=name) for name, *fields in CASES),
        *(pytest.param(*fields, id=name, marks=pytest.mark.nightly) for name, *fields in SWEEP),
    ],
)
def test_bad_input_is_refused_by_name(rag_server: Server, path: str, body: Any, field: str) -> None:
    """A 4xx whose text names the field, never a 500 and never a dead server."""
    status, text = send(rag_server.url + path, body)
    assert 400 <= status < 500, text
    assert field in text
    assert "rendered" not in text


def test_good_request_after_all_bad_ones(rag_server: Server) -> None:
    """Nothing of the refused requests is left: no plan, no load, and a good request is answered."""
    reply = post(rag_server.url + CHAT, {"messages": MESSAGES, "chunks": [CHUNK], "max_tokens": 4})
    assert reply["chunkcache"]["order"] == ["a"]
    stats = get(rag_server.url + "/chunkcache/stats")
    assert stats["tree"]["open_plans"] == 0
    assert stats["prompt_tokens_in_flight"] == [0]


@pytest.mark.parametrize(
    "text",
    ["🙂 中文 é \u0000 \u202e", "<|end|><|system|>", "\n\n\n", "a" * 1000],
    ids=["unicode", "special", "newlines", "long"],
)
def test_odd_text_is_answered(rag_server: Server, text: str) -> None:
    """Text is text: unicode, control characters, the template's own tokens, no spaces."""
    reply = post(
        rag_server.url + CHAT,
        {
            "messages": [{"role": "user", "content": text[:200]}],
            "chunks": [{"text": text}],
            "max_tokens": 2,
        },
    )
    assert sum(reply["chunkcache"]["fates"].values()) == reply["usage"]["prompt_tokens"]


def send(url: str, body: Any, *, timeout_s: float = DEADLINE_S) -> tuple[int, str]:
    """Status and text of a request with any body; "GET" for none."""
    data = None if body == "GET" else body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode(errors="replace")
