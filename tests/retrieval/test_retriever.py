"""Retriever: what each mode answers, one generation at a time,
and only with the encoder that the index has."""

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
from retrieval.build import build_index
from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.index import Index
from retrieval.rank_fusion import reciprocal_rank_fusion
from retrieval.retriever import RRF_CONSTANT, ZERO, Mode, Retriever
from tests.retrieval.small_index import (
    OPTIONS,
    TOKENS,
    WordEncoder,
    build,
    delete,
    make_documents,
    make_settings,
    quiet,
    remove,
)


def make_retriever(folder: Path) -> Retriever:
    return Retriever(Index.open(folder, verify=True), WordEncoder(), verify=True, threads=1)


def ids(retriever: Retriever, query: str, *, k: int = 3, mode: Mode) -> list[str]:
    return [hit.passage.id for hit in retriever.search([query], k=k, mode=mode, nprobe=1).hits[0]]


def test_each_mode_finds_a_word(whole_index: Path) -> None:
    """In the base, in the later segment; not what was removed."""
    retriever = make_retriever(whole_index)
    assert retriever.modes == ("fusion", "dense", "bm25", "filled")
    for mode in retriever.modes:
        for number in (0, 7, 39):
            assert ids(retriever, f"word{number} shared tail{number % 5}", k=1, mode=mode) == [
                f"d{number}"
            ]
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
        assert ids(retriever, "word5 tail1", k=k, mode="fusion") == [
            hit.passage.id for hit in hits[:k]
        ]


def test_filled_is_bm25_then_what_else_is_near(whole_index: Path) -> None:
    """Fewer than k share a word: vectors fill up, none twice, none without likeness,
    and each score says whose it is."""
    retriever = make_retriever(whole_index)
    words = retriever.search(["word5"], k=30, mode="bm25", nprobe=1).hits[0]
    near = retriever.search(["word5"], k=30, mode="dense", nprobe=1).hits[0]
    assert len(words) == 1
    assert min(hit.score for hit in near) < 0, "some must not be taken"
    expected = [
        *words,
        *(hit for hit in near if hit.score > ZERO and hit.passage != words[0].passage),
    ]
    found = retriever.search(["word5"], k=30, mode="filled", nprobe=1)
    assert found.hits[0] == expected
    assert {hit.mode for hit in found.hits[0]} == {"bm25", "dense"}
    assert retriever.search(["word5"], k=3, mode="filled", nprobe=1).hits[0] == expected[:3]


def test_filled_asks_the_vectors_only_for_queries_that_are_short(whole_index: Path) -> None:
    """The others take no time of the encoder, and find what BM25 alone does;
    a query without words finds nothing."""
    retriever = make_retriever(whole_index)
    full = retriever.search(["shared"], k=3, mode="filled", nprobe=1)
    assert (full.hits, set(full.ms)) == (
        retriever.search(["shared"], k=3, mode="bm25", nprobe=1).hits,
        {"bm25", "read"},
    )
    batch = retriever.search(["shared", "word5", ""], k=3, mode="filled", nprobe=1)
    assert batch.hits[0] == full.hits[0]
    assert [hit.mode for hit in batch.hits[1]] == ["bm25", "dense", "dense"]
    assert batch.hits[2] == []


def test_modes_of_the_embedded_encoder(tmp_path: Path) -> None:
    """Filled by default; an index without words has vectors alone."""
    for folder, language, modes in [
        (tmp_path / "words", "none", ("filled", "bm25", "fusion", "dense")),
        (tmp_path / "vectors", None, ("dense",)),
    ]:
        settings = make_settings(encoder={"kind": "hashed", "dim": 8}, bm25_language=language)
        documents = make_documents(["one text", "another text"])
        build_index(
            documents,
            folder,
            settings,
            tokens=TOKENS,
            encoder=None,
            options=OPTIONS,
            progress=quiet,
        )
        assert (
            Retriever.open(folder, encoder=None, device=None, verify=True, threads=1).modes == modes
        )


