"""Which variants of which chunks a store keeps: KV keyed by content, several variants a chunk
(Cache-Craft 3.3).

    identity ──► (head, ()) ────────► Variant: blob, scores, uses
                 (head, (c7, c2)) ──► Variant: ...   at most `max_chunks` * `max_variants` in all

A chunk enters that is asked for at least a quarter as often as that of the variant that would leave
(`HeldVariants`). A chunk that has `max_variants` gets another only for a prefix that is asked for
more often than that of its lowest one, in whose place it comes where the store is full. "Often"
counts requests and never the clock: tensor-parallel ranks decide alike.

Of KV it knows the bytes; in a replay there is nothing else. One thread uses it.
Invariant: bytes and variants are within their limits whenever a method returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from math import inf
from typing import NamedTuple

from radix_ext.access_table import AccessTable
from radix_ext.cfo import Prefix, Scored
from radix_ext.errors import check_at_least
from radix_ext.variants import HeldVariants, Identity, Variant, nbytes_of

ADMITTED_SHARE = 0.25
"""Of the requests for the chunk of the variant that would leave. The smaller, the sooner a store
follows its traffic, and the more it copies (eval/LOG.md)."""


class StoreStats(NamedTuple):
    """Sizes now, counts since the start (`clear` included)."""

    num_chunks: int
    num_variants: int
    num_bytes: int
    num_added: int
    num_replaced: int
    num_refused: int
    num_evicted: int
    num_uses: int


class VariantIndex:
    """Variants by chunk identity, bounded in bytes and number.

    Args:
        max_bytes: of KV and scores together.
        max_chunks: Cache-Craft's N.
        max_variants: Cache-Craft's M. The limit is N * M in all: a chunk may have more than M while
            others have fewer.
        window: requests in which prefixes are counted.
    Raises:
        LimitError: a limit below 1.
    """

    def __init__(self, *, max_bytes: int, max_chunks: int, max_variants: int, window: int) -> None:
        check_at_least("max_bytes", max_bytes, 1)
        check_at_least("max_chunks", max_chunks, 1)
        check_at_least("max_variants", max_variants, 1)
        self.max_variants = max_variants
        self.held = HeldVariants(
            max_bytes=max_bytes, max_entries=max_chunks * max_variants, window=window
        )
        # chunk -> (head, prefix) -> variant
        self._chunks: dict[Identity, dict[tuple[str, Prefix], Variant]] = {}
        self._asked = AccessTable(window)
        self.watchers: list[Callable[[Identity, Variant, bool], None]] = []
        """Told when a variant has come or has left, for whatever reason."""
        self._num_added = self._num_replaced = self._num_refused = self._num_evicted = 0

    def chunks(self) -> Iterator[tuple[Variant, ...]]:
        """The variants of each chunk, while nothing comes or leaves."""
        return (tuple(variants.values()) for variants in self._chunks.values())

    def find(self, identity: Identity) -> tuple[Variant, ...]:
        """All variants of the chunk, oldest first; no use is counted."""
        return tuple(self._chunks.get(identity, {}).values())

    def get(self, identity: Identity, head: str, prefix: Prefix) -> Variant | None:
        """The one variant; no use is counted."""
        return self._chunks.get(identity, {}).get((head, prefix))

    def ask(self, chunks: Iterable[tuple[Identity, str, Prefix]]) -> None:
        """Count one request: its distinct chunks, each with head and prefix. O(chunks)."""
        places = list(chunks)
        self._asked.observe([*places, *(identity for identity, _, _ in places)])
        self.held.next_request()

    def wants(
        self,
        identity: Identity,
        head: str,
        prefix: Prefix,
        *,
        scored: Scored = Scored.NOTHING,
        has_outward: bool = False,
        preprocessed: bool = False,
        nbytes: int = 0,
    ) -> bool:
        """Whether `put` would take such a variant, of so many bytes: ask before copying any KV."""
        held = self.held
        old = self.get(identity, head, prefix)
        if old is not None and (preprocessed <= old.preprocessed or old.is_exact):
            knows_more = scored > old.scored or (has_outward and old.outward is None)
            if preprocessed != old.preprocessed or not knows_more:
                return False
        if preprocessed:
            return held.fits(nbytes) or held.may_reserve(nbytes)
        if held.reserved_bytes + nbytes > held.max_bytes:
            return False
        if old is not None:
            return True
        if held.num_reserved >= held.max_entries:
            return False
        siblings = self.find(identity)
        asked = self._asked.count((identity, head, prefix) if siblings else identity)
        if len(siblings) >= self.max_variants:
            lowest = held.lowest_of(siblings)
            return lowest is not None and asked > self._asked.count(
                (identity, lowest.head, lowest.prefix)
            )
        return held.fits(nbytes) or asked >= ADMITTED_SHARE * self._asked_for_lowest()

    def gains(self, identity: Identity, head: str, prefix: Prefix, nbytes: int) -> bool:
        """Whether there is room for an exact variant, or it is asked for more often than what would
        leave: than that chunk, if it is moved, and behind its head and prefix, if it is exact, or
        chains that share a chunk would replace each other without end."""
        if self.held.fits(nbytes):
            return True
        lowest, asked_for_lowest = self.held.lowest(), self._asked_for_lowest()
        if lowest is not None and lowest.is_exact:
            chunk = self.held.identity_of(lowest)
            asked_for_lowest = self._asked.count((chunk, lowest.head, lowest.prefix))
        return len(self.held) > 0 and self._asked.count((identity, head, prefix)) > asked_for_lowest

    def put(self, identity: Identity, variant: Variant) -> bool:
        """Add `variant`, evicting others until it fits: O(log variants), amortised over uses.

        With the same identity, head and prefix it replaces the old one if it is preprocessed and
        the old one is not, or, where they agree in that, if more of it is scored, or its outward
        attention is known and the old one's is not. It takes over the old one's priority and
        uses, and what was measured of it alone. An exact one stays, and takes over what was
        measured.

        Returns:
            False: it is not wanted, is in the store already, is larger than the whole store, or, as
                the last of which others have left, too little may leave for it.
        """
        old = self.get(identity, variant.head, variant.prefix)
        scores, outward = variant.scores, variant.outward
        if old is not None:
            scores = old.scores if old.scored > variant.scored else scores
            outward = old.outward if outward is None else outward
        nbytes = nbytes_of(variant.blob, scores, outward)
        wanted = self.wants(
            identity,
            variant.head,
            variant.prefix,
            scored=variant.scored,
            has_outward=variant.outward is not None,
            preprocessed=variant.preprocessed,
            nbytes=nbytes,
        )
        if not wanted or variant in self.held:
            self._num_refused += 1
            return False
        if old is not None and old.is_exact and not variant.is_exact:
            self.held.learn(old, scores, outward)
            return False
        variant.scores, variant.outward = scores, outward
        return self._insert(identity, variant, nbytes, old)

    def insert(self, identity: Identity, variant: Variant) -> bool:
        """`put` what its caller has decided to keep: an exact one, which replaces any other.
        False: an exact one is in the store already, or too little may leave for it."""
        old = self.get(identity, variant.head, variant.prefix)
        if old is not None and old.is_exact:
            return False
        return self._insert(identity, variant, variant.nbytes, old)

    def turned_away(self, nbytes: int) -> None:
        """So many bytes were not admitted. For lack of room: what is held is that much older."""
        if not self.held.fits(nbytes):
            self.held.aging.turned_away(nbytes / self.held.max_bytes)

    def evict(self) -> bool:
        """What is to leave next leaves. False: nothing does."""
        lowest = self.held.lowest()
        if lowest is None or lowest.is_reserved:
            return False
        self._evict(lowest)
        return True

    def restore(self, identity: Identity, variant: Variant) -> bool:
        """Add what an earlier store has kept, with its priority and uses: nobody has asked this one
        for it yet. Nothing leaves for it. False: there is no room, or its place is taken."""
        nbytes, old = variant.nbytes, self.get(identity, variant.head, variant.prefix)
        if old is not None or not self.held.fits(nbytes):
            return False
        self._add(identity, variant, nbytes)
        return True

    def restore_all(self, kept: Iterable[tuple[Identity, Variant]]) -> list[Variant]:
        """`restore` each, what is to leave last first; what was used when the earlier store was
        this old is as old here. Returns those that were not added."""
        left, added = list[Variant](), list[Variant]()
        for identity, variant in kept:
            (added if self.restore(identity, variant) else left).append(variant)
            self.held.aging.resume(variant.priority, variant.num_uses)
        self.held.set_last_used(reversed(added))
        return left

    def drop(self, variant: Variant) -> None:
        """Take it out, which counts as no eviction. No effect if it has left."""
        if variant not in self.held:
            return
        identity = self.held.remove(variant)
        siblings = self._chunks[identity]
        del siblings[variant.head, variant.prefix]
        if not siblings:
            del self._chunks[identity]
        self._tell(identity, variant, is_here=False)

    def clear(self, *, keep: Callable[[Variant], bool] = lambda variant: False) -> None:
        """Forget every variant but those to keep; the counts stay. Not counted as eviction."""
        for variant in list(self.held):
            if not keep(variant):
                self.drop(variant)

    def stats(self) -> StoreStats:
        return StoreStats(
            num_chunks=len(self._chunks),
            num_variants=len(self.held),
            num_bytes=self.held.num_bytes,
            num_added=self._num_added,
            num_replaced=self._num_replaced,
            num_refused=self._num_refused,
            num_evicted=self._num_evicted,
            num_uses=self.held.num_uses,
        )

    def _insert(
        self, identity: Identity, variant: Variant, nbytes: int, old: Variant | None
    ) -> bool:
        if old is not None:
            self.drop(old)
            variant.num_uses = max(variant.num_uses, old.num_uses)
            variant.priority = max(variant.priority, old.priority)
            self._num_replaced += 1
        if not self._make_room(identity, variant, nbytes):
            self._num_refused += 1
            return False
        variant.priority = max(variant.priority, self.held.aging.now(variant.num_uses))
        self._add(identity, variant, nbytes)
        return True

    def _add(self, identity: Identity, variant: Variant, nbytes: int) -> None:
        self.held.add(identity, variant, nbytes)
        self._chunks.setdefault(identity, {})[variant.head, variant.prefix] = variant
        self._num_added += 1
        self._tell(identity, variant, is_here=True)

    def _tell(self, identity: Identity, variant: Variant, *, is_here: bool) -> None:
        for watcher in self.watchers:
            watcher(identity, variant, is_here)

    def _make_room(self, identity: Identity, variant: Variant, nbytes: int) -> bool:
        siblings, is_full = self.find(identity), not self.held.fits(nbytes)
        if is_full and not variant.preprocessed and len(siblings) >= self.max_variants:
            lowest = self.held.lowest_of(siblings)
            if lowest is not None:
                self._evict(lowest)
        while not self.held.fits(nbytes):
            if not self.evict():
                return False
        return True

    def _asked_for_lowest(self) -> float:
        """Requests for the chunk of what leaves next. Infinite: nothing may leave."""
        lowest = self.held.lowest()
        if lowest is None or lowest.is_reserved:
            return inf
        return self._asked.count(self.held.identity_of(lowest))

    def _evict(self, variant: Variant) -> None:
        self.held.aging.left(variant.priority)
        self.drop(variant)
        self._num_evicted += 1
