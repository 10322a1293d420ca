"""PassageStore: rows are given in order and never again, a text is kept once, damage is told."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.passage import Document, Passage
from retrieval.store import PassageStore


@pytest.fixture
def store(tmp_path: Path) -> Iterator[PassageStore]:
    opened = PassageStore(tmp_path / "passages.sqlite", writable=True)
    yield opened
    opened.close()


def put(store: PassageStore, name: str, texts: Sequence[str], *, run: int = 0) -> tuple[int, int]:
    """A document with these texts as its passages `name#0`, `name#1` …"""
    passages = [
        Passage(f"{name}#{at}", name, "", text, at, at + 1, 1) for at, text in enumerate(texts)
    ]
    return store.put(Document(name, "", " ".join(texts)), passages, run)


def live(store: PassageStore) -> dict[str, int]:
    gone = set(store.removed_rows().tolist())
    return {passage.id: row for row, passage in store.iterate(0, store.num_rows) if row not in gone}


def test_rows_count_up_from_zero(store: PassageStore) -> None:
    """What FAISS numbers by position and BM25 by row is the same passage."""
    assert (store.num_rows, put(store, "a", ["x", "y"]), put(store, "b", ["z"])) == (
        0,
        (2, 0),
        (1, 0),
    )
    assert store.num_rows == 3
    assert live(store) == {"a#0": 0, "a#1": 1, "b#0": 2}
    assert store.get([2, 0, 2]) == [
        Passage("b#0", "b", "", "z", 0, 1, 1),
        Passage("a#0", "a", "", "x", 0, 1, 1),
        Passage("b#0", "b", "", "z", 0, 1, 1),
    ]


def test_passages_that_stay_keep_their_rows(store: PassageStore) -> None:
    """A document with one changed passage costs one new vector."""
    put(store, "a", ["x", "y", "z"])
    assert put(store, "a", ["x", "Y", "z"]) == (1, 0)
    assert live(store) == {"a#0": 0, "a#2": 2, "a#1": 3}
    assert store.removed_rows().tolist() == [1]
    assert store.get([1])[0].text == "y", "a server of an older generation reads it on"


def test_a_rows_number_is_never_given_again(tmp_path: Path) -> None:
    """Even when the last one is removed and the file opened anew."""
    for row in range(3):
        store = PassageStore(tmp_path / "passages.sqlite", writable=True)
        put(store, "a", [f"text {row}"])
        store.close(checkpoint=True)
    store = PassageStore(tmp_path / "passages.sqlite", writable=False)
    assert live(store) == {"a#0": 2}
    store.close()


def test_a_text_is_kept_once(store: PassageStore) -> None:
    """Within a document and across documents; the title belongs to the text."""
    assert put(store, "a", ["x", "x"]) == (1, 1)
    assert put(store, "b", ["x", "y"]) == (1, 1)
    titled = Passage("c#0", "c", "title", "x", 0, 1, 1)
    assert store.put(Document("c", "title", "x"), [titled], 0) == (1, 0)


def test_a_duplicate_takes_over_when_its_text_goes(store: PassageStore) -> None:
    """Otherwise a text that another document still has would be lost."""
    put(store, "a", ["x"])
    put(store, "b", ["x"])
    put(store, "c", ["x"])
    assert put(store, "a", ["y"], run=1) == (2, 0)
    assert live(store) == {"b#0": 1, "a#0": 2}
    assert store.is_known(Document("b", "", "x"), 1)
    put(store, "c", ["z"], run=1)
    put(store, "b", ["w"], run=1)
    assert live(store) == {"a#0": 2, "c#0": 3, "b#0": 4}, "c waits no more"


def test_is_known_tells_changed_documents(store: PassageStore) -> None:
    """By title and text."""
    assert not store.is_known(Document("a", "", "x"), 0)
    put(store, "a", ["x"])
    run = store.begin_run()
    assert run == 1
    assert store.is_known(Document("a", "", "x"), run)
    assert store.is_known(Document("a", "", "x"), run), (
        "the same document twice in one run is no mistake"
    )
    assert not store.is_known(Document("a", "title", "x"), run + 1)
    with pytest.raises(RetrievalError, match="'a' occurs twice"):
        store.is_known(Document("a", "", "z"), run)


def test_removed_documents_are_read_anew(store: PassageStore) -> None:
    """`remove` takes the passage out, and forgets that the document was read."""
    put(store, "a", ["x", "y"])
    assert (store.rows_of("a"), store.rows_of("a#1"), store.rows_of("b")) == ([0, 1], [1], [])
    store.remove([1])
    assert (store.rows_of("a"), store.rows_of("a#1")) == ([0], [])
    assert not store.is_known(Document("a", "", "x y"), 1)
    assert put(store, "a", ["x", "y"]) == (1, 0)
    assert live(store) == {"a#0": 0, "a#1": 2}


def test_one_id_in_two_documents(store: PassageStore) -> None:
    """An id names one passage."""
    put(store, "a", ["x"])
    with pytest.raises(RetrievalError, match="'a#0' occurs twice"):
        store.put(Document("b", "", "y"), [Passage("a#0", "b", "", "y", 0, 1, 1)], 0)


def test_missing_rows(store: PassageStore) -> None:
    """Asked for by an index that names more rows than there are."""
    put(store, "a", ["x"])
    with pytest.raises(CorruptIndexError, match="row 1 is missing"):
        store.get([0, 1])
    with pytest.raises(CorruptIndexError, match="not all there"):
        list(store.iterate(0, 2))
    assert store.get([]) == []


def test_a_changed_text_is_seen(tmp_path: Path, store: PassageStore) -> None:
    """Each row is compared with its checksum whenever it is read."""
    put(store, "a", ["x"])
    with sqlite3.connect(tmp_path / "passages.sqlite") as db:
        db.execute("UPDATE passages SET text = 'y'")
    with pytest.raises(CorruptIndexError, match=r"passages.sqlite: row 0 \('a#0'\) is damaged"):
        store.get([0])


@pytest.mark.parametrize(
    "content", [None, b"", b"no database, but long enough to be looked at" * 100]
)
@pytest.mark.parametrize("writable", [False, True])
def test_no_such_file(tmp_path: Path, content: bytes | None, writable: bool) -> None:
    """Named, whether it is missing, empty or something else; a writer makes what is missing."""
    path = tmp_path / "passages.sqlite"
    if content is not None:
        path.write_bytes(content)
    if writable and not content:
        PassageStore(path, writable=True).close()
    else:
        with pytest.raises(CorruptIndexError, match=r"passages\.sqlite"):
            PassageStore(path, writable=writable)


def test_more_rows_than_sqlite_takes_variables(store: PassageStore) -> None:
    """32,766 in one statement."""
    store.begin()
    put(store, "a", [f"text {number}" for number in range(33_000)])
    store.commit()
    assert [passage.id for passage in store.get(range(33_000))] == [
        f"a#{number}" for number in range(33_000)
    ]


def test_looking_up_an_id_reads_no_table(store: PassageStore) -> None:
    """With 38 million passages a scan takes a minute for each id."""
    statements: list[str] = []
    store._db.set_trace_callback(statements.append)
    store.rows_of("a")
    store.removed_rows()
    put(store, "a", ["x"])
    store.remove([0])
    store._db.set_trace_callback(None)
    for statement in statements:
        if statement.startswith(("SELECT", "UPDATE", "DELETE")):
            plan = [step for *_, step in store._db.execute(f"EXPLAIN QUERY PLAN {statement}")]
            assert not [step for step in plan if step.startswith("SCAN") and "INDEX" not in step], (
                statement
            )


def test_readers_beside_a_writer(tmp_path: Path, store: PassageStore) -> None:
    """Threads of a server read whole texts while a build writes."""
    put(store, "a", [f"text {number}" for number in range(50)])
    reader = PassageStore(tmp_path / "passages.sqlite", writable=False)
    failures: list[BaseException] = []

    def read() -> None:
        try:
            for number in range(100):
                assert reader.get([number % 50])[0].text == f"text {number % 50}"
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    store.begin()
    put(store, "b", [f"other {number}" for number in range(500)])
    store.commit()
    for thread in threads:
        thread.join()
    reader.close()
    assert not failures


def test_a_transaction_is_whole_or_not_there(tmp_path: Path) -> None:
    """What a killed build began is gone, and closing in the middle of it says nothing of its
    own."""
    store = PassageStore(tmp_path / "passages.sqlite", writable=True)
    store.begin()
    put(store, "a", ["x"])
    store.commit()
    store.begin()
    put(store, "b", ["y"])
    store.close(checkpoint=True)
    store = PassageStore(tmp_path / "passages.sqlite", writable=True)
    assert store.num_rows == 1
    put(store, "c", ["z"])
    assert live(store) == {"a#0": 0, "c#0": 1}
    store.close()


def test_full_disk_is_named(tmp_path: Path, store: PassageStore) -> None:
    """Nothing is damaged then, and what was committed stays."""
    put(store, "first", ["text of the first"])
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(
        RetrievalError, match=r"passages\.sqlite: the disk is full; make room"
    ) as caught:
        put(store, "second", ["long text " * 10_000])
    assert not isinstance(caught.value, CorruptIndexError)
    assert live(store)["first#0"] == 0
