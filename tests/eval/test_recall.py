"""Recall and overlap on folders of questions, by the real index and retriever; the figures can be
done by hand.

CHUNKCACHE_DATA=DIR python -m pytest tests/eval/test_recall.py
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product, takewhile
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

pytest.importorskip("faiss")
pytest.importorskip("tantivy")

from eval import recall
from eval.errors import CommandError
from eval.recall import main, neighbor_shares, overlap, read_set, summarize
from eval.run import read_record, read_samples

WORDS = ("apple", "brick", "candle", "dune")
TEXTS = ("apple apple", "brick apple", "candle brick", "dune candle")
PASSAGES = [{"id": f"p{i}", "text": text} for i, text in enumerate(TEXTS)]
TURNS = [{"question": f"turn {i}", "rewrite": f"rewritten {i}"} for i in range(3)]

Make = Callable[..., Path]


def talk(*turns: Mapping[str, Any], name: str = "c1", **more: str) -> dict[str, Any]:
    return {"id": name, "turns": [*turns], **more}


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes the set `one`, of questions or conversations; returns the folder that holds it."""

    def write(*rows: Mapping[str, Any], passages: Sequence[Mapping[str, Any]] = PASSAGES) -> Path:
        (tmp_path / "one").mkdir(exist_ok=True)
        name = "conversations" if "turns" in rows[0] else "questions"
        for file, content in (("passages", passages), (name, rows)):
            lines = "\n".join(json.dumps(row) for row in content)
            (tmp_path / "one" / f"{file}.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
        return tmp_path

    return write


def ask(query: str, *gold: str) -> dict[str, Any]:
    return {"id": query, "question": query, "gold_passage_ids": list(gold)}


def run(data: Path, *flags: str) -> dict[tuple[str, str], dict[str, float]]:
    """(query, arm) -> means; two passages for each question, unless flags say otherwise."""
    out = data / "record"
    assert main(["--data", str(data), "--sets", "one", "--out", str(out), "--k", "2", *flags]) == 0
    cells = read_record(out)["results"]["cells"]
    return {(cell["cell"]["query"], cell["arm"]): means(cell) for cell in cells}


def means(cell: Mapping[str, Any]) -> dict[str, float]:
    return {name: value["mean"] for name, value in cell["metrics"].items()}


def queries(data: Path, *kinds: str, limit: int | None = None) -> list[list[str]]:
    found = read_set(data / "one", kinds or ["last"], limit=limit)
    return [[request.question for request in asked.requests] for asked in found.values()]


def test_recall_of_each_mode(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    """The mean over the questions that have right passages; the last line is JSON."""
    found = run(
        data := make(
            ask("apple", "p0", "p1"), ask("dune", "p3"), ask("candle", "p0", "p2"), ask("brick")
        )
    )
    assert [arm for _, arm in found] == ["bm25", "dense", "fusion"]
    for figures in found.values():
        assert figures["recall@2"] == pytest.approx((1 + 1 + 1 / 2) / 3, abs=1e-4)
        assert figures["all_gold@2"] == pytest.approx(2 / 3, abs=1e-4)
        assert "repeated" not in figures
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results == read_record(data / "record")["results"]
    assert [table["title"] for table in results["tables"]][:2] == ["recall@2", "all_gold@2"]


def test_overlap_is_that_of_what_was_retrieved(make: Make) -> None:
    """apple -> p0 p1, brick -> p1 p2, apple again: half is known, then all."""
    data = make(talk(ask("apple"), ask("brick"), ask("apple")))
    figures = run(data, "--modes", "bm25", "--query", "last")["last", "bm25"]
    expected = {"prefix": 1 / 2, "total": 3 / 4, "hit": 1 / 2, "repeated": 3 / 4}
    assert figures == pytest.approx(expected)


def test_each_domain_has_an_index_of_its_own(make: Make) -> None:
    """Answers come back to their questions, whatever order domains are searched in."""
    passages = [{**row, "domain": domain} for row, domain in zip(PASSAGES, "xyxy", strict=True)]
    turns = {
        "x": [ask("candle", "p2"), ask("apple", "p0")],
        "y": [ask("candle", "p3"), ask("apple", "p1")],
    }
    talks = [talk(*turns[domain], name=f"c{i}", domain=domain) for i, domain in enumerate("xyx")]
    data = make(*talks, passages=passages)
    figures = run(data, "--modes", "bm25", "--query", "last", "--k", "1")["last", "bm25"]
    assert figures["recall@1"] == 1.0
    assert figures["hit"] == pytest.approx(2 / 6, abs=1e-4)
    assert figures["repeated"] == 0.0


def test_equal_texts_are_one_passage(make: Make) -> None:
    """The index keeps the first; a question about the second is answered by it too."""
    passages = [*PASSAGES, {"id": "p4", "text": TEXTS[3]}]
    data = make(ask("dune", "p4"), passages=passages)
    assert run(data, "--modes", "bm25", "--k", "1")["last", "bm25"]["recall@1"] == 1.0


def test_an_interrupted_run_goes_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells that are there are not searched again, and the record is the same."""
    data = make(talk(*TURNS))
    whole, folder = run(data), data / "record"
    samples = (folder / "samples.jsonl").read_text().splitlines(keepends=True)
    record = read_record(folder)
    (folder / "record.json").write_text(json.dumps(record | {"complete": False}))
    # `last` and one mode of `turns:2`
    (folder / "samples.jsonl").write_text("".join(samples[:12]))
    searched: list[tuple[str, recall.Mode]] = []
    search = recall._search

    def note(asked: Any, cells: Sequence[tuple[str, recall.Mode]], *rest: Any) -> Any:
        searched.extend(cells)
        return search(asked, cells, *rest)

    monkeypatch.setattr(recall, "_search", note)
    assert run(data) == whole
    assert searched[:2] == [("turns:2", "dense"), ("turns:2", "fusion")]
    assert searched[2:] == [("rewrite", mode) for mode in ("bm25", "dense", "fusion")]
    assert len(read_samples(folder)) == len(samples)


class CountingEncoder:
    """A vector has the count of each word; a model's place in the interface."""

    dim = 4
    num_encoded = 0

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.num_encoded += len(texts)
        return self.encode_queries(texts)

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        counts = [[text.split().count(word) for word in WORDS] for text in texts]
        return np.array(counts, np.float32)

    def spec(self) -> dict[str, Any]:
        return {"kind": "counting", "dim": self.dim, "model": "/models/counting"}


def test_a_model_names_its_arms_and_encodes_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All queries and modes search one index: a model needs minutes for each."""
    encoder = CountingEncoder()
    monkeypatch.setattr(recall, "_encoder", lambda path: encoder)
    found = run(make(talk({"question": "dune", "rewrite": "dune candle"})))
    arms = ("bm25", "dense/counting", "fusion/counting")
    assert set(found) == {*product(("last", "turns:2", "rewrite"), arms)}
    assert encoder.num_encoded == len(PASSAGES)


def test_co_retrieval_in_three_readings() -> None:
    """One question with one pair at places 0 and 2, one without any."""
    shares = neighbor_shares([[[0], [], [2]], [[], []]])
    found = {reading: (by_n["2"], by_n["3"]) for reading, by_n in shares.items()}
    assert found == {"questions": (0.5, 0.5), "any": (0.2, 0.4), "pairs": (0.125, 0.25)}
    assert neighbor_shares([]) == {}


def test_neighbours_of_what_was_found(make: Make) -> None:
    """p0 and p1 were retrieved together, and each other's vectors are among the nearest."""
    run(data := make(ask("apple")))
    found = read_record(data / "record")["results"]["cells"]
    cells = {cell["arm"]: cell["neighbors"] for cell in found}
    assert cells["bm25"] == {}
    assert cells["dense"]["any"]["15"] == cells["dense"]["pairs"]["15"] == 1.0


def test_means_are_over_sets_and_last_questions() -> None:
    """Other queries are asked of conversations only and would weigh them more."""
    cells = [("a", "last", 0.2), ("b", "last", 0.4), ("b", "rewrite", 1.0)]
    same = {"found": 2, "neighbors": [[0], []]}
    taken = [
        {"arm": arm, "cell": {"data": data, "query": query}, "metrics": {"hit": value}, **same}
        for data, query, value in cells
        for arm in ("bm25", "dense")
    ]
    hit, near = summarize(taken)["tables"]
    assert hit["rows"][-1] == {"set": "mean of sets", "bm25": 0.3, "dense": 0.3}
    assert near["rows"][-1]["n = 2"] == 0.5
    # a record is written before the first search
    assert summarize([]) == {"cells": [], "tables": [], "verdict": []}


def test_questions_are_shuffled_and_limited(make: Make) -> None:
    """A limit takes from the shuffled ones, so that it is a sample."""
    data = make(*(ask(f"question {i}") for i in range(9)))
    (asked,) = queries(data)
    assert sorted(asked) == [f"question {i}" for i in range(9)]
    assert [asked] == queries(data)
    assert asked != sorted(asked)
    assert queries(data, limit=4) == [asked[:4]]


def test_what_a_turn_searches_for(make: Make) -> None:
    """Its last questions, oldest first, or its rewrite, without which it is left out."""
    data = make(talk(*TURNS, {"question": "q"}))
    assert queries(data, "last", "turns:2", "rewrite") == [
        ["turn 0", "turn 1", "turn 2", "q"],
        ["turn 0", "turn 0\nturn 1", "turn 1\nturn 2", "turn 2\nq"],
        ["rewritten 0", "rewritten 1", "rewritten 2"],
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sets", "nothing"], r"nothing/passages\.jsonl\.gz does not exist"),
        (["--factory", "Nonsense"], "factory 'Nonsense'"),
    ],
)
def test_mistakes_are_one_line(make: Make, flags: list[str], message: str) -> None:
    """No traceback."""
    with pytest.raises(CommandError, match=message):
        run(make(ask("apple")), *flags)


def test_the_papers_example() -> None:
    """One chunk lies in front in both requests, three are in both."""
    rows = overlap(["14567", "12345"], ["a", "a"], k=5)
    shared = {"prefix": 1 / 5, "total": 3 / 5, "hit": 3 / 5, "repeated": 3 / 5}
    assert rows == [{"hit": 0.0}, shared]


@pytest.mark.parametrize("num_chunks", [6, 12, 40])
@pytest.mark.parametrize("seed", range(5))
def test_equal_to_the_papers_formulas(num_chunks: int, seed: int) -> None:
    """Trie and inverted index find what comparing all pairs finds, in short lists too."""

    def lcp(a: list[str], b: list[str]) -> int:
        return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))

    rng = Random(seed)
    requests = [
        [str(i) for i in rng.sample(range(num_chunks), rng.randint(0, 5))] for _ in range(60)
    ]

    def shares(requests: Sequence[Sequence[str]], name: str, k: int) -> float:
        return fmean(row[name] for row in overlap(requests, [None] * len(requests), k=k)[1:])

    for name, shared in (("prefix", lcp), ("total", lambda a, b: len({*a} & {*b}))):
        best = [
            max(shared(ids, earlier) for earlier in requests[:i]) / 5
            for i, ids in enumerate(requests)
            if i
        ]
        assert shares(requests, name, 5) == pytest.approx(fmean(best))
    full = [[str(i) for i in rng.sample(range(7), 3)] for _ in range(50)]
    assert shares(full, "prefix", 3) == pytest.approx(shares(full[::-1], "prefix", 3))


