"""VariantIndex as a plain list, every question answered by looking at all of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, replace
from math import log2

from radix_ext import ChunkId
from radix_ext.eviction import NEW_ON_HOST
from radix_ext.variant_index import ADMITTED_SHARE
from radix_ext.variants import RESERVED_SHARE, RESERVED_WINDOWS


@dataclass
class NaiveVariant:
    identity: Hashable
    prefix: tuple[ChunkId, ...]
    kv_bytes: int
    scored: int
    preprocessed: bool
    head: str = ""
    score_bytes: int = 0
    outward_bytes: int = 0
    """0: not known."""
    priority: float = 0
    num_uses: int = 0
    is_below: bool = False
    last_used: int = 0
    reserved_until: int = 0
    """Number of the request with which that ends."""

    @property
    def nbytes(self) -> int:
        return self.kv_bytes + self.score_bytes + self.outward_bytes

    @property
    def place(self) -> tuple[Hashable, str, tuple[ChunkId, ...]]:
        return self.identity, self.head, self.prefix


def num_bytes(variants: Collection[NaiveVariant]) -> int:
    """Of all together."""
    return sum(v.nbytes for v in variants)


class NaiveStore:
    """`ask`, `put` and `use` as the store describes them."""

    def __init__(self, max_bytes: int, max_chunks: int, max_variants: int, window: int) -> None:
        self.max_bytes, self.max_chunks, self.max_variants = max_bytes, max_chunks, max_variants
        self.window = window
        self.asked: list[list[tuple[Hashable, str, tuple[ChunkId, ...]]]] = []
        self.variants: list[NaiveVariant] = []
        self.evicted: list[NaiveVariant] = []
        self.clock, self.age = 0, 0.0

    def ask(self, chunks: Sequence[tuple[Hashable, str, tuple[ChunkId, ...]]]) -> None:
        self.asked.append(list(chunks))

    def is_reserved(self, variant: NaiveVariant) -> bool:
        is_new = variant.num_uses == 0 and not variant.is_below
        return is_new and len(self.asked) < variant.reserved_until

    @property
    def reserved(self) -> list[NaiveVariant]:
        return [v for v in self.variants if self.is_reserved(v)]

    def may_reserve(self, nbytes: int) -> bool:
        return (
            num_bytes(self.reserved) + nbytes <= RESERVED_SHARE * self.max_bytes
            and len(self.reserved) < RESERVED_SHARE * self.max_chunks * self.max_variants
        )

    def put(self, new: NaiveVariant) -> bool:
        joined = replace(new)
        for old in [v for v in self.variants if v.place == new.place]:
            if old.scored > new.scored:
                joined.scored, joined.score_bytes = old.scored, old.score_bytes
            joined.outward_bytes = new.outward_bytes or old.outward_bytes
        if joined.nbytes > self.max_bytes or not self.wants(new, joined):
            return False
        new.scored, new.score_bytes, new.outward_bytes = (
            joined.scored,
            joined.score_bytes,
            joined.outward_bytes,
        )
        for old in [v for v in self.variants if v.place == new.place]:
            self.variants.remove(old)
            new.num_uses, new.priority = old.num_uses, old.priority
        if new.preprocessed and not new.num_uses and self.may_reserve(new.nbytes):
            new.reserved_until = len(self.asked) + RESERVED_WINDOWS * self.window
        siblings = self.leaving(new.identity)
        is_full_house = (
            len([v for v in self.variants if v.identity == new.identity]) >= self.max_variants
        )
        if is_full_house and siblings and not self.fits(new) and not new.preprocessed:
            self.evict(siblings[0])
        while not self.fits(new):
            self.evict(self.leaving()[0])
        self.clock += 1
        new.last_used = self.clock
        new.priority = max(new.priority, self.age + NEW_ON_HOST + log2(1 + new.num_uses))
        self.variants.append(new)
        return True

    def wants(self, new: NaiveVariant, joined: NaiveVariant) -> bool:
        for old in [v for v in self.variants if v.place == new.place]:
            adds = new.scored > old.scored or bool(new.outward_bytes and not old.outward_bytes)
            if (new.preprocessed, adds) <= (old.preprocessed, False):
                return False
        if not new.preprocessed and num_bytes([*self.reserved, joined]) > self.max_bytes:
            return False
        if new.preprocessed:
            return self.fits(joined) or self.may_reserve(joined.nbytes)
        if any(v.place == new.place for v in self.variants):
            return True
        if len(self.reserved) == self.max_chunks * self.max_variants:
            return False
        recent = [place for places in self.asked[-self.window :] for place in places]
        by_chunk, by_place = Counter(identity for identity, _, _ in recent), Counter(recent)
        siblings = [v for v in self.variants if v.identity == new.identity]
        asked = by_place[new.place] if siblings else by_chunk[new.identity]
        if len(siblings) >= self.max_variants:
            lowest = self.leaving(new.identity)
            return bool(lowest) and asked > by_place[lowest[0].place]
        return self.fits(joined) or asked >= ADMITTED_SHARE * by_chunk[self.leaving()[0].identity]

    def use(self, variant: NaiveVariant) -> None:
        self.clock += 1
        variant.num_uses += 1
        variant.priority = self.age + NEW_ON_HOST + log2(1 + variant.num_uses)
        variant.last_used = self.clock

    def fits(self, new: NaiveVariant) -> bool:
        is_full = len(self.variants) == self.max_chunks * self.max_variants
        return not is_full and num_bytes([*self.variants, new]) <= self.max_bytes

    def leaving(self, identity: Hashable = None) -> list[NaiveVariant]:
        """What leaves first; of one chunk those that are not reserved."""
        among = [
            v
            for v in self.variants
            if identity is None or (v.identity == identity and not self.is_reserved(v))
        ]
        return sorted(
            among,
            key=lambda v: (self.is_reserved(v), v.priority, v.last_used),
        )

    def evict(self, variant: NaiveVariant) -> None:
        self.age = max(self.age, variant.priority)
        self.variants.remove(variant)
        self.evicted.append(variant)
