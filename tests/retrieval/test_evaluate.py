"""Recall and overlap over a folder of questions, by the real index and the real retriever."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from retrieval.build import BuildOptions
from retrieval.errors import RetrievalError
from retrieval.evaluate import evaluate, table
from retrieval.index import IndexSettings
from retrieval.questions import read_questions
from retrieval.tokens import load_tokens

pytest.importorskip("tantivy")

WORDS = ("apple", "brick", "candle", "dune")
PASSAGES = [
    {"id": "p0", "title": "", "text": "apple apple"},
    {"id": "p1", "title": "", "text": "brick apple"},
    {"id": "p2", "title": "", "text": "candle brick"},
    {"id": "p3", "title": "", "text": "dune candle"},
]


class CountingEncoder:
    """A vector has the count of each of WORDS: inner products can be done by hand."""

    dim = len(WORDS)

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        return np.array([[text.split().count(word) for word in WORDS] for text in texts], np.float32)

    encode_queries = encode_passages

    def spec(self) -> dict[str, Any]:
        return {"kind": "counting", "dim": self.dim}


def make_folder(
    folder: Path, rows: Sequence[Any], *, name: str = "questions", passages: Sequence[Any] = PASSAGES
) -> Path:
    for file, content in (("passages", passages), (name, rows)):
        lines = "\n".join(json.dumps(row) for row in content)
        (folder / f"{file}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    return folder


def run(data: Path, *, retriever: str = "default", k: int = 2, nprobe: int = 1, **changed: Any) -> dict[str, Any]:
    """With CountingEncoder, unless `embedded`."""
    encoder = None if changed.pop("embedded", False) else CountingEncoder()
    settings = IndexSettings(
        tokens="words",
        tokens_name=load_tokens("words").name,
        is_split=True,
        max_tokens=8,
        overlap_tokens=0,
        encoder=encoder.spec() if encoder else {"kind": "hashed", "dim": 4, "seed": 0},
        factory="Flat",
        bm25_language="none",
    )
    options = BuildOptions(fit_passages=100, encode_batch=2, bm25_memory_bytes=15 << 20, seed=0)
    n_values = changed.pop("n_values", ())
    asked = read_questions(data, **{"query": 1, "file": None, "seed": 0, "limit": None, **changed})
    return evaluate(
        asked,
        retriever=retriever,
        k=k,
        nprobe=nprobe,
        n_values=n_values,
        settings=settings,
        encoder=encoder,
        options=options,
        progress=lambda stage, done, total: None,
    )


def ask(query: str, *gold: str) -> dict[str, Any]:
    return {"question": query, "gold_passage_ids": list(gold)}


@pytest.mark.parametrize("retriever", ["bm25", "default", "fusion"])
def test_recall(tmp_path: Path, retriever: str) -> None:
    """Mean share of the right passages among the k, over the questions that have any."""
    rows = [ask("apple", "p0", "p1"), ask("dune", "p3"), ask("candle", "p0", "p2"), ask("brick")]
    result = run(make_folder(tmp_path, rows), retriever=retriever)
    assert (result["questions"], result["with_gold"], result["passages"]) == (4, 3, 4)
    assert result["recall"] == pytest.approx((1 + 1 + 1 / 2) / 3, abs=1e-4)
    assert result["all_gold"] == pytest.approx(2 / 3, abs=1e-4)
    assert result["repeated"] is None
    json.dumps(result)


def test_overlap_is_that_of_what_was_retrieved(tmp_path: Path) -> None:
    """apple -> p0 p1, brick -> p1 p2, apple again: half of the second is known, and all of the third."""
    talk = {"id": "c", "turns": [ask("apple"), ask("brick"), ask("apple")]}
    result = run(make_folder(tmp_path, [talk], name="conversations"))
    assert result["prefix"] == pytest.approx((0 + 1) / 2)
    assert result["total"] == pytest.approx((1 / 2 + 1) / 2)
    assert result["hit"] == pytest.approx(3 / 6)
    assert result["repeated"] == pytest.approx((1 / 2 + 1) / 2)
    assert result["recall"] is result["all_gold"] is None


def test_each_domain_has_an_index_of_its_own(tmp_path: Path) -> None:
    """Answers come back to their questions, whatever order domains are searched in."""
    passages = [{**row, "domain": domain} for row, domain in zip(PASSAGES, "xyxy", strict=True)]
    turns = {"x": [ask("candle", "p2"), ask("apple", "p0")], "y": [ask("candle", "p3"), ask("apple", "p1")]}
    talks = [{"id": f"c{i}", "domain": "xyx"[i], "turns": turns["xyx"[i]]} for i in range(3)]
    result = run(make_folder(tmp_path, talks, name="conversations", passages=passages), k=1)
    assert result["recall"] == 1.0
    assert result["hit"] == pytest.approx(2 / 6, abs=1e-4)
    assert result["repeated"] == 0.0


def test_equal_texts_are_one_passage(tmp_path: Path) -> None:
    """The index keeps the first; a question whose right passage is the second is answered by it too."""
    passages = [*PASSAGES, {"id": "p4", "title": "", "text": PASSAGES[3]["text"]}]
    assert run(make_folder(tmp_path, [ask("dune", "p4")], passages=passages))["recall"] == 1.0


def test_prefix_does_not_depend_on_the_seed(tmp_path: Path) -> None:
    """Total does."""
    data = make_folder(tmp_path, [ask(word) for word in WORDS for _ in range(2)])
    assert len({run(data, k=1, seed=seed)["prefix"] for seed in range(3)}) == 1


def test_co_retrieval(tmp_path: Path) -> None:
    """p0 and p1 were retrieved together and are each other's nearest."""
    result = run(make_folder(tmp_path, [ask("apple")]), n_values=(1, 2))
    assert result["co_retrieval"]["any"] == {"1": 1.0, "2": 1.0}
    assert result["co_retrieval"]["pairs"] == {"1": 1.0, "2": 1.0}
    assert "100.0%" in table(result)


def test_embedded_encoder(tmp_path: Path) -> None:
    """Fitted on the folder's passages, nothing downloaded."""
    result = run(make_folder(tmp_path, [ask("dune", "p3")]), embedded=True)
    assert result["recall"] == 1.0
    assert result["encoder"]["kind"] == "hashed"


def test_vectors_alone_need_no_word_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where its library is not installed, `default` still runs."""
    monkeypatch.setitem(sys.modules, "retrieval.bm25", None)
    assert run(make_folder(tmp_path, [ask("dune", "p3")]))["recall"] == 1.0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"retriever": "dense"}, "retriever must be one of bm25, default, fusion, got 'dense'"),
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"nprobe": 0}, "nprobe must be at least 1, got 0"),
        ({"n_values": (2, 0)}, "n must be at least 1, got 0"),
    ],
)
def test_mistakes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: dict[str, Any], message: str) -> None:
    """Refused before anything is built."""
    monkeypatch.setattr("retrieval.evaluate.build_index", None)
    with pytest.raises(RetrievalError, match=message):
        run(make_folder(tmp_path, [ask("apple")]), **changed)
