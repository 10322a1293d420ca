"""Recall and overlap on folders of questions, by the real index and retriever; the figures can be
done by hand.

CHUNKCACHE_DATA=DIR python -m pytest tests/eval/test_recall.py      DIR: holds ragpulse/requests.jsonl.gz
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
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

PASSAGES = [
    {"id": "p0", "text": "apple apple"},
    {"id": "p1", "text": "brick apple"},
    {"id": "p2", "text": "candle brick"},
    {"id": "p3", "text": "dune candle"},
]
TURNS = [{"question": f"turn {i}", "rewrite": f"rewritten {i}"} for i in range(3)]
TALK = {"id": "c1", "turns": TURNS}

Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Writes the set `one`; returns the folder that holds it."""

    def write(
        rows: Sequence[Any], *, name: str = "questions", passages: Sequence[Any] = PASSAGES
    ) -> Path:
        (tmp_path / "one").mkdir(exist_ok=True)
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
    """The mean share of the right passages among the k, over the questions that have any;
    the last line is JSON."""
    data = make(
        [ask("apple", "p0", "p1"), ask("dune", "p3"), ask("candle", "p0", "p2"), ask("brick")]
    )
    found = run(data)
    assert [arm for _, arm in found] == ["bm25", "dense", "fusion"]
    for figures in found.values():
        assert figures["recall@2"] == pytest.approx((1 + 1 + 1 / 2) / 3, abs=1e-4)
        assert figures["all_gold@2"] == pytest.approx(2 / 3, abs=1e-4)
        assert "repeated" not in figures
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert results == read_record(data / "record")["results"]
    assert [table["title"] for table in results["tables"]][:2] == ["recall@2", "all_gold@2"]
    assert len(results["verdict"]) == 2


def test_overlap_is_that_of_what_was_retrieved(make: Make) -> None:
    """apple -> p0 p1, brick -> p1 p2, apple again:
    half of the second is known, and all of the third."""
    talk = {"id": "c", "turns": [ask("apple"), ask("brick"), ask("apple")]}
    figures = run(make([talk], name="conversations"), "--modes", "bm25", "--query", "last")[
        "last", "bm25"
    ]
    assert figures == pytest.approx(
        {"prefix": 1 / 2, "total": 3 / 4, "hit": 1 / 2, "repeated": 3 / 4}
    )


def test_each_domain_has_an_index_of_its_own(make: Make) -> None:
    """Answers come back to their questions, whatever order domains are searched in."""
    passages = [{**row, "domain": domain} for row, domain in zip(PASSAGES, "xyxy", strict=True)]
    turns = {
        "x": [ask("candle", "p2"), ask("apple", "p0")],
        "y": [ask("candle", "p3"), ask("apple", "p1")],
    }
    talks = [{"id": f"c{i}", "domain": "xyx"[i], "turns": turns["xyx"[i]]} for i in range(3)]
    data = make(talks, name="conversations", passages=passages)
    figures = run(data, "--modes", "bm25", "--query", "last", "--k", "1")["last", "bm25"]
    assert figures["recall@1"] == 1.0
    assert figures["hit"] == pytest.approx(2 / 6, abs=1e-4)
    assert figures["repeated"] == 0.0


def test_equal_texts_are_one_passage(make: Make) -> None:
    """The index keeps the first; a question whose right passage is the second is answered by it
    too."""
    data = make(
        [ask("dune", "p4")], passages=[*PASSAGES, {"id": "p4", "text": PASSAGES[3]["text"]}]
    )
    assert run(data, "--modes", "bm25", "--k", "1")["last", "bm25"]["recall@1"] == 1.0


