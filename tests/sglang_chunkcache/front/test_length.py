"""Long requests: refused before they are read or tokenised,
and each text of the others is encoded once."""

from __future__ import annotations

import asyncio
import gc
import json
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

pytest.importorskip("sglang")

from starlette.requests import Request

from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.errors import BodyTooLargeError, RequestError
from sglang_chunkcache.front.drafter import Drafter
from sglang_chunkcache.front.parse import MAX_VALUES, json_object
from sglang_chunkcache.front.request import Identity, Passage
from tests.kit.front_bench import A, B, Bench, user
from tests.kit.front_planning import Talk, assistant, system

CONFIG = ChunkCacheConfig(max_body_bytes=10_000)


class Body:
    """A request whose body comes in pieces; counts what was read."""

    def __init__(self, pieces: Sequence[bytes], **headers: str) -> None:
        self.pieces, self.num_read = list(pieces), 0
        self.headers = {name.replace("_", "-"): value for name, value in headers.items()}

    async def stream(self) -> AsyncIterator[bytes]:
        for piece in self.pieces:
            self.num_read += len(piece)
            yield piece


def read(body: Body, config: ChunkCacheConfig = CONFIG) -> dict[str, Any]:
    return asyncio.run(json_object(body, config))  # type: ignore[arg-type]


# Bodies


def test_body_of_a_told_length_is_refused_unread() -> None:
    body = Body([b" " * 5000] * 3, content_length="10001")
    with pytest.raises(BodyTooLargeError, match="body: more than 10000 bytes") as error:
        read(body)
    assert (body.num_read, error.value.status) == (0, 413)


def test_endless_body_is_refused_while_it_is_read() -> None:
    body = Body([b" " * 3000] * 100)
    with pytest.raises(BodyTooLargeError):
        read(body)
    assert body.num_read == 12_000


def test_body_at_the_limit_is_read() -> None:
    text = json.dumps({"a": "x" * 9991}).encode()
    pieces = [text[:7000], text[7000:]]
    assert (len(text), read(Body(pieces, content_length="10000"))) == (10_000, json.loads(text))


def test_client_that_leaves_amid_its_body_is_refused_like_any_other() -> None:
    """A command that is killed while it sends made a traceback of each of its requests."""
    begun = {"type": "http.request", "body": b'{"a": ', "more_body": True}
    messages = iter([begun, {"type": "http.disconnect"}])

    async def receive() -> Any:
        return next(messages)

    with pytest.raises(RequestError, match="body: the client has disconnected"):
        asyncio.run(json_object(Request({"type": "http", "headers": []}, receive), CONFIG))


N = 4 * MAX_VALUES
BOMBS = {
    "lists": b"[" + b"[]," * N + b"1]",
    "nested": b"[" * N,
    "numbers": b"[" + b"1," * N + b"1]",
    "brackets behind strings": b"[" + b'"",' * 50_500 + b"[]," * N + b"0]",
    "strings": b"[" + b'"a",' * N + b'"a"]',
    "escapes": b"[" + b'"\\\\",' * N + b'"a"]',
    "keys": b"{" + b'"a":1,' * N + b'"a":1}',
    "unterminated": b'{"a": "' + b"[]," * N,
}


@pytest.mark.parametrize("kind", BOMBS)
def test_too_many_values_are_refused_before_they_are_parsed(kind: str) -> None:
    """A parser makes an object of each; a million of them takes seconds of the event loop."""
    big = ChunkCacheConfig()
    gc.collect()
    with pytest.raises(RequestError, match=r"body: (too many values|not JSON)"):
        read(Body([b'{"messages": ' + BOMBS[kind] + b"}"]), big)


@pytest.mark.parametrize("text", ['{"a": [1, 2]}, "b"', "\\", '\\"[', "é,中", ",\n"])
def test_text_of_any_signs_is_read(text: str) -> None:
    body = {"messages": [{"role": "user", "content": text * 100_000}]}
    assert read(Body([json.dumps(body).encode()]), ChunkCacheConfig()) == body


# Texts


def encoded(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The texts that are encoded from now on."""
    seen: list[str] = []
    tokenizer = bench.assembler.tokenizer
    for name in ("_raw", "_raw_plain"):
        raw = getattr(tokenizer, name)

        def encode(text: str, raw: Any = raw) -> Any:
            seen.append(text)
            return raw(text)

        monkeypatch.setattr(tokenizer, name, encode)
    return seen


def many(size: int) -> list[Passage]:
    return [Passage(str(i), f"{i}" * size) for i in range(100)]


@pytest.mark.parametrize(
    ("ask", "field"),
    [
        (lambda bench: bench.ask("q" * 100_000), "messages: more than 200 tokens"),
        (lambda bench: bench.ask("q" * 100_000, to="c"), "messages: more than 200 tokens"),
        (lambda bench: bench.ask("q", *many(100)), "chunks: "),
        (lambda bench: bench.ask("q", *many(100_000)), "chunks: "),
        (lambda bench: bench.parts(["x" * 1000, "y" * 1000]), "parts: "),
    ],
    ids=["question", "later question", "chunks", "long chunks", "parts"],
)
def test_what_cannot_fit_is_not_tokenised(
    ask: Any, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is what stands around a question."""
    bench = Bench(context_len=200)
    seen = encoded(bench, monkeypatch)
    with pytest.raises(RequestError, match=field):
        ask(bench)
    assert max(map(len, seen), default=0) < 10


def test_texts_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a turn that goes on, one that breaks the prefix, one whose conversation was forgotten."""
    bench = Bench(context_len=300, reuse="fused")
    talk, seen = Talk(bench, system("sys")), encoded(bench, monkeypatch)
    departed = 0
    for i in range(12):
        if i == 10:
            bench.bookkeeper.forget()
        seen.clear()
        own = Passage(f"p{i}", f"<{i}>" + "x" * 30)
        request = talk.turn(f"question {i}", own, max_new_tokens=10)
        departed += request.num_departed
        assert [text for text, count in Counter(seen).items() if count > 1] == []
    assert departed
    seen.clear()
    wide = Drafter(bench.config, bench.assembler, context_len=100_000)
    wide.preprocessing([], [Passage("long", "n" * 20_000), A], B, identity=Identity())
    assert set(Counter(seen).values()) == {1}


def test_long_forgotten_conversation_is_cut_in_time() -> None:
    """Only the exchanges that stay are encoded: the others are as many as the client likes."""
    bench = Bench(context_len=300)
    messages = [system("sys")]
    for i in range(1000):
        messages += [user(f"question {i}"), assistant(f"answer {i}")]
    request = bench.ask([*messages, user("now")], to="c", max_new_tokens=10)
    text = "".join(map(chr, request.input_ids))
    assert text.startswith("\x02\x01ssys\x03\x01u")
    assert "answer 999\x03\x01unow" in text
    assert 100 < len(request.input_ids) <= 150 + len("\x03\x01unow\x03\x01a")
    assert request.num_departed == 1000 - text.count("answer")
