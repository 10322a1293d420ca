"""Workloads of other projects, read from small files of their formats."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from eval.errors import CommandError
from tests.eval.make_data import requests


def write_qcfuse(folder: Path) -> None:
    """Two of the seven files, in the four fields of the published ones."""
    shared = "Entity: Green. A colour."
    rows = [
        {
            "input": "Who?",
            "context": [shared, f"Text {n}.", shared],
            "answers": [f"a{n}", "b"],
            "num_chunks": 3,
        }
        for n in range(2)
    ]
    for name in ("musique", "bird"):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def test_qcfuse_sets_share_chunks_of_equal_text(tmp_path: Path) -> None:
    """One file, or the folder of all; a text that is shown twice is one chunk."""
    write_qcfuse(tmp_path)
    asked = requests("--task", "qcfuse", "--data", tmp_path)
    assert [r.id for r in asked] == [
        "qcfuse:musique:0",
        "qcfuse:musique:1",
        "qcfuse:bird:0",
        "qcfuse:bird:1",
    ]
    assert [c.text for c in asked[1].chunks] == ["Entity: Green. A colour.", "Text 1."]
    assert len({r.chunks[0] for r in asked}) == 1
    assert [(r.question, r.answers, r.max_new_tokens) for r in asked[::2]] == [
        ("Who?", ("a0", "b"), 48),
        ("Who?", ("a0", "b"), 512),
    ]
    assert requests("--task", "qcfuse", "--data", tmp_path / "bird.jsonl") == asked[2:]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (
            {"input": "Who?", "context": "one text", "answers": []},
            "context must be a list of strings or integers",
        ),
        ({"context": ["a"], "answers": "b"}, "input must be a non-empty string"),
    ],
)
def test_other_rows_than_qcfuses_are_refused(
    tmp_path: Path, row: dict[str, object], said: str
) -> None:
    (tmp_path / "musique.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(CommandError, match=f"line 1: {said}"):
        requests("--task", "qcfuse", "--data", tmp_path / "musique.jsonl")


def write_longbench(file: Path, contexts: Sequence[str]) -> Path:
    """A question for each context, in the eight fields of the published files."""
    rows = [
        {
            "input": "Who?",
            "context": context,
            "answers": [f"a{n}"],
            "length": 9,
            "dataset": "musique",
            "language": "en",
        }
        | {"all_classes": None, "_id": f"id{n}"}
        for n, context in enumerate(contexts)
    ]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_longbench_contexts_are_split_into_their_passages(tmp_path: Path) -> None:
    """Headings are numbers of the prompt and no part of a passage:
    with them no chunk would be found at another place."""
    first, second = "Green\nA colour.\nPassage 7: no heading.", "Blue\nA colour."
    contexts = [
        f"Passage 1:\n{first}\n\nPassage 2:\n{second}\n",
        f"Passage 1:\n{second}\nPassage 2:\n{first}",
    ]
    write_longbench(tmp_path / "musique.jsonl", contexts)
    write_longbench(tmp_path / "2wikimqa_e.jsonl", contexts[:1])
    asked = requests("--task", "longbench", "--data", tmp_path)
    assert [r.id for r in asked] == [
        "longbench:musique:0",
        "longbench:musique:1",
        "longbench:2wikimqa_e:0",
    ]
    assert [[c.text for c in r.chunks] for r in asked[:2]] == [[first, second], [second, first]]
    assert {c.id for c in asked[0].chunks} == {c.id for c in asked[1].chunks}
    assert [(r.question, r.answers, r.max_new_tokens) for r in asked[:2]] == [
        ("Who?", ("a0",), 32),
        ("Who?", ("a1",), 32),
    ]
    assert requests("--task", "longbench", "--data", tmp_path / "2wikimqa_e.jsonl") == asked[2:]


def test_a_context_without_headings_is_refused(tmp_path: Path) -> None:
    """LongBench's other sets are single documents, which have no chunks."""
    file = write_longbench(tmp_path / "qasper.jsonl", ["A paper."])
    with pytest.raises(CommandError, match='line 1: context must begin with "Passage 1:"'):
        requests("--task", "longbench", "--data", file)


