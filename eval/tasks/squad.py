"""`squad`: questions about one Wikipedia paragraph; five to twenty-five share each.

Source: SQuAD 1.1 (Rajpurkar et al. 2016). Licence: CC BY-SA 4.0.
Hub: rajpurkar/squad, split validation. Questions have no lists of their own: each has one paragraph, and all paragraphs together
are searched. A row:

    {"id": "56be4db0acb8001400a502ec", "title": "Super_Bowl_50", "context": "Super Bowl 50 was an American football game ...",
     "question": "Which NFL team represented the AFC at Super Bowl 50?",
     "answers": {"text": ["Denver Broncos", "Denver Broncos"], "answer_start": [177, 177]}}
"""

from __future__ import annotations

from eval.data.hub import HubName
from eval.data.question_set import Example, Found, load_questions
from eval.data.rows import Row
from eval.task import Source, TaskData

HUB = HubName("rajpurkar/squad", None, "validation")


def load(source: Source) -> TaskData:
    """From a folder, or from the hub."""
    return load_questions(source, HUB, example)


def example(row: Row) -> Example:
    """The hub's columns in our terms."""
    passage = Found(row["title"].replace("_", " "), row["context"], True)
    return Example(row["id"], row["question"], tuple(dict.fromkeys(row["answers"]["text"])), (passage,), is_list=False)