def test_repetition_stays_inside_a_conversation() -> None:
    """Turns may alternate; one that retrieves nothing is a turn without a share."""
    rows = overlap(["ab", "a", "", "ac", "a", "cdbe"], [*"xyyxyx"], k=5)
    assert [row.get("repeated") for row in rows] == [None, None, None, 1 / 2, 1.0, 2 / 4]


@pytest.mark.data
def test_ragpulse_as_recorded(data_dir: Path) -> None:
    """The figures published with the trace: hits, and repeats as turns' mean."""
    with gzip.open(data_dir / "ragpulse" / "requests.jsonl.gz", "rt") as lines:
        logged = [json.loads(line) for line in lines]
    rows = overlap([one["passages"] for one in logged], [one["session_id"] for one in logged], k=1)
    sizes = [len(one["passages"]) for one in logged]
    hits = sum(row.get("hit", 0) * size for row, size in zip(rows, sizes, strict=True))
    assert hits / sum(sizes) == pytest.approx(0.886, abs=0.0005)
    repeated = fmean(row["repeated"] for row in rows if "repeated" in row)
    assert repeated == pytest.approx(0.321, abs=0.0005)


@pytest.mark.data
@pytest.mark.nightly
def test_figures_of_the_record(data_dir: Path, tmp_path: Path) -> None:
    """musique as measured before."""
    out = tmp_path / "record"
    assert main(["--data", str(data_dir), "--sets", "musique", "--out", str(out)]) == 0
    cells = read_record(out)["results"]["cells"]
    found = {cell["arm"]: means(cell)["recall@5"] for cell in cells}
    assert found == {"bm25": 0.4978, "dense": 0.4474, "fusion": 0.4878}
