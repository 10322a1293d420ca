"""Which variants of which chunks a store keeps: KV keyed by content, several variants a chunk (Cache-Craft 3.3).

    identity ──► prefix () ────────► Variant: blob, scores, f_r
                 prefix (c7, c2) ──► Variant: ...            at most `max_variants`

The variant with the lowest f_r (1/CFO summed over its uses) leaves first, among equals the least recently used one. "Recently" is
a counter and never the clock: tensor-parallel ranks decide alike. f_r does not age, so a variant that was popular once stays
until others overtake it. What KV is, the index does not know: a blob has bytes, and in a
replay nothing else. No positions, no device, no prompt. One thread uses it.

Invariant: bytes, chunks and variants of each chunk are within their limits whenever a method returns.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from typing import Any, NamedTuple

from radix_ext.cfo import Attention, Prefix
from radix_ext.errors import IntegrityError, check_at_least

Identity = Hashable
"""Of a chunk, for one tenant."""


@dataclass(eq=False)
class Variant:
    """One chunk's KV as computed after `prefix`. Its readers keep it alive when it leaves the store."""

    prefix: Prefix
    """The chunks before it, in order, the template head excluded."""
    blob: Any
    """Its KV, with its size as `nbytes`."""
    scores: Attention | None = None
    preprocessed: bool = False
    """Computed ahead of requests, after similar chunks (FusionRAG 3.1)."""
    reuse: float = 0.0
    """f_r. Written by the store alone, like the fields below."""
    last_used: int = 0
    serial: int = field(default=0, init=False)
    """New each time it enters a store; stays when it leaves."""

    @property
    def nbytes(self) -> int:
        """Bytes of KV and scores."""
        kv: int = self.blob.nbytes
        return kv + (self.scores.nbytes if self.scores else 0)


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
    """Variants by chunk identity, bounded in bytes, chunks and variants a chunk.

    Args:
        max_bytes: of KV and scores together.
        max_chunks: Cache-Craft's N.
        max_variants: Cache-Craft's M, per chunk.
    Raises:
        LimitError: a limit below 1.
    """

    def __init__(self, *, max_bytes: int, max_chunks: int, max_variants: int) -> None:
        check_at_least("max_bytes", max_bytes, 1)
        check_at_least("max_chunks", max_chunks, 1)
        check_at_least("max_variants", max_variants, 1)
        self._max_bytes, self._max_chunks, self._max_variants = max_bytes, max_chunks, max_variants
        self._chunks: dict[Identity, dict[Prefix, Variant]] = {}
        self._held: dict[int, tuple[Identity, Variant, int]] = {}  # serial -> ..., bytes when it came
        self._order: list[tuple[float, int, int]] = []
        """Heap of (f_r, last used, serial). Both only grow, so an entry may be older than its variant: it is corrected when it
        surfaces. Serials instead of variants: an outdated entry keeps no KV in memory."""
        self._clock = 0
        self._num_bytes = 0
        self._num_added = self._num_replaced = self._num_refused = self._num_evicted = self._num_uses = 0

    @property
    def max_variants(self) -> int:
        """Cache-Craft's M."""
        return self._max_variants

    def find(self, identity: Identity) -> tuple[Variant, ...]:
        """All variants of the chunk, oldest first; no use is counted."""
        return tuple(self._chunks.get(identity, {}).values())

    def wants(self, identity: Identity, prefix: Prefix, *, scored: bool = False, preprocessed: bool = False) -> bool:
        """Whether `put` would take such a variant if it fits: ask before copying any KV."""
        old = self._chunks.get(identity, {}).get(prefix)
        return old is None or (preprocessed, scored) > (old.preprocessed, old.scores is not None)

    def put(self, identity: Identity, variant: Variant) -> bool:
        """Add `variant`, evicting others until it fits: O(log variants), amortised over uses.

        With the same identity and prefix it replaces the old one, and takes over its f_r, if it is preprocessed and the old
        one is not, or is scored and the old one, otherwise equal, is not.

        Returns:
            False: nothing changed. It brings nothing new, is in the store already, or is larger than the whole store.
        """
        nbytes, scored = variant.nbytes, variant.scores is not None
        wanted = self.wants(identity, variant.prefix, scored=scored, preprocessed=variant.preprocessed)
        if nbytes > self._max_bytes or not wanted or self._holds(variant):
            self._num_refused += 1
            return False
        old = self._chunks.get(identity, {}).get(variant.prefix)
        if old is not None:
            variant.reuse = max(variant.reuse, old.reuse)
            self._drop(old)
            self._num_replaced += 1
        self._make_room(identity, nbytes)
        self._clock += 1
        variant.last_used = variant.serial = self._clock
        self._chunks.setdefault(identity, {})[variant.prefix] = variant
        self._held[variant.serial] = identity, variant, nbytes
        self._num_bytes += nbytes
        self._num_added += 1
        heappush(self._order, (variant.reuse, variant.last_used, variant.serial))
        if len(self._order) > 2 * len(self._held) + 16:  # mostly entries of variants that left otherwise
            self._order = [(v.reuse, v.last_used, v.serial) for _, v, _ in self._held.values()]
            heapify(self._order)
        return True

    def use(self, variant: Variant, cfo: float | None) -> None:
        """Count one use: f_r += 1/CFO (Cache-Craft 3.3), or 1 for selectors that know no CFO. No effect if it has left.

        Raises:
            ValueError: `cfo` is not in (0, 1].
        """
        if cfo is not None and not 0 < cfo <= 1:
            raise ValueError(f"cfo must be over 0 and at most 1 but got {cfo}")
        if self._holds(variant):
            self._clock += 1
            variant.reuse += 1.0 if cfo is None else 1 / cfo
            variant.last_used = self._clock
            self._num_uses += 1

    def clear(self) -> None:
        """Forget everything; the counts stay. Not counted as eviction."""
        self._chunks.clear()
        self._held.clear()
        self._order.clear()
        self._num_bytes = 0

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
        """Variants, chunks, the most variants of one chunk, the mean f_r, and the share of variants never used. O(variants)."""
        reuse = [variant.reuse for _, variant, _ in self._held.values()]
        return {
            "variants": len(reuse),
            "chunks": len(self._chunks),
            "most_variants": max(map(len, self._chunks.values()), default=0),
            "mean_reuse": round(sum(reuse) / max(1, len(reuse)), 3),
            "unused": round(reuse.count(0) / max(1, len(reuse)), 3),
        }

    def check_integrity(self) -> None:
        """Check every invariant and counter; O(variants), for tests and idle moments.

        Raises:
            IntegrityError: with all violations.
        """
        violations = list(self._violations())
        if violations:
            raise IntegrityError(violations)

    def _holds(self, variant: Variant) -> bool:
        held = self._held.get(variant.serial)
        return held is not None and held[1] is variant

    def _make_room(self, identity: Identity, nbytes: int) -> None:
        siblings = self._chunks.get(identity, {})
        if len(siblings) >= self._max_variants:
            self._evict(min(siblings.values(), key=lambda v: (v.reuse, v.last_used)))
        while self._num_bytes + nbytes > self._max_bytes or (
            identity not in self._chunks and len(self._chunks) >= self._max_chunks
        ):
            self._evict(self._lowest())

    def _lowest(self) -> Variant:
        while True:
            reuse, last_used, serial = heappop(self._order)
            if serial in self._held:
                variant = self._held[serial][1]
                if (variant.reuse, variant.last_used) == (reuse, last_used):
                    return variant
                heappush(self._order, (variant.reuse, variant.last_used, serial))

    def _evict(self, variant: Variant) -> None:
        self._drop(variant)
        self._num_evicted += 1

    def _drop(self, variant: Variant) -> None:
        identity, _, nbytes = self._held.pop(variant.serial)
        siblings = self._chunks[identity]
        del siblings[variant.prefix]
        if not siblings:
            del self._chunks[identity]
        self._num_bytes -= nbytes

    def _violations(self) -> Iterator[str]:
        counted = sum(nbytes for _, _, nbytes in self._held.values())
        if counted != self._num_bytes:
            yield f"num_bytes {self._num_bytes} but the variants count {counted}"
        if self._num_bytes > self._max_bytes:
            yield f"num_bytes {self._num_bytes} over max_bytes {self._max_bytes}"
        if len(self._chunks) > self._max_chunks:
            yield f"{len(self._chunks)} chunks over max_chunks {self._max_chunks}"
        listed = sum(len(variants) for variants in self._chunks.values())
        if listed != len(self._held):
            yield f"{listed} variants listed by chunk but {len(self._held)} held"
        for identity, variants in self._chunks.items():
            if not 1 <= len(variants) <= self._max_variants:
                yield f"chunk {identity} has {len(variants)} variants, not 1 to {self._max_variants}"
        entries = {serial: (reuse, last_used) for reuse, last_used, serial in sorted(self._order, reverse=True)}
        for serial, (identity, variant, nbytes) in self._held.items():
            name = f"variant {serial} of chunk {identity}"
            if variant.serial != serial or self._chunks.get(identity, {}).get(variant.prefix) is not variant:
                yield f"{name} is not where its identity and prefix say"
            if variant.nbytes != nbytes:
                yield f"{name} came with {nbytes} bytes and has {variant.nbytes}"
            if not (variant.reuse, variant.last_used) >= entries.get(serial, (float("inf"), 0)):
                yield f"{name} has f_r {variant.reuse}, {variant.last_used} but {entries.get(serial)} in the eviction order"
