"""Building: reports, refusals, and that a killed build continues."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from retrieval import build as build_module
from retrieval.build import BuildReport, Pruning, find_gone
from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.hashed_encoder import STATE_FILE
from retrieval.index import Index
from retrieval.manifest import (
    MANIFEST,
    PASSAGES,
    VECTORS,
    writer_lock,
)
from retrieval.passage import Document
from retrieval.retriever import Retriever
from retrieval.settings import SETTINGS
from tests.retrieval.small_index import (
    DIM,
    WordEncoder,
    build,
    flip,
    found_ids,
    make_documents,
    make_retriever,
    remove,
)


def served(folder: Path) -> dict[str, str]:
    """Live passages by row: id -> text."""
    index = Index.open(folder, verify=True)
    rows = index.store.iterate(0, index.num_rows)
    return {passage.id: passage.text for row, passage in rows if row not in index.removed}


class CountingEncoder(WordEncoder):
    num_texts = 0

    def encode_passages(self, texts: Sequence[str]) -> Any:
        self.num_texts += len(texts)
        return super().encode_passages(texts)


def test_reports(tmp_path: Path) -> None:
    """New, known, changed and duplicate documents; one that is not there any more stays."""
    first = make_documents(["a", "b", "c", "b"])
    assert build(tmp_path, first) == BuildReport(
        documents=4, added=3, duplicates=1, encoded=3, passages=3, generation=1
    )
    assert build(tmp_path, first) == BuildReport(documents=4, unchanged=4, passages=3, generation=1)
    assert build(tmp_path, make_documents(["A", "b"])) == BuildReport(
        documents=2, unchanged=1, changed=1, added=1, removed=1, encoded=1, passages=3, generation=2
    )
    assert list(served(tmp_path).values()) == ["b", "c", "A"]


def test_encodes_each_passage_once(tmp_path: Path) -> None:
    """Except one, to check a continued build."""
    encoder = CountingEncoder()
    build(tmp_path, make_documents([f"text {n}" for n in range(10)]), encoder=encoder)
    build(tmp_path, make_documents([f"text {n}" for n in range(12)]), encoder=encoder)
    remove(tmp_path, "d3")
    assert encoder.num_texts == 12 + 1


def test_long_documents_make_short_transactions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thousands of books are not read twice because the last one cannot be read."""
    books = make_documents(["one long book", "two long books", "three"])

    def broken() -> Iterator[Document]:
        yield from books
        raise RetrievalError("the fourth is not UTF-8")

    monkeypatch.setattr(build_module, "READ_CHARS", 20)
    with pytest.raises(RetrievalError, match="fourth"):
        build(tmp_path, broken())
    assert build(tmp_path, books).unchanged == 2


def test_a_document_that_only_waits_can_be_removed(tmp_path: Path) -> None:
    """Its text stays, since it is another one's too; it does not come back when that goes."""
    build(tmp_path, make_documents(["same", "same", "more"]))
    assert remove(tmp_path, "d1") == 0
    assert remove(tmp_path, "d0") == 1
    assert served(tmp_path) == {"d2": "more"}


def test_a_lost_store_is_not_filled_anew(tmp_path: Path) -> None:
    """Rows would count from 0 again, but the old vectors are still in the file."""
    build(tmp_path, make_documents(["a", "b", "c"]))
    (tmp_path / PASSAGES).unlink()
    with pytest.raises(CorruptIndexError, match="holds 0 of 3 passages"):
        build(tmp_path, make_documents(["x", "a", "b", "c"]))


def test_a_build_is_resumed_with_its_encoder_only(tmp_path: Path) -> None:
    """There is no manifest yet that could tell; half of the vectors are."""
    documents = make_documents([f"text {n}" for n in range(10)])
    build(tmp_path, documents)
    (tmp_path / MANIFEST).unlink()
    with open(tmp_path / VECTORS, "r+b") as file:
        file.truncate(2 * DIM * 4)
    with pytest.raises(CorruptIndexError, match="written by another encoder"):
        build(tmp_path, documents, encoder=WordEncoder(seed=1))


def test_settings_are_kept_by_what_is_made_with_them(tmp_path: Path) -> None:
    """Factory and words stick once there is an index, the rest once there is a passage."""
    documents = make_documents(["a", "b"])
    with pytest.raises(RetrievalError, match="no text"):
        build(tmp_path, [], max_tokens=64, is_split=True)
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({"is_split": True, "max_tokens": 1}, "at least 8 tokens"),
        ({"bm25_language": "klingon"}, "klingon"),
        ({"factory": "IVF64,Flat"}, "at least 64 passages, there are 2"),
    ]
    for changes, message in mistakes:
        with pytest.raises(RetrievalError, match=message):
            build(tmp_path, documents, **changes)
    assert build(tmp_path, documents).encoded == 0
    others: dict[str, Any] = {"factory": "HNSW8", "max_tokens": 9, "bm25_language": None}
    for name, value in others.items():
        with pytest.raises(RetrievalError, match=f"built with {name} .*use another directory"):
            build(tmp_path, documents, **{name: value})


