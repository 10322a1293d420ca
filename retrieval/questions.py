"""A folder of passages and questions whose right passages are known: what `evaluate` reads.

    passages.jsonl.gz         {"id", "title", "text"}, title optional; "domain" optional: a question looks into its own alone
    questions.jsonl.gz        {"question", "gold_passage_ids"}, the latter optional
    conversations.jsonl.gz    {"id", "domain", "turns": [{"question", "rewrite", "gold_passage_ids"}]}, the latter two optional

There is a questions file or a conversations file; every turn of a conversation is a question. Other fields are not looked at.
Knows no index: passages come out as documents, one each.
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
"""The first that is there is read, unless another one is asked for."""

Query = int | Literal["rewrite"]
"""What a turn searches for: its last so many questions, oldest first, a line each; or the question as somebody rewrote it to
stand alone, which leaves turns out that nobody did that for."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is searched for, and what ought to be found.

    Attributes:
        domain: of the passages it looks into; "" where passages have none.
        conversation: id of the conversation that it is a turn of; None for a question of its own.
        gold: ids of the right passages; empty where nobody said.
    """

    query: str
    domain: str
    conversation: str | None
    gold: frozenset[str]


@dataclass(frozen=True, slots=True)
class QuestionSet:
    """Documents by domain, and questions in the order in which they are asked.

    Attributes:
        data, file, query, seed: what they were read with; `file` is the name of the one that was found.
    """

    data: Path
    file: str
    query: Query
    seed: int
    documents: Mapping[str, list[Document]]
    questions: list[Question]


def parse_query(text: str) -> Query:
    """`last`, `rewrite` or `turns:N` as the command line has it. Raises RetrievalError."""
    if text in ("last", "rewrite"):
        return 1 if text == "last" else "rewrite"
    kind, _, number = text.partition(":")
    if kind == "turns" and number.isdecimal() and int(number) > 0:
        return int(number)
    raise RetrievalError(f"query must be last, rewrite or turns:N with N at least 1, got {text!r}")


def read_questions(data: Path, *, file: str | None, query: Query, seed: int, limit: int | None) -> QuestionSet:
    """Read a folder. Questions of their own are shuffled; conversations stay as they are, turn by turn.

    Args:
        file: name of the questions' file; None: the first of `QUESTION_FILES` that is there.
        seed: of the shuffle.
        limit: at most so many questions, after the shuffle; None: all.

    Raises:
        RetrievalError: a file that is missing or cannot be read, or a line that is not what it should be, with its number.
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
            raise RetrievalError(f"{where}: id {document.id!r} is there twice")
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
            raise RetrievalError(f"{where}: a question of its own has no rewrite")
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
        raise RetrievalError(f"{where}: gold_passage_ids must be a list of texts")
    gold = [clean(name) for name in gold]
    if unknown := next((name for name in gold if name not in ids), None):
        raise RetrievalError(
            f"{where}: gold passage {unknown!r} is not among the passages that this question looks into"
        )
    return frozenset(gold)


def _text(row: Mapping[str, Any], field: str, where: str) -> str:
    value = row.get(field)
    if not isinstance(value, str) or not value.strip():
        raise RetrievalError(f"{where}: {field} must be a text that is not empty")
    return clean(value)


def _rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(file:line, object) of every line that is not empty."""
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
        raise RetrievalError(f"{path}: there is no such file") from None
    except (OSError, EOFError, UnicodeDecodeError, ZlibError) as error:
        raise RetrievalError(f"{path}:{number + 1}: {error}") from None
