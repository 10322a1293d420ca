"""Files of questions, chunks and answers, and bad ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("requests")

from sglang_chunkcache.chunk_files import Example, read_examples
from sglang_chunkcache.client import ServerError

ROW = {"question": "q", "chunks": ["a", "b"], "answers": ["x"], "id": 7}


def test_examples_are_read(tmp_path: Path) -> None:
    """Empty lines and further fields do no harm, nor does a separator of lines in a text."""
    path = tmp_path / "examples.jsonl"
    other = json.dumps({**ROW, "question": "q\u2028r"}, ensure_ascii=False)
    path.write_text(f"{json.dumps(ROW)}\n\n{other}\n", encoding="utf-8")
    chunks, answers = ("a", "b"), ("x",)
    assert read_examples(path) == [
        Example("q", chunks, answers),
        Example("q\u2028r", chunks, answers),
    ]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        (b"\xff\xfe", "1: JSON is malformed"),
        (b"", "no examples"),
        *(
            (text, message)
            for text, message in (
                (b"not json", "1: JSON is malformed"),
                (b'{"x":' + b"[" * 100_000, "1: maximum recursion depth exceeded"),
                (b'["q"]', "1: Expected `object`, got `array`"),
                (b"7", "1: Expected `object`, got `int`"),
            )
        ),
        (b'\n{"question": "q", "chunks": ["a"]}', "2: Object missing required field `answers`"),
        *(({"chunks": each}, "1: Expected `array`, got") for each in (7, "text", {"a": 1})),
        ({"chunks": []}, "1: Expected `array` of length >= 1 - at `$.chunks`"),
        ({"chunks": [""]}, "1: Expected `str` of length >= 1 - at `$.chunks[0]`"),
        ({"chunks": [1]}, "1: Expected `str`, got `int` - at `$.chunks[0]`"),
        ({"question": ""}, "1: Expected `str` of length >= 1 - at `$.question`"),
        ({"answers": []}, "1: Expected `array` of length >= 1 - at `$.answers`"),
        ({"answers": "text"}, "1: Expected `array`, got `str` - at `$.answers`"),
    ],
)
def test_bad_files_are_named_with_the_line(
    tmp_path: Path, content: bytes | dict[str, object] | None, message: str
) -> None:
    path = tmp_path / "examples.jsonl"
    if content is not None:
        whole = json.dumps(ROW | content).encode() if isinstance(content, dict) else content
        path.write_bytes(whole)
    with pytest.raises(ServerError) as caught:
        read_examples(path)
    assert str(path) in str(caught.value)
    assert message in str(caught.value)
