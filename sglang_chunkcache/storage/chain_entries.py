"""Entries of exact chains by the chunk that they hold, for requests that move it: what precedes it
there is another prompt's."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from radix_ext import ChunkId
from radix_ext.cfo import Prefix
from radix_ext.variants import Identity, Variant
from sglang_chunkcache.storage.key import StoredChunk
from sglang_chunkcache.storage.manifest import UNKNOWN, Row
from sglang_chunkcache.storage.storage import Storage


class Found(NamedTuple):
    """An entry of a storage."""

    variant: Variant
    """The chunk's KV, as a store has it."""
    stored: Variant
    """The same in the storage's index."""


class ChainEntries:
    """Of one rank's storage.

    Args:
        how: what their KV depends on beside model, weights and tokens.
    """

    def __init__(self, storage: Storage, how: tuple[str, ...]) -> None:
        self.how, self._storage = how, storage
        self._entries: dict[StoredChunk, dict[str, Variant]] = {}
        for variant in storage.index.held:
            self._changed(None, variant, is_here=True)
        storage.index.watchers.append(self._changed)

    def find(self, chunk: ChunkId, extra_key: str | None, cache_salt: str | None) -> list[Found]:
        """Those of the chunk, after whatever chain."""
        if self._storage.is_off:
            return []
        key = self._storage.naming.chunk(self.how, extra_key, cache_salt, chunk)
        return [
            Found(
                replace(stored, prefix=stored.prefix[:-1], head=stored.head.partition(" ")[2]),
                stored,
            )
            for stored in self._entries.get(key, {}).values()
        ]

    def twin(
        self, chunk: ChunkId, tenant: tuple[str | None, str | None], head: str, prefix: Prefix
    ) -> Variant | None:
        """The index's, of the chunk after just these."""
        if self._storage.is_off:
            return None
        entries = self._entries.get(self._storage.naming.chunk(self.how, *tenant, chunk), {})
        whole = (*prefix, chunk)
        return next(
            (
                stored
                for stored in entries.values()
                if stored.prefix == whole and stored.head.partition(" ")[2] == head
            ),
            None,
        )

    def _changed(self, identity: Identity, variant: Variant, is_here: bool) -> None:
        """As `VariantIndex.watchers`. Other entries are of other models, and are not asked for."""
        row: Row = variant.blob.row
        if not row.place.prefix or row.start == UNKNOWN:
            return
        key = StoredChunk(row.place.model, row.place.tenant, row.place.prefix[-1])
        if is_here:
            self._entries.setdefault(key, {})[row.name] = variant
        elif (held := self._entries.get(key)) is not None:
            held.pop(row.name, None)
            if not held:
                del self._entries[key]
