"""`mtrag` and `mtrag-un`: conversations of people with a RAG system, turn by turn.

Source: IBM's MTRAG (Katsis et al. 2025) and MTRAG-UN, github.com/IBM/mt-rag-benchmark, read from files; not from the hub.
Licence: Apache-2.0; the passages come from Wikipedia, finance posts, cloud documentation and US government pages.
A conversation searches one of four domains. `mtrag` lists the passages that were attached to each turn when it was written;
`mtrag-un`, whose last questions cannot be answered or are unclear, lists none. A turn's `reply` is the data set's. A row of
`<DIR>/mtrag/conversations.jsonl.gz` (`conversations_un.jsonl.gz`), next to `passages.jsonl.gz`:

    {"id": "0208bf26...", "domain": "clapnq", "turns": [{"turn": 1, "question": "Where do guinea pigs sleep in the wild?",
     "answer": "In the wild, guinea pigs ...", "gold_passage_ids": ["850931827_11086-12414-0-1328"],
     "retrieved_passage_ids": ["850931827_11086-12414-0-1328", ...]}, ...]}
"""

from __future__ import annotations

from eval.data.question_set import chunks_of, read_passages
from eval.data.rows import name_of, read_rows, text_of
from eval.errors import CommandError
from eval.task import Request, Source, TaskData

FILES = {"mtrag": "conversations.jsonl.gz", "mtrag-un": "conversations_un.jsonl.gz"}


def load(source: Source) -> TaskData:
    """Conversations in the file's order. Raises CommandError."""
    folder = source.folder("mtrag")
    passages, domains = read_passages(folder)
    requests: dict[str, Request] = {}
    for where, row in read_rows(folder / FILES[source.task]):
        conversation, turns = f"{source.task}:{name_of(row, 'id', where)}", row.get("turns")
        if not isinstance(turns, list) or not all(isinstance(turn, dict) for turn in turns):
            raise CommandError(f"{where}: turns must be a list of objects")
        for number, turn in enumerate(turns, 1):
            inside, name = f"{where}, turn {number}", f"{conversation}:{number}"
            if name in requests:
                raise CommandError(f"{where}: id {row['id']!r} occurs twice")
            reply = turn.get("answer") or None
            requests[name] = Request(
                name,
                text_of(turn, "question", inside),
                chunks_of(turn, "retrieved_passage_ids", inside, passages),
                (reply,) if reply else (),
                tuple(chunk.id for chunk in chunks_of(turn, "gold_passage_ids", inside, passages)),
                conversation,
                reply,
            )
            if row.get("domain"):
                domains[name] = str(row["domain"])
    return TaskData(tuple(passages.values()), tuple(requests.values()), domains)
