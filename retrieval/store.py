"""Stores passages in one SQLite file, rows numbered in order of arrival.

    documents    id, hash when it was read, file: to continue a build, to tell what has changed
    passages     row, id, text …, hash, is_removed: rows 0, 1, 2 … without a gap; never reused
    duplicates   passages whose text another document's row holds; one replaces it when it goes

FAISS and BM25 identify a passage by its row. Rows are added and marked as removed, but never
changed, so a process that serves an older generation of the index can still read its rows. The
manifest, not this file, says which rows a generation serves.
"""

from __future__ import annotations

import json
import os
import sqlite3
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from retrieval.errors import CorruptIndexError, RetrievalError
from retrieval.passage import Document, Passage, hash_of

_WRITER = """
PRAGMA journal_mode = WAL;  -- readers of the served index do not wait
PRAGMA synchronous = FULL;  -- rows are on disk before their vectors, and both before the manifest
PRAGMA cache_size = -262144;  -- KiB, since hashes are inserted in random order
"""
_SCHEMA = """
CREATE TABLE IF NOT EXISTS documents (
    id TEXT PRIMARY KEY, hash BLOB NOT NULL, run INTEGER NOT NULL, file TEXT) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS passages (
    row INTEGER PRIMARY KEY, id TEXT NOT NULL, document TEXT NOT NULL, title TEXT NOT NULL,
    text TEXT NOT NULL, start INTEGER NOT NULL, end INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
    hash BLOB NOT NULL, checksum BLOB NOT NULL, is_removed INTEGER NOT NULL DEFAULT 0);
CREATE UNIQUE INDEX IF NOT EXISTS live_ids ON passages (id) WHERE is_removed = 0;
CREATE UNIQUE INDEX IF NOT EXISTS live_hashes ON passages (hash) WHERE is_removed = 0;
CREATE INDEX IF NOT EXISTS live_documents ON passages (document) WHERE is_removed = 0;
CREATE INDEX IF NOT EXISTS removed_rows ON passages (row) WHERE is_removed = 1;
CREATE TABLE IF NOT EXISTS duplicates (
    id TEXT PRIMARY KEY, document TEXT NOT NULL, title TEXT NOT NULL, text TEXT NOT NULL,
    start INTEGER NOT NULL, end INTEGER NOT NULL, num_tokens INTEGER NOT NULL,
    hash BLOB NOT NULL) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS duplicate_hashes ON duplicates (hash);
CREATE INDEX IF NOT EXISTS duplicate_documents ON duplicates (document);
"""
_COLUMNS = "row, id, document, title, text, start, end, num_tokens, checksum"
_LOCK_TIMEOUT_S = 60.0
_PAGE_ROWS = 1000
"""Rows fetched at a time while iterating.
No statement stays open between fetches, so writing during an iteration is safe."""


