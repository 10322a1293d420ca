"""Folders of questions: order, what a turn searches for, and what is said about a folder with something wrong in it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from retrieval.errors import RetrievalError
from retrieval.questions import Query, QuestionSet, parse_query, read_questions

PASSAGES = [{"id": f"p{i}", "title": "", "text": f"passage {i}"} for i in range(3)]
QUESTIONS = [{"question": f"question {i}", "gold_passage_ids": ["p1"]} for i in range(9)]
TURNS = [{"question": f"turn {i}", "rewrite": f"rewritten {i}"} for i in range(3)]
TALK = {"id": "c1", "domain": "", "turns": TURNS}


def write_rows(path: Path, rows: Sequence[Any]) -> None:
    """Strings as they are, everything else as JSON."""
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    path.write_bytes(gzip.compress("\n".join(lines).encode("utf-8", "surrogatepass")))


def make_folder(
    folder: Path, rows: Sequence[Any], *, name: str = "questions", passages: Sequence[Any] = PASSAGES
) -> Path:
    write_rows(folder / "passages.jsonl.gz", passages)
    write_rows(folder / f"{name}.jsonl.gz", rows)
    return folder


def read(
    folder: Path, *, file: str | None = None, query: Query = 1, seed: int = 0, limit: int | None = None
) -> QuestionSet:
    return read_questions(folder, file=file, query=query, seed=seed, limit=limit)


def queries(found: QuestionSet) -> list[str]:
    return [question.query for question in found.questions]


def test_questions_are_shuffled_and_limited(tmp_path: Path) -> None:
    """By the seed; a limit takes from the shuffled ones, so that it is a sample."""
    make_folder(tmp_path, QUESTIONS)
    asked = queries(read(tmp_path))
    assert sorted(asked) == [f"question {i}" for i in range(9)]
    assert asked == queries(read(tmp_path)) != queries(read(tmp_path, seed=1))
    assert queries(read(tmp_path, limit=4)) == asked[:4]
    assert read(tmp_path).questions[0].gold == {"p1"}


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("last", ["turn 0", "turn 1", "turn 2"]),
        ("turns:2", ["turn 0", "turn 0\nturn 1", "turn 1\nturn 2"]),
        ("turns:9", ["turn 0", "turn 0\nturn 1", "turn 0\nturn 1\nturn 2"]),
        ("rewrite", ["rewritten 0", "rewritten 1", "rewritten 2"]),
    ],
)
def test_what_a_turn_searches_for(tmp_path: Path, text: str, asked: list[str]) -> None:
    """Its last questions, oldest first, or its rewrite; turns keep their order."""
    make_folder(tmp_path, [TALK], name="conversations")
    found = read(tmp_path, query=parse_query(text))
    assert queries(found) == asked
    assert {question.conversation for question in found.questions} == {"c1"}


def test_the_file_that_is_asked_for(tmp_path: Path) -> None:
    """A folder may hold two sets of conversations over the same passages."""
    make_folder(tmp_path, [TALK], name="conversations")
    make_folder(tmp_path, [{**TALK, "id": "c2"}], name="conversations_un")
    assert read(tmp_path).file == "conversations.jsonl.gz"
    assert read(tmp_path, file="conversations_un.jsonl.gz").questions[0].conversation == "c2"


def test_domains_are_kept_apart(tmp_path: Path) -> None:
    """Documents by domain; a right passage must lie in the question's own."""
    passages = [{**row, "domain": domain} for row, domain in zip(PASSAGES, "aab", strict=True)]
    make_folder(tmp_path, [{**QUESTIONS[0], "domain": "a"}], passages=passages)
    found = read(tmp_path)
    assert {domain: len(inside) for domain, inside in found.documents.items()} == {"a": 2, "b": 1}
    make_folder(tmp_path, [{**QUESTIONS[0], "domain": "b"}], passages=passages)
    with pytest.raises(RetrievalError, match=r"questions\.jsonl\.gz:1: gold passage 'p1' is not among"):
        read(tmp_path)
    make_folder(tmp_path, [QUESTIONS[0]], passages=passages)
    with pytest.raises(RetrievalError, match="1: there are no passages without domain"):
        read(tmp_path)


