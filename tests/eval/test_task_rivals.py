"""Workloads of other projects, read from small files of their formats."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from eval.errors import CommandError
from eval.task import Request
from tests.eval.make_data import requests


def write_lines(path: Path, rows: Iterable[object]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def texts(request: Request) -> list[str]:
    return [chunk.text for chunk in request.chunks]


def test_qcfuse_sets_share_chunks_of_equal_text(tmp_path: Path) -> None:
    """One file, or the folder of all; a text that is shown twice is one chunk."""
    shared = "Entity: Green. A colour."
    contexts = [[shared, f"Text {n}.", shared] for n in range(2)]
    rows = [
        {"input": "Who?", "context": c, "answers": ["a", "b"], "num_chunks": 3} for c in contexts
    ]
    for name in ("musique", "bird"):
        write_lines(tmp_path / f"{name}.jsonl", rows)
    asked = requests("--task", "qcfuse", "--data", tmp_path)
    ids = [f"qcfuse:{name}:{n}" for name in ("musique", "bird") for n in range(2)]
    assert [r.id for r in asked] == ids
    assert texts(asked[1]) == [shared, "Text 1."]
    assert len({r.chunks[0] for r in asked}) == 1
    assert {(r.question, r.answers) for r in asked} == {("Who?", ("a", "b"))}
    assert [r.max_new_tokens for r in asked] == [48, 48, 512, 512]
    assert requests("--task", "qcfuse", "--data", tmp_path / "bird.jsonl") == asked[2:]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"input": "Who?", "context": "one text", "answers": []}, "context must be a list"),
        ({"context": ["a"], "answers": "b"}, "input must be a non-empty string"),
    ],
)
def test_other_rows_than_qcfuses_are_refused(
    tmp_path: Path, row: dict[str, object], said: str
) -> None:
    path = write_lines(tmp_path / "musique.jsonl", [row])
    with pytest.raises(CommandError, match=f"line 1: {said}"):
        requests("--task", "qcfuse", "--data", path)


def write_longbench(file: Path, contexts: Sequence[str]) -> Path:
    """A question for each context, as the published files have them."""
    rows = enumerate(contexts)
    return write_lines(
        file, [{"input": "Who?", "context": c, "answers": [f"a{n}"]} for n, c in rows]
    )


def test_longbench_contexts_are_split_into_their_passages(tmp_path: Path) -> None:
    """With their headings no chunk would be found at another place."""
    first, second = "Green\nA colour.\nPassage 7: no heading.", "Blue\nA colour."
    contexts = [
        f"Passage 1:\n{first}\n\nPassage 2:\n{second}\n",
        f"Passage 1:\n{second}\nPassage 2:\n{first}",
    ]
    write_longbench(tmp_path / "musique.jsonl", contexts)
    write_longbench(tmp_path / "2wikimqa_e.jsonl", contexts[:1])
    asked = requests("--task", "longbench", "--data", tmp_path)
    ids = [r.id.removeprefix("longbench:") for r in asked]
    assert ids == ["musique:0", "musique:1", "2wikimqa_e:0"]
    assert [texts(r) for r in asked[:2]] == [[first, second], [second, first]]
    assert {c.id for c in asked[0].chunks} == {c.id for c in asked[1].chunks}
    assert {(r.question, r.max_new_tokens) for r in asked} == {("Who?", 32)}
    assert [r.answers for r in asked[:2]] == [("a0",), ("a1",)]
    assert requests("--task", "longbench", "--data", tmp_path / "2wikimqa_e.jsonl") == asked[2:]


def test_a_context_without_headings_is_refused(tmp_path: Path) -> None:
    """LongBench's other sets are single documents, which have no chunks."""
    file = write_longbench(tmp_path / "qasper.jsonl", ["A paper."])
    with pytest.raises(CommandError, match='line 1: context must begin with "Passage 1:"'):
        requests("--task", "longbench", "--data", file)


GREEN = {"idx": 0, "title": "Green", "paragraph_text": "A colour.", "is_supporting": True}
SENTENCES = ["An", " American."]
RAG_QA_ROWS: tuple[dict[str, object], ...] = (
    {"id": "2hop__1", "paragraphs": [GREEN], "answer": "Giraudy", "answer_aliases": ["M. G."]},
    {"_id": "h1", "context": [["Ed Wood", SENTENCES]], "answer": "yes"},
    {"context": {"title": ["Ed Wood"], "sentences": [SENTENCES]}, "answer": "yes"},
    {"ctxs": [{"title": "", "text": "A colour."}, "Loose."], "answers": [["x", "y"], ["z"]]},
)
"""MuSiQue's columns, HotpotQA's in both layouts, CacheBlend's; all but the question."""


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_rag_qa_quality_reads_the_four_kinds_of_rows(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"data{suffix}"
    unusable: list[dict[str, object]] = [{"ctxs": ["no answer"]}, {"answer": "no passages"}]
    rows = [{"question": "Which?", **row} for row in (*RAG_QA_ROWS, *unusable)]
    if suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        write_lines(path, rows)
    asked = requests("--task", "rag-qa-quality", "--data", path)
    assert [r.id.partition(":")[2] for r in asked] == ["2hop__1", "h1", "2", "3"]
    ed = ["Ed Wood\nAn American."]
    assert [*map(texts, asked)] == [["Green\nA colour."], ed, ed, ["A colour.", "Loose."]]
    answers = [("Giraudy", "M. G."), ("yes",), ("yes",), ("x", "y", "z")]
    assert [r.answers for r in asked] == answers
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
        ({"context": {"title": ["t"], "sentences": []}}, "context has 1 titles but 0 lists"),
        ({"ctxs": 5}, "ctxs must be a list"),
        ({"ctxs": "abc"}, "ctxs must be a list"),
        ({"contexts": [5]}, "contexts must be a list of objects or strings"),
        ({"paragraphs": [{"text": ["a"]}]}, "title and text in paragraphs must be strings"),
    ],
)
def test_other_rows_than_rag_qa_qualitys_are_refused(
    tmp_path: Path, passages: dict[str, object], said: str
) -> None:
    rows = [{"question": "Which?", "answer": "x", **row} for row in (RAG_QA_ROWS[0], passages)]
    path = write_lines(tmp_path / "a.jsonl", rows)
    with pytest.raises(CommandError, match=rf"a\.jsonl, line 2: {said}"):
        requests("--task", "rag-qa-quality", "--data", path)


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
    documents = {f"doc{i}" for i in range(5)}
    assert all({c.id for c in r.chunks} == documents for r in asked)
    assert {len(c.text.split()) for r in asked for c in r.chunks} == {50}
    assert {(len(r.system.split()), r.question) for r in asked} == {(10, "")}
    config = {"ldp_num_contexts": 3, "ldp_context_length": 7, "ldp_num_permutations": 99}
    path = tmp_path / "bench_config.json"
    path.write_text(json.dumps(config | {"ldp_system_prompt_length": 0}))
    options = ("--task", "long-doc-permutator", "--data", path)
    few = requests(*options)
    assert len(few) == 6, "there are no more orders of three"
    assert {len(c.text.split()) for r in few for c in r.chunks} == {7}
    assert few[0].system == ""
    assert len(requests(*options, "--requests", "4", "--k", "4")) == 4
