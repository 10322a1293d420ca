"""Neighbours of passages: the right ones, whole files, and the preprocessing reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray

from retrieval import neighbors
from retrieval.errors import RetrievalError
from retrieval.index import Index
from retrieval.neighbors import nearest, write_corpus, write_neighbors
from retrieval.passage import Passage
from sglang_chunkcache.chunk_files import read_corpus, read_neighbors


class FakeIndex:
    """What the module uses of an `Index`, over vectors in memory; row r is the passage `p<r>`."""

    def __init__(self, vectors: Sequence[Sequence[float]], *, removed: Sequence[int] = ()) -> None:
        self.all = np.array(vectors, np.float32).reshape(len(vectors), -1)
        self.removed = list(removed)
        self.num_rows = len(vectors)
        self.store = self

    def vectors(self, first: int, last: int) -> NDArray[np.float32]:
        return self.all[first:last]

    def is_live(self, rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        return ~np.isin(rows, self.removed)

    def search_dense(
        self, queries: NDArray[np.float32], *, k: int, nprobe: int
    ) -> tuple[Any, NDArray[np.int64]]:
        scores = queries @ self.all.T
        scores[:, self.removed] = -np.inf
        rows = np.argsort(-scores, axis=1, kind="stable")
        rows[np.isneginf(np.take_along_axis(scores, rows, axis=1))] = -1
        short = max(0, k - rows.shape[1])
        return scores, np.pad(rows, ((0, 0), (0, short)), constant_values=-1)[:, :k]

    def get(self, rows: Sequence[int]) -> list[Passage]:
        return [
            Passage(f"p{row}", f"p{row}", "", f"text {row} \u2028\ud800", 0, 2, 2) for row in rows
        ]

    def ids(self, rows: Sequence[int]) -> dict[int, str]:
        return {row: f"p{row}" for row in rows}

    def iterate(self, first: int, last: int) -> Iterator[tuple[int, Passage]]:
        yield from zip(range(first, last), self.get(range(first, last)), strict=True)


def make_index(vectors: Sequence[Sequence[float]], *, removed: Sequence[int] = ()) -> Index:
    return cast(Index, FakeIndex(vectors, removed=removed))


def on_circle(num: int) -> list[list[float]]:
    """Unit vectors at 0, 0.5, 2, 4.5 ...
    degrees: the previous row is nearer than the next, and no two are equally near."""
    return [
        [float(np.cos(angle)), float(np.sin(angle))]
        for angle in np.radians(np.arange(num) ** 2 / 2)
    ]


def quiet(stage: str, done: int, total: int | None) -> None:
    """No progress is shown."""


def write(index: Index, path: Path, *, n: int = 2) -> int:
    return write_neighbors(index, path, n=n, nprobe=1, progress=quiet)


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def test_neighbors_are_the_nearest_others() -> None:
    """Nearest first, without the passage itself and without removed ones,
    on either side of a batch's border."""
    index = make_index(on_circle(6), removed=[2])
    assert nearest(index, 0, 3, n=2, nprobe=1) == {0: [1, 3], 1: [0, 3]}
    assert nearest(index, 3, 6, n=2, nprobe=1) == {3: [4, 1], 4: [3, 5], 5: [4, 3]}


def test_equal_vectors() -> None:
    """Where more passages than asked for have one vector, the search may not name the passage
    itself: still n others."""
    index = make_index([[1.0]] * 5)
    found = nearest(index, 0, 5, n=2, nprobe=1)
    assert found[4] == [0, 1]
    assert all(len(others) == 2 and row not in others for row, others in found.items())


def test_fewer_passages_than_neighbors() -> None:
    """An index of one passage has no neighbours, an empty one no lines."""
    assert nearest(make_index([[1.0]]), 0, 1, n=3, nprobe=1) == {0: []}
    assert nearest(make_index([[1.0], [1.0]], removed=[0, 1]), 0, 2, n=3, nprobe=1) == {}


