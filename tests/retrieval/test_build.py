"""Building: reports, refusals, and that a killed build continues."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from retrieval import build as build_module
from retrieval.bm25 import Bm25Index
from retrieval.build import BuildReport, Pruning, build_index
from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.hashed_encoder import STATE_FILE
from retrieval.index import Index
from retrieval.manifest import (
    ANALYZER,
    MANIFEST,
    PASSAGES,
    VECTORS,
    _digest,
    entry_of,
    read_manifest,
    removed_rows,
    writer_lock,
)
from retrieval.passage import Document
from retrieval.retriever import Retriever
from retrieval.settings import SETTINGS
from retrieval.store import PassageStore
from tests.retrieval.small_index import (
    DIM,
    OPTIONS,
    TOKENS,
    WordEncoder,
    build,
    make_documents,
    make_settings,
    remove,
)

NUM_DOCUMENTS = 3000


def texts_of(folder: Path) -> list[str]:
    """Live texts by row."""
    index = Index.open(folder, verify=True)
    return [
        passage.text
        for row, passage in index.store.iterate(0, index.num_rows)
        if row not in index.removed
    ]


def ids_of(folder: Path) -> list[str]:
    """Live ids by row."""
    index = Index.open(folder, verify=True)
    return [
        passage.id
        for row, passage in index.store.iterate(0, index.num_rows)
        if row not in index.removed
    ]


class CountingEncoder(WordEncoder):
    """Counts the texts."""

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
    report = build(tmp_path, make_documents(["A", "b"]))
    assert report == BuildReport(
        documents=2, unchanged=1, changed=1, added=1, removed=1, encoded=1, passages=3, generation=2
    )
    assert texts_of(tmp_path) == ["b", "c", "A"]


def test_encodes_each_passage_once(tmp_path: Path) -> None:
    """Encoding is the most expensive step: stored passages are not encoded again,
    except one to check a continued build."""
    encoder = CountingEncoder()
    build(tmp_path, make_documents([f"text {n}" for n in range(10)]), encoder=encoder)
    build(tmp_path, make_documents([f"text {n}" for n in range(12)]), encoder=encoder)
    remove(tmp_path, "d3")
    assert encoder.num_texts == 12 + 1


def test_long_documents_make_short_transactions(tmp_path: Path) -> None:
    """Thousands of books are not read twice because the last one cannot be read,
    nor held at once."""

    def books() -> Iterator[Document]:
        yield from make_documents(["one long book", "two long books", "three"])
        raise RetrievalError("the fourth is not UTF-8")

    with (
        patch.object(build_module, "READ_CHARS", 20),
        pytest.raises(RetrievalError, match="fourth"),
    ):
        build(tmp_path, books())
    assert (
        build(tmp_path, make_documents(["one long book", "two long books", "three"])).unchanged == 2
    )


def test_a_text_that_two_documents_have_outlives_one_of_them(tmp_path: Path) -> None:
    """d0 changes, or goes: d1's passage is found at once, under d1's id."""
    build(tmp_path, make_documents(["same", "same", "more"]))
    report = build(tmp_path, [Document("d1", "", "same"), Document("d0", "", "other")])
    assert (report.added, report.removed, report.duplicates) == (2, 1, 0)
    assert sorted(texts_of(tmp_path)) == ["more", "other", "same"]
    build(tmp_path, make_documents(["same"], prefix="z"))
    assert remove(tmp_path, "d1") == 1
    assert sorted(texts_of(tmp_path)) == ["more", "other", "same"], "z0's, encoded by the removal"
    assert ids_of(tmp_path) == ["d2", "d0", "z0"]


def test_shifted_rows_without_ids_lose_nothing(tmp_path: Path) -> None:
    """The first line of a file is deleted: every other line is another document now,
    with its neighbour's text."""
    texts = [f"text {n}" for n in range(30)]
    build(tmp_path, make_documents(texts))
    build(tmp_path, make_documents(texts[1:]))
    assert sorted(texts_of(tmp_path)) == sorted(texts[1:])