def test_a_batch_is_its_queries(whole_index: Path) -> None:
    """What else is asked at the same time changes nothing; phases that ran are timed."""
    retriever = make_retriever(whole_index)
    queries = ["word1", "late", "shared tail2", ""]
    phases: dict[Mode, set[str]] = {
        "fusion": {"encode", "dense", "bm25", "read"},
        "dense": {"encode", "dense", "read"},
        "bm25": {"bm25", "read"},
        "filled": {"encode", "dense", "bm25", "read"},
    }
    for mode, timed in phases.items():
        result = retriever.search(queries, k=4, mode=mode, nprobe=1)
        assert set(result.ms) == timed
        for query, hits in zip(queries, result.hits, strict=True):
            (alone,) = retriever.search([query], k=4, mode=mode, nprobe=1).hits
            assert [hit.passage for hit in hits] == [hit.passage for hit in alone]
            np.testing.assert_allclose(
                [hit.score for hit in hits], [hit.score for hit in alone], atol=1e-5
            )
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
    assert (ids(retriever, "newcomer", mode="bm25"), ids(retriever, "word0", mode="bm25")) == (
        ["n0"],
        [],
    )
    assert (
        retriever.index.faiss_indexes["dense-1-0.faiss"] is early.faiss_indexes["dense-1-0.faiss"]
    ), "not read twice"
    _, rows = early.search_dense(
        WordEncoder().encode_queries(["word0 shared tail0"]), k=1, nprobe=1
    )
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
    delete(folder)
    with pytest.raises(CorruptIndexError, match="no index there"):
        retriever.refresh()
    for mode in retriever.modes:
        assert ids(retriever, "word0 shared tail0", k=1, mode=mode) == ["d0"]


def replace(folder: Path, *, num_builds: int) -> None:
    """Another index under the same name, of generation `num_builds`."""
    delete(folder)
    for end in range(num_builds):
        texts = ["word0 shared tail0", *(f"other{number}" for number in range(45 + end))]
        build(folder, make_documents(texts, prefix="x"))


@pytest.mark.parametrize("num_builds", [1, 3, 4])
def test_index_that_was_made_anew_is_served(folder: Path, num_builds: int) -> None:
    """Whatever its generation, lower, equal or higher than the served one;
    never a mixture of both."""
    retriever = make_retriever(folder)
    early = retriever.index
    replace(folder, num_builds=num_builds)
    assert ids(retriever, "word5", k=1, mode="bm25") == ["d5"]
    assert retriever.refresh()
    assert not retriever.refresh()
    assert retriever.index.generation == num_builds
    for mode in retriever.modes:
        assert ids(retriever, "word0 shared tail0", k=1, mode=mode) == ["x0"]
        assert ids(retriever, "other7", k=1, mode=mode) == ["x8"]
    assert early.store.get([5])[0].id == "d5", (
        "a search that began before finishes on what it began with"
    )


def test_index_put_back_is_served(folder: Path, tmp_path: Path) -> None:
    """The directory removed and restored from a copy of an earlier generation:
    numbers go back, answers too."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    build(folder, make_documents(["a newcomer"], prefix="n"))
    retriever = make_retriever(folder)
    delete(folder)
    for _ in range(2):
        with pytest.raises(CorruptIndexError, match="no index there"):
            retriever.refresh()
    assert ids(retriever, "newcomer", mode="bm25") == ["n0"], (
        "open files are served until there is something better"
    )
    shutil.copytree(copy, folder)
    assert retriever.refresh()
    assert (retriever.index.generation, ids(retriever, "newcomer", mode="bm25")) == (3, [])


def build_with(folder: Path, encoder: WordEncoder) -> None:
    """An index of one passage by another encoder."""
    settings = make_settings(encoder=encoder.spec())
    build_index(
        make_documents(["something else"]),
        folder,
        settings,
        tokens=TOKENS,
        encoder=encoder,
        options=OPTIONS,
        progress=quiet,
    )


def test_another_encoder_comes_with_another_index(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An index swapped for one with other vectors:
    its encoder is loaded, or, if it does not fit, the old index stays."""
    encoder = WordEncoder(seed=1, dim=12)
    retriever = open_with(monkeypatch, folder, WordEncoder())
    delete(folder)
    build_with(folder, encoder)
    with pytest.raises(
        CorruptIndexError, match="the vectors have 12 dimensions, but the encoder gives 8"
    ):
        retriever.refresh()
    assert ids(retriever, "word5 shared tail0", k=1, mode="dense") == ["d5"]
    retriever._load = lambda spec: encoder
    (folder / "manifest.json").touch()
    assert retriever.refresh()
    assert ids(retriever, "something", k=1, mode="dense") == ["d0"]


