"""Questions with their chunks and right answers, as a file: one JSON object a line.

{"question": "...", "chunks": ["...", ...], "answers": ["...", ...]}
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sglang_chunkcache.errors import ServerError


@dataclass(frozen=True, slots=True)
class Example:
    """One validation question."""

    question: str
    chunks: tuple[str, ...]
    answers: tuple[str, ...]


def read_examples(path: Path) -> list[Example]:
    """Examples of a file. Raises ServerError naming file and line."""
    examples = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ServerError(f"{path}: {error}") from None
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            example = Example(row["question"], tuple(row["chunks"]), tuple(row["answers"]))
        except (ValueError, TypeError, LookupError, RecursionError) as error:
            raise ServerError(
                f"{path}:{number}: needs question, chunks and answers: {error!r}"
            ) from None
        # tuple() takes a text apart into letters, which are texts that are not empty.
        if not isinstance(row["chunks"], list) or not isinstance(row["answers"], list):
            raise ServerError(f"{path}:{number}: chunks and answers must be lists")
        texts = (example.question, *example.chunks, *example.answers)
        if (
            not example.chunks
            or not example.answers
            or not all(isinstance(text, str) and text for text in texts)
        ):
            raise ServerError(
                f"{path}:{number}: question, chunks and answers must be texts that are not empty"
            )
        examples.append(example)
    # The server would calibrate on made-up questions instead, without a word.
    if not examples:
        raise ServerError(f"{path}: no examples")
    return examples