def test_a_document_that_only_waits_can_be_removed(tmp_path: Path) -> None:
    """Its text stays, since it is another one's too; it does not come back when that goes."""
    build(tmp_path, make_documents(["same", "same", "more"]))
    assert remove(tmp_path, "d1") == 0
    assert remove(tmp_path, "d0") == 1
    assert texts_of(tmp_path) == ["more"]


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
    """A mistake in the first build costs no more than that build: factory and words until there is
    an index, the rest until there is a passage."""
    with pytest.raises(RetrievalError, match="no text"):
        build(tmp_path, [], max_tokens=64, is_split=True)
    with pytest.raises(RetrievalError, match="at least 64 passages"):
        build(tmp_path, make_documents(["a", "b"]), factory="IVF64,Flat")
    assert build(tmp_path, make_documents(["a", "b"]), factory="Flat").encoded == 0
    with pytest.raises(RetrievalError, match="was built with factory 'Flat', not 'HNSW32'"):
        build(tmp_path, make_documents(["a", "b"]), factory="HNSW32")


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
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 4
    path.write_bytes(content)
    build(tmp_path, make_documents(["more"], prefix="e"))
    with pytest.raises(CorruptIndexError, match="bm25-2"):
        Index.open(tmp_path, verify=True)


def make_older(folder: Path) -> None:
    """As the version before made it: format 1 and the first analyzer."""
    manifest = read_manifest(folder)
    assert manifest.bm25 is not None
    place, store = folder / manifest.bm25, PassageStore(folder / PASSAGES, writable=False)
    shutil.rmtree(place)
    hidden = set(removed_rows(folder, manifest).tolist())
    rows = (
        (row, passage.content)
        for row, passage in store.iterate(0, manifest.num_rows)
        if row not in hidden
    )
    Bm25Index.create(place, language="none", version=1).update(
        rows, [], memory_bytes=OPTIONS.bm25_memory_bytes
    )
    store.close()
    others = {
        name: entry for name, entry in manifest.files.items() if not name.startswith(manifest.bm25)
    }
    words = {
        f"{place.name}/{path.name}": entry_of(path)
        for path in place.iterdir()
        if path.suffix != ".lock"
    }
    fields = asdict(replace(manifest, files={**others, **words}))
    del fields["analyzer"]
    (folder / MANIFEST).write_text(json.dumps({"format": 1, "xxh3": _digest(fields), **fields}))


def test_index_of_an_older_analyzer_is_searched_with_it_until_the_next_build(
    tmp_path: Path,
) -> None:
    """Never words cut in one way among those cut in another:
    the next build indexes the texts anew, and encodes none again."""
    documents = [
        *make_documents(["退货政策很简单", "plain words", "gone"]),
        Document("zh", "", "退货"),
    ]
    build(tmp_path, documents)
    remove(tmp_path, "d2")
    make_older(tmp_path)
    retriever = Retriever(Index.open(tmp_path, verify=True), WordEncoder(), verify=True, threads=1)

    def found(query: str) -> list[str]:
        return [
            hit.passage.id for hit in retriever.search([query], k=5, mode="bm25", nprobe=1).hits[0]
        ]

    assert (found("退货"), found("words gone")) == (["zh"], ["d1"])
    assert "run `python -m retrieval build` again" in (retriever.notice or "")
    encoder = CountingEncoder()
    report = build(tmp_path, [documents[0]], encoder=encoder)
    assert (report.unchanged, report.encoded, report.generation, encoder.num_texts) == (1, 0, 3, 1)
    assert retriever.refresh()
    assert (found("退货"), found("words gone"), retriever.notice) == (["zh", "d0"], ["d1"], None)
    assert build(tmp_path, [documents[0]]).generation == 3