def test_a_tokenizer_may_move(tmp_path: Path) -> None:
    """What counts is its fingerprint."""
    build(tmp_path, make_documents(["a"]), tokens="/old/place", tokens_name="place@12ab")
    build(tmp_path, make_documents(["a", "b"]), tokens="/new/home", tokens_name="home@12ab")
    with pytest.raises(RetrievalError, match="tokens_name"):
        build(tmp_path, make_documents(["a"]), tokens="/new/home", tokens_name="home@ffff")


def test_words_that_were_damaged_get_no_new_checksum(tmp_path: Path) -> None:
    """The next generation links the old one's files: what they were is known."""
    build(tmp_path, make_documents([f"word{n} text" for n in range(20)]))
    path = next((tmp_path / "bm25-1").glob("*.idx"))
    flip(path, path.stat().st_size // 2)
    build(tmp_path, make_documents(["more"], prefix="e"))
    with pytest.raises(CorruptIndexError, match="bm25-2"):
        Index.open(tmp_path, verify=True)


def test_documents_of_unknown_files_are_pruned_with_care(tmp_path: Path) -> None:
    """They stay while anything is unreadable."""
    documents = [Document(name, "", f"text {name}") for name in "abc"]
    build(tmp_path, documents)
    for left, unread, num_pruned in [(2, {"other.txt"}, 0), (1, {"b.jsonl"}, 0), (2, None, 1)]:
        pruning = Pruning(unread or (), even_most=False)
        assert build(tmp_path, documents[:left], pruning=pruning).pruned == num_pruned
    assert list(served(tmp_path)) == ["a", "b"]


def test_many_later_rows_become_the_base(tmp_path: Path) -> None:
    """Up to a fifth of the base is searched in a second segment."""
    documents = make_documents([f"text {n}" for n in range(25)])
    build(tmp_path, documents[:20])
    for end, segments in [(22, [20, 2]), (24, [20, 4]), (25, [25])]:
        build(tmp_path, documents[:end])
        index = Index.open(tmp_path, verify=True)
        assert [segment.num_rows for segment in index.manifest.segments] == segments


def test_everything_removed(tmp_path: Path) -> None:
    build(tmp_path, make_documents(["a", "b"]))
    assert remove(tmp_path, "d0", "d1") == 2
    retriever = make_retriever(tmp_path)
    assert [found_ids(retriever, "a", mode=mode) for mode in retriever.modes] == [[]] * 4
    assert build(tmp_path, make_documents(["a", "b"])).passages == 2
    assert retriever.refresh()
    assert found_ids(retriever, "a", k=1, mode="dense") == ["d0"]


def test_remove_is_all_or_nothing(tmp_path: Path) -> None:
    """What died marked, but not served yet, is finished by the same command."""
    build(tmp_path, make_documents(["a", "b"]))
    with pytest.raises(RetrievalError, match="has the id 'nobody'"):
        remove(tmp_path, "d0", "nobody")
    with patch.object(build_module, "publish", side_effect=OSError), pytest.raises(OSError):
        remove(tmp_path, "d0")
    assert list(served(tmp_path)) == ["d0", "d1"]
    remove(tmp_path, "d0", "d0")
    assert list(served(tmp_path)) == ["d1"]


def test_not_a_directory_of_an_index(tmp_path: Path) -> None:
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(RetrievalError, match=f"no {SETTINGS}; use another directory"):
        build(tmp_path, make_documents(["a"]))
    assert (tmp_path / MANIFEST).read_text() == "{}"


def test_one_builder_at_a_time(tmp_path: Path) -> None:
    build(tmp_path, make_documents(["a"]))
    for work in (lambda: build(tmp_path, make_documents(["b"])), lambda: remove(tmp_path, "d0")):
        with writer_lock(tmp_path), pytest.raises(RetrievalError, match="another process is build"):
            work()
        work()


@pytest.mark.parametrize("name", [VECTORS, "dense-1-0.faiss", "bm25-1/meta.json", PASSAGES])
def test_nothing_is_built_on_damage(tmp_path: Path, name: str) -> None:
    """Neither a build nor a removal says that all is well."""
    documents = make_documents([f"text {n}" for n in range(20)])
    build(tmp_path, documents)
    (tmp_path / name).write_bytes(b"")
    before = (tmp_path / MANIFEST).read_bytes()
    with pytest.raises(CorruptIndexError, match=name):
        build(tmp_path, [*documents, Document("new", "", "new")])
    with pytest.raises(CorruptIndexError, match=name):
        remove(tmp_path, "d1")
    assert (tmp_path / MANIFEST).read_bytes() == before


def test_the_embedded_encoder_is_never_fitted_twice(tmp_path: Path) -> None:
    """Another sample gives other vectors: a lost state is said, not replaced."""
    build(tmp_path, make_documents(["one text", "another text"]), encoder=None)
    (tmp_path / STATE_FILE).unlink()
    with pytest.raises(CorruptIndexError, match=r"encoder\.npz: No such file"):
        build(tmp_path, make_documents(["a", "b", "something new"]), encoder=None)
    assert not (tmp_path / STATE_FILE).exists()


def start_build(corpus: Path, folder: Path) -> subprocess.Popen[bytes]:
    flags = "--dim 32 --chunk-tokens 32 --overlap-tokens 0 --bm25 none --json"
    return subprocess.Popen(
        [sys.executable, "-m", "retrieval", "build", corpus, "--out", folder, *flags.split()],
        env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def content_of(folder: Path) -> Any:
    """Passages, documents, and answers of all kinds."""
    retriever = Retriever.open(folder, encoder=None, device="cpu", verify=True, threads=1)
    queries = [f"unique{number}" for number in range(1, 200, 7)]
    found = [
        [[(hit.passage.id, round(hit.score, 3)) for hit in hits] for hits in result.hits]
        for mode in ("dense", "bm25")
        for result in [retriever.search(queries, k=3, mode=mode, nprobe=1)]
    ]
    with sqlite3.connect(folder / PASSAGES) as db:
        documents = db.execute("SELECT id FROM documents ORDER BY id").fetchall()
    rows = list(retriever.index.store.iterate(0, retriever.index.num_rows))
    return len(documents), documents, rows, found


@pytest.mark.nightly
def test_killed_again_and_again(tmp_path: Path) -> None:
    """SIGKILL at any moment: the same rows, the same answers as undisturbed."""
    corpus, undisturbed, folder = (tmp_path / name for name in ("c.jsonl", "undisturbed", "killed"))
    generator = random.Random(1)
    with open(corpus, "w") as file:
        for number in range(3000):
            words = [f"w{generator.randrange(5000)}" for _ in range(generator.randrange(5, 120))]
            text = " ".join([f"unique{number}", *words]) if number % 10 else f"same {number % 70}"
            file.write(json.dumps({"id": f"doc{number}", "text": text}) + "\n")
    begun = time.monotonic()
    assert start_build(corpus, undisturbed).wait(600) == 0
    takes_s = time.monotonic() - begun
    for num_killed in count():
        process = start_build(corpus, folder)
        try:
            process.wait(takes_s * (generator.uniform(0.2, 0.7) + 0.1 * num_killed))
            break
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    assert process.returncode == 0
    assert num_killed
    assert content_of(folder)[0] == 3000
    assert content_of(folder) == content_of(undisturbed)


def test_a_reader_sees_whole_generations(tmp_path: Path) -> None:
    """While another process adds and removes and is killed: every answer is one generation's."""
    build(tmp_path / "index", make_documents([f"text w{n}" for n in range(30)]))
    program = """if True:
        import sys
        from pathlib import Path
        from tests.retrieval.small_index import build, make_documents, remove
        folder = Path(sys.argv[1])
        for round in range(1000):
            build(folder, make_documents([f"text w{n}" for n in range(30 + 10 * round)]))
            remove(folder, "d0")
    """
    retriever = make_retriever(tmp_path / "index", verify=False)
    seen: set[int] = set()
    for num_killed in range(2):
        process = subprocess.Popen(
            [sys.executable, "-c", program, str(tmp_path / "index")], cwd=os.getcwd()
        )
        try:
            while len(seen) < 3 * (num_killed + 1):
                assert process.poll() is None
                retriever.refresh()
                index = retriever.index
                near = found_ids(retriever, "text", k=10_000, mode="dense")
                ids = sorted(int(name[1:]) for name in near)
                assert len(ids) == index.num_live
                assert ids in (list(range(len(ids))), list(range(1, len(ids) + 1)))
                num_found = len(found_ids(retriever, "text", k=10_000, mode="bm25"))
                assert num_found in (index.num_live, retriever.index.num_live)
                seen.add(index.manifest.generation)
        finally:
            process.kill()
            process.wait()


def test_dry_run_knows_the_document_of_a_removed_passage(tmp_path: Path) -> None:
    """The index has forgotten what it knew of it, and it is in the corpus all the same."""
    text = (
        "ash elm cedar birch ash elm oak. elm ash birch cedar elm ash oak. birch elm ash oak elm."
    )
    documents = [Document("d", "", 2 * text)]
    documents += [Document("e", "", "oak oak elm.")]
    build(tmp_path, documents, is_split=True, overlap_tokens=0)
    first, *others = (name for name in served(tmp_path) if name.startswith("d"))
    assert others
    assert remove(tmp_path, first) == 1
    gone = find_gone(documents, tmp_path, Pruning((), even_most=True))
    assert gone.documents == []
