"""The recall bench on a few passages."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("faiss")
pytest.importorskip("tantivy")

from eval.bench.recall import main, means
from eval.errors import CommandError

pytestmark = pytest.mark.nightly


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    path.parent.mkdir(exist_ok=True)
    with gzip.open(path, "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A set of questions and one of conversations, each word in one passage."""
    passages = [{"id": f"p{i}", "title": "", "text": f"alpha{i} beta{i} gamma{i % 3} delta."} for i in range(12)]
    write(tmp_path / "single" / "passages.jsonl.gz", passages)
    questions = [{"id": f"q{i}", "question": f"alpha{i} beta{i}?", "gold_passage_ids": [f"p{i}"]} for i in range(12)]
    write(tmp_path / "single" / "questions.jsonl.gz", questions)
    write(tmp_path / "turns" / "passages.jsonl.gz", [{**passage, "domain": "d"} for passage in passages])
    asked = [f"alpha{i}?" for i in range(3)]
    turns = [
        {"turn": i + 1, "question": text, "rewrite": text, "gold_passage_ids": [f"p{i}"]}
        for i, text in enumerate(asked)
    ]
    write(tmp_path / "turns" / "conversations.jsonl.gz", [{"id": "c", "domain": "d", "turns": turns}])
    return tmp_path


def test_every_set_query_and_retriever_has_a_row(data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Words of one passage only are found by all three."""
    assert main(["--data", str(data), "--sets", "single", "turns", "--k", "3"]) == 0
    results = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [(row["data"], row["query"], row["retriever"]) for row in results["rows"]] == [
        *(("single", 1, name) for name in ("bm25", "default", "fusion")),
        *(("turns", query, name) for query in (1, 2, "rewrite") for name in ("bm25", "default", "fusion")),
    ]
    assert all(row["recall"] == 1.0 for row in results["rows"] if row["query"] == 1)
    assert set(results["means"]["fusion"]) == {"prefix", "total", "hit", "co_retrieval"}


def test_means_are_over_sets_and_last_questions() -> None:
    """Other queries are asked of conversations only and would weigh them more."""
    rows = [
        {"retriever": "bm25", "query": query, "prefix": share, "total": share, "hit": share}
        for query, share in [(1, 0.2), (1, 0.4), (2, 1.0)]
    ]
    assert means(rows) == {"bm25": {"prefix": 0.3, "total": 0.3, "hit": 0.3}}


def test_a_missing_set_is_one_line(tmp_path: Path) -> None:
    """No traceback for a wrong folder."""
    with pytest.raises(CommandError, match=r"passages\.jsonl\.gz"):
        main(["--data", str(tmp_path), "--sets", "nothing"])
