"""PassageStore: rows are given in order and never again, a text is kept once, damage is told."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
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
    assert store.num_rows == 0
    assert (put(store, "a", ["x", "y"]), put(store, "b", ["z"])) == ((2, 0), (1, 0))
    assert store.num_rows == 3
    assert [passage.id for _, passage in store.iterate(0, 3)] == ["a#0", "a#1", "b#0"]
    assert (store.rows_of("a"), store.rows_of("a#1"), store.rows_of("c")) == ([0, 1], [1], [])
    first, last = Passage("a#0", "a", "", "x", 0, 1, 1), Passage("b#0", "b", "", "z", 0, 1, 1)
    assert store.get([2, 0, 2]) == [last, first, last]
    assert store.get([]) == []
    with pytest.raises(CorruptIndexError, match="row 3 is missing"):
        store.get([0, 3])
    with pytest.raises(CorruptIndexError, match="not all there"):
        list(store.iterate(0, 4))


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
    assert not store.is_known(Document("a", "", "x"), 0)
    put(store, "a", ["x"])
    run = store.begin_run()
    for _ in range(2):
        assert store.is_known(Document("a", "", "x"), run), "the same one twice is no mistake"
    assert not store.is_known(Document("a", "title", "x"), run + 1)
    with pytest.raises(RetrievalError, match="'a' occurs twice"):
        store.is_known(Document("a", "", "z"), run)


def test_one_id_in_two_documents(store: PassageStore) -> None:
    put(store, "a", ["x"])
    with pytest.raises(RetrievalError, match="'a#0' occurs twice"):
        store.put(Document("b", "", "y"), [Passage("a#0", "b", "", "y", 0, 1, 1)], 0)


def test_a_changed_text_is_seen(tmp_path: Path, store: PassageStore) -> None:
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
    """A writer makes what is missing."""
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
    assert [passage.start for passage in store.get(range(33_000))] == list(range(33_000))


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
            scans = [step for step in plan if step.startswith("SCAN") and "INDEX" not in step]
            assert not scans, statement


def test_readers_beside_a_writer(tmp_path: Path, store: PassageStore) -> None:
    put(store, "a", [f"text {number}" for number in range(50)])
    reader = PassageStore(tmp_path / "passages.sqlite", writable=False)

    def read(number: int) -> bool:
        return reader.get([number])[0].text == f"text {number}"

    with ThreadPoolExecutor(3) as pool:
        answers = pool.map(read, [*range(50)] * 6)
        store.begin()
        put(store, "b", [f"other {number}" for number in range(500)])
        store.commit()
        assert all(answers)
    reader.close()


def test_full_disk_is_named(tmp_path: Path, store: PassageStore) -> None:
    """Nothing is damaged then, and what was committed stays."""
    put(store, "first", ["text of the first"])
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count = {pages + 1}")
    with pytest.raises(RetrievalError, match=r"passages\.sqlite: the disk is full") as caught:
        put(store, "second", ["long text " * 10_000])
    assert not isinstance(caught.value, CorruptIndexError)
    assert store.get([0])[0].id == "first#0"