def test_documents_of_an_older_store_are_pruned_with_care(tmp_path: Path) -> None:
    """Their files are not known: they stay while anything is unreadable."""
    documents = [Document(name, "", f"text {name}", file=f"{name}.jsonl") for name in "abc"]
    build(tmp_path, documents)
    with sqlite3.connect(tmp_path / PASSAGES) as db:
        db.execute("ALTER TABLE documents DROP COLUMN file")
    db.close()
    assert (
        build(tmp_path, documents[:2], pruning=Pruning({"other.txt"}, even_most=False)).pruned == 0
    )
    assert build(tmp_path, documents[:1], pruning=Pruning({"b.jsonl"}, even_most=False)).pruned == 0
    assert build(tmp_path, documents[:2], pruning=Pruning((), even_most=False)).pruned == 1
    assert ids_of(tmp_path) == ["a", "b"]


def test_a_server_follows_a_pruning(tmp_path: Path) -> None:
    """One generation has all, the next has the rest; what was opened answers as it did."""
    documents = make_documents(["word a", "word b", "word c"])
    build(tmp_path, documents)
    retriever = Retriever(Index.open(tmp_path, verify=True), WordEncoder(), verify=True, threads=1)

    def found() -> list[str]:
        hits = retriever.search(["word"], k=9, mode="filled", nprobe=1).hits[0]
        return sorted(hit.passage.id for hit in hits)

    report = build(tmp_path, documents[1:], pruning=Pruning((), even_most=False))
    assert (report.pruned, report.removed, report.passages, report.generation) == (1, 1, 2, 2)
    assert found() == ["d0", "d1", "d2"]
    assert retriever.refresh()
    assert found() == ["d1", "d2"]


def test_index_of_a_newer_analyzer_is_refused(tmp_path: Path) -> None:
    """Its words cannot be looked up."""
    build(tmp_path, make_documents(["a"]))
    newer = replace(read_manifest(tmp_path), analyzer=ANALYZER + 1)
    (tmp_path / MANIFEST).write_text(newer.to_json())
    with pytest.raises(
        CorruptIndexError,
        match=f"analyzer is of version {ANALYZER + 1}, this release has {ANALYZER}",
    ):
        Index.open(tmp_path, verify=False)


def test_many_later_rows_become_the_base(tmp_path: Path) -> None:
    """Up to a fifth of the base is searched in a second segment."""
    documents = make_documents([f"text {n}" for n in range(25)])
    build(tmp_path, documents[:20])
    for end, segments in [(22, [20, 2]), (24, [20, 4]), (25, [25])]:
        build(tmp_path, documents[:end])
        index = Index.open(tmp_path, verify=True)
        assert [segment.num_rows for segment in index.manifest.segments] == segments


def test_everything_removed(tmp_path: Path) -> None:
    """Finds nothing, and takes documents again."""
    build(tmp_path, make_documents(["a", "b"]))
    assert remove(tmp_path, "d0", "d1") == 2
    retriever = Retriever(Index.open(tmp_path, verify=True), WordEncoder(), verify=True, threads=1)
    for mode in retriever.modes:
        assert retriever.search(["a"], k=3, mode=mode, nprobe=1).hits == [[]]
    assert build(tmp_path, make_documents(["a", "b"])).passages == 2
    assert retriever.refresh()
    assert retriever.search(["a"], k=1, mode="dense", nprobe=1).hits[0][0].passage.id == "d0"


def test_remove_is_all_or_nothing(tmp_path: Path) -> None:
    """One unknown id, and no passage goes."""
    build(tmp_path, make_documents(["a", "b"]))
    with pytest.raises(RetrievalError, match="has the id 'nobody'"):
        remove(tmp_path, "d0", "nobody")
    assert texts_of(tmp_path) == ["a", "b"]
    assert remove(tmp_path, "d0", "d0") == 1