def test_halves_of_characters_are_replaced(tmp_path: Path) -> None:
    """JSON can hold them; the index, a tokenizer and a terminal cannot."""
    passages = [{"id": "p\ud800", "text": "x\udfff"}]
    make_folder(tmp_path, [{"question": "q\ud800", "gold_passage_ids": ["p\ud800"]}], passages=passages)
    found = read(tmp_path)
    assert found.documents[""][0].text == "x\ufffd"
    assert found.questions[0].gold == {found.documents[""][0].id} == {"p\ufffd"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([QUESTIONS[0], "{"], "2: not JSON"),
        (["[" * 200_000], "1: not JSON"),
        ([7], "1: must be a JSON object"),
        ([{"gold_passage_ids": []}], "1: question must be a non-empty string"),
        ([{"question": " "}], "1: question must be a non-empty string"),
        ([{"question": "q", "gold_passage_ids": "p1"}], "1: gold_passage_ids must be a list of strings"),
        ([{"question": "q", "gold_passage_ids": ["p9"]}], "1: gold passage 'p9' is not among the passages"),
        ([{"question": "q", "domain": "x"}], "1: there are no passages of domain 'x'"),
        ([{"id": "c", "turns": {}}], "1: turns must be a list of objects"),
        ([{"turns": []}], "1: id must be a non-empty string"),
        ([{"id": "c", "turns": [{}]}], "1: turn 1: question must be a non-empty string"),
        ([], "no questions"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, rows: list[Any], message: str) -> None:
    """File, line, and what it should be."""
    with pytest.raises(RetrievalError, match=rf"questions\.jsonl\.gz:? ?{message}"):
        read(make_folder(tmp_path, rows))


@pytest.mark.parametrize(
    ("passages", "message"),
    [
        ([{"id": "p1"}], "1: text must be a non-empty string"),
        ([{"text": "t"}], "1: id must be a non-empty string"),
        ([PASSAGES[0], PASSAGES[0]], "2: id 'p0' occurs twice"),
        ([], "no passages"),
    ],
)
def test_wrong_passages_are_named(tmp_path: Path, passages: list[Any], message: str) -> None:
    """File, line, and what it should be."""
    with pytest.raises(RetrievalError, match=rf"passages\.jsonl\.gz:? ?{message}"):
        read(make_folder(tmp_path, QUESTIONS, passages=passages))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    """Missing, not gzip, cut off, not UTF-8."""
    with pytest.raises(RetrievalError, match=r"nowhere/passages\.jsonl\.gz: no such file"):
        read(tmp_path / "nowhere")
    questions = make_folder(tmp_path, QUESTIONS) / "questions.jsonl.gz"
    whole = questions.read_bytes()
    for damaged in (b"plain text", whole[:-9], whole[:30] + b"\xff" * 9 + whole[39:], gzip.compress(b'{"\xff"}')):
        questions.write_bytes(damaged)
        with pytest.raises(RetrievalError, match=r"questions\.jsonl\.gz:\d+: "):
            read(tmp_path)
    questions.unlink()
    with pytest.raises(RetrievalError, match=r"questions\.jsonl\.gz: no such file"):
        read(tmp_path)


@pytest.mark.parametrize("text", ["first", "turns", "turns:", "turns:0", "turns:-1", "turns:x", ""])
def test_unknown_queries_are_refused(text: str) -> None:
    """With what there is."""
    with pytest.raises(RetrievalError, match="query must be last, rewrite or turns:N"):
        parse_query(text)


def test_rewrites_and_limits_that_are_not_there(tmp_path: Path) -> None:
    """A turn without a rewrite is left out, not searched for by something else."""
    make_folder(tmp_path, QUESTIONS)
    with pytest.raises(RetrievalError, match=r"questions\.jsonl\.gz:1: a single question has no rewrite"):
        read(tmp_path, query="rewrite")
    with pytest.raises(RetrievalError, match="limit must be at least 1, got 0"):
        read(tmp_path, limit=0)
    conversations = "conversations.jsonl.gz"
    make_folder(tmp_path, [{**TALK, "turns": [TURNS[0], {"question": "q", "rewrite": None}]}], name="conversations")
    assert queries(read(tmp_path, file=conversations, query="rewrite")) == ["rewritten 0"]
    make_folder(tmp_path, [{**TALK, "turns": [{"question": "q"}]}], name="conversations")
    with pytest.raises(RetrievalError, match=r"conversations\.jsonl\.gz: no rewrites"):
        read(tmp_path, file=conversations, query="rewrite")
    make_folder(tmp_path, [{**TALK, "turns": [{"question": "q", "rewrite": 7}]}], name="conversations")
    with pytest.raises(RetrievalError, match="1: turn 1: rewrite must be a non-empty string"):
        read(tmp_path, file=conversations, query="rewrite")
