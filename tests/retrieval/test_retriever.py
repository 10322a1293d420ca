"""Retriever: what each mode answers, one generation at a time,
and only with the encoder that the index has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from retrieval import retriever as retriever_module
from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.hits import Hit, Mode
from retrieval.rank_fusion import reciprocal_rank_fusion
from retrieval.retriever import RRF_CONSTANT, ZERO, Retriever
from tests.retrieval.small_index import (
    WordEncoder,
    build,
    delete,
    make_documents,
    make_retriever,
)
from tests.retrieval.small_index import found_ids as ids


def hits_of(retriever: Retriever, query: str, *, k: int, mode: Mode) -> list[Hit]:
    return retriever.search([query], k=k, mode=mode, nprobe=1).hits[0]


def check_all_modes(retriever: Retriever, query: str, best: str) -> None:
    for mode in retriever.modes:
        assert ids(retriever, query, k=1, mode=mode) == [best]


def test_each_mode_finds_a_word(whole_index: Path) -> None:
    retriever = make_retriever(whole_index)
    assert retriever.modes == ("fusion", "dense", "bm25", "filled")
    for number in (0, 7, 39):
        check_all_modes(retriever, f"word{number} shared tail{number % 5}", f"d{number}")
    check_all_modes(retriever, "later words", "e1")
    for mode in retriever.modes:
        assert "d3" not in ids(retriever, "word3 shared tail3", k=100, mode=mode)
    assert ids(retriever, "word3", mode="bm25") == []


def test_rank_fusion_is_of_the_two_lists(whole_index: Path) -> None:
    """By reciprocal ranks; a smaller k is the front of a larger one."""
    retriever = make_retriever(whole_index)
    lists = [ids(retriever, "word5 tail1", k=100, mode=mode) for mode in ("dense", "bm25")]
    numbers = {name: number for number, name in enumerate(dict.fromkeys([*lists[0], *lists[1]]))}
    ranked = [[numbers[name] for name in names] for names in lists]
    hits = hits_of(retriever, "word5 tail1", k=50, mode="fusion")
    assert [(numbers[hit.passage.id], hit.score) for hit in hits] == reciprocal_rank_fusion(
        ranked, k=50, constant=RRF_CONSTANT
    )
    for k in (1, 4, 30):
        assert hits_of(retriever, "word5 tail1", k=k, mode="fusion") == hits[:k]


def test_filled_is_bm25_then_what_else_is_near(whole_index: Path) -> None:
    """Vectors fill up, none twice, none without likeness."""
    retriever = make_retriever(whole_index)
    words = hits_of(retriever, "word5", k=30, mode="bm25")
    near = hits_of(retriever, "word5", k=30, mode="dense")
    assert len(words) == 1
    assert min(hit.score for hit in near) < 0, "some must not be taken"
    others = [hit for hit in near if hit.score > ZERO and hit.passage != words[0].passage]
    found = hits_of(retriever, "word5", k=30, mode="filled")
    assert found == [*words, *others]
    assert {hit.mode for hit in found} == {"bm25", "dense"}
    full = retriever.search(["shared"], k=3, mode="filled", nprobe=1)
    assert set(full.ms) == {"bm25", "read"}, "no time of the encoder for what is not short"
    batch = retriever.search(["shared", "word5", ""], k=3, mode="filled", nprobe=1)
    assert batch.hits == [hits_of(retriever, "shared", k=3, mode="bm25"), found[:3], []]


def test_modes_of_the_embedded_encoder(tmp_path: Path) -> None:
    """Filled by default."""
    build(tmp_path, make_documents(["one text", "another text"]), encoder=None)
    retriever = Retriever.open(tmp_path, encoder=None, device=None, verify=True, threads=1)
    assert retriever.modes == ("filled", "bm25", "fusion", "dense")


@pytest.mark.parametrize("mode", ["fusion", "dense", "bm25", "filled"])
def test_a_batch_is_its_queries(whole_index: Path, mode: Mode) -> None:
    """Nothing is near a query without words; phases that ran are timed."""
    retriever = make_retriever(whole_index)
    queries = ["word1", "late", "shared tail2", ""]
    result = retriever.search(queries, k=4, mode=mode, nprobe=1)
    phases = {"dense": {"encode", "dense"}, "bm25": {"bm25"}}
    assert set(result.ms) == {"read", *phases.get(mode, {"encode", "dense", "bm25"})}
    for query, hits in zip(queries, result.hits, strict=True):
        alone = hits_of(retriever, query, k=4, mode=mode)
        assert [hit.passage for hit in hits] == [hit.passage for hit in alone]
        assert [hit.score for hit in hits] == pytest.approx([hit.score for hit in alone], abs=1e-5)
    assert result.hits[-1] == []
    assert retriever.search([], k=1, mode=mode, nprobe=1).hits == []


def test_wrong_arguments(whole_index: Path, tmp_path: Path) -> None:
    retriever = make_retriever(whole_index)
    for k, nprobe in [(0, 1), (1, 0), (-1, 1)]:
        with pytest.raises(RetrievalError, match="at least 1"):
            retriever.search(["x"], k=k, mode="dense", nprobe=nprobe)
    build(tmp_path, make_documents(["a"]), bm25_language=None)
    assert make_retriever(tmp_path).modes == ("dense",)
    with pytest.raises(RetrievalError, match="mode 'bm25': this index has dense"):
        make_retriever(tmp_path).search(["x"], k=1, mode="bm25", nprobe=1)


def test_refresh_switches_to_what_was_built(folder: Path) -> None:
    """Once for each generation; an index that was opened before answers as it did."""
    retriever = make_retriever(folder)
    early, name = retriever.index, "dense-1-0.faiss"
    assert not retriever.refresh()
    build(folder, make_documents(["a newcomer"], prefix="n"))
    assert ids(retriever, "newcomer", mode="bm25") == []
    assert (retriever.refresh(), retriever.refresh()) == (True, False)
    assert ids(retriever, "newcomer", mode="bm25") == ["n0"]
    assert retriever.index.segments[name].index is early.segments[name].index, "not read twice"
    assert early.num_rows == 42


def test_refresh_keeps_serving_when_the_newer_one_is_damaged(folder: Path) -> None:
    """Until its files change, without a new manifest; or while there is nothing at all."""
    retriever = make_retriever(folder)
    build(folder, make_documents([f"a newcomer {number}" for number in range(3)], prefix="n"))
    (path,) = folder.glob("dense-4-*.faiss")
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:-1])
    for _ in range(2):
        with pytest.raises(CorruptIndexError, match="dense-4"):
            retriever.refresh()
    assert (retriever.damage, retriever.index.manifest.generation) == (None, 3)
    check_all_modes(retriever, "word0 shared tail0", "d0")
    path.write_bytes(whole)
    assert retriever.refresh()
    check_all_modes(retriever, "newcomer 2", "n2")


@pytest.mark.parametrize("num_builds", [1, 3, 4])
def test_index_that_was_made_anew_is_served(folder: Path, num_builds: int) -> None:
    """Of a lower, equal or higher generation; never a mixture of both."""
    retriever = make_retriever(folder)
    early = retriever.index
    delete(folder)
    for _ in range(2):
        with pytest.raises(CorruptIndexError, match="no index there"):
            retriever.refresh()
    for end in range(num_builds):
        texts = ["word0 shared tail0", *(f"other{number}" for number in range(45 + end))]
        build(folder, make_documents(texts, prefix="x"))
    found = ids(retriever, "word5", k=1, mode="bm25")
    assert found == ["d5"], "open files are served until there is something better"
    assert (retriever.refresh(), retriever.refresh()) == (True, False)
    assert retriever.index.manifest.generation == num_builds
    check_all_modes(retriever, "word0 shared tail0", "x0")
    check_all_modes(retriever, "other7", "x8")
    assert early.store.get([5])[0].id == "d5", "what a search began with is there to its end"


def open_with(monkeypatch: pytest.MonkeyPatch, folder: Path, encoder: Any) -> Retriever:
    monkeypatch.setattr(retriever_module, "load_encoder", lambda spec, **arguments: encoder)
    return Retriever.open(folder, encoder=None, device=None, verify=True, threads=1)


def test_another_encoder_comes_with_another_index(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is loaded, or, if it does not fit, the old index stays."""
    encoder = WordEncoder(seed=1, dim=12)
    retriever = open_with(monkeypatch, folder, WordEncoder())
    delete(folder)
    build(folder, make_documents(["something else"]), encoder=encoder)
    with pytest.raises(CorruptIndexError, match="have 12 dimensions, but the encoder gives 8"):
        retriever.refresh()
    assert ids(retriever, "word5 shared tail0", k=1, mode="dense") == ["d5"]
    retriever._load = lambda spec: encoder
    (folder / "manifest.json").touch()
    assert retriever.refresh()
    assert ids(retriever, "something", k=1, mode="dense") == ["d0"]


