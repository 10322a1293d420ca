"""Which variants of which chunks a store keeps: KV keyed by content, several variants a chunk
(Cache-Craft 3.3).

    identity ──► (head, ()) ────────► Variant: blob, scores, uses
                 (head, (c7, c2)) ──► Variant: ...   at most `max_chunks` * `max_variants` in all

    leaves first   the lowest priority by `Aging`: least frequently used, and what nobody has used
                   for some turnovers of the store before all else. Among equals the least recently
                   used one. Preprocessed variants that are reserved leave for nothing.
    enters         a chunk that is asked for at least a quarter as often as that of the variant that
                   would leave. A chunk that has `max_variants` gets another only for a prefix that
                   is asked for more often than that of its lowest one, in whose place it comes
                   where the store is full.
    is reserved    a preprocessed variant until its first use, for `RESERVED_WINDOWS` windows at
                   most, as long as all of them take `RESERVED_SHARE` of the store at most, and
                   unless a slower tier has it. What finds no such place comes only where there is
                   room.

"Recently" and "often" count requests and never the clock: tensor-parallel ranks decide alike.

What KV is, the index does not know: a blob has bytes, in a replay nothing else. No positions, no
device, no prompt. One thread uses it.
Invariant: bytes and variants are within their limits whenever a method returns.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from math import inf
from typing import Any, NamedTuple, TypeAlias

from radix_ext.access_table import AccessTable
from radix_ext.cfo import Attention, Prefix, Scored
from radix_ext.errors import IntegrityError, check_at_least
from radix_ext.eviction import NEW_ON_HOST, Aging

Identity = Hashable
"""Of a chunk, for one tenant."""

ADMITTED_SHARE = 0.25
"""Of the requests for the chunk of the variant that would leave. The smaller, the sooner a store
follows its traffic, and the more it copies (eval/LOG.md)."""

RESERVED_WINDOWS = 10
"""Of requests: what nobody has asked for by then is as good as any other chunk."""
RESERVED_SHARE = 0.5
"""Of the store, so that live traffic has the rest."""

_Place: TypeAlias = tuple[str, Prefix]
"""Head and prefix."""

_Entry: TypeAlias = tuple[bool, float, int, int]
"""Is reserved, priority, last used, serial."""


@dataclass(eq=False)
class Variant:
    """One chunk's KV as computed after `head` and `prefix`.
    Its readers keep it alive when it leaves the store."""

    prefix: Prefix
    """The chunks before it, in order."""
    blob: Any
    """Its KV, with its size as `nbytes`."""
    scores: Attention | None = None
    preprocessed: bool = False
    """Computed ahead of requests, after similar chunks (FusionRAG 3.1)."""
    head: str = ""
    """Names the text before it that is no chunk: `text_before`."""
    start: int = 0
    """Position of the first token."""
    outward: Any = None
    """Per token: attention beyond the chunk in the calibrated heads. None: not known."""
    priority: float = 0.0
    """As of its last use. Written by the store alone, like the fields below."""
    num_uses: int = 0
    is_below: bool = False
    """A slower tier has it."""
    is_exact: bool = False
    """What an ordinary prefill computes there, bit by bit."""
    is_reserved: bool = field(default=False, init=False)
    """Ordinary variants leave it alone."""
    last_used: int = 0
    serial: int = field(default=0, init=False)
    """New each time it enters a store; stays when it leaves."""

    @property
    def nbytes(self) -> int:
        """Bytes of KV and scores."""
        return _nbytes(self.blob, self.scores, self.outward)

    @property
    def scored(self) -> Scored:
        """How much of it is measured."""
        return self.scores.scored if self.scores else Scored.NOTHING


def _nbytes(*parts: Any) -> int:
    num_bytes: int = sum(part.nbytes for part in parts if part is not None)
    return num_bytes


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
        self._max_bytes, self._max_in_all, self._max_variants = (
            max_bytes,
            max_chunks * max_variants,
            max_variants,
        )
        self._asked = AccessTable(window)
        self._num_asked = 0
        self._chunks: dict[Identity, dict[_Place, Variant]] = {}
        # serial -> ..., bytes when it came
        self._held: dict[int, tuple[Identity, Variant, int]] = {}
        self._aging = Aging(NEW_ON_HOST)
        self._reserved: deque[tuple[int, int]] = deque()
        """(request with which it ends, serial)"""
        self._order: list[_Entry] = []
        """Heap. An entry may be outdated: where its variant has risen since, it is corrected when
        it surfaces. Where it has fallen, which no longer being reserved does, a second one has been
        pushed. Serials, not variants: an outdated entry keeps no KV in memory."""
        self._stays: Callable[[Variant], bool] = lambda variant: False
        self.watchers: list[Callable[[Identity, Variant, bool], None]] = []
        """Told when a variant has come or has left, for whatever reason."""
        self._clock = 0
        self._num_bytes = self._num_reserved = self._reserved_bytes = 0
        self._num_added = self._num_replaced = self._num_refused = self._num_evicted = (
            self._num_uses
        ) = 0

    def stay_if(self, stays: Callable[[Variant], bool]) -> None:
        """What must not leave for others as long as that holds."""
        self._stays = stays

    @property
    def max_bytes(self) -> int:
        """Of KV and scores together."""
        return self._max_bytes

    @property
    def reserved_bytes(self) -> int:
        """Of what ordinary variants leave alone."""
        return self._reserved_bytes

    @property
    def max_variants(self) -> int:
        """That a chunk gets without asking how often."""
        return self._max_variants

    @property
    def max_entries(self) -> int:
        """Variants of all chunks together."""
        return self._max_in_all

    def variants(self) -> Iterator[Variant]:
        """All, while nothing comes or leaves."""
        return (variant for _, variant, _ in self._held.values())

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
        self._num_asked += 1
        while self._reserved and self._reserved[0][0] <= self._num_asked:
            _, serial = self._reserved.popleft()
            if serial in self._held:
                self._release(self._held[serial][1])

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
        if nbytes > self._max_bytes:
            return False
        old = self.get(identity, head, prefix)
        if old is not None and (preprocessed <= old.preprocessed or old.is_exact):
            knows_more = scored > old.scored or (has_outward and old.outward is None)
            if preprocessed != old.preprocessed or not knows_more:
                return False
        if not preprocessed and self._reserved_bytes + nbytes > self._max_bytes:
            return False
        if preprocessed:
            return self._fits(nbytes) or self._may_reserve(nbytes)
        if old is not None:
            return True
        if self._num_reserved >= self._max_in_all:
            return False
        siblings = self.find(identity)
        asked = self._asked.count((identity, head, prefix) if siblings else identity)
        if len(siblings) >= self._max_variants:
            lowest = self._lowest_of(siblings)
            return lowest is not None and asked > self._asked.count(
                (identity, lowest.head, lowest.prefix)
            )
        return self._fits(nbytes) or asked >= ADMITTED_SHARE * self._asked_for_lowest()

    def gains(self, identity: Identity, nbytes: int) -> bool:
        """Whether there is room, or it is asked for more often than what would leave."""
        return self._fits(nbytes) or (
            bool(self._held) and self._asked.count(identity) > self._asked_for_lowest()
        )

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
        nbytes = _nbytes(variant.blob, scores, outward)
        wanted = self.wants(
            identity,
            variant.head,
            variant.prefix,
            scored=variant.scored,
            has_outward=variant.outward is not None,
            preprocessed=variant.preprocessed,
            nbytes=nbytes,
        )
        if not wanted or self.holds(variant):
            self._num_refused += 1
            return False
        if old is not None and old.is_exact and not variant.is_exact:
            self._learn(old, scores, outward)
            return False
        variant.scores, variant.outward = scores, outward
        return self._insert(identity, variant, nbytes, old)

    def insert(self, identity: Identity, variant: Variant) -> bool:
        """`put` what its caller has decided to keep: an exact one, which replaces any other.

        Returns:
            False: an exact one is in the store already, or too little may leave for it.
        """
        old = self.get(identity, variant.head, variant.prefix)
        if old is not None and old.is_exact:
            return False
        return self._insert(identity, variant, variant.nbytes, old)

    def evict(self) -> bool:
        """What is to leave next leaves. False: nothing does."""
        lowest = self._lowest()
        if lowest is None or lowest.is_reserved:
            return False
        self._evict(lowest)
        return True

    def restore(self, identity: Identity, variant: Variant) -> bool:
        """Add what an earlier store has kept, with its priority and uses: nobody has asked this one
        for it yet. Nothing leaves for it.

        Returns:
            False: nothing changed. There is no room, or its place is taken.
        """
        nbytes = variant.nbytes
        if not self._fits(nbytes) or self.get(identity, variant.head, variant.prefix) is not None:
            return False
        self._add(identity, variant, nbytes, reserves=self._reserves(variant, nbytes))
        return True

    def restore_all(self, kept: Iterable[tuple[Identity, Variant]]) -> list[Variant]:
        """`restore` each, what is to leave last first; what was used when the earlier store was
        this old is as old here. Returns those that were not added."""
        left, added = list[Variant](), list[Variant]()
        for identity, variant in kept:
            (added if self.restore(identity, variant) else left).append(variant)
            self._aging.resume(variant.priority, variant.num_uses)
        for variant in reversed(added):
            self._clock += 1
            variant.last_used = self._clock
        self._sort()
        return left

    def use(self, variant: Variant) -> None:
        """Count one use. No effect if it has left."""
        if self.holds(variant):
            self._clock += 1
            self._num_uses += 1
            variant.num_uses += 1
            variant.last_used = self._clock
            variant.priority = self._aging.now(variant.num_uses)
            self._release(variant)

    def touch(self, variant: Variant) -> None:
        """It was used, which counts for nothing but its age. No effect if it has left."""
        if self.holds(variant):
            self._clock += 1
            variant.last_used = self._clock
            variant.priority = max(variant.priority, self._aging.now(variant.num_uses))

    def learn(self, variant: Variant, scores: Attention | None, outward: Any) -> None:
        """What is measured of it, if there is room for that. No effect if it has left."""
        if self.holds(variant):
            self._learn(variant, scores, outward)

    def set_below(self, variant: Variant) -> None:
        """A slower tier has it. No effect if it has left."""
        if self.holds(variant):
            variant.is_below = True
            self._release(variant)

    def drop(self, variant: Variant) -> None:
        """Take it out, which counts as no eviction. No effect if it has left."""
        if not self.holds(variant):
            return
        identity, _, nbytes = self._held.pop(variant.serial)
        siblings = self._chunks[identity]
        del siblings[variant.head, variant.prefix]
        if not siblings:
            del self._chunks[identity]
        self._count(variant, nbytes, -1)
        self._tell(identity, variant, is_here=False)

    def clear(self, *, keep: Callable[[Variant], bool] = lambda variant: False) -> None:
        """Forget every variant but those to keep; the counts stay. Not counted as eviction."""
        for _, variant, _ in list(self._held.values()):
            if not keep(variant):
                self.drop(variant)
        self._sort()

    def forget_scores(self) -> None:
        """Another calibration makes them stale: every variant counts as not scored."""
        for _, variant, _ in list(self._held.values()):
            self._learn(variant, None, None)

    def stats(self) -> StoreStats:
        """Sizes and counts, O(1)."""
        return StoreStats(
            num_chunks=len(self._chunks),
            num_variants=len(self._held),
            num_bytes=self._num_bytes,
            num_added=self._num_added,
            num_replaced=self._num_replaced,
            num_refused=self._num_refused,
            num_evicted=self._num_evicted,
            num_uses=self._num_uses,
        )

    def profile(self) -> dict[str, float]:
        """Variants, chunks, the most variants of one chunk, the mean number of uses,
        and the share of variants never used. O(variants)."""
        variants = [variant for _, variant, _ in self._held.values()]
        return {
            "variants": len(variants),
            "chunks": len(self._chunks),
            "most_variants": max(map(len, self._chunks.values()), default=0),
            "mean_uses": round(sum(v.num_uses for v in variants) / max(1, len(variants)), 3),
            "unused": round(sum(not v.num_uses for v in variants) / max(1, len(variants)), 3),
        }

    def check_integrity(self) -> None:
        """Check every invariant and counter; O(variants), for tests and idle moments.

        Raises:
            IntegrityError: with all violations.
        """
        violations = list(self._violations())
        if violations:
            raise IntegrityError(violations)

    def _learn(self, variant: Variant, scores: Attention | None, outward: Any) -> None:
        identity, _, nbytes = self._held[variant.serial]
        self._count(variant, nbytes, -1)
        variant.scores, variant.outward = scores, outward
        if self._num_bytes + variant.nbytes > self._max_bytes:
            variant.scores = variant.outward = None
        self._held[variant.serial] = identity, variant, variant.nbytes
        self._count(variant, variant.nbytes, 1)

    def _insert(
        self, identity: Identity, variant: Variant, nbytes: int, old: Variant | None
    ) -> bool:
        if old is not None:
            self.drop(old)
            variant.num_uses = max(variant.num_uses, old.num_uses)
            variant.priority = max(variant.priority, old.priority)
            self._num_replaced += 1
        reserves = self._reserves(variant, nbytes)
        if not self._make_room(identity, variant, nbytes):
            self._num_refused += 1
            return False
        variant.priority = max(variant.priority, self._aging.now(variant.num_uses))
        self._add(identity, variant, nbytes, reserves=reserves)
        return True

    def _may_reserve(self, nbytes: int) -> bool:
        return self._reserved_bytes + nbytes <= RESERVED_SHARE * self._max_bytes and (
            self._num_reserved < RESERVED_SHARE * self._max_in_all
        )

    def _reserves(self, variant: Variant, nbytes: int) -> bool:
        is_new = variant.preprocessed and not (variant.num_uses or variant.is_below)
        return is_new and self._may_reserve(nbytes)

    def _add(
        self, identity: Identity, variant: Variant, nbytes: int, *, reserves: bool = False
    ) -> None:
        self._clock += 1
        variant.last_used = variant.serial = self._clock
        self._chunks.setdefault(identity, {})[variant.head, variant.prefix] = variant
        self._held[variant.serial] = identity, variant, nbytes
        variant.is_reserved = reserves
        if reserves:
            self._reserved.append(
                (self._num_asked + RESERVED_WINDOWS * self._asked.window, variant.serial)
            )
        self._count(variant, nbytes, 1)
        self._num_added += 1
        heappush(self._order, self._entry(variant))
        self._bound_order()
        self._tell(identity, variant, is_here=True)

    def _tell(self, identity: Identity, variant: Variant, *, is_here: bool) -> None:
        for watcher in self.watchers:
            watcher(identity, variant, is_here)

    def _release(self, variant: Variant) -> None:
        """Ordinary variants may take its place."""
        if variant.is_reserved:
            nbytes = self._held[variant.serial][2]
            self._count(variant, nbytes, -1)
            variant.is_reserved = False
            self._count(variant, nbytes, 1)
            heappush(self._order, self._entry(variant))
            self._bound_order()

    def holds(self, variant: Variant) -> bool:
        """Whether it is in the store."""
        held = self._held.get(variant.serial)
        return held is not None and held[1] is variant

    def _make_room(self, identity: Identity, variant: Variant, nbytes: int) -> bool:
        siblings = self.find(identity)
        is_full = not self._fits(nbytes)
        if is_full and not variant.preprocessed and len(siblings) >= self._max_variants:
            lowest = self._lowest_of(siblings)
            if lowest is not None:
                self._evict(lowest)
        while not self._fits(nbytes):
            if not self.evict():
                return False
        return True

    def _fits(self, nbytes: int) -> bool:
        return self._num_bytes + nbytes <= self._max_bytes and len(self._held) < self._max_in_all

    def _lowest_of(self, siblings: Iterable[Variant]) -> Variant | None:
        free = (v for v in siblings if not (v.is_reserved or self._stays(v)))
        return min(free, key=self._entry, default=None)

    def _lowest(self) -> Variant | None:
        """What leaves next; it stays in the heap. None: nothing may leave."""
        staying, found = list[_Entry](), None
        while self._order and found is None:
            entry = self._order[0]
            held = self._held.get(entry[-1])
            if held is None:
                heappop(self._order)
            elif self._entry(held[1]) != entry:
                heapreplace(self._order, self._entry(held[1]))
            elif self._stays(held[1]):
                staying.append(heappop(self._order))
            else:
                found = held[1]
        for entry in staying:
            heappush(self._order, entry)
        return found

    def _asked_for_lowest(self) -> float:
        """Requests for the chunk of what leaves next. Infinite: nothing may leave."""
        lowest = self._lowest()
        if lowest is None or lowest.is_reserved:
            return inf
        return self._asked.count(self._held[lowest.serial][0])

    def _evict(self, variant: Variant) -> None:
        self._aging.left(variant.priority)
        self.drop(variant)
        self._num_evicted += 1

    def _count(self, variant: Variant, nbytes: int, sign: int) -> None:
        self._num_bytes += sign * nbytes
        if variant.is_reserved:
            self._reserved_bytes += sign * nbytes
            self._num_reserved += sign

    def _entry(self, variant: Variant) -> _Entry:
        return variant.is_reserved, variant.priority, variant.last_used, variant.serial

    def _bound_order(self) -> None:
        if len(self._order) > 2 * len(self._held) + 16:  # mostly outdated entries
            self._sort()

    def _sort(self) -> None:
        self._order = [self._entry(variant) for _, variant, _ in self._held.values()]
        heapify(self._order)

    def _violations(self) -> Iterator[str]:
        held = [variant for _, variant, _ in self._held.values()]
        reserved = [variant for variant in held if variant.is_reserved]
        for variants, counted in ((held, self._num_bytes), (reserved, self._reserved_bytes)):
            if (num_bytes := sum(each.nbytes for each in variants)) != counted:
                yield f"num_bytes {counted} but the variants count {num_bytes}"
        if self._num_bytes > self._max_bytes:
            yield f"num_bytes {self._num_bytes} over max_bytes {self._max_bytes}"
        if len(reserved) != self._num_reserved:
            yield f"{len(reserved)} variants are reserved but {self._num_reserved} were counted"
        if len(self._held) > self._max_in_all:
            yield f"{len(self._held)} variants over {self._max_in_all}"
        listed = sum(len(variants) for variants in self._chunks.values())
        if listed != len(self._held):
            yield f"{listed} variants listed by chunk but {len(self._held)} held"
        if empty := [identity for identity, variants in self._chunks.items() if not variants]:
            yield f"chunks without a variant: {empty[:8]}"
        entries = {entry[-1]: entry for entry in sorted(self._order, reverse=True)}
        for serial, (identity, variant, nbytes) in self._held.items():
            name = f"variant {serial} of chunk {identity}"
            if (
                variant.serial != serial
                or self.get(identity, variant.head, variant.prefix) is not variant
            ):
                yield f"{name} is not where its identity, head and prefix say"
            if variant.nbytes != nbytes:
                yield f"{name} came with {nbytes} bytes and has {variant.nbytes}"
            if serial not in entries or self._entry(variant) < entries[serial]:
                yield (
                    f"{name} is {self._entry(variant)} but {entries.get(serial)} in the eviction"
                    " order"
                )
