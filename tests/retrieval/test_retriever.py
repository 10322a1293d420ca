"""Retriever: what each mode answers, one generation at a time, and only with the encoder that the index has."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from retrieval import retriever as retriever_module
from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.index import Index
from retrieval.rank_fusion import reciprocal_rank_fusion
from retrieval.retriever import RRF_CONSTANT, Mode, Retriever
from tests.retrieval.small_index import WordEncoder, build, make_documents, remove


def make_retriever(folder: Path) -> Retriever:
    return Retriever(Index.open(folder, verify=True), WordEncoder(), verify=True, threads=1)


def ids(retriever: Retriever, query: str, *, k: int = 3, mode: Mode) -> list[str]:
    return [hit.passage.id for hit in retriever.search([query], k=k, mode=mode, nprobe=1).hits[0]]


def test_each_mode_finds_a_word(whole_index: Path) -> None:
    """In the base, in the later segment; not what was removed."""
    retriever = make_retriever(whole_index)
    assert retriever.modes == ("fusion", "dense", "bm25")
    for mode in retriever.modes:
        for number in (0, 7, 39):
            assert ids(retriever, f"word{number} shared tail{number % 5}", k=1, mode=mode) == [f"d{number}"]
        assert ids(retriever, "later words", k=1, mode=mode) == ["e1"]
        assert "d3" not in ids(retriever, "word3 shared tail3", k=100, mode=mode)
    assert ids(retriever, "word3", mode="bm25") == []


def test_rank_fusion_is_of_the_two_lists(whole_index: Path) -> None:
    """By reciprocal ranks; a smaller k is the front of a larger one."""
    retriever = make_retriever(whole_index)
    lists = [ids(retriever, "word5 tail1", k=100, mode=mode) for mode in ("dense", "bm25")]
    numbers = {name: number for number, name in enumerate(dict.fromkeys([*lists[0], *lists[1]]))}
    expected = reciprocal_rank_fusion(
        [[numbers[name] for name in names] for names in lists], k=50, constant=RRF_CONSTANT
    )
    hits = retriever.search(["word5 tail1"], k=50, mode="fusion", nprobe=1).hits[0]
    assert [(numbers[hit.passage.id], hit.score) for hit in hits] == expected
    for k in (1, 4, 30):
        assert ids(retriever, "word5 tail1", k=k, mode="fusion") == [hit.passage.id for hit in hits[:k]]


def test_a_batch_is_its_queries(whole_index: Path) -> None:
    """What else is asked at the same time changes nothing; phases that ran are timed."""
    retriever = make_retriever(whole_index)
    queries = ["word1", "late", "shared tail2", ""]
    phases: dict[Mode, set[str]] = {
        "fusion": {"encode", "dense", "bm25", "read"},
        "dense": {"encode", "dense", "read"},
        "bm25": {"bm25", "read"},
    }
    for mode, timed in phases.items():
        result = retriever.search(queries, k=4, mode=mode, nprobe=1)
        assert set(result.ms) == timed
        for query, hits in zip(queries, result.hits, strict=True):
            (alone,) = retriever.search([query], k=4, mode=mode, nprobe=1).hits
            assert [hit.passage for hit in hits] == [hit.passage for hit in alone]
            np.testing.assert_allclose([hit.score for hit in hits], [hit.score for hit in alone], atol=1e-5)
    assert retriever.search([], k=1, mode="dense", nprobe=1).hits == []


def test_wrong_arguments(whole_index: Path, tmp_path: Path) -> None:
    """One line each."""
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
    early = retriever.index
    assert not retriever.refresh()
    build(folder, make_documents(["a newcomer"], prefix="n"))
    remove(folder, "d0")
    assert ids(retriever, "newcomer", mode="bm25") == []
    assert retriever.refresh()
    assert not retriever.refresh()
    assert (ids(retriever, "newcomer", mode="bm25"), ids(retriever, "word0", mode="bm25")) == (["n0"], [])
    assert retriever.index.faiss_indexes["dense-1-0.faiss"] is early.faiss_indexes["dense-1-0.faiss"], "not read twice"
    _, rows = early.search_dense(WordEncoder().encode_queries(["word0 shared tail0"]), k=1, nprobe=1)
    assert early.store.get(rows[0].tolist())[0].id == "d0"


def test_refresh_keeps_serving_when_the_newer_one_is_damaged(folder: Path) -> None:
    """`refresh` raises for each caller, and searches continue."""
    retriever = make_retriever(folder)
    remove(folder, "d0")
    (folder / "removed-4.npy").write_bytes(b"")
    with pytest.raises(CorruptIndexError, match="removed-4"):
        retriever.refresh()
    assert retriever.index.generation == 3
    assert ids(retriever, "word0", mode="bm25") == ["d0"]
    shutil.rmtree(folder)
    with pytest.raises(CorruptIndexError, match="no index there"):
        retriever.refresh()
    for mode in retriever.modes:
        assert ids(retriever, "word0 shared tail0", k=1, mode=mode) == ["d0"]


@pytest.mark.parametrize("num_builds", [1, 3])
def test_refresh_of_a_directory_that_was_made_anew(folder: Path, num_builds: int) -> None:
    """Another index under the same name, at any generation: refused, and never a mixture of both."""
    retriever = make_retriever(folder)
    shutil.rmtree(folder)
    for end in range(num_builds):
        texts = ["word0 shared tail0", *(f"other{number}" for number in range(45 + end))]
        build(folder, make_documents(texts, prefix="x"))
    with pytest.raises(CorruptIndexError, match="is another index now; open it anew"):
        retriever.refresh()
    assert ids(retriever, "word5 shared tail0", k=1, mode="dense") == ["d5"]
    assert ids(retriever, "word5", k=1, mode="bm25") == ["d5"]


def test_searches_beside_refreshes(folder: Path) -> None:
    """Threads search while generations change: whole answers, no error."""
    retriever = make_retriever(folder)
    failures: list[BaseException] = []
    done = threading.Event()

    def search() -> None:
        try:
            while not done.is_set():
                for mode in retriever.modes:
                    found = ids(retriever, "word20 shared tail0", k=2, mode=mode)
                    assert found[0] == "d20"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(4):
        build(folder, make_documents([f"newcomer{number}"], prefix=f"n{number}-"))
        assert retriever.refresh()
    done.set()
    for thread in threads:
        thread.join()
    assert not failures


def open_with(monkeypatch: pytest.MonkeyPatch, folder: Path, encoder: Any) -> Retriever:
    def load(spec: Mapping[str, Any], **arguments: Any) -> Any:
        assert spec == WordEncoder().spec()
        return encoder

    monkeypatch.setattr(retriever_module, "load_encoder", load)
    return Retriever.open(folder, encoder=None, device=None, verify=True, threads=1)


def test_only_its_own_encoder(whole_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model's vectors would find anything; the stored probe tells."""
    assert ids(open_with(monkeypatch, whole_index, WordEncoder()), "word1", k=1, mode="bm25") == ["d1"]
    with pytest.raises(CorruptIndexError, match="vectors have 8 dimensions, but the encoder gives 9"):
        open_with(monkeypatch, whole_index, WordEncoder(dim=9))
    with pytest.raises(CorruptIndexError, match="written by another encoder"):
        open_with(monkeypatch, whole_index, WordEncoder(seed=1))