@pytest.mark.parametrize("with_times", [False, True])
def test_damage_is_refused_until_it_is_mended(folder: Path, with_times: bool) -> None:
    """Written over in place; `with_times`: mended by rsync -t."""
    retriever = make_retriever(folder)
    path = folder / "dense-1-0.faiss"
    whole, stat = path.read_bytes(), path.stat()
    path.write_bytes(whole[:-64] + bytes(64))
    for _ in range(2):
        with pytest.raises(CorruptIndexError, match=r"dense-1-0\.faiss: .* checksum differs"):
            retriever.refresh()
    assert "dense-1-0.faiss" in str(retriever.damage)
    for mode in retriever.modes:
        with pytest.raises(CorruptIndexError, match="checksum differs"):
            ids(retriever, "word5", k=1, mode=mode)
    path.write_bytes(whole)
    if with_times:
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert retriever.refresh()
    assert retriever.damage is None
    assert ids(retriever, "word5 shared tail0", k=1, mode="dense") == ["d5"]


def test_store_overwritten_and_mended_in_place(folder: Path) -> None:
    """SQLite's file has no checksum in the manifest, its rows have."""
    retriever, path = make_retriever(folder), folder / "passages.sqlite"
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:4096] + bytes(len(whole) - 4096))
    with pytest.raises(CorruptIndexError, match=r"passages\.sqlite"):
        retriever.refresh()
    found = ids(retriever, "word5", k=1, mode="bm25")
    assert found == ["d5"], "the removed file is still open and whole"
    path.unlink()
    path.write_bytes(whole)
    assert retriever.refresh()
    assert ids(retriever, "word5", k=1, mode="bm25") == ["d5"]


