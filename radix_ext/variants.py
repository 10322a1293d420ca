"""The variants that a store holds, within its limits, in the order in which they leave.

leaves first   the lowest priority by `Aging`: least frequently used, and what nobody has used
               for some turnovers of the store before all else. Among equals the least recently
               used one. Preprocessed variants that are reserved leave for nothing.
is reserved    a preprocessed variant until its first use, for `RESERVED_WINDOWS` windows at
               most, as long as all of them take `RESERVED_SHARE` of the store at most, and
               unless a slower tier has it. What finds no such place comes only where there is
               room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, TypeAlias

from radix_ext.cfo import Attention, KvFacts, Scored
from radix_ext.eviction import NEW_ON_HOST, Aging

Identity = Hashable  # of a chunk, for one tenant

RESERVED_WINDOWS = 10
"""Of requests: what nobody has asked for by then is as good as any other chunk."""
RESERVED_SHARE = 0.5  # of the store, so that live traffic has the rest

_Entry: TypeAlias = tuple[bool, float, int, int]  # is reserved, priority, last used, serial


@dataclass(eq=False)
class Variant(KvFacts):
    """Of a chunk, in a store. Its readers keep it alive when it leaves."""

    blob: Any  # its KV, with its size as `nbytes`
    _: KW_ONLY
    preprocessed: bool = False  # computed ahead of requests, after similar chunks (FusionRAG 3.1)
    priority: float = 0.0  # as of its last use. Written by the store alone, like the fields below
    num_uses: int = 0
    is_below: bool = False  # a slower tier has it
    is_exact: bool = False  # what an ordinary prefill computes there, bit by bit
    is_reserved: bool = field(default=False, init=False)  # ordinary variants leave it alone
    last_used: int = 0
    serial: int = field(default=0, init=False)
    """New each time it enters a store; stays when it leaves."""

    @property
    def nbytes(self) -> int:
        """Bytes of KV and scores."""
        return nbytes_of(self.blob, self.scores, self.outward)

    @property
    def scored(self) -> Scored:
        return self.scores.scored if self.scores else Scored.NOTHING


def nbytes_of(*parts: Any) -> int:
    """Of all parts together; None has none."""
    num_bytes: int = sum(part.nbytes for part in parts if part is not None)
    return num_bytes


class HeldVariants:
    """Bytes, uses and eviction order of a store's variants; `VariantIndex` alone adds and removes.

    Args:
        max_bytes: of KV and scores together.
        max_entries: variants of all chunks together.
        window: as of `RESERVED_WINDOWS`.
    """

    def __init__(self, *, max_bytes: int, max_entries: int, window: int) -> None:
        self.max_bytes, self.max_entries, self._window = max_bytes, max_entries, window
        self.num_bytes = self.reserved_bytes = self.num_reserved = self.num_uses = 0
        self.aging = Aging(NEW_ON_HOST)
        self._clock = self._num_requests = 0
        # serial -> ..., bytes when it came
        self._held: dict[int, tuple[Identity, Variant, int]] = {}
        self._reserved: deque[tuple[int, int]] = deque()  # (request with which it ends, serial)
        self._order: list[_Entry] = []
        """Heap. An entry may be outdated: where its variant has risen since, it is corrected when
        it surfaces. Where it has fallen, which no longer being reserved does, a second one has been
        pushed. Serials, not variants: an outdated entry keeps no KV in memory."""
        self._stays: Callable[[Variant], bool] = lambda variant: False

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[Variant]:
        """All variants as they came, while none comes or leaves."""
        return (variant for _, variant, _ in self._held.values())

    def __contains__(self, variant: Variant) -> bool:
        held = self._held.get(variant.serial)
        return held is not None and held[1] is variant

    def identity_of(self, variant: Variant) -> Identity:
        """The chunk of a variant that is held."""
        return self._held[variant.serial][0]

    def stay_if(self, stays: Callable[[Variant], bool]) -> None:
        """A variant must not leave for others as long as `stays` holds for it."""
        self._stays = stays

    def fits(self, nbytes: int) -> bool:
        """Whether there is room for another variant of so many bytes."""
        return self.num_bytes + nbytes <= self.max_bytes and len(self._held) < self.max_entries

    def may_reserve(self, nbytes: int) -> bool:
        """Whether another variant of so many bytes may be reserved."""
        return self.reserved_bytes + nbytes <= RESERVED_SHARE * self.max_bytes and (
            self.num_reserved < RESERVED_SHARE * self.max_entries
        )

    def add(self, identity: Identity, variant: Variant, nbytes: int) -> None:
        """A variant that fits comes. O(log variants), amortised over uses."""
        self._clock += 1
        variant.last_used = variant.serial = self._clock
        self._held[variant.serial] = identity, variant, nbytes
        is_new = variant.preprocessed and not (variant.num_uses or variant.is_below)
        variant.is_reserved = is_new and self.may_reserve(nbytes)
        if variant.is_reserved:
            ends = self._num_requests + RESERVED_WINDOWS * self._window
            self._reserved.append((ends, variant.serial))
        self._count(variant, nbytes, 1)
        self._push(variant)

    def remove(self, variant: Variant) -> Identity:
        """A variant leaves. Returns its chunk."""
        identity, _, nbytes = self._held.pop(variant.serial)
        self._count(variant, nbytes, -1)
        return identity

    def next_request(self) -> None:
        """End the reservations whose windows are over."""
        self._num_requests += 1
        while self._reserved and self._reserved[0][0] <= self._num_requests:
            _, serial = self._reserved.popleft()
            if serial in self._held:
                self._release(self._held[serial][1])

    def use(self, variant: Variant) -> None:
        """Count one use. No effect if it has left."""
        if variant in self:
            self._clock += 1
            self.num_uses += 1
            variant.num_uses += 1
            variant.last_used = self._clock
            variant.priority = self.aging.now(variant.num_uses)
            self._release(variant)

    def touch(self, variant: Variant) -> None:
        """The variant was used; only its age counts that. No effect if it has left."""
        if variant in self:
            self._clock += 1
            variant.last_used = self._clock
            variant.priority = max(variant.priority, self.aging.now(variant.num_uses))

    def set_last_used(self, variants: Iterable[Variant]) -> None:
        """These variants were used after all others, in this order."""
        for variant in variants:
            self._clock += 1
            variant.last_used = self._clock

    def set_below(self, variant: Variant) -> None:
        """A slower tier has the variant. No effect if it has left."""
        if variant in self:
            variant.is_below = True
            self._release(variant)

    def learn(self, variant: Variant, scores: Attention | None, outward: Any) -> None:
        """Keep what is measured of the variant, if there is room. No effect if it has left."""
        if variant in self:
            identity, _, nbytes = self._held[variant.serial]
            self._count(variant, nbytes, -1)
            variant.scores, variant.outward = scores, outward
            if self.num_bytes + variant.nbytes > self.max_bytes:
                variant.scores = variant.outward = None
            self._held[variant.serial] = identity, variant, variant.nbytes
            self._count(variant, variant.nbytes, 1)

    def forget_scores(self) -> None:
        """Another calibration makes them stale: every variant counts as not scored."""
        for variant in list(self):
            self.learn(variant, None, None)

    def lowest(self) -> Variant | None:
        """The variant that leaves next; it stays in the heap. None: no variant may leave."""
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

    def lowest_of(self, siblings: Iterable[Variant]) -> Variant | None:
        """Which of these leaves first. None: none of them may."""
        free = (v for v in siblings if not (v.is_reserved or self._stays(v)))
        return min(free, key=self._entry, default=None)

    def _release(self, variant: Variant) -> None:
        """Ordinary variants may take its place."""
        if variant.is_reserved:
            nbytes = self._held[variant.serial][2]
            self._count(variant, nbytes, -1)
            variant.is_reserved = False
            self._count(variant, nbytes, 1)
            self._push(variant)

    def _count(self, variant: Variant, nbytes: int, sign: int) -> None:
        self.num_bytes += sign * nbytes
        if variant.is_reserved:
            self.reserved_bytes += sign * nbytes
            self.num_reserved += sign

    def _entry(self, variant: Variant) -> _Entry:
        return variant.is_reserved, variant.priority, variant.last_used, variant.serial

    def _push(self, variant: Variant) -> None:
        heappush(self._order, self._entry(variant))
        if len(self._order) > 2 * len(self._held) + 16:  # mostly outdated entries
            self._order = [self._entry(each) for each in self]
            heapify(self._order)
