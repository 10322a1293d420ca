"""Entries on their way to the storage."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from radix_ext.cfo import Prefix
from radix_ext.variant_index import VariantIndex
from radix_ext.variants import Variant
from sglang_chunkcache.storage.entry import OVERHEAD_BYTES, Entry, Layout
from sglang_chunkcache.storage.held import replaces, variant_of_row
from sglang_chunkcache.storage.jobs import Load, Write
from sglang_chunkcache.storage.key import Place, StoredChunk
from sglang_chunkcache.storage.loader import Loader
from sglang_chunkcache.storage.manifest import Row
from sglang_chunkcache.storage.naming import Naming

RESERVED_S = 10.0
"""A place in the queue for what a request will write: as long as the front waits for one."""


class Writes:
    """Of one rank. `under_way` is the `Storage`'s; `kept` gets what the index has taken."""

    def __init__(
        self,
        index: VariantIndex,
        loader: Loader,
        naming: Naming,
        under_way: dict[str, Load | None],
        kept: Callable[[Variant], None],
    ) -> None:
        self._index, self._loader, self._naming = index, loader, naming
        self._under_way, self._kept = under_way, kept
        self._num_bytes = self._num_cleared = 0
        self._reserved: dict[tuple[StoredChunk, str, Prefix], tuple[int, float]] = {}
        """Places in the queue of writes: of so many bytes, until when."""

    def write(
        self,
        row: Row,
        entry: Callable[[], Entry],
        done: Callable[[], object] = lambda: None,
        layout: Layout | None = None,
    ) -> bool:
        """Keep it, unless the storage has as good an entry or wants none. The thread calls `entry`,
        the scheduler `done` when the index knows what has become of it. False: nothing is written.
        `layout`: of the entry; None: the pool's."""
        self._reserved.pop(row.place.index_key, None)
        num_bytes = row.num_tokens * (layout or self._naming.layout).token_bytes
        if self._cannot or row.name in self._under_way or not self._wants(row, num_bytes):
            return False
        then = partial(self._written, self._num_cleared, done)
        job = Write(row, entry, num_bytes + OVERHEAD_BYTES, done=then)
        if not self._loader.write(job):
            return False
        self._under_way[row.name] = None
        self._num_bytes += job.size
        return True

    def gains(self, place: Place, num_tokens: int) -> bool:
        """Whether there is room beside what is being written, or it is asked for more often than
        what would leave."""
        num_bytes = num_tokens * self._naming.layout.token_bytes + OVERHEAD_BYTES + self._num_bytes
        return self._index.gains(*place.index_key, num_bytes)

    @property
    def is_behind(self) -> bool:
        """Whether what would be written now may soon find no place in the queue."""
        return not (self._cannot or self._loader.waiting[Write].has_spare)

    def reserve(self, chunk: StoredChunk, head: str, prefix: Prefix, num_bytes: int) -> bool:
        """Whether an entry of so many bytes, which a request will make, finds a place in the queue,
        beside those that others were promised in the last `RESERVED_S` and have not used yet."""
        if self._cannot:
            return True
        key, now = (chunk, head, prefix), self._loader.worker.clock()
        self._reserved.pop(key, None)
        self._reserved = {each: held for each, held in self._reserved.items() if held[1] > now}
        size, waiting = num_bytes + OVERHEAD_BYTES, self._loader.waiting[Write]
        all_bytes = size + sum(held for held, _ in self._reserved.values())
        has_room = waiting.has_spare and waiting.has_room(1 + len(self._reserved), all_bytes)
        if has_room:
            self._reserved[key] = size, now + RESERVED_S
        return has_room

    def clear(self) -> None:
        """The storage is empty: what is under way is deleted when it is there."""
        self._num_cleared += 1

    # Private, in order of use

    @property
    def _cannot(self) -> bool:
        return self._naming.is_off or self._loader.is_paused

    def _wants(self, row: Row, num_bytes: int) -> bool:
        place = row.place
        old = self._index.get(*place.index_key)
        if old is not None:
            return self._replaces(row, old)
        return bool(place.exact) or self._index.wants(  # of an exact one `gains` was asked
            *place.index_key, preprocessed=place.preprocessed, nbytes=num_bytes
        )

    def _replaces(self, row: Row, old: Variant) -> bool:
        return replaces(row, self._naming.in_these_heads(old.blob.row))

    def _written(self, num_cleared: int, done: Callable[[], object], job: Write) -> None:
        self._under_way.pop(job.row.name, None)
        self._num_bytes -= job.size
        try:
            if not self._is_taken(num_cleared, job) and job.is_own:
                self._loader.delete([job.row])
        finally:
            done()

    def _is_taken(self, num_cleared: int, job: Write) -> bool:
        """Whether the entry stays: the index has it, or there is none."""
        row, stored = job.row, variant_of_row(job.row, is_own=job.is_own)
        if not job.is_confirmed:
            return not row.num_bytes  # else another rank could not, or the manifest has it not
        if num_cleared != self._num_cleared:
            return False
        old = self._index.get(*row.place.index_key)
        if old is not None:
            if old.blob.row.name == row.name:
                if old.blob.is_own or not job.is_own:
                    return True
            elif not self._replaces(row, old):
                return False
            stored.priority, stored.num_uses = old.priority, old.num_uses
            self._index.drop(old)
        keep = self._index.insert if stored.is_exact else self._index.put
        if not keep(row.place.stored_chunk, stored):
            return False
        self._kept(stored)
        return True
