"""Entries in the storage's index, without their KV."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from radix_ext.variants import Variant
from sglang_chunkcache.storage.manifest import Row


@dataclass(frozen=True, slots=True)
class Stored:
    """In place of an entry's KV and of what was measured of it."""

    row: Row
    is_own: bool
    """Whether this server has written it."""

    @property
    def nbytes(self) -> int:
        """What others have written is in their budgets."""
        return self.row.num_bytes if self.is_own else 0


class Known(NamedTuple):
    """What there is of one variant."""

    exact: str
    """As `Place.exact`."""
    preprocessed: bool
    scored: int
    has_outward: bool

    def replaces(self, old: Known) -> bool:
        """As in a store, except that nothing that was measured is lost:
        a backend joins no entries. An exact one serves those who move it, too."""
        if self.exact != old.exact:
            return bool(self.exact)
        if self.preprocessed != old.preprocessed:
            return self.preprocessed
        return self != old and self.scored >= old.scored and self.has_outward >= old.has_outward


def known_of(row: Row) -> Known:
    """In whatever heads it was measured."""
    return Known(row.place.exact, row.place.preprocessed, row.scored, row.has_outward)


def variant_of_row(row: Row, priority: float, num_uses: int, *, is_own: bool = True) -> Variant:
    """The index's."""
    place = row.place
    return Variant(
        place.prefix,
        Stored(row, is_own),
        preprocessed=place.preprocessed,
        head=place.head,
        start=row.start,
        priority=priority,
        num_uses=num_uses,
        is_exact=bool(place.exact),
    )
