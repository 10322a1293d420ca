"""Neighbours of passages: the right ones, whole files, and the preprocessing reads them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from retrieval import neighbors
from retrieval.errors import RetrievalError
from retrieval.index import Index
from retrieval.neighbors import nearest, write_corpus, write_neighbors
from sglang_chunkcache.chunk_files import read_corpus, read_neighbors
from tests.retrieval.small_index import DIM, WordEncoder, build, make_documents, quiet, remove


class Angles(WordEncoder):
    """Text n lies at 2 n² degrees: no two are equally near."""

    def _encode(self, text: str) -> NDArray[np.float32]:
        angle = np.radians(2 * int(text.split()[0]) ** 2)
        return np.array([np.cos(angle), np.sin(angle), *[0] * (DIM - 2)], np.float32)


def make_index(folder: Path, texts: Iterable[object], *removed: str) -> Index:
    """Documents d0, d1 …, some of them removed."""
    documents = make_documents([str(text) for text in texts])
    build(folder / "index", documents, encoder=Angles(), bm25_language=None)
    if removed:
        remove(folder / "index", *removed)
    return Index.open(folder / "index", verify=True)


def write(index: Index, path: Path, *, n: int = 2) -> int:
    return write_neighbors(index, path, n=n, nprobe=1, progress=quiet)


def test_neighbors_are_the_nearest_others(tmp_path: Path) -> None:
    """Without the passage itself and removed ones, on either side of a batch's border."""
    index = make_index(tmp_path, range(6), "d2")
    assert nearest(index, 0, 3, n=2, nprobe=1) == {0: [1, 3], 1: [0, 3]}
    assert nearest(index, 3, 6, n=2, nprobe=1) == {3: [4, 1], 4: [3, 5], 5: [4, 3]}


def test_equal_vectors(tmp_path: Path) -> None:
    """The search may not name the passage itself: still n others."""
    found = nearest(make_index(tmp_path, ["0 " + name for name in "abcde"]), 0, 5, n=2, nprobe=1)
    assert found[4] == [0, 1]
    assert all(len(others) == 2 and row not in others for row, others in found.items())


def test_fewer_passages_than_neighbors(tmp_path: Path) -> None:
    """An index of one passage has no neighbours, an empty one no lines."""
    index = make_index(tmp_path, range(2), "d1")
    assert nearest(index, 0, 2, n=3, nprobe=1) == {0: []}
    assert nearest(make_index(tmp_path, range(1), "d0"), 0, 2, n=3, nprobe=1) == {}


@pytest.mark.parametrize("batch_rows", [1, 3, 100])
def test_file_holds_every_live_passage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_rows: int
) -> None:
    """For any batch size; no other file remains."""
    monkeypatch.setattr(neighbors, "BATCH_ROWS", batch_rows)
    index, path = make_index(tmp_path, range(7), "d0"), tmp_path / "n.jsonl"
    assert write(index, path) == 6
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [line["id"] for line in lines] == [f"d{row}" for row in range(1, 7)]
    assert lines[0] == {"id": "d1", "neighbors": ["d2", "d3"]}
    assert {file.name for file in tmp_path.iterdir()} == {"index", "n.jsonl"}


def test_a_killed_run_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the neighbours would be read as all of them; the next run writes the whole file."""
    monkeypatch.setattr(neighbors, "BATCH_ROWS", 4)
    index, path = make_index(tmp_path, range(10)), tmp_path / "n.jsonl"

    def die(stage: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_neighbors(index, path, n=2, nprobe=1, progress=die)
    assert not path.exists()
    assert write(index, path) == 10
    assert {file.name for file in tmp_path.iterdir()} == {"index", "n.jsonl"}


def test_the_preprocessing_reads_both_files(tmp_path: Path) -> None:
    """Whatever characters are in the texts; only neighbours that are in the corpus."""
    index = make_index(tmp_path, ["0", "1", "2", "3 \u2028\x85", "4"], "d4")
    write(index, tmp_path / "n.jsonl")
    assert write_corpus(index, tmp_path / "c.jsonl", progress=quiet) == 4
    texts = read_corpus(tmp_path / "c.jsonl")
    assert texts["d3"] == "3 \u2028\x85"
    assert read_neighbors(tmp_path / "n.jsonl", texts)["d3"] == ["d2", "d1"]


def test_mistakes(tmp_path: Path) -> None:
    index = make_index(tmp_path, range(3))
    with pytest.raises(RetrievalError, match="n must be at least 1, got 0"):
        write(index, tmp_path / "n.jsonl", n=0)
    with pytest.raises(RetrievalError, match=r"missing/n\.jsonl: No such file"):
        write(index, tmp_path / "missing" / "n.jsonl")
    with pytest.raises(RetrievalError, match=r"missing/c\.jsonl: No such file"):
        write_corpus(index, tmp_path / "missing" / "c.jsonl", progress=quiet)