def test_searches_beside_refreshes(folder: Path) -> None:
    retriever, done = make_retriever(folder), threading.Event()

    def search() -> None:
        while not done.is_set():
            for mode in retriever.modes:
                assert ids(retriever, "word20 shared tail0", k=2, mode=mode)[0] == "d20"

    with ThreadPoolExecutor(3) as pool:
        searches = [pool.submit(search) for _ in range(3)]
        try:
            for number in range(4):
                build(folder, make_documents([f"newcomer{number}"], prefix=f"n{number}-"))
                assert retriever.refresh()
        finally:
            done.set()
    for each in searches:
        each.result()


def test_only_its_own_encoder(whole_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model's vectors would find anything; the stored probe tells."""
    retriever = open_with(monkeypatch, whole_index, WordEncoder())
    assert ids(retriever, "word1", k=1, mode="bm25") == ["d1"]
    info = retriever.info()
    assert (info["passages"], info["generation"], info["factory"]) == (41, 3, ["Flat", "Flat"])
    with pytest.raises(CorruptIndexError, match="have 8 dimensions, but the encoder gives 9"):
        open_with(monkeypatch, whole_index, WordEncoder(dim=9))
    with pytest.raises(CorruptIndexError, match="written by another encoder"):
        open_with(monkeypatch, whole_index, WordEncoder(seed=1))


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_searching_needs_no_right_to_write(whole_index: Path, tmp_path: Path) -> None:
    """The index may belong to another user, or be on a read-only medium."""
    without = shutil.ignore_patterns("*-wal", "*-shm")
    folder = Path(shutil.copytree(whole_index, tmp_path / "index", ignore=without))
    program = f"""if True:
        import os
        from pathlib import Path
        from tests.retrieval.small_index import make_retriever, found_ids as ids
        ids(make_retriever(Path({str(whole_index)!r})), "x", mode="fusion")  # imports what it needs
        os.setuid(65534)
        assert not os.access({str(folder)!r}, os.W_OK)
        retriever = make_retriever(Path({str(folder)!r}))
        for mode in retriever.modes:
            assert ids(retriever, "word0 shared tail0", k=1, mode=mode) == ["d0"]
    """
    for parent in [folder, *folder.parents][:-1]:
        parent.chmod(parent.stat().st_mode | 0o055)
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path.cwd()
    )
    assert result.returncode == 0, result.stderr