def test_a_removal_that_died_is_finished_by_the_same_command(tmp_path: Path) -> None:
    """It was marked, but not served yet."""
    build(tmp_path, make_documents(["a", "b"]))
    with (
        patch.object(build_module, "publish", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        remove(tmp_path, "d0")
    assert texts_of(tmp_path) == ["a", "b"]
    remove(tmp_path, "d0")
    assert texts_of(tmp_path) == ["b"]


@pytest.mark.parametrize(
    ("texts", "changes", "message"),
    [
        ([], {}, "these documents contain no text"),
        (["a"], {"factory": "Nonsense"}, "factory 'Nonsense'"),
        (["a"], {"factory": "IVF8,Flat"}, "needs at least 8 passages, there are 1"),
        (["a"], {"bm25_language": "klingon"}, "klingon"),
        (["a"], {"is_split": True, "max_tokens": 1}, "at least 8 tokens"),
    ],
)
def test_no_index_can_be_made(
    tmp_path: Path, texts: list[str], changes: dict[str, Any], message: str
) -> None:
    """One line."""
    with pytest.raises(RetrievalError, match=message):
        build(tmp_path, make_documents(texts), **changes)


@pytest.mark.parametrize("changes", [{"factory": "Nonsense"}, {"is_split": True, "max_tokens": 1}])
def test_a_mistake_in_the_settings_does_not_stick(tmp_path: Path, changes: dict[str, Any]) -> None:
    """The same directory can be used with better ones."""
    with pytest.raises(RetrievalError):
        build(tmp_path, make_documents(["a"]), **changes)
    build(tmp_path, make_documents(["a"]))


@pytest.mark.parametrize(
    "changes", [{"factory": "HNSW8"}, {"max_tokens": 9}, {"bm25_language": None}]
)
def test_other_settings_are_refused(tmp_path: Path, changes: dict[str, Any]) -> None:
    """Half of the passages cut or encoded otherwise would be found by accident."""
    build(tmp_path, make_documents(["a"]))
    with pytest.raises(
        RetrievalError, match=f"was built with {next(iter(changes))} .*use another directory"
    ):
        build(tmp_path, make_documents(["a", "b"]), **changes)


def test_not_a_directory_of_an_index(tmp_path: Path) -> None:
    """Nothing of another program is written over."""
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(RetrievalError, match=f"no {SETTINGS}; use another directory"):
        build(tmp_path, make_documents(["a"]))
    assert (tmp_path / MANIFEST).read_text() == "{}"


def test_two_documents_of_one_id(tmp_path: Path) -> None:
    """Said as what it is, from within a transaction."""
    with pytest.raises(RetrievalError, match="'d0' occurs twice, with different texts"):
        build(tmp_path, [Document("d0", "", "a"), Document("d0", "", "b")])
    build(tmp_path, make_documents(["a"]))


def test_one_builder_at_a_time(tmp_path: Path) -> None:
    """The second says so, and goes on when the first has gone."""
    build(tmp_path, make_documents(["a"]))
    with writer_lock(tmp_path):
        for work in (
            lambda: build(tmp_path, make_documents(["b"])),
            lambda: remove(tmp_path, "d0"),
        ):
            with pytest.raises(RetrievalError, match="another process is building it"):
                work()
    assert remove(tmp_path, "d0") == 1


@pytest.mark.parametrize("name", [VECTORS, "dense-1-0.faiss", "bm25-1/meta.json", PASSAGES])
def test_nothing_is_built_on_damage(tmp_path: Path, name: str) -> None:
    """What is served stays as it is, and neither a build nor a removal says that all is well."""
    documents = make_documents([f"text {n}" for n in range(20)])
    build(tmp_path, documents)
    (tmp_path / name).write_bytes(b"")
    before = (tmp_path / MANIFEST).read_bytes()
    for go_on in (
        lambda: build(tmp_path, [*documents, Document("new", "", "new")]),
        lambda: remove(tmp_path, "d1"),
    ):
        with pytest.raises(CorruptIndexError, match=name):
            go_on()
    assert (tmp_path / MANIFEST).read_bytes() == before


def test_the_embedded_encoder_is_never_fitted_twice(tmp_path: Path) -> None:
    """Another sample gives other vectors: a lost state is said, not replaced."""
    settings = make_settings(encoder={"kind": "hashed", "dim": 8, "seed": 0})
    for documents in (
        make_documents(["one text", "another text"]),
        make_documents(["a", "b", "something new"]),
    ):
        try:
            build_index(
                documents,
                tmp_path,
                settings,
                tokens=TOKENS,
                encoder=None,
                options=OPTIONS,
                progress=lambda *_: None,
            )
            (tmp_path / STATE_FILE).unlink()
        except CorruptIndexError as error:
            message = str(error)
    assert "encoder.npz: No such file" in message
    assert not (tmp_path / STATE_FILE).exists()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of one to four passages, some of them twice."""
    generator = random.Random(0)
    path = tmp_path_factory.mktemp("corpus") / "corpus.jsonl"
    with open(path, "w") as file:
        for number in range(NUM_DOCUMENTS):
            words = [f"w{generator.randrange(5000)}" for _ in range(generator.randrange(5, 120))]
            text = " ".join(words) if number % 10 else f"the same {number % 70}"
            file.write(
                json.dumps(
                    {
                        "id": f"doc{number}",
                        "text": f"unique{number} {text}" if number % 10 else text,
                    }
                )
                + "\n"
            )
    return path


def start_build(corpus: Path, folder: Path) -> subprocess.Popen[bytes]:
    command = [
        sys.executable,
        "-m",
        "retrieval",
        "build",
        str(corpus),
        "--out",
        str(folder),
        "--dim",
        "32",
    ]
    command += ["--chunk-tokens", "32", "--overlap-tokens", "0", "--bm25", "none", "--json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )


def content_of(folder: Path) -> Any:
    """Passages, documents, and answers of all kinds."""
    retriever = Retriever.open(folder, encoder=None, device="cpu", verify=True, threads=1)
    index = retriever.index
    queries = [f"unique{number}" for number in range(1, 200, 7)]
    found = [
        [[(hit.passage.id, round(hit.score, 3)) for hit in hits] for hits in result.hits]
        for mode in ("dense", "bm25")
        for result in [retriever.search(queries, k=3, mode=mode, nprobe=1)]
    ]
    with sqlite3.connect(folder / "passages.sqlite") as db:
        documents = db.execute("SELECT id FROM documents ORDER BY id").fetchall()
    return list(index.store.iterate(0, index.num_rows)), documents, found


@pytest.mark.nightly
def test_killed_again_and_again(corpus: Path, tmp_path: Path) -> None:
    """SIGKILL at any moment costs time and nothing else:
    the same rows, the same answers as undisturbed."""
    undisturbed, folder = tmp_path / "undisturbed", tmp_path / "killed"
    begun = time.monotonic()
    process = start_build(corpus, undisturbed)
    assert process.wait(600) == 0
    takes_s = time.monotonic() - begun
    generator = random.Random(1)
    num_killed = 0
    while True:
        process = start_build(corpus, folder)
        try:
            process.wait(takes_s * (generator.uniform(0.2, 0.7) + 0.1 * num_killed))
            break
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)
            process.wait()
            num_killed += 1
    assert process.returncode == 0
    assert num_killed
    assert len(content_of(folder)[1]) == NUM_DOCUMENTS
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
    retriever = Retriever(
        Index.open(tmp_path / "index", verify=False), WordEncoder(), verify=False, threads=1
    )
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
                hits = retriever.search(["text"], k=10_000, mode="dense", nprobe=1).hits[0]
                ids = sorted(int(hit.passage.id[1:]) for hit in hits)
                assert len(ids) == index.num_live
                assert ids in (list(range(len(ids))), list(range(1, len(ids) + 1)))
                assert len(retriever.search(["text"], k=10_000, mode="bm25", nprobe=1).hits[0]) in (
                    index.num_live,
                    retriever.index.num_live,
                )
                seen.add(index.generation)
        finally:
            process.kill()
            process.wait()
