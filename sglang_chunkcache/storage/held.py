"""Entries in the storage's index, without their KV."""

from __future__ import annotations

from dataclasses import dataclass
from operator import ge

from radix_ext.variants import Variant
from sglang_chunkcache.storage.manifest import Row


@dataclass(frozen=True, slots=True)
class Stored:
    """In place of an entry's KV and of what was measured of it."""

    row: Row
    is_own: bool  # whether this server has written it

    @property
    def nbytes(self) -> int:
        """What others have written is in their budgets."""
        return self.row.num_bytes if self.is_own else 0


def variant_of_row(row: Row, *, is_own: bool = True) -> Variant:
    return Variant(
        row.place.prefix,
        Stored(row, is_own),
        preprocessed=row.place.preprocessed,
        head=row.place.head,
        start=row.start,
        priority=row.priority,
        num_uses=row.num_uses,
        is_exact=bool(row.place.exact),
    )


def replaces(row: Row, old: Row) -> bool:
    """Whether an entry takes the place of another one: as in a store, except that nothing that was
    measured is lost, as a backend joins no entries. An exact one serves those who move it, too."""
    if row.place.exact != old.place.exact:
        return bool(row.place.exact)
    if row.place.preprocessed != old.place.preprocessed:
        return row.place.preprocessed
    measured, before = (row.scored, row.has_outward), (old.scored, old.has_outward)
    return measured != before and all(map(ge, measured, before))