@pytest.mark.parametrize("batch_rows", [1, 3, 100])
def test_file_holds_every_live_passage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batch_rows: int
) -> None:
    """For any batch size; no other file remains."""
    monkeypatch.setattr(neighbors, "BATCH_ROWS", batch_rows)
    index = make_index(on_circle(7), removed=[0])
    assert write(index, tmp_path / "n.jsonl") == 6
    lines = lines_of(tmp_path / "n.jsonl")
    assert [line["id"] for line in lines] == [f"p{row}" for row in range(1, 7)]
    assert lines[0] == {"id": "p1", "neighbors": ["p2", "p3"]}
    assert [path.name for path in tmp_path.iterdir()] == ["n.jsonl"]


def test_a_killed_run_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the neighbours would be read as all of them; the next run writes the whole file."""
    monkeypatch.setattr(neighbors, "BATCH_ROWS", 4)
    index, path = make_index(on_circle(10)), tmp_path / "n.jsonl"

    def die(stage: str, done: int, total: int | None) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_neighbors(index, path, n=2, nprobe=1, progress=die)
    assert not path.exists()
    assert write(index, path) == 10
    assert [file.name for file in tmp_path.iterdir()] == ["n.jsonl"]


def test_the_preprocessing_reads_both_files(tmp_path: Path) -> None:
    """Texts as the served model reads them, whatever characters are in them,
    and only neighbours that are in the corpus."""
    index = make_index(on_circle(5), removed=[4])
    write(index, tmp_path / "n.jsonl")
    assert write_corpus(index, tmp_path / "c.jsonl", progress=quiet) == 4
    texts = read_corpus(tmp_path / "c.jsonl")
    assert texts["p3"] == "text 3 \u2028\ud800"
    assert read_neighbors(tmp_path / "n.jsonl", texts)["p3"] == ["p2", "p1"]


def test_a_real_index(tmp_path: Path) -> None:
    """As `FakeIndex` promises: built, a passage taken out, opened again."""
    from retrieval.build import build_index, remove_passages

    def never() -> Any:
        raise AssertionError("no passage takes over d1's text")

    from retrieval.passage import Document
    from retrieval.settings import BuildOptions, IndexSettings
    from retrieval.tokens import load_tokens

    tokens = load_tokens("words")
    encoder = {"kind": "hashed", "dim": 8, "seed": 0}
    settings = IndexSettings(is_split=False, encoder=encoder, factory="Flat", bm25_language=None)
    options = BuildOptions(fit_passages=100, encode_batch=4, bm25_memory_bytes=15 << 20, seed=0)
    texts = ("red apple", "red apple pie", "red apple tart", "deep blue sea", "blue sea")
    documents = [Document(f"d{i}", "", text) for i, text in enumerate(texts)]
    folder = tmp_path / "index"
    build_index(
        documents, folder, settings, tokens=tokens, encoder=None, options=options, progress=quiet
    )
    remove_passages(folder, ["d1"], load=never, options=options, progress=quiet)
    index = Index.open(folder, verify=True)
    write(index, tmp_path / "n.jsonl", n=3)
    write_corpus(index, tmp_path / "c.jsonl", progress=quiet)
    read = read_neighbors(tmp_path / "n.jsonl", read_corpus(tmp_path / "c.jsonl"))
    assert list(read) == ["d0", "d2", "d3", "d4"]
    assert all(len(others) == 3 for others in read.values())
    assert (read["d0"][0], read["d2"][0], read["d3"][0], read["d4"][0]) == ("d2", "d0", "d4", "d3")


def test_mistakes(tmp_path: Path) -> None:
    """Named in one line."""
    index = make_index(on_circle(3))
    with pytest.raises(RetrievalError, match="n must be at least 1, got 0"):
        write(index, tmp_path / "n.jsonl", n=0)
    with pytest.raises(RetrievalError, match=r"missing/n\.jsonl: No such file"):
        write(index, tmp_path / "missing" / "n.jsonl")
    with pytest.raises(RetrievalError, match=r"missing/c\.jsonl: No such file"):
        write_corpus(index, tmp_path / "missing" / "c.jsonl", progress=quiet)
