"""The trace format: what each field becomes, and every mistake as one line that names file and
line."""

from __future__ import annotations

import gzip
import json
import os
from pathlib import Path
from typing import Any

import pytest

from eval.data.rows import MAX_COUNT
from eval.errors import CommandError
from eval.replay.trace import TraceFacts, TraceFile, TraceRequest, scan
from radix_ext import Chunk, ChunkId


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "t.jsonl"


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path, *records: object, **options: Any) -> tuple[list[TraceRequest], TraceFacts]:
    trace = TraceFile(write(path, *records), **options)
    return [*trace], scan(trace)


def read_error(path: Path, **options: Path) -> str:
    """One line."""
    with pytest.raises(CommandError) as error:
        list(TraceFile(path, **options))  # type: ignore[arg-type]
    assert "\n" not in str(error.value)
    return str(error.value)


def test_every_field_is_read(path: Path) -> None:
    """All of the documented format; ids become strings, a repeated one counts once."""
    line = {"chunks": ["a", 7, "a"], "lengths": [5, 3, 5], "timestamp": 2, "conversation": 9}
    line |= {"head": 3, "question": "not looked at"}
    line |= {"question_tokens": 4, "system_tokens": 0, "output_tokens": 8}
    requests, facts = read(path, line)
    chunks = (Chunk(ChunkId("a"), 5), Chunk(ChunkId("7"), 3))
    assert requests == [TraceRequest(chunks, True, 2.0, "9", "3", 4, 0, 8)]
    assert (facts.num_headed, facts.num_heads, facts.has_lengths) == (1, 1, True)


def test_fields_not_given_are_none(path: Path) -> None:
    """Chunks of one token each, and no request without chunks."""
    requests, facts = read(path, {"passages": ["a"], "timestamp": None}, {"passages": []})
    assert requests == [TraceRequest((Chunk(ChunkId("a"), 1),), False)]
    assert (facts.has_lengths, facts.num_turns) == (False, {})


def test_facts_are_counted(path: Path) -> None:
    """Each distinct chunk once; other digests for other contents, order or cut."""
    first = {"passages": ["a", "b"], "lengths": [5, 7]}
    last = {"passages": ["b"], "lengths": [7], "conversation": 1}
    facts = read(path, first, last)[1]
    assert (facts.num_requests, facts.num_counted) == (2, 2)
    assert (facts.distinct_chunks, facts.distinct_tokens) == (2, 12)
    assert (facts.largest_chunks, facts.largest_tokens) == (2, 12)
    others = [{"passages": ["b"], "lengths": [7]}, {**last, "lengths": [8]}]
    others += [{**last, "passages": ["a b"]}, last]
    digests = {read(path, {"passages": ["a"]}, other)[1].sha256 for other in others}
    assert len(digests) == 4
    assert facts.sha256 == read(path, first, last)[1].sha256


def test_equal_ids_are_one_object(path: Path) -> None:
    """Memory grows with distinct chunks, however often the file is read."""
    trace = TraceFile(write(path, {"passages": ["a", 7]}, {"passages": ["7"]}))
    (first, second), (again, _) = trace, trace
    assert first.chunks[1] is second.chunks[0] is again.chunks[1]


def test_conversation_needs_a_second_turn(path: Path) -> None:
    """Otherwise there is nothing to drop, and the columns for it stay away."""
    turns = [{"passages": [1], "conversation": name} for name in "xyx"]
    assert read(path, *turns)[1].num_turns == {"x": 2}
    assert read(path, *turns[:2])[1].num_turns == {}


def test_turn_without_passages_stays_in_its_conversation(path: Path) -> None:
    """Left out, the next turn would look like a first one; it says nothing about lengths."""
    last = {"passages": [1], "lengths": [3], "conversation": "x"}
    requests, facts = read(path, {"passages": [], "conversation": "x"}, {"passages": []}, last)
    assert [len(request.chunks) for request in requests] == [0, 1]
    assert (facts.num_requests, facts.num_counted, facts.num_turns) == (2, 1, {"x": 2})
    assert facts.has_lengths
    with pytest.raises(CommandError, match="has no request with passages among the first 1"):
        [*TraceFile(path, max_requests=1)]


def test_max_requests_cut(path: Path) -> None:
    """Requests without chunks do not count among the first so many."""
    records = [{"passages": []}, {"passages": [1, 1, 2, 3]}, {"passages": [4]}]
    ((request,), _) = read(path, *records, max_requests=1)
    assert [chunk.id for chunk in request.chunks] == ["1", "2", "3"]