def test_info(whole_index: Path) -> None:
    """For people."""
    info = make_retriever(whole_index).info()
    assert (info["passages"], info["generation"], info["factory"]) == (41, 3, ["Flat", "Flat"])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_searching_needs_no_right_to_write(whole_index: Path, tmp_path: Path) -> None:
    """The index may belong to another user, or be on a read-only medium."""
    folder = Path(shutil.copytree(whole_index, tmp_path / "index", ignore=shutil.ignore_patterns("*-wal", "*-shm")))
    program = f"""if True:
        import os
        from pathlib import Path
        from tests.retrieval.test_retriever import make_retriever, ids
        ids(make_retriever(Path({str(whole_index)!r})), "x", mode="fusion")  # imports what it needs
        os.setuid(65534)
        assert not os.access({str(folder)!r}, os.W_OK)
        retriever = make_retriever(Path({str(folder)!r}))
        for mode in retriever.modes:
            assert ids(retriever, "word0 shared tail0", k=1, mode=mode) == ["d0"]
    """
    for parent in [folder, *folder.parents][:-1]:
        parent.chmod(parent.stat().st_mode | 0o055)
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=Path.cwd())
    assert result.returncode == 0, result.stderr


def test_a_query_without_words_finds_nothing(tmp_path: Path) -> None:
    """Its vector is zero and everything equally near: unrelated passages would become chunks."""
    build(tmp_path, make_documents(["one", "two"]))
    retriever = make_retriever(tmp_path)
    for mode in retriever.modes:
        assert retriever.search(["", "one"], k=2, mode=mode, nprobe=1).hits[0] == []
