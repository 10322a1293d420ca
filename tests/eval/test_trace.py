"""The trace format: what each field becomes, and every mistake as one line that names file and line."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from eval.errors import CommandError
from eval.replay.trace import MAX_TOKENS, TraceRequest, read_trace
from radix_ext import Chunk, ChunkId


def write(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_error(path: Path, **options: Path) -> str:
    with pytest.raises(CommandError) as error:
        read_trace(path, **options)  # type: ignore[arg-type]
    return str(error.value)


def test_every_field_is_read(tmp_path: Path) -> None:
    """All of the documented format; ids become strings, a repeated one counts once."""
    line = {
        "chunks": ["a", 7, "a"],
        "lengths": [5, 3, 5],
        "timestamp": 2,
        "conversation": 9,
        "question": "not looked at",
    }
    counts = {"question_tokens": 4, "system_tokens": 0, "output_tokens": 8}
    trace = read_trace(write(tmp_path / "t.jsonl", line | counts))
    chunks = (Chunk(ChunkId("a"), 5), Chunk(ChunkId("7"), 3))
    assert trace.requests == (TraceRequest(chunks, True, 2.0, "9", 4, 0, 8),)
    assert trace.has_lengths


def test_fields_not_given_are_none(tmp_path: Path) -> None:
    """Chunks of one token each, and no request without chunks."""
    trace = read_trace(write(tmp_path / "t.jsonl", {"passages": ["a"], "timestamp": None}, {"passages": []}))
    assert trace.requests == (TraceRequest((Chunk(ChunkId("a"), 1),), False),)
    assert not trace.has_lengths
    assert not trace.has_conversations


def test_lengths_count_only_where_all_have_them(tmp_path: Path) -> None:
    """One request without them would mix units."""
    assert not read_trace(
        write(tmp_path / "t.jsonl", {"passages": ["a"], "lengths": [3]}, {"passages": ["b"]})
    ).has_lengths


def test_conversation_needs_a_second_turn(tmp_path: Path) -> None:
    """Otherwise there is nothing to drop, and the columns for it stay away."""
    turns = [{"passages": [1], "conversation": name} for name in "xyx"]
    assert read_trace(write(tmp_path / "t.jsonl", *turns)).has_conversations
    assert not read_trace(write(tmp_path / "t.jsonl", *turns[:2])).has_conversations


def test_turn_without_passages_stays_in_its_conversation(tmp_path: Path) -> None:
    """Left out, the next turn would look like a first one; it says nothing about lengths."""
    turns: list[dict[str, object]] = [
        {"passages": [], "conversation": "x"},
        {"passages": []},
        {"passages": [1], "lengths": [3], "conversation": "x"},
    ]
    trace = read_trace(write(tmp_path / "t.jsonl", *turns))
    assert [len(request.chunks) for request in trace.requests] == [0, 1]
    assert trace.counted == trace.requests[1:]
    assert trace.has_conversations
    assert trace.has_lengths
    with pytest.raises(CommandError, match="has no request with passages among the first 1"):
        read_trace(tmp_path / "t.jsonl", max_requests=1)


def test_k_and_max_requests_cut(tmp_path: Path) -> None:
    """Requests without chunks do not count among the first so many."""
    records = [{"passages": []}, {"passages": [1, 1, 2, 3]}, {"passages": [4]}]
    (request,) = read_trace(write(tmp_path / "t.jsonl", *records), k=2, max_requests=1).requests
    assert [chunk.id for chunk in request.chunks] == ["1", "2"]


def test_components_give_lengths(tmp_path: Path) -> None:
    """RAGPulse keeps them in a second file; other kinds than passages are not chunks."""
    components = write(
        tmp_path / "components.jsonl",
        {"kind": "sys_prompt", "id": 7, "token_length": 99},
        {"kind": "passage", "id": 7, "token_length": 5},
    )
    trace = write(tmp_path / "t.jsonl", {"passages": [7]})
    assert read_trace(trace, components=components).requests[0].chunks == (Chunk(ChunkId("7"), 5),)
    write(trace, {"passages": [7]}, {"passages": [8]})
    assert read_error(trace, components=components) == f"{trace}, line 2: --components has no length for '8'"
    write(components, {"kind": "passage", "id": 7, "token_length": 0})
    assert 'line 1: "token_length" must be a positive integer but has 0' in read_error(trace, components=components)
    write(components, {"kind": "history", "id": 7, "token_length": 3})
    assert "has no passage with a length" in read_error(trace, components=components)


def test_byte_order_mark_is_no_mistake(tmp_path: Path) -> None:
    """Editors on Windows write one."""
    path = tmp_path / "t.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"passages": [1]}\r\n')
    assert len(read_trace(path).requests) == 1


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1, 2]", "must be a JSON object but is a list (expected: one JSON object per line)"),
        ("null", "must be a JSON object but is null"),
        ("{", "Expecting property name"),
        ("id,passages,timestamp", "Expecting value"),
        ("[" * 100_000, "line 1: "),
        ('{"question": "?"}', 'has neither "passages" nor "chunks"'),
        ('{"passages": "abc"}', '"passages" must be a list but is a string'),
        ('{"passages": [1.5]}', '"passages" must hold strings or integers but has a number'),
        ('{"passages": [true]}', '"passages" must hold strings or integers but has a boolean'),
        ('{"passages": [null]}', '"passages" must hold strings or integers but has null'),
        ('{"chunks": [{"id": 1}]}', '"chunks" must hold strings or integers but has an object'),
        ('{"chunks": [""]}', '"chunks" must not hold an empty string'),
        ('{"passages": [' + "9" * 5000 + "]}", "integer string conversion"),
        ('{"passages": [1, 2], "lengths": [3]}', '"lengths" must be a list of 2 token counts'),
        ('{"passages": [1], "lengths": 3}', '"lengths" must be a list of 1 token counts'),
        ('{"passages": [1], "lengths": [0]}', '"lengths" must hold positive integers but has 0'),
        ('{"passages": [1], "lengths": ["3"]}', "\"lengths\" must hold positive integers but has '3'"),
        ('{"passages": [1], "lengths": [2.5]}', '"lengths" must hold positive integers but has 2.5'),
        ('{"passages": [1], "lengths": [1e400]}', '"lengths" must hold positive integers but has inf'),
        (f'{{"passages": [1], "lengths": [{MAX_TOKENS + 1}]}}', f"must be token counts of at most {MAX_TOKENS}"),
        ('{"passages": [1, 1], "lengths": [2, 3]}', "\"passages\" has '1' twice, with 2 and with 3 tokens"),
        ('{"passages": [1], "timestamp": NaN}', "NaN is no JSON number"),
        ('{"passages": [1], "timestamp": Infinity}', "Infinity is no JSON number"),
        ('{"passages": [1], "timestamp": -1}', '"timestamp" must be seconds from 0 to 1e12 but is -1'),
        ('{"passages": [1], "timestamp": 1e400}', '"timestamp" must be seconds from 0 to 1e12 but is inf'),
        ('{"passages": [1], "timestamp": "2026-01-01"}', '"timestamp" must be seconds, a number, but is a string'),
        ('{"passages": [1], "timestamp": true}', '"timestamp" must be seconds, a number, but is a boolean'),
        ('{"passages": [1], "conversation": ["x"]}', '"conversation" must hold strings or integers but has a list'),
        ('{"passages": [1], "question_tokens": -1}', '"question_tokens" must be an integer of at least 0 but has -1'),
        ('{"passages": [1], "system_tokens": 1.5}', '"system_tokens" must be an integer of at least 0 but has 1.5'),
        ('{"passages": [1], "output_tokens": "8"}', "\"output_tokens\" must be an integer of at least 0 but has '8'"),
    ],
)
def test_wrong_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    """File, number and reason, in one line."""
    path = tmp_path / "t.jsonl"
    path.write_text(line + "\n")
    error = read_error(path)
    assert error.startswith(f"{path}, line 1: ")
    assert message in error
    assert "\n" not in error


def test_line_number_counts_blank_lines(tmp_path: Path) -> None:
    """As an editor shows them."""
    path = tmp_path / "t.jsonl"
    path.write_text('{"passages": [1]}\n\n{"passages": [1]\n')
    assert f"{path}, line 3: Expecting" in read_error(path)


def test_lines_that_contradict_each_other_are_named(tmp_path: Path) -> None:
    """Time does not go back, and a chunk has one length: both lines are in the message."""
    path = write(tmp_path / "t.jsonl", {"passages": [1], "timestamp": 5}, {"passages": [1], "timestamp": 4})
    assert '"timestamp" 4 is before 5 of line 1: lines must be in the order of arrival' in read_error(path)
    write(path, {"passages": [1], "lengths": [5]}, {"passages": [1], "lengths": [6]})
    assert "line 2: '1' has 6 tokens but had 5 on line 1" in read_error(path)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("t.jsonl", b"", "has no request with passages"),
        ("t.jsonl", b'{"passages": []}\n', "has no request with passages"),
        ("t.jsonl", None, "does not exist"),
        ("t.jsonl", b'{"passages": ["\xff"]}\n', "cannot be read after line 0: 'utf-8' codec"),
        ("t.jsonl", b"\x7fELF\x02\x01\x01\x00\xff\xfe", "cannot be read after line 0: 'utf-8' codec"),
        ("t.jsonl", '{"passages": [1]}'.encode("utf-16"), "cannot be read after line 0: 'utf-8' codec"),
        ("t.jsonl.gz", b"plain text", "cannot be read after line 0: Not a gzipped file"),
        ("t.jsonl.gz", gzip.compress(b'{"passages": [1]}\n' * 999)[:-9], "cannot be read after line"),
        ("t.jsonl.gz", gzip.compress(b"x")[:10] + b"\xff" * 40, "cannot be read after line 0"),
    ],
)
def test_unreadable_file_is_one_clear_line(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    """Missing, empty, another encoding, binary, not gzip, cut off, garbage inside."""
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    error = read_error(path)
    assert message in error
    assert "\n" not in error


@pytest.mark.parametrize("name", ["folder", "folder.gz"])
def test_directory_is_no_trace(tmp_path: Path, name: str) -> None:
    """Said so, whatever it is called."""
    (tmp_path / name).mkdir()
    assert read_error(tmp_path / name) == f"{tmp_path / name} cannot be read: it is a directory, name a file"
