"""`hotpotqa`: questions whose answer takes two Wikipedia paragraphs.

Source: HotpotQA (Yang et al. 2018), distractor setting. Licence: CC BY-SA 4.0.
Hub: hotpotqa/hotpot_qa, config distractor, split validation. A question's list is its ten paragraphs; gold are those whose
title is among the supporting facts. A row:

    {"id": "5a8b...", "question": "Were Scott Derrickson and Ed Wood of the same nationality?", "answer": "yes",
     "supporting_facts": {"title": ["Scott Derrickson", "Ed Wood"], "sent_id": [0, 0]},
     "context": {"title": ["Ed Wood (film)", ...], "sentences": [["Ed Wood is a 1994 ...", ...], ...]}}
"""

from __future__ import annotations

from eval.data.hub import HubName
from eval.data.question_set import Example, Found, load_questions
from eval.data.rows import Row
from eval.task import Source, TaskData

HUB = HubName("hotpotqa/hotpot_qa", "distractor", "validation")


def load(source: Source) -> TaskData:
    """From a folder, or from the hub."""
    return load_questions(source, HUB, example)


def example(row: Row) -> Example:
    """The hub's columns in our terms; sentences carry the spaces between them."""
    gold, context = set(row["supporting_facts"]["title"]), row["context"]
    passages = (
        Found(title, "".join(sentences), title in gold)
        for title, sentences in zip(context["title"], context["sentences"], strict=True)
        if "".join(sentences).strip()
    )
    return Example(row["id"], row["question"], (row["answer"],), tuple(passages))