RAG_QA_ROWS: tuple[dict[str, object], ...] = (
    {
        "id": "2hop__1",
        "paragraphs": [
            {"idx": 0, "title": "Green", "paragraph_text": "A colour.", "is_supporting": True}
        ],
        "question": "Which?",
        "answer": "Giraudy",
        "answer_aliases": ["M. Giraudy"],
    },
    {
        "_id": "h1",
        "context": [["Ed Wood", ["An", " American."]]],
        "question": "Which?",
        "answer": "yes",
    },
    {
        "context": {"title": ["Ed Wood"], "sentences": [["An", " American."]]},
        "question": "Which?",
        "answer": "yes",
    },
    {
        "ctxs": [{"title": "", "text": "A colour."}, "Loose."],
        "question": "Which?",
        "answers": [["x", "y"], ["z"]],
    },
)
"""MuSiQue's columns, HotpotQA's in both layouts, CacheBlend's."""


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_rag_qa_quality_reads_the_four_kinds_of_rows(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data{suffix}"
    rows = [
        *RAG_QA_ROWS,
        {"id": "no answer", "ctxs": ["a"], "question": "Which?"},
        {"question": "Which?", "answer": "x"},
    ]
    path.write_text(
        json.dumps(rows) if suffix == ".json" else "".join(json.dumps(row) + "\n" for row in rows)
    )
    asked = requests("--task", "rag-qa-quality", "--data", path)
    assert [r.id.partition(":")[2] for r in asked] == ["2hop__1", "h1", "2", "3"]
    assert [[c.text for c in r.chunks] for r in asked] == [
        ["Green\nA colour."],
        ["Ed Wood\nAn American."],
        ["Ed Wood\nAn American."],
        ["A colour.", "Loose."],
    ]
    assert [r.answers for r in asked] == [
        ("Giraudy", "M. Giraudy"),
        ("yes",),
        ("yes",),
        ("x", "y", "z"),
    ]
    assert asked[1].chunks == asked[2].chunks


@pytest.mark.parametrize(
    ("passages", "said"),
    [
        (
            {"context": ["plain", "text"]},
            "context must be a list of a title and its sentences each",
        ),
        ({"context": "plain"}, "context must be a list"),
        ({"context": [["t", None]]}, "sentences in context must be a list"),
        ({"context": [["t", ["a", 1]]]}, "sentences in context must be strings"),
        ({"context": {"title": ["t"]}}, "sentences in context must be a list"),
        (
            {"context": {"title": ["t"], "sentences": []}},
            "context has 1 titles but 0 lists of sentences",
        ),
        ({"ctxs": 5}, "ctxs must be a list"),
        ({"ctxs": "abc"}, "ctxs must be a list"),
        ({"contexts": [5]}, "contexts must be a list of objects or strings"),
        ({"paragraphs": [{"text": ["a"]}]}, "title and text in paragraphs must be strings"),
    ],
)
def test_other_rows_than_rag_qa_qualitys_are_refused(
    tmp_path: Path, passages: dict[str, object], said: str
) -> None:
    rows = [RAG_QA_ROWS[0], {"question": "Which?", "answer": "x"} | passages]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with pytest.raises(CommandError, match=rf"a\.jsonl, line 2: {said}$"):
        requests("--task", "rag-qa-quality", "--data", tmp_path / "a.jsonl")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"foo": 1}, "must be a JSON object with one or more of ldp_num_contexts"),
        ([1], "must be a JSON object"),
        (["ldp_num_contexts"], "must be a JSON object"),
        ({"ldp_num_contexts": True}, "ldp_num_contexts must be a positive integer, got True"),
        ({"ldp_context_length": 0}, "ldp_context_length must be a positive integer, got 0"),
    ],
)
def test_other_configurations_than_lmcaches_are_refused(
    tmp_path: Path, config: object, said: str
) -> None:
    (tmp_path / "a.json").write_text(json.dumps(config))
    with pytest.raises(CommandError, match=rf"a\.json:? {said}"):
        requests("--task", "long-doc-permutator", "--data", tmp_path / "a.json")


def test_long_doc_permutator_sends_all_documents_in_other_orders(tmp_path: Path) -> None:
    """LMCache's defaults; lengths are those of a configuration it exports, divided by --scale."""
    asked = requests("--task", "long-doc-permutator", "--scale", "100")
    assert len(asked) == len({tuple(c.id for c in r.chunks) for r in asked}) == 10
    assert {frozenset(c.id for c in r.chunks) for r in asked} == {
        frozenset(f"doc{i}" for i in range(5))
    }
    assert {len(c.text.split()) for r in asked for c in r.chunks} == {50}
    assert {(len(r.system.split()), r.question) for r in asked} == {(10, "")}
    config = {
        "workload": "long-doc-permutator",
        "ldp_num_contexts": 3,
        "ldp_context_length": 7,
        "ldp_num_permutations": 99,
    }
    path = tmp_path / "bench_config.json"
    path.write_text(json.dumps(config | {"ldp_system_prompt_length": 0}))
    few = requests("--task", "long-doc-permutator", "--data", path)
    assert len(few) == 6, "there are no more orders of three"
    assert {len(c.text.split()) for r in few for c in r.chunks} == {7}
    assert few[0].system == ""
    assert (
        len(
            requests("--task", "long-doc-permutator", "--data", path, "--requests", "4", "--k", "4")
        )
        == 4
    )
