"""Question sets in a folder: single questions or conversations over passages.

    passages.jsonl.gz        {"id", "title", "text"}, title and "domain" optional
    questions.jsonl.gz       {"id", "question", "answers", "gold_passage_ids",
                             "context_passage_ids"}, the last three optional
    conversations.jsonl.gz   {"id", "domain", "turns": [{"question", "answer", "gold_passage_ids",
                             "retrieved_passage_ids"}]}

`context_passage_ids` is the list that the data set itself gives for a question. The model reads a
passage as its title, a line break and its text.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from eval.data.rows import Row, names_of, new_name, read_rows, text_of
from eval.errors import CommandError
from eval.task import Request, TaskData, TextChunk


def read_questions(folder: Path, task: str) -> TaskData:
    """Read a folder, its questions in the file's order. Raises CommandError."""
    passages, _ = read_passages(folder)
    requests: dict[str, Request] = {}
    for where, row in read_rows(folder / "questions.jsonl.gz"):
        name = new_name(row, where, requests, f"{task}:")
        chunks = chunks_of(row, "context_passage_ids", where, passages)
        gold = tuple(chunk.id for chunk in chunks_of(row, "gold_passage_ids", where, passages))
        question, answers = text_of(row, "question", where), names_of(row, "answers", where)
        requests[name] = Request(name, question, chunks, answers, gold)
    return TaskData(tuple(passages.values()), tuple(requests.values()))


def read_conversations(path: Path, task: str, *, field: str = "question") -> TaskData:
    """Read conversations turn by turn, in the file's order, with the passages of its folder.

    Args:
        field: holds a turn's question; turns without another field than `question` are left out.
    Raises:
        CommandError: a file cannot be read, or a line is not of the format.
    """
    passages, domains = read_passages(path.parent)
    conversations: set[str] = set()
    requests: list[Request] = []
    for where, row in read_rows(path):
        conversation, turns = new_name(row, where, conversations, f"{task}:"), row.get("turns")
        conversations.add(conversation)
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise CommandError(f"{where}: turns must be a list of objects")
        for number, turn in enumerate(turns, 1):
            # Numbered before turns are left out: a turn's id does not depend on `field`.
            inside, name = f"{where}, turn {number}", f"{conversation}:{number}"
            if field != "question" and turn.get(field) is None:
                continue
            reply, question = turn.get("answer") or None, text_of(turn, field, inside)
            chunks = chunks_of(turn, "retrieved_passage_ids", inside, passages)
            gold = tuple(
                chunk.id for chunk in chunks_of(turn, "gold_passage_ids", inside, passages)
            )
            answers = (reply,) if reply else ()
            requests.append(Request(name, question, chunks, answers, gold, conversation, reply))
            if row.get("domain"):
                domains[name] = str(row["domain"])
    return TaskData(tuple(passages.values()), tuple(requests), domains)


def read_passages(folder: Path) -> tuple[dict[str, TextChunk], dict[str, str]]:
    """A folder's passages by id, and the domains of those that have one. Raises CommandError."""
    passages: dict[str, TextChunk] = {}
    domains: dict[str, str] = {}
    path = folder / "passages.jsonl.gz"
    for where, row in read_rows(path):
        name = new_name(row, where, passages)
        passages[name] = TextChunk(
            name, content(str(row.get("title") or ""), text_of(row, "text", where))
        )
        if row.get("domain"):
            domains[name] = str(row["domain"])
    if not passages:
        raise CommandError(f"{path} has no passages")
    return passages, domains


def chunks_of(
    row: Row, field: str, where: str, passages: Mapping[str, TextChunk]
) -> tuple[TextChunk, ...]:
    """The passages that a field names. Raises CommandError for an unknown one."""
    # A passage that a list names twice is one chunk of the prompt.
    names = dict.fromkeys(names_of(row, field, where))
    if unknown := next((name for name in names if name not in passages), None):
        raise CommandError(f"{where}: {field} names {unknown!r}, which is not among the passages")
    return tuple(passages[name] for name in names)


def content(title: str, text: str) -> str:
    """The text of a passage that the model reads, in the same format as `retrieval`'s."""
    # A text that begins with its title, as a Markdown heading or plain, needs no second one.
    first_line = text.partition("\n")[0].lstrip("#").strip()
    return text if title in ("", first_line) else f"{title}\n{text}"


def text_chunk(task: str, title: str, text: str) -> TextChunk:
    """A passage whose id is made of its text, so that equal ones are one chunk."""
    # 48 bits of the digest: among a million passages two share an id with a chance of 0.2%.
    content_text = content(title.strip(), text.strip())
    return TextChunk(f"{task}-{hashlib.sha1(content_text.encode()).hexdigest()[:12]}", content_text)


def distinct(chunks: Iterable[TextChunk]) -> tuple[TextChunk, ...]:
    """The chunks without repetitions, in their order."""
    return tuple({chunk.id: chunk for chunk in chunks}.values())
