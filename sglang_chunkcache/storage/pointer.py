"""How servers on one storage find each other's entries: a few small values a chunk, under names
that follow from the chunk.

    ccp1-<model, tenant, chunk>-0 ──► head, chunks before it, what was measured, sizes
                                  ──► an entry's name
    ccp1-<model, tenant, chunk>-1 ──► ...   no gaps, at most `MAX_POINTERS`
    ccp1-<model, tenant, chain>-0 ──► the exact entry that is the end of a chain

An entry's own name cannot be guessed: it holds what precedes the chunk. A pointer is framed and
checked as an entry is, and says nothing that the entry's reader does not check again. Places are
filled without locks: who finds its place taken takes the next one, who empties one moves the last
pointer there, and two who do so at once may lose one. That costs speed, nothing else.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from torch import Tensor

from radix_ext import ChunkId
from sglang_chunkcache.storage.backend import Backend
from sglang_chunkcache.storage.entry import Refusal, RefusedEntryError, framed, header_of
from sglang_chunkcache.storage.key import Names, Place, StoredChunk
from sglang_chunkcache.storage.manifest import Row

MAX_POINTERS = 8
"""Of one chunk. Further entries are found by their writer alone."""
POINTER_BYTES = 4096
"""Of each: HiCache's `get` must know a size.
It holds the names of a hundred chunks before this one."""

_MAGIC = b"chunkpt\n"
_Positive = Annotated[int, msgspec.Meta(ge=1)]


class _Pointer(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    of: str  # the chunk's first pointer
    head: str
    prefix: tuple[str, ...]
    preprocessed: bool
    num_tokens: _Positive
    num_bytes: _Positive
    scored: int
    has_outward: bool
    heads: tuple[tuple[int, int], ...]
    start: int
    exact: str = ""
    chunk: str = ""  # of an exact entry: its chain may point to it, too


class Pointers:
    """Of one backend. Its methods raise what the backend raises."""

    def __init__(self, backend: Backend, names: Names) -> None:
        self._backend, self._names = backend, names

    def find(self, chunk: StoredChunk) -> list[Row]:
        """The entries that are pointed to, the oldest first.
        Whether they are there is not asked."""
        return [row for row in self._all(chunk) if row is not None]

    def add(self, row: Row) -> bool:
        """Point to this entry. False: there is no place, or too much precedes the chunk."""
        is_found, *_ = [self._add(chunk, row) for chunk in row.place.pointed_from]
        return is_found

    def remove(self, row: Row) -> None:
        """Point to this entry no more, nor to what cannot be read.
        No effect where the backend cannot delete."""
        for chunk in row.place.pointed_from:
            self._remove(chunk, row)

    # Private, in order of use

    def _add(self, chunk: StoredChunk, row: Row) -> bool:
        data = self._bytes(chunk, row)
        if data is None:
            return False
        for _ in range(MAX_POINTERS + 1):
            there = self._all(chunk)
            # Set by the last turn of this loop, or by another server.
            if row.name in (each.name for each in there if each is not None):
                return True
            number = len(there)
            # What is no pointer of this chunk helps nobody: its place is free once it is deleted.
            damaged = there.index(None) if None in there else number
            if damaged < number and self._backend.delete(self._names.pointer(chunk, damaged)):
                number = damaged
            if number == MAX_POINTERS:
                break
            # and look: another server may have been faster
            self._backend.set(self._names.pointer(chunk, number), data)
        return False

    def _remove(self, chunk: StoredChunk, row: Row) -> None:
        there = self._all(chunk)
        for number in reversed(range(len(there))):
            found = there[number]
            if found is not None and found.name != row.name:
                continue
            if not self._backend.delete(self._names.pointer(chunk, number)):
                return
            last = there.pop()
            # Places have no gaps, so the last pointer comes here, behind the delete: `set`
            # overwrites nothing.
            if number < len(there):  # what is behind has been looked at, so it stays
                assert last is not None
                data = self._bytes(chunk, last)
                assert data is not None
                self._backend.set(self._names.pointer(chunk, number), data)
                self._backend.delete(self._names.pointer(chunk, len(there)))
                there[number] = last

    def _all(self, chunk: StoredChunk) -> list[Row | None]:
        """By place, up to the first free one. None: what is there is no pointer of this chunk."""
        found = list[Row | None]()
        for number in range(MAX_POINTERS):
            try:
                data = self._backend.get(self._names.pointer(chunk, number), POINTER_BYTES)
                if data is None:
                    break
                found.append(self._row(data, chunk))
            except RefusedEntryError:
                found.append(None)
        return found

    def _row(self, data: Tensor, chunk: StoredChunk) -> Row:
        told, _ = header_of(data, _MAGIC, _Pointer, secret=self._names.secret)
        if told.of != self._names.pointer(chunk, 0):
            raise RefusedEntryError(Refusal.OTHER_ENTRY, f"these are the bytes of {told.of}")
        own = ChunkId(told.chunk) if told.exact else chunk.chunk
        of_place = told.head, tuple(map(ChunkId, told.prefix)), told.preprocessed, told.exact
        place = Place(chunk.model, chunk.tenant, own, *of_place)
        if chunk not in place.pointed_from:
            raise RefusedEntryError(Refusal.OTHER_ENTRY, "it points to another chunk's entry")
        # Computed, not told: no pointer leads to another chunk's or tenant's entry.
        measured = told.scored, told.has_outward, told.heads
        name = self._names.entry(place, *measured)
        return Row(name, place, told.num_tokens, told.num_bytes, *measured, start=told.start)

    def _bytes(self, chunk: StoredChunk, row: Row) -> Tensor | None:
        """None: it does not fit."""
        place, secret = row.place, self._names.secret
        of_place = place.head, place.prefix, place.preprocessed
        of_entry = row.num_tokens, row.num_bytes, int(row.scored), row.has_outward, row.heads
        exact = place.exact, place.chunk if place.exact else ""
        told = (self._names.pointer(chunk, 0), *of_place, *of_entry, row.start, *exact)
        header = msgspec.json.encode(_Pointer(*told))
        # Filled up: all pointers have one size, which `get` must know.
        room = POINTER_BYTES - len(framed(_MAGIC, header, (), secret=secret))
        return None if room < 0 else framed(_MAGIC, header, [bytearray(room)], secret=secret)