def test_components_give_lengths(path: Path, tmp_path: Path) -> None:
    """RAGPulse keeps them in a second file; other kinds than passages are not chunks."""
    passage = {"kind": "passage", "id": 7, "token_length": 5}
    head = {"kind": "sys_prompt", "id": 7, "token_length": 99}
    components = write(tmp_path / "components.jsonl", head, passage)
    (request,), _ = read(path, {"passages": [7]}, components=components)
    assert request.chunks == (Chunk(ChunkId("7"), 5),)
    write(path, {"passages": [7]}, {"passages": [8]})
    told = read_error(path, components=components)
    assert "line 2: the length of '8' must be an integer" in told
    write(components, passage | {"token_length": "5"})
    told = read_error(path, components=components)
    assert "line 1: token_length must be an integer" in told


def test_byte_order_mark_is_no_mistake(path: Path) -> None:
    """Editors on Windows write one."""
    path.write_bytes(b'\xef\xbb\xbf{"passages": [1]}\r\n')
    assert len([*TraceFile(path)]) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1, 2]", "must be a JSON object"),
        ('{"passages": [}', "Expecting value"),
        ('{"question": "?"}', "is it a log of calls? --log reads one"),
        ('{"passages": "abc"}', "passages must be a list of strings or integers"),
        ('{"passages": [1.5]}', "passages must be a list of strings or integers"),
        ('{"chunks": [{"id": 1}]}', "chunks must be a list of strings or integers"),
        ('{"passages": [1, 2], "lengths": [3]}', "lengths must be a list of 2 token counts"),
        ('{"passages": [1], "lengths": 3}', "lengths must be a list of 1 token counts"),
        ('{"passages": [1], "lengths": [0]}', "the length of '1' must be an integer from 1 to"),
        ('{"passages": [1], "lengths": ["3"]}', "the length of '1' must be an integer from 1 to"),
        (f'{{"passages": [1], "lengths": [{MAX_COUNT + 1}]}}', f"from 1 to {MAX_COUNT:,}"),
        ('{"passages": [1, 1], "lengths": [2, 3]}', "'1' has 3 tokens but had 2 before"),
        ('{"passages": [9], "lengths": [6]}', "'9' has 6 tokens but had 2 before"),
        ('{"passages": [1], "timestamp": NaN}', "timestamp must be a finite number"),
        ('{"passages": [1], "timestamp": 1e400}', "timestamp must be a finite number"),
        ('{"passages": [1], "timestamp": "2026-01-01"}', "timestamp must be a finite number"),
        ('{"passages": [1], "timestamp": 4}', "timestamp is before 5 of a line above it"),
        ('{"passages": [1], "conversation": ["x"]}', "conversation must be a non-empty string"),
        ('{"passages": [1], "question_tokens": -1}', "question_tokens must be an integer from 0"),
        ('{"passages": [1], "system_tokens": 1.5}', "system_tokens must be an integer from 0 to"),
        ('{"passages": [1], "output_tokens": true}', "output_tokens must be an integer from 0 to"),
    ],
)
def test_wrong_line_is_named(path: Path, line: str, message: str) -> None:
    """As an editor counts it. Time does not go back, and a chunk has one length."""
    path.write_text('{"passages": [9], "lengths": [2], "timestamp": 5}\n\n' + line + "\n")
    error = read_error(path)
    assert error.startswith((f"{path}, line 3: ", f"{path}, line 3, column "))
    assert message in error


def test_pipe_is_no_trace(path: Path) -> None:
    """It can be read once only, and a replay reads a trace several times."""
    os.mkfifo(path)
    assert "must be a file, since it is read several times" in read_error(path)


WHOLE = gzip.compress(b'{"passages": [1]}\n' * 999, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", b"", "has no request with passages"),
        ("t.jsonl", b'{"passages": []}\n', "has no request with passages"),
        ("t.jsonl", None, "does not exist"),
        ("t.jsonl", b'{"passages": ["\xff"]}\n', "cannot be read after line 0: 'utf-8' codec"),
        ("t.jsonl", b"[" * 100_000, "cannot be read after line 1: maximum recursion depth"),
        ("t.jsonl.gz", b"plain text", "cannot be read after line 0: Not a gzipped file"),
        ("t.jsonl.gz", WHOLE[:-9], "cannot be read after line"),
        ("t.jsonl.gz", WHOLE[:10] + b"\xff" * 40, "cannot be read after line 0"),
        ("", None, "Is a directory"),
    ],
)
def test_unreadable_file_is_one_clear_line(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    """Also too deep, cut off, and garbage inside."""
    if content is not None:
        (tmp_path / name).write_bytes(content)
    assert message in read_error(tmp_path / name)
