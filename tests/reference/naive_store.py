"""VariantIndex as a plain list, every question answered by looking at all of it."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from radix_ext import ChunkId


@dataclass
class NaiveVariant:
    identity: Hashable
    prefix: tuple[ChunkId, ...]
    nbytes: int
    scored: bool
    preprocessed: bool
    reuse: float
    last_used: int


class NaiveStore:
    """`put` and `use` as the store describes them."""

    def __init__(self, max_bytes: int, max_chunks: int, max_variants: int) -> None:
        self.max_bytes, self.max_chunks, self.max_variants = max_bytes, max_chunks, max_variants
        self.variants: list[NaiveVariant] = []
        self.evicted: list[NaiveVariant] = []
        self.clock = 0

    def put(self, new: NaiveVariant) -> bool:
        same = [v for v in self.variants if v.identity == new.identity and v.prefix == new.prefix]
        for old in same:
            better = new.preprocessed and not old.preprocessed
            if not better and not (new.preprocessed == old.preprocessed and new.scored and not old.scored):
                return False
        if new.nbytes > self.max_bytes:
            return False
        for old in same:
            self.variants.remove(old)
            new.reuse = old.reuse
        siblings = [v for v in self.variants if v.identity == new.identity]
        if len(siblings) + 1 > self.max_variants:
            self.evict(siblings)
        while not self.fits(new):
            self.evict(self.variants)
        self.clock += 1
        new.last_used = self.clock
        self.variants.append(new)
        return True

    def use(self, variant: NaiveVariant, cfo: float | None) -> None:
        self.clock += 1
        variant.reuse += 1 if cfo is None else 1 / cfo
        variant.last_used = self.clock

    def fits(self, new: NaiveVariant) -> bool:
        after = [*self.variants, new]
        return sum(v.nbytes for v in after) <= self.max_bytes and len({v.identity for v in after}) <= self.max_chunks

    def evict(self, among: list[NaiveVariant]) -> None:
        lowest = sorted(among, key=lambda v: (v.reuse, v.last_used))[0]
        self.variants.remove(lowest)
        self.evicted.append(lowest)
