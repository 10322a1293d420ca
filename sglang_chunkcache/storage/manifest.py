"""What a rank's storage holds: one row an entry, in SQLite beside the entries.

A row is written after the backend has confirmed the entry's bytes, and deleted before they are. So
after SIGKILL at any moment each row's bytes are there, and bytes without a row are left over. One
process has a folder: a lock says so, which goes with the process. After a power cut the last rows
may be missing, or rows of torn bytes be there, which reading refuses.
"""

from __future__ import annotations

import fcntl
import logging
import os
import sqlite3
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from radix_ext import ChunkId
from sglang_chunkcache.storage.key import Place

logger = logging.getLogger(__name__)

SCHEMA = 4
"""Of the table. A folder with another one is refused: its entries would be deleted."""

_TABLE = """CREATE TABLE IF NOT EXISTS entries (
    name TEXT PRIMARY KEY, model TEXT NOT NULL, tenant TEXT NOT NULL, chunk TEXT NOT NULL,
    head TEXT NOT NULL, prefix TEXT NOT NULL, preprocessed INTEGER NOT NULL,
    exact TEXT NOT NULL, num_tokens INTEGER NOT NULL, num_bytes INTEGER NOT NULL,
    scored INTEGER NOT NULL, outward INTEGER NOT NULL, heads TEXT NOT NULL, start INTEGER NOT NULL,
    priority REAL NOT NULL, num_uses INTEGER NOT NULL, last_used INTEGER NOT NULL
) WITHOUT ROWID"""


class Row(NamedTuple):
    name: str
    place: Place
    num_tokens: int
    num_bytes: int
    scored: int  # a `radix_ext.cfo.Scored`
    has_outward: bool
    heads: tuple[tuple[int, int], ...] = ()  # those that scores and `outward` were measured with
    start: int = 0  # position of the first token
    priority: float = 0.0  # in the order of eviction, as of its last use
    num_uses: int = 0


class InUseError(ValueError):
    """Another process has the folder."""


class SchemaError(ValueError):
    """The folder is another release's."""


class Manifest:
    """Of one folder. Opened by one thread and used by another one afterwards, never by two at once.
    Raises InUseError: another process has the folder; SchemaError: another release wrote it;
    OSError: it cannot be made or written."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._lock = _locked(folder / "lock")
        file = folder / "manifest.sqlite"
        try:
            self._database = _opened(file)
        except SchemaError:
            os.close(self._lock)
            raise
        except sqlite3.OperationalError as error:  # no room, no right: not the file's fault
            os.close(self._lock)
            raise OSError(f"{file}: {error}") from None
        except sqlite3.DatabaseError as error:
            logger.warning("chunk cache: %s is damaged, the storage starts empty: %s", file, error)
            # With its -wal and -shm, which SQLite would replay into the new one.
            for each in folder.glob(f"{file.name}*"):
                each.replace(each.with_name(each.name.replace("manifest", "damaged")))
            self._database = _opened(file)
        # `last_used` counts calls, so that no clock that was set back changes the order.
        (self._clock,) = self._database.execute(
            "SELECT coalesce(max(last_used), 0) FROM entries"
        ).fetchone()

    def rows(self) -> list[Row]:
        """All, the most used first; of those that were used together what precedes the others."""
        # The tokens before a first chunk have their chain for a chunk.
        found = self._database.execute(
            "SELECT * FROM entries ORDER BY priority DESC, last_used DESC, length(prefix),"
            " instr(exact, chunk) = 0, name"
        )
        return list(map(_row, found))

    def put(self, row: Row) -> None:
        """The row is there, for good, when this returns."""
        place = row.place
        self._clock += 1
        heads = " ".join(f"{layer}.{head}" for layer, head in row.heads)
        of_place = (*place[:4], " ".join(place.prefix), place.preprocessed, place.exact)
        of_entry = row.num_tokens, row.num_bytes, row.scored, row.has_outward, heads, row.start
        values = row.name, *of_place, *of_entry, row.priority, row.num_uses, self._clock
        marks = ", ".join("?" * len(values))
        self._execute(f"INSERT OR REPLACE INTO entries VALUES ({marks})", [values])

    def drop(self, names: Iterable[str]) -> None:
        self._execute("DELETE FROM entries WHERE name = ?", [(name,) for name in names])

    def use(self, uses: Mapping[str, tuple[float, int]]) -> None:
        """Priority and number of uses by name of what was used. What is not there stays away."""
        self._clock += 1
        told = [(*use, self._clock, name) for name, use in uses.items()]
        self._execute(
            "UPDATE entries SET priority = ?, num_uses = ?, last_used = ? WHERE name = ?", told
        )

    def close(self) -> None:
        """The folder is free. No effect the second time."""
        self._database.close()
        if self._lock >= 0:  # after the database: the lock says that nobody has it open
            os.close(self._lock)
            self._lock = -1

    def _execute(self, statement: str, values: Sequence[tuple[object, ...]]) -> None:
        with self._database:  # one transaction, all rows or none
            self._database.executemany(statement, values)


# Private, in order of use


def _locked(file: Path) -> int:
    """The lock's file descriptor: whoever has it open has the folder."""
    lock = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        holder = os.pread(lock, 32, 0).decode(errors="replace").strip() or "?"
        os.close(lock)
        raise InUseError(f"{file.parent} is used by another server (process {holder})") from None
    os.truncate(lock, 0)  # a shorter number would keep digits of the last one
    os.pwrite(lock, str(os.getpid()).encode(), 0)
    return lock


def _opened(file: Path) -> sqlite3.Connection:
    # Opened by the thread of the start, used by the loader's.
    database = sqlite3.connect(file, timeout=1.0, check_same_thread=False)
    try:
        database.execute("PRAGMA journal_mode = WAL")
        # after a power cut bytes may be torn, too: reading finds out
        database.execute("PRAGMA synchronous = NORMAL")
        (schema,) = database.execute("PRAGMA user_version").fetchone()
        if schema not in (0, SCHEMA):
            raise SchemaError(
                f"{file} is of another release (schema {schema}, this one has {SCHEMA}): name"
                " another folder, or delete it"
            )
        with database:
            database.execute(_TABLE)
            database.execute(f"PRAGMA user_version = {SCHEMA}")
            # Reads every page, so that damage shows now, while the start can still begin anew.
            database.execute("SELECT count(*) FROM entries").fetchone()
    except (sqlite3.Error, SchemaError):
        database.close()
        raise
    return database


def _row(told: Sequence[Any]) -> Row:
    name, model, tenant, chunk, head, prefix, preprocessed, exact, *of_entry = told
    num_tokens, num_bytes, scored, outward, heads, start, priority, num_uses, _ = of_entry
    before = tuple(map(ChunkId, prefix.split()))
    place = Place(model, tenant, ChunkId(chunk), head, before, bool(preprocessed), exact)
    pairs = (each.split(".") for each in heads.split())
    measured = scored, bool(outward), tuple((int(layer), int(number)) for layer, number in pairs)
    return Row(name, place, num_tokens, num_bytes, *measured, start, priority, num_uses)
