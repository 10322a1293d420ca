"""Files of questions, chunks and answers, and bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("requests")

from sglang_chunkcache.client import ServerError
from sglang_chunkcache.examples import Example, read_examples


def test_examples_are_read(tmp_path: Path) -> None:
    """Empty lines and further fields do no harm."""
    path = tmp_path / "examples.jsonl"
    row = {"question": "q", "chunks": ["a", "b"], "answers": ["x"], "id": 7}
    path.write_text(f"{json.dumps(row)}\n\n")
    assert read_examples(path) == [Example("q", ("a", "b"), ("x",))]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no examples"),
        ("not json", ":1: needs question, chunks and answers"),
        ('\n{"question": "q", "chunks": ["a"]}', ":2: needs question, chunks and answers"),
        ('["q"]', ":1: needs question, chunks and answers"),
        ("7", ":1: needs question, chunks and answers"),
        (
            '{"question": "q", "chunks": 7, "answers": ["x"]}',
            ":1: needs question, chunks and answers",
        ),
        (
            '{"question": "q", "chunks": [], "answers": ["x"]}',
            ":1: question, chunks and answers must be texts",
        ),
        (
            '{"question": "q", "chunks": ["a"], "answers": []}',
            ":1: question, chunks and answers must be texts",
        ),
        (
            '{"question": "", "chunks": ["a"], "answers": ["x"]}',
            ":1: question, chunks and answers must be texts",
        ),
        (
            '{"question": "q", "chunks": [""], "answers": ["x"]}',
            ":1: question, chunks and answers must be texts",
        ),
        (
            '{"question": "q", "chunks": [1], "answers": ["x"]}',
            ":1: question, chunks and answers must be texts",
        ),
        (
            '{"question": "q", "chunks": "text", "answers": ["x"]}',
            ":1: chunks and answers must be lists",
        ),
        (
            '{"question": "q", "chunks": ["a"], "answers": "text"}',
            ":1: chunks and answers must be lists",
        ),
        (
            '{"question": "q", "chunks": {"a": 1}, "answers": ["x"]}',
            ":1: chunks and answers must be lists",
        ),
    ],
)
def test_bad_files_are_named_with_the_line(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text(text)
    with pytest.raises(ServerError) as caught:
        read_examples(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)


def test_no_file_and_no_text(tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=r"missing\.jsonl"):
        read_examples(tmp_path / "missing.jsonl")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    with pytest.raises(ServerError, match="bytes"):
        read_examples(tmp_path / "bytes")
