"""Tasks through `datasets`: the mapping from the hub's columns,
on small local copies in the published layouts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from eval.data.hub import HubName, parse_hub
from eval.errors import CommandError
from eval.task import Request, Source, TaskData, load_task

datasets = pytest.importorskip("datasets")


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is left in the user's cache."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def published(folder: Path, *rows: dict[str, Any], split: str = "validation") -> str:
    """A folder with these rows as the hub has them; gives its name for `--hub`."""
    datasets.Dataset.from_list(list(rows)).to_parquet(folder / f"{split}.parquet")
    return str(folder)


def load(task: str, hub: str) -> TaskData:
    """All of a task; questions in any order."""
    return load_task(Source(task, hub=hub))


def only(data: TaskData) -> tuple[Request, dict[str, str]]:
    """The one request, and the texts of all passages by id."""
    (request,) = data.requests
    return request, {passage.id: passage.text for passage in data.passages}


TWO_PARAGRAPHS = {
    "id": "5a8b",
    "question": "Were Scott Derrickson and Ed Wood of the same nationality?",
    "answer": "yes",
    "supporting_facts": {"title": ["Scott Derrickson", "Ed Wood"], "sent_id": [0, 0]},
    "context": {
        "title": ["Ed Wood (film)", "Ed Wood", "Scott Derrickson", "Empty"],
        "sentences": [
            ["A film.", " By Tim Burton."],
            ["An American."],
            ["Another American."],
            [""],
        ],
    },
}


@pytest.mark.parametrize("task", ["hotpotqa", "2wikimqa"])
def test_paragraphs_with_supporting_titles(tmp_path: Path, task: str) -> None:
    request, texts = only(load(task, published(tmp_path, TWO_PARAGRAPHS)))
    assert (request.id, request.answers) == (f"{task}:5a8b", ("yes",))
    film, ed, scott = (chunk.text for chunk in request.chunks)
    assert film == "Ed Wood (film)\nA film. By Tim Burton."
    assert (ed, scott) == ("Ed Wood\nAn American.", "Scott Derrickson\nAnother American.")
    assert {texts[name] for name in request.gold_ids} == {ed, scott}
    assert all(name.startswith(f"{task}-") for name in texts)


def test_musique(tmp_path: Path) -> None:
    green = {"idx": 0, "title": "Green", "paragraph_text": "A colour.", "is_supporting": False}
    gold = {"idx": 1, "title": "Miquette Giraudy", "paragraph_text": "A musician."}
    row = {
        "id": "2hop__1_2",
        "question": "Who is the spouse of the Green performer?",
        "answer": "Miquette Giraudy",
        "answer_aliases": ["Giraudy"],
        "answerable": True,
        "paragraphs": [green, {**gold, "is_supporting": True}],
    }
    unanswerable = row | {"id": "2hop__3", "answerable": False}
    request, texts = only(load("musique", published(tmp_path, row, unanswerable)))
    assert request.answers == ("Miquette Giraudy", "Giraudy")
    assert [texts[name] for name in request.gold_ids] == ["Miquette Giraudy\nA musician."]
    assert len(request.chunks) == 2


def test_squad_questions_share_a_paragraph(tmp_path: Path) -> None:
    """Equal paragraphs are one passage, and no list is given."""
    game = {"title": "Super_Bowl_50", "context": "It was a football game."}
    answers = {"text": ["Denver", "Denver", "Denver Broncos"], "answer_start": [1, 1, 1]}
    rows = [
        {"id": f"q{i}", "question": f"Question {i}?", "answers": answers, **game} for i in range(3)
    ]
    data = load("squad", published(tmp_path, *rows))
    (passage,) = data.passages
    assert passage.text == "Super Bowl 50\nIt was a football game."
    assert {request.gold_ids for request in data.requests} == {(passage.id,)}
    assert {request.answers for request in data.requests} == {("Denver", "Denver Broncos")}
    assert not any(request.chunks for request in data.requests)


def test_triviaqa_pages_are_cut_and_gold_holds_an_answer(tmp_path: Path) -> None:
    page = " ".join(["word"] * 150 + ["Sunset", "Boulevard,"] + ["end"] * 20)
    row = {
        "question_id": "tc_33",
        "question": "Which musical premiered in 1993?",
        "answer": {"value": "Sunset Boulevard", "aliases": ["Sunset Blvd", "Sunset Boulevard"]},
        "entity_pages": {
            "title": ["Lloyd Webber", "A review"],
            "wiki_context": [page, "Newsunset Boulevard, Sunset Boulevards."],
        },
    }
    request, texts = only(load("triviaqa", published(tmp_path, row)))
    assert request.answers == ("Sunset Boulevard", "Sunset Blvd")
    assert [len(text.split()) for text in texts.values()] == [102, 74, 6]
    assert [texts[name].split()[-1] for name in request.gold_ids] == ["end"]


def test_nq_paragraphs_without_mark_up(tmp_path: Path) -> None:
    words = [
        *("<P>", *["palace"] * 24, "</P>"),
        *("<P>", "short", "</P>"),
        *("<Td>", *["inside"] * 24, "</Td>"),
    ]
    is_html = [word.startswith("<") for word in words]
    long_answer = {"start_token": 0, "end_token": 26}
    row = {
        "id": "7978",
        "question": {"text": "who lives in the imperial palace in tokyo", "tokens": []},
        "document": {
            "title": "Tokyo Imperial Palace",
            "tokens": {"token": words, "is_html": is_html},
        },
        "long_answer_candidates": {
            "start_token": [0, 26, 29],
            "end_token": [26, 29, 55],
            "top_level": [True, True, False],
        },
        "annotations": {
            "long_answer": [long_answer, {"start_token": -1, "end_token": -1}],
            "short_answers": [{"text": ["the Emperor"]}, {"text": []}],
        },
    }
    nothing: dict[str, list[Any]] = {"long_answer": [], "short_answers": [{"text": []}]}
    unanswered = row | {"id": "1", "annotations": nothing}
    request, texts = only(load("nq", published(tmp_path, row, unanswered)))
    assert request.answers == ("the Emperor",)
    paragraph = "Tokyo Imperial Palace\n" + " ".join(["palace"] * 24)
    assert texts == {request.gold_ids[0]: paragraph}


def test_sharegpt(tmp_path: Path) -> None:
    turns = [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "Yes."}]
    (tmp_path / "train.json").write_text(json.dumps([{"id": "a", "conversations": turns}]))
    request, _ = only(load("sharegpt", str(tmp_path)))
    assert (request.id, request.question, request.reply) == ("sharegpt:a:1", "One?", "Yes.")


def test_names_on_the_hub() -> None:
    """A bare `--hub` is the published set; a copy elsewhere brings no config along."""
    name = "hotpotqa/hotpot_qa"
    hotpot = HubName(name, "distractor", "validation")
    for text, expected in (
        ("", hotpot),
        (f"{name}:fullwiki", HubName(name, "fullwiki", "validation")),
        ("me/copy", HubName("me/copy", None, "validation")),
        ("me/copy::train[:9]", HubName("me/copy", None, "train[:9]")),
    ):
        assert parse_hub(text, hotpot) == expected


def test_a_part_of_a_split(tmp_path: Path) -> None:
    """A whole data set may be too much to index."""
    rows = [TWO_PARAGRAPHS | {"id": str(i)} for i in range(5)]
    data = load("hotpotqa", published(tmp_path, *rows) + "::validation[:3]")
    assert {request.id for request in data.requests} == {f"hotpotqa:{i}" for i in range(3)}


def test_rows_of_another_layout_are_named(tmp_path: Path) -> None:
    told = r"row 1 does not have the format of task squad: KeyError 'title'"
    with pytest.raises(CommandError, match=told):
        load("squad", published(tmp_path, TWO_PARAGRAPHS))


@pytest.mark.parametrize(("rest", "said"), [("::test", "Unknown split"), (":fullwiki", "fullwiki")])
def test_no_such_split_or_config(tmp_path: Path, rest: str, said: str) -> None:
    with pytest.raises(CommandError, match=said):
        load("hotpotqa", published(tmp_path, TWO_PARAGRAPHS) + rest)


def test_unreachable_hub_is_one_line(tmp_path: Path) -> None:
    """`HF_HUB_OFFLINE` is read when the library is imported, so this needs a process of its own."""
    code = "from eval.task import *; load_task(Source('squad', hub=''))"
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False
    )
    told = "eval.errors.CommandError: --hub rajpurkar/squad: Couldn't reach"
    assert done.stderr.splitlines()[-1].startswith(told)
