"""`hotpotqa`, `2wikimqa`, `musique`, `squad`, `triviaqa`, `nq`: single questions over Wikipedia,
from a folder or the hub.

On the hub the row of a question contains its passages; equal ones become one passage. Each function
below maps a row, in the columns of its docstring, to our terms. The passages are Wikipedia's, CC
BY-SA.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple

from eval.data.hub import HubName, hub_rows, parse_hub
from eval.data.question_set import distinct, read_questions, text_chunk
from eval.data.rows import Row
from eval.errors import CommandError
from eval.task import Request, Source, TaskData, TextChunk

PIECE_WORDS = 100
"""As in the Wikipedia passages of DPR (Karpukhin et al.
2020), which are those of triviaqa's folder."""
MIN_WORDS = 20
"""Shorter passages of nq are remains of headings and boxes, and contain no answers."""


class Found(NamedTuple):
    """A passage in a row of the hub."""

    title: str
    text: str
    is_gold: bool


class Example(NamedTuple):
    """A row of the hub in our terms; `is_list`:
    its passages are the data set's own list for the question."""

    id: str
    question: str
    answers: tuple[str, ...]
    passages: tuple[Found, ...]
    is_list: bool = True


def load(source: Source) -> TaskData:
    """From a folder or the hub, shuffled, because in the files questions about one passage follow
    each other."""
    data = (
        _hub(source)
        if source.hub is not None
        else read_questions(source.folder(source.task), source.task)
    )
    requests = list(data.requests)
    random.Random(source.seed).shuffle(requests)
    return TaskData(data.passages, tuple(requests))


def two_paragraphs(row: Row) -> Example:
    """HotpotQA (Yang et al. 2018, CC BY-SA 4.0), distractor setting: ten paragraphs, gold those
    named as supporting facts.

    {"id": "5a8b...", "question": "Were Scott Derrickson and ...?", "answer": "yes",
    "supporting_facts": {"title": ["Ed Wood"],
     "sent_id": [0]}, "context": {"title": ["Ed Wood (film)", ...], "sentences": [["Ed Wood is a
     1994 ...", ...], ...]}}
    """
    return _supported(row, lambda sentences: "".join(sentences))


def two_wiki(row: Row) -> Example:
    """2WikiMultihopQA (Ho et al. 2020, Apache-2.0): hotpotqa's columns; the authors' own files have
    `_id`.

    Its sentences have no spaces between them. xanhho/2WikiMultihopQA is a loading script, which
    `datasets` no longer runs.
    """
    return _supported(row, lambda sentences: " ".join(sentence.strip() for sentence in sentences))


def musique(row: Row) -> Example | None:
    """MuSiQue-Ans (Trivedi et al. 2022, CC BY 4.0), the authors' files: twenty paragraphs;
    unanswerable questions are left out.

    {"id": "2hop__460946_294723", "question": "Who is the spouse of the Green performer?", "answer":
    "Miquette Giraudy",
     "answer_aliases": [], "answerable": true, "paragraphs": [{"idx": 0, "title": "Grant's First
     Stand", "paragraph_text": "Grant's First Stand is ...", "is_supporting": false}, ...]}
    """
    if not row.get("answerable", True):
        return None
    passages = tuple(
        Found(p["title"], p["paragraph_text"], p["is_supporting"]) for p in row["paragraphs"]
    )
    return Example(row["id"], row["question"], (row["answer"], *row["answer_aliases"]), passages)


def squad(row: Row) -> Example:
    """SQuAD 1.1 (Rajpurkar et al. 2016, CC BY-SA 4.0): no lists; five to twenty-five questions
    share a paragraph.

    {"id": "56be...", "title": "Super_Bowl_50", "context": "Super Bowl 50 was ...", "question":
    "Which NFL team ...?",
     "answers": {"text": ["Denver Broncos", "Denver Broncos"], "answer_start": [177, 177]}}
    """
    passage = Found(row["title"].replace("_", " "), row["context"], True)
    return Example(
        row["id"],
        row["question"],
        tuple(dict.fromkeys(row["answers"]["text"])),
        (passage,),
        is_list=False,
    )


def triviaqa(row: Row) -> Example:
    """TriviaQA (Joshi et al. 2017, Apache-2.0), reading comprehension: whole articles, cut into
    pieces of 100 words; no lists.

    Gold are the pieces that contain an answer, although they may not answer the question.

    {"question_id": "tc_33", "question": "Which Lloyd Webber musical ...?", "answer": {"value":
    "Sunset Boulevard",
     "aliases": ["Sunset Blvd", ...], ...}, "entity_pages": {"title": ["Andrew Lloyd Webber"],
     "wiki_context": ["..."], ...}}
    """
    answers = tuple(dict.fromkeys((row["answer"]["value"], *row["answer"]["aliases"])))
    told = [_words(answer) for answer in answers]
    passages = tuple(
        Found(title, piece, any(answer in _words(piece) for answer in told))
        for title, piece in _pieces(row)
    )
    return Example(row["question_id"], row["question"], answers, passages, is_list=False)


