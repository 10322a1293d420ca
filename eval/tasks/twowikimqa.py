"""`2wikimqa`: questions whose answer takes two to four Wikipedia paragraphs.

Source: 2WikiMultihopQA (Ho et al. 2020). Licence: Apache-2.0; the paragraphs are Wikipedia's, CC BY-SA.
Hub: framolfese/2WikiMultihopQA, split validation, HotpotQA's columns as Parquet; xanhho/2WikiMultihopQA is a loading script,
which `datasets` no longer runs. Its sentences have no spaces between them. A row:

    {"id": "8813f87c...", "question": "Who is the mother of the director of film Polish-Russian War (Film)?",
     "answer": "Małgorzata Braunek", "supporting_facts": {"title": ["Polish-Russian War (film)", "Xawery Żuławski"],
     "sent_id": [1, 2]}, "context": {"title": ["Maheen Khan", ...], "sentences": [["Maheen Khan is ...", ...], ...]}}
"""

from __future__ import annotations

from eval.data.hub import HubName
from eval.data.question_set import Example, Found, load_questions
from eval.data.rows import Row
from eval.task import Source, TaskData

HUB = HubName("framolfese/2WikiMultihopQA", None, "validation")


def load(source: Source) -> TaskData:
    """From a folder, or from the hub."""
    return load_questions(source, HUB, example)


def example(row: Row) -> Example:
    """The hub's columns in our terms; the authors' own files have `_id`."""
    gold, context = set(row["supporting_facts"]["title"]), row["context"]
    passages = (
        Found(title, " ".join(sentence.strip() for sentence in sentences), title in gold)
        for title, sentences in zip(context["title"], context["sentences"], strict=True)
        if "".join(sentences).strip()
    )
    return Example(row["id"] if "id" in row else row["_id"], row["question"], (row["answer"],), tuple(passages))