@pytest.mark.parametrize("with_times", [False, True])
def test_damage_is_refused_until_it_is_mended(folder: Path, with_times: bool) -> None:
    """Files written over in place are mapped into memory: answers from them would be noise.
    `with_times`: mended by rsync -t."""
    retriever = make_retriever(folder)
    (path,) = folder.glob("dense-1-0.faiss")
    whole, stat = path.read_bytes(), path.stat()
    path.write_bytes(whole[:-64] + bytes(64))
    for _ in range(2):
        with pytest.raises(
            CorruptIndexError, match=r"dense-1-0\.faiss: damaged, its checksum differs"
        ):
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


def test_damaged_newer_generation_is_looked_at_again_when_its_files_change(folder: Path) -> None:
    """Mended without a new manifest."""
    retriever = make_retriever(folder)
    build(folder, make_documents([f"a newcomer {number}" for number in range(3)], prefix="n"))
    (path,) = folder.glob("dense-4-*.faiss")
    whole = path.read_bytes()
    path.unlink()
    path.write_bytes(whole[:-1])
    with pytest.raises(CorruptIndexError, match="dense-4"):
        retriever.refresh()
    assert (retriever.damage, ids(retriever, "word5", k=1, mode="bm25")) == (None, ["d5"])
    path.write_bytes(whole)
    assert retriever.refresh()
    assert ids(retriever, "newcomer 2", k=1, mode="fusion") == ["n2"]


def test_store_overwritten_and_mended_in_place(folder: Path) -> None:
    """SQLite's file has no checksum in the manifest, its rows have."""
    retriever = make_retriever(folder)
    whole = (folder / "passages.sqlite").read_bytes()
    (folder / "passages.sqlite").unlink()
    (folder / "passages.sqlite").write_bytes(whole[:4096] + bytes(len(whole) - 4096))
    with pytest.raises(CorruptIndexError, match=r"passages\.sqlite"):
        retriever.refresh()
    assert ids(retriever, "word5", k=1, mode="bm25") == ["d5"], (
        "the removed file is still open and whole"
    )
    (folder / "passages.sqlite").unlink()
    (folder / "passages.sqlite").write_bytes(whole)
    assert retriever.refresh()
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
        return encoder

    monkeypatch.setattr(retriever_module, "load_encoder", load)
    return Retriever.open(folder, encoder=None, device=None, verify=True, threads=1)


def test_only_its_own_encoder(whole_index: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another model's vectors would find anything; the stored probe tells."""
    assert ids(open_with(monkeypatch, whole_index, WordEncoder()), "word1", k=1, mode="bm25") == [
        "d1"
    ]
    with pytest.raises(
        CorruptIndexError, match="vectors have 8 dimensions, but the encoder gives 9"
    ):
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
    folder = Path(
        shutil.copytree(
            whole_index, tmp_path / "index", ignore=shutil.ignore_patterns("*-wal", "*-shm")
        )
    )
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
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=Path.cwd()
    )
    assert result.returncode == 0, result.stderr


def test_a_query_without_words_finds_nothing(tmp_path: Path) -> None:
    """Its vector is zero and everything equally near: unrelated passages would become chunks."""
    build(tmp_path, make_documents(["one", "two"]))
    retriever = make_retriever(tmp_path)
    for mode in retriever.modes:
        assert retriever.search(["", "one"], k=2, mode=mode, nprobe=1).hits[0] == []
