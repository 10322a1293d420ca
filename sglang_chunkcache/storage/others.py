"""Entries that other servers have written to a shared storage: asked for by chunk, told by pointers
(pointer.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

from radix_ext.variant_index import VariantIndex
from sglang_chunkcache.storage.held import replaces, variant_of_row
from sglang_chunkcache.storage.jobs import Lookup
from sglang_chunkcache.storage.key import StoredChunk
from sglang_chunkcache.storage.loader import Loader
from sglang_chunkcache.storage.manifest import Row
from sglang_chunkcache.storage.naming import Naming
from sglang_chunkcache.storage.waits import PendingLoads

LOOKED_UP_S = 10.0
"""How long what was looked up counts as known: a miss costs one question."""
MAX_LOOKED_UP = 10_000
"""Chunks of which that is remembered, about three megabytes."""
MAX_OVERHEAD_BYTES = 1 << 20
"""What an entry may have beside twice its KV, if another server tells of it."""


class Others:
    def __init__(self, index: VariantIndex, loader: Loader, naming: Naming) -> None:
        self._index, self._loader, self._naming = index, loader, naming
        self._looked_up: dict[StoredChunk, float] = {}  # until when that is known, the oldest first
        self.num_found = 0

    def look_up(
        self, chunks: Mapping[StoredChunk, int], then: Callable[[], None], asked: PendingLoads
    ) -> None:
        """Ask what others have of these chunks of so many tokens, unless that is known. `then` is
        called when the index knows it."""
        if not self._loader.is_shared:
            return
        now = self._loader.worker.clock()
        unknown = {
            chunk: number
            for chunk, number in chunks.items()
            if now >= self._looked_up.get(chunk, now)
        }
        job = Lookup(list(unknown), done=partial(self._found, self._naming.era, unknown, then))
        if not unknown or not self._loader.look_up(job):
            return
        asked.lookup = job
        for chunk in unknown:
            self._looked_up.pop(chunk, None)
            self._looked_up[chunk] = now + LOOKED_UP_S
        while len(self._looked_up) > MAX_LOOKED_UP:
            del self._looked_up[next(iter(self._looked_up))]

    def clear(self) -> None:
        """Nothing counts as known."""
        self._looked_up.clear()

    def _found(
        self, era: int, chunks: Mapping[StoredChunk, int], then: Callable[[], None], job: Lookup
    ) -> None:
        is_stale = era != self._naming.era
        for chunk in job.chunks:
            if is_stale or chunk not in job.found:  # the storage has failed
                self._looked_up.pop(chunk, None)
        if is_stale:
            return
        for chunk, rows in job.found.items():
            for row in rows:
                self._take_over(row, chunks[chunk], is_asked=chunk == row.place.pointed_from[0])
        then()

    def _take_over(self, row: Row, num_tokens: int, *, is_asked: bool) -> None:
        """Into the index, if it has nothing as good there. Nothing leaves for it. `is_asked`: the
        entry was asked for, and not only its chunk."""
        room = 2 * num_tokens * self._naming.layout.token_bytes + MAX_OVERHEAD_BYTES
        is_refused = row.name in self._loader.worker.refused
        if row.num_tokens != num_tokens or row.num_bytes > room or is_refused:
            return
        old, in_these_heads = self._index.get(*row.place.index_key), self._naming.in_these_heads
        if old is not None:
            if not replaces(in_these_heads(row), in_these_heads(old.blob.row)) or (
                old.is_exact and not is_asked  # by other hardware it may be exact for nobody here
            ):
                return
            self._index.drop(old)
        self.num_found += self._index.restore(
            row.place.stored_chunk, variant_of_row(row, is_own=False)
        )
