"""`triviaqa`: trivia questions over pieces of the Wikipedia pages that are about them.

Source: TriviaQA (Joshi et al. 2017), reading comprehension. Licence: Apache-2.0; the pages are Wikipedia's, CC BY-SA, and the
web pages' licences are their own.
Hub: mandarjoshi/trivia_qa, config rc.wikipedia, split validation. Pages are whole articles: they are cut into pieces of 100
words, and gold are the pieces that contain an answer, although they may not answer the question. With config rc the web pages
found for a question (`search_results`) are used too. Questions have no lists; all pieces together are searched. A row:

    {"question_id": "tc_33", "question": "Which Lloyd Webber musical premiered in the US on 10th December 1993?",
     "answer": {"value": "Sunset Boulevard", "aliases": ["Sunset Blvd", ...], ...},
     "entity_pages": {"title": ["Andrew Lloyd Webber"], "wiki_context": ["Andrew Lloyd Webber, Baron ..."], ...},
     "search_results": {"title": [...], "search_context": [...], ...}}
"""

from __future__ import annotations

from collections.abc import Iterator

from eval.data.hub import HubName
from eval.data.question_set import Example, Found, load_questions
from eval.data.rows import Row
from eval.task import Source, TaskData

HUB = HubName("mandarjoshi/trivia_qa", "rc.wikipedia", "validation")
PIECE_WORDS = 100
"""As in the Wikipedia passages of DPR (Karpukhin et al. 2020), which are those of the folder."""


def load(source: Source) -> TaskData:
    """From a folder, or from the hub."""
    return load_questions(source, HUB, example)


def example(row: Row) -> Example:
    """The hub's columns in our terms."""
    answers = tuple(dict.fromkeys((row["answer"]["value"], *row["answer"]["aliases"])))
    told = [_words(answer) for answer in answers]
    passages = tuple(
        Found(title, piece, any(answer in _words(piece) for answer in told)) for title, piece in _pieces(row)
    )
    return Example(row["question_id"], row["question"], answers, passages, is_list=False)


def _pieces(row: Row) -> Iterator[tuple[str, str]]:
    for pages, column in ((row["entity_pages"], "wiki_context"), (row.get("search_results") or {}, "search_context")):
        for title, text in zip(pages.get("title", ()), pages.get(column, ()), strict=True):
            words = text.split()
            for start in range(0, len(words), PIECE_WORDS):
                yield title, " ".join(words[start : start + PIECE_WORDS])


def _words(text: str) -> str:
    """The text with a space around each word, so that only whole words are found."""
    return f" {' '.join(''.join(c if c.isalnum() else ' ' for c in text.lower()).split())} "
