"""Entries on their way to the storage: what is worth writing, what is under way, what has become of
it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from radix_ext.cfo import Prefix
from radix_ext.variant_index import VariantIndex
from radix_ext.variants import Variant
from sglang_chunkcache.storage.entry import OVERHEAD_BYTES, Entry, Layout
from sglang_chunkcache.storage.held import Known, known_of, variant_of_row
from sglang_chunkcache.storage.jobs import Load, Write
from sglang_chunkcache.storage.key import Place, StoredChunk
from sglang_chunkcache.storage.loader import Loader
from sglang_chunkcache.storage.manifest import Row
from sglang_chunkcache.storage.naming import Naming

RESERVED_S = 10.0
"""A place in the queue for what a request will write: as long as the front waits for one."""


class _Reserved(NamedTuple):
    """A place in the queue of writes."""

    size: int
    until: float


class Writes:
    """Of one rank.

    Args:
        under_way: names that are being loaded or, None, written.
        layout: of the pool's KV.
        kept: called with what the index has taken.
        clock: seconds.
    """

    def __init__(
        self,
        index: VariantIndex,
        loader: Loader,
        naming: Naming,
        under_way: dict[str, Load | None],
        layout: Layout,
        kept: Callable[[Variant], None],
        clock: Callable[[], float],
    ) -> None:
        self._index, self._loader, self._naming = index, loader, naming
        self._under_way, self._layout, self._kept, self._clock = under_way, layout, kept, clock
        self._num_bytes = self._num_cleared = 0
        self._reserved: dict[tuple[StoredChunk, str, Prefix], _Reserved] = {}

    def write(
        self,
        row: Row,
        entry: Callable[[], Entry],
        done: Callable[[], object] = lambda: None,
        layout: Layout | None = None,
    ) -> bool:
        """Keep it, unless `has`. The thread calls `entry`, the scheduler `done` when the index
        knows what has become of it. False: nothing is written. `layout`: of the entry; None: the
        pool's."""
        self._reserved.pop((row.place.stored_chunk, row.place.head, row.place.prefix), None)
        if (
            self._naming.is_off
            or self._loader.is_paused
            or row.name in self._under_way
            or self.has(row, layout)
        ):
            return False
        num_bytes = row.num_tokens * (layout or self._layout).token_bytes + OVERHEAD_BYTES
        if not self._loader.write(
            Write(row, entry, num_bytes, partial(self._written, self._num_cleared, done))
        ):
            return False
        self._under_way[row.name] = None
        self._num_bytes += num_bytes
        return True

    def has(self, row: Row, layout: Layout | None = None) -> bool:
        """Whether the storage has as much of it, or something better in its place,
        or would not take it."""
        old = self._index.get(row.place.stored_chunk, row.place.head, row.place.prefix)
        if old is not None:
            return not known_of(row).replaces(self.known(old))
        if row.place.exact:  # `gains` was asked
            return False
        return not self._index.wants(
            row.place.stored_chunk,
            row.place.head,
            row.place.prefix,
            preprocessed=row.place.preprocessed,
            nbytes=row.num_tokens * (layout or self._layout).token_bytes,
        )

    def known(self, stored: Variant) -> Known:
        """What can be used of one of the index's."""
        return known_of(self._naming.in_these_heads(stored.blob.row))

    def gains(self, place: Place, num_tokens: int) -> bool:
        """Whether there is room beside what is being written, or it is asked for more often than
        what would leave."""
        num_bytes = num_tokens * self._layout.token_bytes + OVERHEAD_BYTES + self._num_bytes
        return self._index.gains(place.stored_chunk, place.head, place.prefix, num_bytes)

    @property
    def is_behind(self) -> bool:
        """Whether there is much to write: what would be written now may soon find no place in the
        queue."""
        return not (self._naming.is_off or self._loader.is_paused) and self._loader.is_behind

    def reserve(self, chunk: StoredChunk, head: str, prefix: Prefix, num_bytes: int) -> bool:
        """Whether an entry of so many bytes, which a request will make, finds a place in the queue,
        beside those of others that were told so in the last `RESERVED_S` and have not written
        yet."""
        if self._naming.is_off or self._loader.is_paused:
            return True
        now, key = self._clock(), (chunk, head, prefix)
        others = {
            each: held for each, held in self._reserved.items() if each != key and held.until > now
        }
        size = num_bytes + OVERHEAD_BYTES
        has_room = not self._loader.is_behind and self._loader.has_room(
            1 + len(others), size + sum(each.size for each in others.values())
        )
        self._reserved = {**others, key: _Reserved(size, now + RESERVED_S)} if has_room else others
        return has_room

    def clear(self) -> None:
        """The storage is empty: what is under way is deleted when it is there."""
        self._num_cleared += 1

    # Private, in order of use

    def _written(self, num_cleared: int, done: Callable[[], object], job: Write) -> None:
        """The entry is there: the index has it, and another one leaves for it."""
        self._under_way.pop(job.row.name, None)
        self._num_bytes -= job.size
        try:
            if not self._is_taken(num_cleared, job) and job.is_own:
                self._loader.delete([job.row])
        finally:
            done()

    def _is_taken(self, num_cleared: int, job: Write) -> bool:
        """Whether the entry stays: the index has it, or there is none."""
        row = job.row
        if not job.is_confirmed:
            return not row.num_bytes  # else another rank could not, or the manifest has it not
        if num_cleared != self._num_cleared:
            return False
        old = self._index.get(row.place.stored_chunk, row.place.head, row.place.prefix)
        if old is not None and old.blob.row.name == row.name:
            if old.blob.is_own or not job.is_own:
                return True
        elif old is not None and not known_of(row).replaces(self.known(old)):
            return False
        stored = variant_of_row(
            row, old.priority if old else 0.0, old.num_uses if old else 0, is_own=job.is_own
        )
        if old is not None:
            self._index.drop(old)
        keep = self._index.insert if stored.is_exact else self._index.put
        if not keep(row.place.stored_chunk, stored):
            return False
        self._kept(stored)
        return True
