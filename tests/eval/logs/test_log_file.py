"""Logs as frameworks and gateways write them, read as the same trace."""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eval.errors import CommandError
from eval.logs.call import seconds_of
from eval.logs.log_file import LogFile, unread_text
from eval.logs.passages import Passages, Splitter, digest
from tests.eval.logs.made_logs import (
    CALLS,
    START_S,
    SYSTEM,
    TEXTS,
    Row,
    flat,
    messages,
    otlp,
    span,
    write,
)


def request(at: int) -> Row:
    return {"model": "m", "messages": messages(CALLS[at], at)}


def handler_line(at: int) -> Row:
    chunks = [{"id": name, "text": TEXTS[name]} for name in TEXTS]  # more than the prompt has
    return {"timestamp": START_S + at, **request(at), "chunks": chunks}


def responses(at: int) -> Row:
    system, user = messages(CALLS[at], at)
    parts = [{"role": "user", "content": [{"type": "input_text", "text": user["content"]}]}]
    return {"model": "m", "instructions": system["content"], "input": parts}


def openinference(at: int) -> list[Row]:
    found = [{"id": name, "content": TEXTS[name]} for name in CALLS[at]]
    told = {"openinference.span.kind": "LLM", "llm.model_name": "m"}
    asked = {**told, **flat("llm.input_messages", messages(CALLS[at], at), "message")}
    kept = {
        "openinference.span.kind": "RETRIEVER",
        **flat("retrieval.documents", found, "document"),
    }
    # as they end, each on its line
    return [
        otlp([span(at, "b", START_S + at, asked)]),
        otlp([span(at, "a", START_S + at - 1, kept)]),
    ]


def genai(at: int, *, as_json: bool) -> list[Row]:
    found = [{"id": name, "content": TEXTS[name], "score": "0.5"} for name in CALLS[at]]
    system, user = messages(CALLS[at], at)
    parts = [{"type": "text", "content": user["content"]}]
    given: Row = {
        "gen_ai.system_instructions": [{"type": "text", "content": system["content"]}],
        "gen_ai.input.messages": [{"role": "user", "parts": parts}],
    }
    kept: Any = {"gen_ai.retrieval.documents": found}
    if as_json:
        given, kept = ({key: json.dumps(each[key]) for key in each} for each in (given, kept))
    told = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m", **given}
    agent = {"gen_ai.operation.name": "invoke_agent", "gen_ai.input.messages": "[]"}
    spans = [span(at, "a", START_S + at - 1, kept), span(at, "b", START_S + at, told, parent="c")]
    return [otlp([*spans, span(at, "c", START_S + at - 2, agent)])]


def events(at: int) -> list[Row]:
    said = [
        {"name": f"gen_ai.{each['role']}.message", "attributes": {"content": each["content"]}}
        for each in messages(CALLS[at], at)
    ]
    told = {"gen_ai.operation.name": "chat", "gen_ai.request.model": "m"}
    context = {"trace_id": f"0x{at}", "span_id": "0x1"}
    return [{"context": context, "start_time": START_S + at, "attributes": told, "events": said}]


def openllmetry(at: int) -> list[Row]:
    found = {"documents": [{"page_content": TEXTS[name]} for name in CALLS[at]]}
    kept = {"traceloop.entity.output": json.dumps(found)}
    said = {"gen_ai.request.model": "m", **flat("gen_ai.prompt", messages(CALLS[at], at))}
    return [otlp([span(at, "a", START_S + at - 1, kept), span(at, "b", START_S + at, said)])]


FORMATS: dict[str, Callable[[int], list[Row]]] = {
    "openai": lambda at: [request(at)],
    "gateway": lambda at: [{"ts": START_S + at, "request": {"body": json.dumps(request(at))}}],
    "batch": lambda at: [{"custom_id": "a", "url": "/v1/chat/completions", "body": request(at)}],
    "litellm": lambda at: [
        {"startTime": START_S + at + 0.5, **request(at), "response": {"id": "x"}}
    ],
    "responses": lambda at: [responses(at)],
    "handler": lambda at: [handler_line(at)],
    "openinference": openinference,
    "genai": lambda at: genai(at, as_json=False),
    "genai-json": lambda at: genai(at, as_json=True),
    "openllmetry": openllmetry,
    "events": events,
}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_the_same_trace(tmp_path: Path, name: str) -> None:
    log = write(tmp_path / "log.jsonl", [row for at in range(3) for row in FORMATS[name](at)])
    read = LogFile(log, Passages(Splitter(r"\n\n", None)))
    found = [*read]
    assert [[chunk.id for chunk in each.chunks] for each in found] == [
        [digest(TEXTS[name]) for name in names] for names in CALLS
    ]
    assert {each.head for each in found} == {digest("\0".join(["m", "", f"system\0{SYSTEM}"]))}
    assert all(each.has_lengths for each in found)
    assert {chunk.num_tokens for each in found for chunk in each.chunks} == {
        len(text) // 4 for text in TEXTS.values()
    }
    assert (read.unread["reasons"], read.unread["histories"]) == ({}, 0)
    times = [each.timestamp for each in found]
    assert times == [None] * 3 or times == sorted(t for t in times if t is not None)


