"""A store that is filled ahead of requests, simulated: which chunks it has in the end, and what was computed twice.

    chunk, neighbours ──► kept       store or storage has it
                      ──► computed   after its neighbours: each is in the store, loaded from the storage, or computed alone before

The server's own index decides what enters and what leaves. KV is a number of bytes here, and nothing waits. Of the device nothing
is known but that it holds what one request brings: what it still has of earlier ones a server need not load or compute.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from radix_ext.cfo import Prefix
from radix_ext.variants import Variant, VariantIndex


@dataclass(frozen=True, slots=True)
class Size:
    """In place of KV."""

    nbytes: int


@dataclass
class FillCounts:
    """Of requests."""

    computed: int = 0
    kept: int = 0
    again: int = 0
    """Neighbours that were computed alone once more."""
    loads: int = 0
    """Neighbours that came from the storage."""


class Filling:
    """Of one rank.

    Args:
        store: the server's, empty or not. Its watcher is replaced.
        storage: behind it; its entries outlive the server. None: there is none.
        num_bytes: of each chunk's KV.
    """

    def __init__(self, store: VariantIndex, storage: VariantIndex | None, num_bytes: Mapping[Any, int]) -> None:
        self.store, self.storage, self._num_bytes = store, storage, num_bytes
        self.counts = FillCounts()
        store.watch = self._store_changed

    def request(self, chunk: Hashable, neighbors: Sequence[Any]) -> None:
        """The chunk alone, or after its neighbours."""
        prefix: Prefix = tuple(neighbors)
        if self._is_there(chunk, prefix):
            self.counts.kept += 1
            return
        for each in prefix:
            if self.store.get(each, "", ()) is None and not self._loads(each):
                self._compute(each, ())
                self.counts.again += 1
        self._compute(chunk, prefix)
        self.counts.computed += 1

    # Private, in order of use

    def _is_there(self, chunk: Hashable, prefix: Prefix) -> bool:
        if self.storage is not None and self.storage.get(chunk, "", prefix) is not None:
            return True
        variant = self.store.get(chunk, "", prefix)
        if variant is not None:
            self._store_changed(chunk, variant, True)
        return variant is not None

    def _loads(self, chunk: Hashable) -> bool:
        if self.storage is None or self.storage.get(chunk, "", ()) is None:
            return False
        has_come = self.store.put(chunk, Variant((), Size(self._num_bytes[chunk]), is_below=True))
        self.counts.loads += has_come
        return has_come

    def _compute(self, chunk: Hashable, prefix: Prefix) -> None:
        self.store.put(chunk, Variant(prefix, Size(self._num_bytes[chunk]), preprocessed=bool(prefix)))

    def _store_changed(self, chunk: Hashable, variant: Variant, is_here: bool) -> None:
        """What is new in the store is written. What is written may leave it for others."""
        if not is_here or variant.is_below or self.storage is None:
            return
        written = Variant(variant.prefix, variant.blob, preprocessed=variant.preprocessed)
        if self.storage.get(chunk, "", variant.prefix) is not None or self.storage.put(chunk, written):
            self.store.set_below(variant)
