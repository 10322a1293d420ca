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

from radix_ext import ConversationMap
from sglang_chunkcache.config import ChunkCacheConfig
from sglang_chunkcache.errors import BodyTooLargeError, RequestError
from sglang_chunkcache.front.parse import MAX_VALUES, json_object
from sglang_chunkcache.front.request import Identity, Passage
from tests.sglang_chunkcache.front.front_bench import A, B, Bench, user

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
    """By Content-Length."""
    body = Body([b" " * 5000] * 3, content_length="10001")
    with pytest.raises(BodyTooLargeError, match="body: more than 10000 bytes") as error:
        read(body)
    assert (body.num_read, error.value.status) == (0, 413)


def test_endless_body_is_refused_while_it_is_read() -> None:
    """Chunked bodies tell no length."""
    body = Body([b" " * 3000] * 100)
    with pytest.raises(BodyTooLargeError):
        read(body)
    assert body.num_read == 12_000


def test_body_at_the_limit_is_read() -> None:
    """In any pieces."""
    text = json.dumps({"a": "x" * 9991}).encode()
    assert len(text) == 10_000
    assert read(
        Body([text[i : i + 700] for i in range(0, len(text), 700)], content_length="10000")
    ) == json.loads(text)


def test_client_that_leaves_amid_its_body_is_refused_like_any_other() -> None:
    """A command that is killed while it sends made a traceback of each of its requests."""
    messages = iter(
        [
            {"type": "http.request", "body": b'{"a": ', "more_body": True},
            {"type": "http.disconnect"},
        ]
    )

    async def receive() -> Any:
        return next(messages)

    with pytest.raises(RequestError, match="body: the client has disconnected"):
        asyncio.run(json_object(Request({"type": "http", "headers": []}, receive), CONFIG))


N = 4 * MAX_VALUES
BOMBS = {
    "lists": b"[" + b"[]," * N + b"1]",
    "nested": b"[" * N,
    "objects": b"[" + b"{}," * N + b"1]",
    "numbers": b"[" + b"1," * N + b"1]",
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
    """What stands in strings is no value."""
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


@pytest.mark.parametrize("to", [None, "c"])
def test_question_that_cannot_fit_is_not_tokenised(
    to: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is what stands around it."""
    bench = Bench(context_len=200)
    seen = encoded(bench, monkeypatch)
    with pytest.raises(RequestError, match="messages: more than 200 tokens"):
        bench.ask("q" * 100_000, to=to)
    assert not any("q" in text for text in seen)


@pytest.mark.parametrize("size", [100, 100_000])
def test_chunks_that_cannot_fit_are_not_tokenised(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One, or many."""
    bench = Bench(context_len=200)
    seen = encoded(bench, monkeypatch)
    with pytest.raises(RequestError, match="chunks: "):
        bench.ask("q", *(Passage(str(i), f"{i}" * size) for i in range(100)))
    assert seen == []


def test_parts_that_cannot_fit_are_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    """Texts of a program."""
    bench = Bench(context_len=200)
    seen = encoded(bench, monkeypatch)
    with pytest.raises(RequestError, match="parts: "):
        bench.parts(["x" * 1000, "y" * 1000])
    assert seen == []


def test_texts_are_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a turn that goes on, one that breaks the prefix, and one whose conversation was
    forgotten."""
    bench = Bench(context_len=300)
    messages: list[dict[str, str]] = [{"role": "system", "content": "sys"}]
    seen = encoded(bench, monkeypatch)
    departed = 0
    for i in range(12):
        if i == 10:
            bench.books.conversations = ConversationMap(
                max_conversations=1, max_tokens=10_000, idle_s=60
            )
        messages.append(user(f"question {i}"))
        seen.clear()
        request = bench.turn(messages, Passage(f"p{i}", f"<{i}>" + "x" * 30), max_new_tokens=10)
        departed += request.num_departed
        assert [text for text, count in Counter(seen).items() if count > 1] == []
    assert departed


def test_preprocessing_encodes_neighbours_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long ones are not remembered."""
    bench = Bench(context_len=100_000, reuse="fused")
    seen = encoded(bench, monkeypatch)
    long = Passage("long", "n" * 20_000)
    bench.drafter.preprocessing([], [long, A], B, identity=Identity())
    assert sorted(Counter(seen).values()) == [1] * len(Counter(seen))


def test_long_forgotten_conversation_is_cut_in_time() -> None:
    """Only the exchanges that stay are encoded: the others are as many as the client likes."""
    bench = Bench(context_len=300)
    messages = [{"role": "system", "content": "sys"}]
    for i in range(1000):
        messages += [user(f"question {i}"), {"role": "assistant", "content": f"answer {i}"}]
    request = bench.ask([*messages, user("now")], to="c", max_new_tokens=10)
    text = "".join(map(chr, request.input_ids))
    assert text.startswith("\x02\x01ssys\x03\x01u")
    assert "answer 999\x03\x01unow" in text
    assert 100 < len(request.input_ids) <= 150 + len("\x03\x01unow\x03\x01a")
    assert request.num_departed == 1000 - text.count("answer")
