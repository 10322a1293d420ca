"""`mtrag` and `mtrag-un`: conversations of people with a RAG system, turn by turn.

Source: IBM's MTRAG (Katsis et al. 2025) and MTRAG-UN, github.com/IBM/mt-rag-benchmark, read from
files; not from the hub. Licence: Apache-2.0; the passages come from Wikipedia, finance posts, cloud
documentation and US government pages. A conversation searches one of four domains. `mtrag` lists
the passages that were attached to each turn when it was written; `mtrag-un`, whose last questions
cannot be answered or are unclear, lists none. A turn's `reply` is the data set's. A row of
`<DIR>/mtrag/conversations.jsonl.gz` (`conversations_un.jsonl.gz`), next to `passages.jsonl.gz`:

    {"id": "0208bf26...", "domain": "clapnq", "turns": [{"turn": 1, "question": "Where do guinea
    pigs sleep in the wild?",
     "answer": "In the wild, guinea pigs ...", "gold_passage_ids": ["850931827_11086-12414-0-1328"],
     "retrieved_passage_ids": ["850931827_11086-12414-0-1328", ...]}, ...]}
"""

from __future__ import annotations

from eval.data.question_set import read_conversations
from eval.task import Source, TaskData

FILES = {"mtrag": "conversations.jsonl.gz", "mtrag-un": "conversations_un.jsonl.gz"}


def load(source: Source) -> TaskData:
    """Conversations in the file's order. Raises CommandError."""
    return read_conversations(source.folder("mtrag") / FILES[source.task], source.task)