class PassageStore:
    """The passages of an index directory: one writer at a time (`build` holds the directory's
    lock), any number of readers. Thread-safe: a lock serialises the calls.

    Raises:
        CorruptIndexError: the file is missing or not a passage store, or a text does not match its
            checksum.
    """

    def __init__(self, path: Path, *, writable: bool) -> None:
        self.path, self._lock = path, threading.Lock()
        uri = f"{path.absolute().as_uri()}?mode={'rwc' if writable else 'ro'}"
        may_log = os.access(path.parent, os.W_OK) or path.with_name(path.name + "-wal").exists()
        if not writable and not may_log:
            uri += "&immutable=1"  # otherwise SQLite would create its log next to the file
        try:
            self._db = sqlite3.connect(
                uri, _LOCK_TIMEOUT_S, isolation_level=None, check_same_thread=False, uri=True
            )
            if writable:
                self._db.executescript(_WRITER + _SCHEMA)
        except sqlite3.Error as error:
            raise _named(error, path) from None
        self._next_row = self.num_rows

    @property
    def num_rows(self) -> int:
        """Number of rows in the file now, removed ones included."""
        return self._count("SELECT coalesce(max(row) + 1, 0) FROM passages")

    def get(self, rows: Sequence[int]) -> list[Passage]:
        """The passages of `rows`, in order. Raises CorruptIndexError: one is missing or damaged."""
        found = dict(map(self._passage, self._select(_COLUMNS, rows)))
        if missing := sorted(set(rows) - found.keys()):
            raise CorruptIndexError(f"{self.path}: row {missing[0]} is missing")
        return [found[row] for row in rows]

    def iterate(self, first: int, last: int) -> Iterator[tuple[int, Passage]]:
        """(row, passage) of rows `[first, last)`, removed ones included."""
        for start in range(first, last, _PAGE_ROWS):
            query = f"SELECT {_COLUMNS} FROM passages WHERE row >= ? AND row < ? ORDER BY row"
            end = min(start + _PAGE_ROWS, last)
            records = self._all(query, start, end)
            if len(records) != end - start:
                raise CorruptIndexError(f"{self.path}: rows [{start}, {end}) are not all there")
            yield from map(self._passage, records)

    def rows_of(self, name: str) -> list[int]:
        """Live rows of the passage, or of all passages of the document, with this id."""
        # Two selects: with OR, SQLite would use neither index and read the whole table.
        query = (
            "SELECT row FROM passages WHERE is_removed = 0 AND id = ? UNION"
            " SELECT row FROM passages WHERE is_removed = 0 AND document = ? ORDER BY row"
        )
        return [row for (row,) in self._all(query, name, name)]

    def ids(self, rows: Sequence[int]) -> dict[int, str]:
        """Passages' ids by row."""
        return dict(self._select("row, id", rows))

    def removed_rows(self) -> NDArray[np.int64]:
        """Rows marked as removed, ascending."""
        rows = self._all("SELECT row FROM passages WHERE is_removed = 1 ORDER BY row")
        return np.array(rows, dtype=np.int64).reshape(-1)

    def check(self) -> None:
        """SQLite's own check of the file. Raises CorruptIndexError."""
        ((answer,),) = self._all("PRAGMA quick_check(1)")
        if answer != "ok":
            raise CorruptIndexError(f"{self.path}: {' '.join(answer.split())}")

    def close(self, *, checkpoint: bool = False) -> None:
        """`checkpoint`: merge the writer's log into the file, so that readers need not write."""
        try:
            # left by a build that an error ended; it would block the checkpoint
            if self._db.in_transaction:
                self._all("ROLLBACK")
            if checkpoint:
                self._all("PRAGMA wal_checkpoint(TRUNCATE)")
        finally:
            with self._lock:
                self._db.close()

    # For the one writer

    def begin_run(self) -> int:
        """A new run's number, which each document that it sees records."""
        run = self._count("PRAGMA user_version") + 1
        self._all(f"PRAGMA user_version = {run}")
        return run

    def is_known(self, document: Document, run: int) -> bool | None:
        """Whether the document was read before, unchanged, which marks it as seen; None: no
        document of this id was.

        Raises:
            RetrievalError: this run has already seen another document of this id.
        """
        found = self._all("SELECT hash, run FROM documents WHERE id = ?", document.id)
        if not found:
            return None
        ((known, seen),) = found
        is_same: bool = known == _document_hash(document)
        if seen == run and not is_same:
            raise RetrievalError(
                f"document {document.id!r} occurs twice, with different texts; the id of a file is"
                " its path relative to the folder on the command line, so give the common parent"
                " of several folders"
            )
        if is_same and seen != run:
            self.mark(document, run)
        return is_same

    def mark(self, document: Document, run: int) -> None:
        """Record that this run has seen the document, whatever was known of its id."""
        values = (document.id, _document_hash(document), run, document.file)
        self._all("INSERT OR REPLACE INTO documents VALUES (?, ?, ?, ?)", *values)

    def put(self, document: Document, passages: Iterable[Passage], run: int) -> tuple[int, int]:
        """Make `passages` the document's passages; those that it has already keep their rows.

        Returns:
            (added, duplicates): numbers of new rows, and of passages not indexed because another
                document has the same text.
        Raises:
            RetrievalError: a passage's id belongs to another document, or occurs twice.
        """
        first_row, num_duplicates = self._next_row, 0
        query = "SELECT id, hash, row FROM passages WHERE document = ? AND is_removed = 0"
        old = {(name, digest): row for name, digest, row in self._all(query, document.id)}
        hashed = [(passage, hash_of(passage.content)) for passage in passages]
        fresh = [pair for pair in hashed if old.pop((pair[0].id, pair[1]), None) is None]
        self._all("DELETE FROM duplicates WHERE document = ?", document.id)
        self._remove(old.values())
        for passage, digest in fresh:
            if not self._all("SELECT 1 FROM passages WHERE hash = ? AND is_removed = 0", digest):
                self._insert(passage, digest)
                continue
            num_duplicates += 1
            query = "INSERT OR REPLACE INTO duplicates VALUES (?, ?, ?, ?, ?, ?, ?, ?)"
            self._all(query, *passage, digest)
        self.mark(document, run)
        return self._next_row - first_row, num_duplicates

    def remove(self, rows: Iterable[int]) -> None:
        """Mark rows as removed; the next build that sees their documents reads them anew."""
        for row in rows:
            ((name,),) = self._all("SELECT document FROM passages WHERE row = ?", row)
            self._forget(name)
            self._remove([row])

    def forget(self, name: str) -> bool:
        """Drop the duplicates of this passage id or document id. Returns whether there were any."""
        query = "DELETE FROM duplicates WHERE id = ? OR document = ? RETURNING document"
        documents = self._all(query, name, name)
        for (document,) in documents:
            self._all("DELETE FROM documents WHERE id = ?", document)
        return bool(documents)

    def num_in(self, last: int) -> tuple[int, int]:
        """Numbers of documents with live rows in `[0, last)`, and of these rows."""
        numbers = "count(DISTINCT document), count(*)"
        query = f"SELECT {numbers} FROM passages WHERE is_removed = 0 AND row < ?"
        ((num_documents, num_rows),) = self._all(query, last)
        return num_documents, num_rows

    def unseen(self, run: int, last: int) -> list[tuple[str, str | None, int]]:
        """(id, file, number of live rows in `[0, last)`) of each document not seen, by id."""
        live = (
            "SELECT count(*) FROM passages WHERE document = there.id AND is_removed = 0 AND row < ?"
        )
        query = (
            "WITH there AS (SELECT id FROM documents UNION SELECT document FROM passages WHERE"
            f" is_removed = 0) SELECT there.id, file, ({live}) FROM there LEFT JOIN documents ON"
            " documents.id = there.id WHERE run IS NOT ? ORDER BY there.id"
        )
        return self._all(query, last, run)

    def drop(self, names: Sequence[str]) -> None:
        """Forget documents, and mark their rows as removed."""
        for name in names:  # first: none of them inherits another's row
            self._forget(name)
        for name in names:
            query = "SELECT row FROM passages WHERE document = ? AND is_removed = 0"
            self._remove([row for (row,) in self._all(query, name)])

    def begin(self) -> None:
        """Start a transaction."""
        self._all("BEGIN")

    def commit(self) -> None:
        """Commit the transaction."""
        self._all("COMMIT")

    # Private, in order of use

    def _select(self, columns: str, rows: Iterable[int]) -> list[tuple[Any, ...]]:
        # one parameter, since SQLite limits their number
        wanted = json.dumps([int(row) for row in rows])
        query = f"SELECT {columns} FROM passages WHERE row IN (SELECT value FROM json_each(?))"
        return self._all(query, wanted)

    def _count(self, query: str) -> int:
        return int(self._all(query)[0][0])

    def _all(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        with self._lock:
            try:
                return self._db.execute(query, values).fetchall()
            except sqlite3.IntegrityError:
                raise  # a caller's mistake, not damage
            except sqlite3.Error as error:
                raise _named(error, self.path) from None

    def _passage(self, record: tuple[Any, ...]) -> tuple[int, Passage]:
        row, *fields, checksum = record
        passage = Passage(*fields)
        if _checksum(passage) != checksum:
            raise CorruptIndexError(f"{self.path}: row {row} ({passage.id!r}) is damaged")
        return row, passage

    def _forget(self, name: str) -> None:
        self._all("DELETE FROM documents WHERE id = ?", name)
        self._all("DELETE FROM duplicates WHERE document = ?", name)

    def _insert(self, passage: Passage, digest: bytes) -> None:
        query = f"INSERT INTO passages ({_COLUMNS}, hash) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
        try:
            self._all(query, self._next_row, *passage, _checksum(passage), digest)
        except sqlite3.IntegrityError:
            what = f"passage id {passage.id!r} occurs twice, with different texts"
            raise RetrievalError(what) from None
        self._next_row += 1

    def _remove(self, rows: Iterable[int]) -> None:
        for row in rows:
            self._all("UPDATE passages SET is_removed = 1 WHERE row = ?", row)
            # A duplicate of another document replaces the removed row.
            query = (
                "DELETE FROM duplicates WHERE id = (SELECT id FROM duplicates WHERE hash ="
                " (SELECT hash FROM passages WHERE row = ?) ORDER BY id LIMIT 1) RETURNING *"
            )
            for *fields, digest in self._all(query, row):
                self._insert(Passage(*fields), digest)


def _named(error: sqlite3.Error, path: Path) -> RetrievalError:
    if error.sqlite_errorcode == sqlite3.SQLITE_FULL:
        return RetrievalError(f"{path}: the disk is full; make room, then run it again to continue")
    return CorruptIndexError(f"{path}: {error}")


def _checksum(passage: Passage) -> bytes:
    """Over all fields, to detect damage; `hash_of` is for finding equal texts."""
    return xxhash.xxh3_64_digest("\0".join(map(str, passage)).encode("utf-8", "surrogatepass"))


def _document_hash(document: Document) -> bytes:
    return hash_of(f"{document.title}\0{document.text}")
