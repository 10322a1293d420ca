"""Reads a folder of passages and of questions whose right passages are known, for `evaluate`.

    passages.jsonl.gz         {"id", "title", "text"}, title optional; "domain" optional: a question searches only its own
    questions.jsonl.gz        {"question", "gold_passage_ids"}, the latter optional
    conversations.jsonl.gz    {"id", "domain", "turns": [{"question", "rewrite", "gold_passage_ids"}]}, the latter two optional

The folder has a questions file or a conversations file; every turn of a conversation is a question. Other fields are ignored.
Knows no index: each passage becomes one document.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Literal
from zlib import error as ZlibError

from retrieval.corpus import clean
from retrieval.errors import RetrievalError
from retrieval.passage import Document

PASSAGES = "passages.jsonl.gz"
QUESTION_FILES = ("questions.jsonl.gz", "conversations.jsonl.gz", "conversations_un.jsonl.gz")
"""The first one that exists is read, unless the caller names another."""

Query = int | Literal["rewrite"]
"""The query of a turn: the conversation's last so many questions, oldest first, one per line; or `rewrite`, the data set's
self-contained version of the question. Turns without a rewrite are then left out."""


@dataclass(frozen=True, slots=True)
class Question:
    """A query and its right passages.

    Attributes:
        domain: of the passages that are searched; "" where passages have none.
        conversation: id of its conversation; None for a single question.
        gold: ids of the right passages; empty where the data set names none.
    """

    query: str
    domain: str
    conversation: str | None
    gold: frozenset[str]


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Documents by domain, and questions in the order in which they are asked.

    Attributes:
        data, file, query, seed: arguments of `read_questions`; `file` is the name of the file that was read.
    """

    data: Path
    file: str
    query: Query
    seed: int
    documents: Mapping[str, list[Document]]
    questions: list[Question]


def parse_query(text: str) -> Query:
    """Parse `last`, `rewrite` or `turns:N`, a value of the flag `--query`. Raises RetrievalError."""
    if text in ("last", "rewrite"):
        return 1 if text == "last" else "rewrite"
    kind, _, number = text.partition(":")
    if kind == "turns" and number.isdecimal() and int(number) > 0:
        return int(number)
    raise RetrievalError(f"query must be last, rewrite or turns:N with N at least 1, got {text!r}")


def read_questions(data: Path, *, file: str | None, query: Query, seed: int, limit: int | None) -> QuestionSet:
    """Read a folder. Single questions are shuffled; conversations keep their order, turn by turn.

    Args:
        file: name of the questions' file; None: the first of `QUESTION_FILES` that exists.
        seed: of the shuffle.
        limit: maximum number of questions, taken after the shuffle; None: all.

    Raises:
        RetrievalError: a file is missing or cannot be read, or a line is invalid (the message has its number).
    """
    if limit is not None and limit < 1:
        raise RetrievalError(f"limit must be at least 1, got {limit}")
    path = data / (file or next((name for name in QUESTION_FILES if (data / name).exists()), QUESTION_FILES[0]))
    documents = _read_documents(data / PASSAGES)
    ids = {domain: {document.id for document in inside} for domain, inside in documents.items()}
    questions = [question for where, row in _rows(path) for question in _questions(row, where, query, ids)]
    if not questions:
        raise RetrievalError(f"{path}: no " + ("rewrites" if query == "rewrite" else "questions"))
    if questions[0].conversation is None:
        Random(seed).shuffle(questions)
    return QuestionSet(data, path.name, query, seed, documents, questions[:limit])


# Private, in order of use


def _read_documents(path: Path) -> dict[str, list[Document]]:
    documents: dict[str, list[Document]] = {}
    known: set[str] = set()
    for where, row in _rows(path):
        document = Document(
            _text(row, "id", where), clean(str(row.get("title") or "")).strip(), _text(row, "text", where)
        )
        if document.id in known:
            raise RetrievalError(f"{where}: id {document.id!r} occurs twice")
        known.add(document.id)
        documents.setdefault(str(row.get("domain") or ""), []).append(document)
    if not documents:
        raise RetrievalError(f"{path}: no passages")
    return documents


def _questions(row: Mapping[str, Any], where: str, query: Query, ids: Mapping[str, set[str]]) -> Iterator[Question]:
    """The questions of one line; `ids` are the passages' by domain."""
    domain = str(row.get("domain") or "")
    if domain not in ids:
        raise RetrievalError(
            f"{where}: there are no passages " + (f"of domain {domain!r}" if domain else "without domain")
        )
    if "turns" not in row:
        if query == "rewrite":
            raise RetrievalError(f"{where}: a single question has no rewrite")
        yield Question(_text(row, "question", where), domain, None, _gold(row, where, ids[domain]))
        return
    conversation, turns = _text(row, "id", where), row["turns"]
    if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
        raise RetrievalError(f"{where}: turns must be a list of objects")
    asked: list[str] = []
    for number, turn in enumerate(turns, 1):
        inside = f"{where}: turn {number}"
        asked.append(_text(turn, "question", inside))
        gold = _gold(turn, inside, ids[domain])
        if query != "rewrite":
            yield Question("\n".join(asked[-query:]), domain, conversation, gold)
        elif turn.get("rewrite") is not None:
            yield Question(_text(turn, "rewrite", inside), domain, conversation, gold)


def _gold(row: Mapping[str, Any], where: str, ids: set[str]) -> frozenset[str]:
    gold = row.get("gold_passage_ids") or []
    if not isinstance(gold, list) or not all(isinstance(name, str) for name in gold):
        raise RetrievalError(f"{where}: gold_passage_ids must be a list of strings")
    gold = [clean(name) for name in gold]
    if unknown := next((name for name in gold if name not in ids), None):
        raise RetrievalError(f"{where}: gold passage {unknown!r} is not among the passages that this question searches")
    return frozenset(gold)


def _text(row: Mapping[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise RetrievalError(f"{where}: {field} must be a non-empty string")
    return clean(value)


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, object) of every non-empty line."""
    number = 0
    try:
        with gzip.open(path, "rt", encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise RetrievalError(f"{path}:{number}: not JSON: {error}") from None
                if not isinstance(row, dict):
                    raise RetrievalError(f"{path}:{number}: must be a JSON object")
                yield f"{path}:{number}", row
    except FileNotFoundError:
        raise RetrievalError(f"{path}: no such file") from None
    except (OSError, EOFError, UnicodeDecodeError, ZlibError) as error:
        raise RetrievalError(f"{path}:{number + 1}: {error}") from None
