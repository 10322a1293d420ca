"""`nq`: questions that people put to a search engine, over the paragraphs of the Wikipedia page that answers them.

Source: Natural Questions (Kwiatkowski et al. 2019). Licence: CC BY-SA 3.0.
Hub: google-research-datasets/natural_questions, config dev, split validation; nq_open has no passages. Passages are the page's
top-level paragraphs and tables of at least 20 words, without mark-up. Gold is the annotator's long answer, answers are the short
ones; questions without a short one are left out. Questions have no lists of their own; all paragraphs together are searched. A
row:

    {"id": "797803103760793766", "question": {"text": "who founded google", ...},
     "document": {"title": "Google", "tokens": {"token": ["<h1>", "Google", ...], "is_html": [true, false, ...]}, ...},
     "long_answer_candidates": {"start_token": [5, ...], "end_token": [22, ...], "top_level": [true, ...]},
     "annotations": {"long_answer": [{"start_token": 5, "end_token": 22, ...}], "short_answers": [{"text": ["Larry", ...]}]}}
"""

from __future__ import annotations

from typing import Any

from eval.data.hub import HubName
from eval.data.question_set import Example, Found, load_questions
from eval.data.rows import Row
from eval.task import Source, TaskData

HUB = HubName("google-research-datasets/natural_questions", "dev", "validation")
MIN_WORDS = 20
"""Shorter passages are remains of headings and boxes, and contain no answers."""


def load(source: Source) -> TaskData:
    """From a folder, or from the hub."""
    return load_questions(source, HUB, example)


def example(row: Row) -> Example | None:
    """The hub's columns in our terms."""
    answers = dict.fromkeys(text for short in row["annotations"]["short_answers"] for text in short["text"])
    if not answers:
        return None
    chosen = {(span["start_token"], span["end_token"]) for span in row["annotations"]["long_answer"]}
    candidates, title = row["long_answer_candidates"], row["document"]["title"]
    passages = []
    for start, end, is_top in zip(
        candidates["start_token"], candidates["end_token"], candidates["top_level"], strict=True
    ):
        text = _text(row["document"]["tokens"], start, end)
        is_gold = (start, end) in chosen
        if text and (is_gold or (is_top and len(text.split()) >= MIN_WORDS)):
            passages.append(Found(title, text, is_gold))
    return Example(row["id"], row["question"]["text"], tuple(answers), tuple(passages), is_list=False)


def _text(tokens: dict[str, Any], start: int, end: int) -> str:
    pairs = zip(tokens["token"][start:end], tokens["is_html"][start:end], strict=True)
    return " ".join(token for token, is_html in pairs if not is_html)