def test_lines_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    """By number and reason, with nothing of their text, and the others are read."""
    bad: list[Row | str | bytes] = ['{"messages": [SECRET', b"\xff\xfe", "[1]", {"level": "info"}]
    bad += [{"messages": [{"role": "user", "content": "rewrite this"}]}, {"messages": []}, " "]
    bad += [{"messages": ["SECRET"], "prompt": 1}, otlp([span(1, "a", START_S, {"http.url": "x"})])]
    log = tmp_path / "log.jsonl.gz"
    write(log, [*bad, request(0)])
    log.write_bytes(gzip.compress(log.read_bytes())[:-6])
    read = LogFile(log, Passages(Splitter(r"\n\n", None)))
    assert len(read) == 1
    assert read.unread["named"] == [
        (1, "not JSON: Expecting value"),
        (2, "not UTF-8"),
        (3, "not a JSON object"),
        (4, "no messages, prompt or span on this line"),
        (5, "--separator matches nothing in this call"),
        (6, "a request without messages"),
        (8, "no messages, prompt or span on this line"),
        (11, "the compressed file ends early"),
    ]
    assert "SECRET" not in (told := "\n".join(unread_text(read.unread)))
    assert "8 were not read: no messages, prompt or span on this line (2 of 8); " in told
    log = write(tmp_path / "none.jsonl", bad[:2])
    with pytest.raises(CommandError, match="no request with passages; line 1: not JSON"):
        LogFile(log, Passages())
    write(log, [request(0)] * 3)
    with pytest.raises(CommandError, match=r"line 1 and 2 more: .* --separator '\\n---\\n', or"):
        LogFile(log, Passages())


def test_histories_without_an_id_are_counted(tmp_path: Path) -> None:
    """Our server needs one; their chunks are behind another text each time."""
    told = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]
    rows = [{"messages": told + messages(CALLS[0]), **each} for each in ({}, {"session_id": "s"})]
    read = LogFile(write(tmp_path / "log.jsonl", rows), Passages(Splitter(r"\n\n", None)))
    assert "1 of 2 requests have a conversation's history" in unread_text(read.unread)[1]


def test_spans_without_texts_have_ids_alone(tmp_path: Path) -> None:
    """OpenTelemetry's documents need no more than an id; a reranker's are those of the prompt; a
    call before the retrieval has none."""
    found = [{"id": name} for name in ("x", "y", "z")]
    told = {"gen_ai.operation.name": "chat"}
    spans = [
        span(1, "a", START_S, told),
        span(1, "b", START_S + 1, {"gen_ai.retrieval.documents": json.dumps(found)}),
        span(1, "c", START_S + 2, flat("reranker.output_documents", found[1::-1], "document")),
        span(1, "d", START_S + 3, told),
        span(1, "e", START_S + 4, told, parent="d"),
        span(2, "a", START_S + 5, {"retrieval.documents": json.dumps(found)}),
    ]
    read = LogFile(write(tmp_path / "log.jsonl", [otlp(spans[::-1])]), Passages())
    assert [[c.id for c in each.chunks] for each in read] == [["y", "x"], ["x", "y", "z"]]
    assert not any(each.has_lengths for each in read)
    assert read.unread["named"] == [(1, "no passages in this call")]


def test_odd_values_end_no_replay(tmp_path: Path) -> None:
    """Whatever stands where something else should: at worst the line is named."""
    rng, odd = random.Random(0), [None, 1, True, "", "x", [], {}, ["a"], {"text": {"text": [1]}}]
    rows = [row for form in FORMATS.values() for row in form(0)]
    broken = []
    for _ in range(600):
        row = place = copy.deepcopy(rng.choice(rows))
        while True:
            key: Any = rng.choice([*(place if isinstance(place, dict) else range(len(place)))])
            if not isinstance(place[key], dict | list) or not place[key] or rng.random() < 0.2:
                break
            place = place[key]
        place[key] = rng.choice(odd)
        broken.append(row)
    read = LogFile(write(tmp_path / "log.jsonl", broken), Passages(Splitter(r"\n\n", None)))
    assert len(read) > 100


@pytest.mark.parametrize(
    "time",
    [
        1.76e9,
        1.76e12,
        1.76e15,
        "1760000000000000000",
        "2025-10-09T08:53:20Z",
        "2025-10-09T08:53:20",
    ],
)
def test_times(time: Any) -> None:
    assert seconds_of(time) == 1.76e9
    nothing: list[Any] = ["yesterday", None, True, {}]
    assert [seconds_of(each) for each in nothing] == [None] * 4


def test_a_gateways_line_in_a_trace_is_a_request(tmp_path: Path) -> None:
    """It has a trace's id and attributes of its own; what is nested too deeply is named."""
    in_trace = {"trace_id": "t", "attributes": {"env": "prod"}}
    deep: Any = "text"
    for _ in range(900):
        deep = [deep]
    rows = [{**handler_line(at), **in_trace} for at in range(3)]
    rows.append({"model": "m", "messages": [{"role": "user", "content": deep}]})
    log = LogFile(write(tmp_path / "log.jsonl", rows), Passages())
    assert len(log) == 3
    assert log.unread["named"] == [(4, "nested too deeply")]
