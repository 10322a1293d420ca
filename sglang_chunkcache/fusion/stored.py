"""An entry of the storage as the tier's index has it, and its way between a variant of the store and bytes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from radix_ext.variants import Variant
from sglang_chunkcache.fusion.measure import Head
from sglang_chunkcache.fusion.store import ChunkScores, HostBlob
from sglang_chunkcache.storage.entry import Entry, Masses
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

    preprocessed: bool
    scored: int
    has_outward: bool

    def replaces(self, old: Known) -> bool:
        """As in a store, except that nothing that was measured is lost: a backend joins no entries."""
        if self.preprocessed != old.preprocessed:
            return self.preprocessed
        return self != old and self.scored >= old.scored and self.has_outward >= old.has_outward


def known_of(row: Row) -> Known:
    return Known(row.place.preprocessed, row.scored, row.has_outward)


def stored_of(row: Row, reuse: float, num_uses: int, *, is_own: bool = True) -> Variant:
    place = row.place
    return Variant(
        place.prefix,
        Stored(row, is_own),
        preprocessed=place.preprocessed,
        head=place.head,
        reuse=reuse,
        num_uses=num_uses,
    )


def entry_of(variant: Variant, heads: tuple[Head, ...]) -> Entry:
    keys, values = variant.blob.read()
    scores: ChunkScores | None = variant.scores  # type: ignore[assignment]
    if scores is None:
        return Entry(keys, values, outward=variant.outward, heads=heads)
    masses = Masses(scores.inter, scores.prefix_lens, scores.intra, scores.head, scores.head_len)
    return Entry(keys, values, masses, scores.context, scores.received, variant.outward, heads)


def variant_of(entry: Entry, stored: Variant, heads: tuple[Head, ...]) -> Variant:
    """As it was written, with its f_r, and with what was measured if that was in these heads."""
    scores, outward = None, None
    if entry.heads in ((), heads):
        outward = entry.outward
        of = entry.masses
        if of is not None and len(of.inter) == len(of.prefix_lens) == len(stored.prefix):
            assert entry.context is not None
            scores = ChunkScores(
                of.inter,
                of.prefix_lens,
                of.intra,
                entry.context,
                entry.received,
                head=of.head,
                head_len=of.head_len,
            )
    return Variant(
        stored.prefix,
        HostBlob(entry.keys, entry.values),
        scores,
        stored.preprocessed,
        stored.head,
        outward,
        stored.reuse,
        stored.num_uses,
    )