def nq(row: Row) -> Example | None:
    """Natural Questions (Kwiatkowski et al. 2019, CC BY-SA 3.0): the page's top-level paragraphs
    and tables, without mark-up.

    Gold is the annotator's long answer, answers are the short ones; questions without a short one
    are left out. No lists.

    {"id": "7978...", "question": {"text": "who founded google", ...}, "document": {"title":
    "Google",
     "tokens": {"token": ["<h1>", "Google", ...], "is_html": [true, false, ...]}, ...},
     "long_answer_candidates": {"start_token": [5, ...], "end_token": [22, ...], "top_level": [true,
     ...]}, "annotations": {"long_answer": [{"start_token": 5, "end_token": 22, ...}],
     "short_answers": [{"text": ["Larry", ...]}]}}
    """
    answers = dict.fromkeys(
        text for short in row["annotations"]["short_answers"] for text in short["text"]
    )
    if not answers:
        return None
    # An annotator without a long answer has (-1, -1), which is no candidate.
    chosen = {
        (span["start_token"], span["end_token"]) for span in row["annotations"]["long_answer"]
    }
    candidates, tokens = row["long_answer_candidates"], row["document"]["tokens"]
    columns = (candidates[name] for name in ("start_token", "end_token", "top_level"))
    passages = []
    for start, end, is_top in zip(*columns, strict=True):
        pairs = zip(tokens["token"][start:end], tokens["is_html"][start:end], strict=True)
        text, is_gold = (
            " ".join(token for token, is_html in pairs if not is_html),
            (start, end) in chosen,
        )
        # Nested candidates repeat their parents' text, but a long answer may be one of them.
        if text and (is_gold or (is_top and len(text.split()) >= MIN_WORDS)):
            passages.append(Found(row["document"]["title"], text, is_gold))
    return Example(
        row["id"], row["question"]["text"], tuple(answers), tuple(passages), is_list=False
    )


SETS: dict[str, tuple[HubName, Callable[[Row], Example | None]]] = {
    "hotpotqa": (HubName("hotpotqa/hotpot_qa", "distractor"), two_paragraphs),
    "2wikimqa": (HubName("framolfese/2WikiMultihopQA"), two_wiki),
    "musique": (HubName("dgslibisey/MuSiQue"), musique),
    "squad": (HubName("rajpurkar/squad"), squad),
    "triviaqa": (HubName("mandarjoshi/trivia_qa", "rc.wikipedia"), triviaqa),
    # nq_open has no passages
    "nq": (HubName("google-research-datasets/natural_questions", "dev"), nq),
}
"""Task -> where it is published, and the function for its rows; all of the split validation."""


# Private, in order of use


def _hub(source: Source) -> TaskData:
    published, example = SETS[source.task]
    passages, requests = dict[str, TextChunk](), dict[str, Request]()
    for where, row in hub_rows(parse_hub(source.hub or "", published)):
        try:
            found = example(row)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            told = f"{type(error).__name__} {error}"
            raise CommandError(
                f"{where} does not have the format of task {source.task}: {told}"
            ) from None
        if found is not None:
            chunks = [
                text_chunk(source.task, passage.title, passage.text) for passage in found.passages
            ]
            passages |= {chunk.id: chunk for chunk in chunks}
            gold = dict.fromkeys(
                c.id for c, passage in zip(chunks, found.passages, strict=True) if passage.is_gold
            )
            name, listed = f"{source.task}:{found.id}", distinct(chunks) if found.is_list else ()
            requests.setdefault(
                name, Request(name, found.question, listed, found.answers, tuple(gold))
            )
    return TaskData(tuple(passages.values()), tuple(requests.values()))


def _supported(row: Row, joined: Callable[[list[str]], str]) -> Example:
    gold, context = set(row["supporting_facts"]["title"]), row["context"]
    passages = tuple(
        Found(title, joined(sentences), title in gold)
        for title, sentences in zip(context["title"], context["sentences"], strict=True)
        # A paragraph without text would be a chunk of its title alone.
        if "".join(sentences).strip()
    )
    return Example(
        row["id"] if "id" in row else row["_id"], row["question"], (row["answer"],), passages
    )


def _pieces(row: Row) -> Iterator[tuple[str, str]]:
    pages = row["entity_pages"]
    for title, text in zip(pages["title"], pages["wiki_context"], strict=True):
        words = text.split()
        for start in range(0, len(words), PIECE_WORDS):
            yield title, " ".join(words[start : start + PIECE_WORDS])


def _words(text: str) -> str:
    """The text with a space around each word, so that only whole words are found."""
    return f" {' '.join(''.join(c if c.isalnum() else ' ' for c in text.lower()).split())} "
