"""`musique`: questions composed of two to four single ones, over Wikipedia paragraphs.

Source: MuSiQue-Ans (Trivedi et al. 2022). Licence: CC BY 4.0; the paragraphs are Wikipedia's, CC BY-SA.
Hub: dgslibisey/MuSiQue, split validation, the authors' files unchanged. A question's list is its twenty paragraphs. A row:

    {"id": "2hop__460946_294723", "question": "Who is the spouse of the Green performer?", "answer": "Miquette Giraudy",
     "answer_aliases": [], "answerable": true, "paragraphs": [{"idx": 0, "title": "Grant's First Stand",
     "paragraph_text": "Grant's First Stand is ...", "is_supporting": false}, ...]}
"""

from __future__ import annotations

from eval.data.hub import HubName
from eval.data.question_set import Example, Found, load_questions
from eval.data.rows import Row
from eval.task import Source, TaskData

HUB = HubName("dgslibisey/MuSiQue", None, "validation")


def load(source: Source) -> TaskData:
    """From a folder, or from the hub."""
    return load_questions(source, HUB, example)


def example(row: Row) -> Example | None:
    """The hub's columns in our terms; the full version's unanswerable questions are left out."""
    if not row.get("answerable", True):
        return None
    passages = tuple(Found(p["title"], p["paragraph_text"], p["is_supporting"]) for p in row["paragraphs"])
    return Example(row["id"], row["question"], (row["answer"], *row["answer_aliases"]), passages)