def test_an_interrupted_run_goes_on(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Cells that are there are not searched again, and the record is that of an uninterrupted
    run."""
    data = make([TALK], name="conversations")
    whole = run(data)
    samples = (data / "record" / "samples.jsonl").read_text().splitlines(keepends=True)
    record = read_record(data / "record")
    (data / "record" / "record.json").write_text(json.dumps(record | {"complete": False}))
    # `last` and one mode of `turns:2`
    (data / "record" / "samples.jsonl").write_text("".join(samples[:12]))
    searched: list[tuple[str, recall.Mode]] = []
    search = recall._search

    def note(asked: Any, cells: Sequence[tuple[str, recall.Mode]], *rest: Any) -> Any:
        searched.extend(cells)
        return search(asked, cells, *rest)

    monkeypatch.setattr(recall, "_search", note)
    assert run(data) == whole
    assert searched[:2] == [("turns:2", "dense"), ("turns:2", "fusion")]
    assert searched[2:] == [("rewrite", mode) for mode in ("bm25", "dense", "fusion")]
    assert len(read_samples(data / "record")) == len(samples)


class CountingEncoder:
    """A vector has the count of each word; a model's place in the interface."""

    dim = 4
    num_encoded = 0

    def encode_passages(self, texts: Sequence[str]) -> NDArray[np.float32]:
        self.num_encoded += len(texts)
        return self.encode_queries(texts)

    def encode_queries(self, texts: Sequence[str]) -> NDArray[np.float32]:
        words = ("apple", "brick", "candle", "dune")
        return np.array(
            [[text.split().count(word) for word in words] for text in texts], np.float32
        )

    def spec(self) -> dict[str, Any]:
        return {"kind": "counting", "dim": self.dim, "model": "/models/counting"}


def test_a_model_names_its_arms_and_encodes_once(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All queries and modes of a set search one index:
    a model needs minutes for each encoding of the passages."""
    encoder = CountingEncoder()
    monkeypatch.setattr(recall, "_encoder", lambda path: encoder)
    found = run(
        make(
            [{**TALK, "turns": [{"question": "dune", "rewrite": "dune candle"}]}],
            name="conversations",
        )
    )
    assert set(found) == {
        (query, arm)
        for query in ("last", "turns:2", "rewrite")
        for arm in ("bm25", "dense/counting", "fusion/counting")
    }
    assert encoder.num_encoded == len(PASSAGES)


def test_co_retrieval_in_three_readings() -> None:
    """One question with one pair at places 0 and 2, one without any."""
    shares = neighbor_shares([[[0], [], [2]], [[], []]])
    assert {reading: (by_n["2"], by_n["3"]) for reading, by_n in shares.items()} == {
        "questions": (0.5, 0.5),
        "any": (0.2, 0.4),
        "pairs": (0.125, 0.25),
    }
    assert neighbor_shares([]) == {}


def test_neighbours_of_what_was_found(make: Make) -> None:
    """p0 and p1 were retrieved together, and each other's vectors are among the nearest."""
    data = make([ask("apple")])
    run(data)
    cells = {
        cell["arm"]: cell["neighbors"] for cell in read_record(data / "record")["results"]["cells"]
    }
    assert cells["bm25"] == {}
    assert cells["dense"]["any"]["15"] == cells["dense"]["pairs"]["15"] == 1.0


def test_first_lists_are_not_compared_any_more(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--data", str(tmp_path), "--first", "1", "8"])
    assert "--first was removed: " in capsys.readouterr().err


def test_means_are_over_sets_and_last_questions() -> None:
    """Other queries are asked of conversations only and would weigh them more."""
    cells = [("a", "last", 0.2), ("b", "last", 0.4), ("b", "rewrite", 1.0)]
    taken = [
        {
            "arm": arm,
            "cell": {"data": data, "query": query},
            "metrics": {"hit": value},
            "found": 2,
            "neighbors": [[0], []],
        }
        for data, query, value in cells
        for arm in ("bm25", "dense")
    ]
    hit, near = summarize(taken)["tables"]
    assert hit["rows"][-1] == {"set": "mean of sets", "bm25": 0.3, "dense": 0.3}
    assert near["rows"][-1]["set"] == "mean of sets"
    assert near["rows"][-1]["n = 2"] == 0.5


def test_no_samples_make_empty_results() -> None:
    """A record is written before the first search."""
    assert summarize([]) == {"cells": [], "tables": [], "verdict": []}


def test_questions_are_shuffled_and_limited(make: Make) -> None:
    """A limit takes from the shuffled ones, so that it is a sample."""
    data = make([ask(f"question {i}") for i in range(9)])
    (asked,) = queries(data)
    assert sorted(asked) == [f"question {i}" for i in range(9)]
    assert [asked] == queries(data)
    assert asked != sorted(asked)
    assert queries(data, limit=4) == [asked[:4]]


def test_what_a_turn_searches_for(make: Make) -> None:
    """Its last questions, oldest first, or its rewrite, without which it is left out;
    turns keep their order."""
    data = make([{**TALK, "turns": [*TURNS, {"question": "q"}]}], name="conversations")
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
        run(make([ask("apple")]), *flags)


def shares(requests: Sequence[Sequence[str]], name: str, k: int) -> float:
    rows = overlap(requests, [None] * len(requests), k=k)
    return fmean(row[name] for row in rows[1:])


def test_the_papers_example() -> None:
    """One chunk lies in front in both requests, three are in both."""
    rows = overlap(
        [["c1", "c4", "c5", "c6", "c7"], ["c1", "c2", "c3", "c4", "c5"]], ["a", "a"], k=5
    )
    assert rows == [
        {"hit": 0.0},
        {"prefix": 1 / 5, "total": 3 / 5, "hit": 3 / 5, "repeated": 3 / 5},
    ]


@pytest.mark.parametrize("num_chunks", [6, 12, 40])
@pytest.mark.parametrize("seed", range(5))
def test_equal_to_the_papers_formulas(num_chunks: int, seed: int) -> None:
    """The trie and the inverted index find the pair that comparing all pairs finds,
    also in lists that came out short."""

    def lcp(a: list[str], b: list[str]) -> int:
        return len(list(takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False))))

    rng = Random(seed)
    requests = [
        [str(i) for i in rng.sample(range(num_chunks), rng.randint(0, 5))] for _ in range(60)
    ]
    for name, shared in (("prefix", lcp), ("total", lambda a, b: len({*a} & {*b}))):
        best = [
            max(shared(ids, earlier) for earlier in requests[:i]) / 5
            for i, ids in enumerate(requests)
            if i
        ]
        assert shares(requests, name, 5) == pytest.approx(fmean(best))
    full = [[str(i) for i in rng.sample(range(7), 3)] for _ in range(50)]
    assert shares(full, "prefix", 3) == pytest.approx(shares(full[::-1], "prefix", 3)), (
        "depends on the order"
    )


def test_repetition_stays_inside_a_conversation() -> None:
    """Turns of two conversations may alternate;
    a turn that retrieves nothing is a turn, but has no share."""
    requests = [["a", "b"], ["a"], [], ["a", "c"], ["a"], ["c", "d", "b", "e"]]
    rows = overlap(requests, ["x", "y", "y", "x", "y", "x"], k=5)
    assert [row.get("repeated") for row in rows] == [None, None, None, 1 / 2, 1.0, 2 / 4]


@pytest.mark.data
def test_ragpulse_as_recorded(data_dir: Path) -> None:
    """The figures published with the trace: hits, and repeats as turns' mean."""
    with gzip.open(data_dir / "ragpulse" / "requests.jsonl.gz", "rt") as lines:
        logged = [json.loads(line) for line in lines]
    rows = overlap([one["passages"] for one in logged], [one["session_id"] for one in logged], k=1)
    hits = sum(
        row.get("hit", 0) * len(one["passages"]) for row, one in zip(rows, logged, strict=True)
    )
    assert hits / sum(len(one["passages"]) for one in logged) == pytest.approx(0.886, abs=0.0005)
    assert fmean(row["repeated"] for row in rows if "repeated" in row) == pytest.approx(
        0.321, abs=0.0005
    )


@pytest.mark.data
@pytest.mark.nightly
def test_figures_of_the_record(data_dir: Path, tmp_path: Path) -> None:
    """musique as measured before."""
    out = tmp_path / "record"
    assert main(["--data", str(data_dir), "--sets", "musique", "--out", str(out)]) == 0
    cells = read_record(out)["results"]["cells"]
    assert {cell["arm"]: means(cell)["recall@5"] for cell in cells} == {
        "bm25": 0.4978,
        "dense": 0.4474,
        "fusion": 0.4878,
    }
