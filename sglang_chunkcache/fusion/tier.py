"""The storage below the store in host memory, on the scheduler's side: what is written, what is loaded and for whom, what leaves.

    store   ──► variant has come ──► write ──► is confirmed ──► index              by f_r others leave the index for it
    request ──► its chunks that neither device nor store has ──► load ──► store    what comes too late serves the next request

The index knows every entry of the manifest and none of its KV. The thread beside the scheduler (storage/loader.py) does all that
takes time. Nothing here waits or raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from radix_ext import ChunkId, FusionRequest, text_before
from radix_ext.cfo import Prefix
from radix_ext.loading import worth_loading
from radix_ext.moved_plan import ReusePlan
from radix_ext.sources import ChunkSources
from radix_ext.variants import Identity, Variant, VariantIndex
from sglang_chunkcache.fusion.measure import Head
from sglang_chunkcache.fusion.store import ChunkScores, HostBlob
from sglang_chunkcache.scheduler.node import ChunkIdentity
from sglang_chunkcache.storage.entry import Entry, Layout, Masses
from sglang_chunkcache.storage.key import Names, Place
from sglang_chunkcache.storage.loader import FAILED, PAUSED, Load, Loader, Write
from sglang_chunkcache.storage.manifest import Row, Use

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_chunkcache.wire.spans import RequestSpans

logger = logging.getLogger(__name__)

MAX_LOADED_VARIANTS = 2
"""Of one chunk, for one request."""
START_S = 10.0
"""What a start may spend on loading the entries that were used most: some gigabytes from a disk."""


class StoredChunk(NamedTuple):
    """A `ChunkIdentity` as a file may have it, of one model and its weights."""

    model: str
    tenant: str
    chunk: ChunkId


@dataclass(frozen=True, slots=True)
class Stored:
    """In place of an entry's KV and of what was measured of it."""

    row: Row

    @property
    def nbytes(self) -> int:
        return self.row.num_bytes


class _Purpose(NamedTuple):
    """Of a load."""

    identity: ChunkIdentity
    variant: Variant
    """The index's."""
    era: int


class _Known(NamedTuple):
    """What there is of one variant."""

    preprocessed: bool
    scored: int
    has_outward: bool

    def replaces(self, old: _Known) -> bool:
        """As in a store, except that nothing that was measured is lost: a backend joins no entries."""
        if self.preprocessed != old.preprocessed:
            return self.preprocessed
        return self != old and self.scored >= old.scored and self.has_outward >= old.has_outward


class StorageTier:
    """Of one rank.

    Args:
        store: in host memory. Its `watch` is taken.
        index: of the storage, empty; with the store's window.
        window: as theirs.
        model_of: the name of model and weights, given the weights' fingerprint.
        rows: what the manifest has, the most used first.
    """

    def __init__(
        self,
        store: VariantIndex,
        index: VariantIndex,
        loader: Loader,
        names: Names,
        *,
        window: int,
        layout: Layout,
        model_of: Callable[[int], str],
        rows: Iterable[Row] = (),
    ) -> None:
        self.index, self.loader = index, loader
        self._store, self._names, self._window = store, names, window
        self._layout, self._model_of, self._model = layout, model_of, ""
        self._heads: tuple[Head, ...] = ()
        self._tenant: tuple[tuple[str | None, str | None], str] = (None, None), names.tenant(None, None)
        """The last one, and its name."""
        self._under_way: set[str] = set()
        """Names that are being loaded or written."""
        self._used: dict[str, Use] = {}
        """Not told to the thread yet."""
        self._num_asked = self._era = self._num_cleared = 0
        self.is_off = True
        """Nothing is written or loaded."""
        self.num_late = 0
        store.watch = self._store_changed
        left = [
            row.name for row in rows if not index.restore(_chunk_of(row.place), _stored(row, row.reuse, row.num_uses))
        ]
        index.watch = self._index_changed
        if left:  # the limit is lower than it was
            loader.delete(left)

    # A rank's life

    def start(self, weights: int | None, heads: tuple[Head, ...]) -> None:
        """From now on with these weights (their fingerprint; None: unknown, as `stop`) and calibrated heads. What is under way
        for others is not used."""
        self.stop()
        if weights is not None:
            self._model, self._heads, self.is_off = self._model_of(weights), heads, False

    def stop(self) -> None:
        """Nobody knows the weights, so nothing can be named: until `start` nothing is written or loaded."""
        self.is_off = True
        self._era += 1

    def calibrated(self, heads: tuple[Head, ...]) -> None:
        """Scores that were measured with other heads are not used any more."""
        self._heads = heads

    def load_most_used(self, seconds: float = START_S) -> int:
        """Fill the store with the entries of highest f_r, before there are requests: the one method that waits, so long at most.

        Entries of tenants are loaded when they ask: no file says who they are.

        Returns:
            How many have come.
        """
        deadline, before = time.monotonic() + seconds, self._store.stats()
        mine, room = (self._model, self._names.tenant(None, None)), self._store.max_bytes - before.num_bytes
        found = [variant for variant in self.index.variants() if variant.blob.row.place[:2] == mine]
        for variant in sorted(found, key=lambda v: (v.is_reserved, v.reuse, v.last_used), reverse=True):
            row: Row = variant.blob.row
            room -= row.num_tokens * self._layout.token_bytes
            if room < 0:
                break
            while self.loader.is_full and time.monotonic() < deadline:
                self.loader.drain(0.05)
                self.poll()
            if time.monotonic() > deadline or self.loader.is_paused:
                break
            self._load(ChunkIdentity(row.place.chunk, None, None), variant, row.num_tokens)
        self.loader.drain(max(0.0, deadline - time.monotonic()))
        self.poll()
        return self._store.stats().num_added - before.num_added

    def close(self) -> None:
        """The end: what waits is written, within `loader.CLOSE_S`."""
        self._tell_uses()
        self.loader.close()

    # A request's life

    def ask(self, req: Req, spans: RequestSpans, fusion: FusionRequest, sources: ChunkSources) -> list[Load]:
        """Load what the storage has of the request's chunks, where neither device nor store has any behind the same head."""
        loads: list[Load] = []
        try:
            self.poll()
            heads = text_before(spans.namespace, spans.spans, req.origin_input_ids)
            for index, (span, head) in enumerate(zip(spans.spans, heads, strict=True)):
                if index in fusion.fresh or self.is_off or self.loader.is_paused:
                    continue
                identity = ChunkIdentity(span.chunk, req.extra_key, req.cache_salt)
                there = sources.candidates(identity, head, alone=fusion.plain)
                if fusion.plain:
                    there = [each for each in there if not (each.prefix or each.preprocessed)]
                if any(each.head == head for each in there):
                    continue
                variants, before = self.index.find(self._chunk(identity)), [each.chunk for each in spans.spans[:index]]
                found = worth_loading(variants, before, head, max_variants=MAX_LOADED_VARIANTS, alone=fusion.plain)
                if there and found and found[0].head != head:  # behind another head it can be had without a load
                    continue
                made = (self._load(identity, variant, span.end - span.start) for variant in found)
                loads += filter(None, made)
        except Exception:  # the scheduler must not die of what can be computed
            logger.exception("chunk cache: nothing is loaded, the prompt is computed")
        return loads

    def planned_without(self, loads: Iterable[Load]) -> None:
        """The request that asked for these is planned: those under way are late."""
        for load in loads:
            if not load.is_done and not load.is_late:
                load.is_late = True
                self.num_late += 1

    def count_asked(self, chunks: Iterable[tuple[ChunkIdentity, str, Prefix]]) -> None:
        """As `VariantIndex.ask` of the store, for the same request."""
        self.index.ask((self._chunk(identity), head, prefix) for identity, head, prefix in chunks)
        self._num_asked += 1
        if self._num_asked % self._window == 0:
            self._used.clear()
            self.loader.halve()
            for variant in self.index.variants():
                if variant.num_uses != variant.blob.row.num_uses:
                    self._note(variant)

    def count_uses(self, plan: ReusePlan, extra_key: str | None, cache_salt: str | None) -> None:
        """As `ChunkSources.count_uses`: a source's twin in the storage is used with it. One that is not there is written."""
        for piece in plan.pieces:
            if piece.source is None or piece.chunk is None or piece.cfo is None:
                continue
            identity, place = (
                ChunkIdentity(piece.chunk, extra_key, cache_salt),
                (piece.source.head, piece.source.prefix),
            )
            twin = self.index.get(self._chunk(identity), *place)
            if twin is not None:
                self.index.use(twin, piece.cfo)
                self._note(twin)
            elif (variant := self._store.get(identity, *place)) is not None:
                self._write(identity, variant)

    def poll(self) -> None:
        """Take in what the thread has done."""
        for job in self.loader.poll():
            if isinstance(job, Load):
                self._loaded(job)
            else:
                self._written(job)
        if self._used and self.loader.is_idle:
            self._tell_uses()

    # Operators

    def clear(self) -> None:
        """Forget every entry, of whatever model, those under way included."""
        self._era += 1
        self._num_cleared += 1
        names = [variant.blob.row.name for variant in self.index.variants()]
        self.index.watch = lambda identity, variant, is_here: None
        self.index.clear()
        self.index.watch = self._index_changed
        self._used.clear()
        self.loader.delete(names)

    def stats(self) -> dict[str, Any]:
        """Of the storage: what it holds, counts since the start, and what waits."""
        self.poll()
        held = self.index.stats()
        return {
            "num_entries": held.num_variants,
            "num_bytes": held.num_bytes,
            "max_bytes": self.index.max_bytes,
            "num_evicted": held.num_evicted,
            "late": self.num_late,
            "off": self.is_off,
            **self.loader.stats(),
        }

    # Private, in order of use

    def _store_changed(self, identity: Identity, variant: Variant, is_here: bool) -> None:
        if is_here:
            assert isinstance(identity, ChunkIdentity)
            self._write(identity, variant)

    def _index_changed(self, identity: Identity, variant: Variant, is_here: bool) -> None:
        if not is_here:
            self._used.pop(variant.blob.row.name, None)
            self.loader.delete([variant.blob.row.name])

    def _write(self, identity: ChunkIdentity, variant: Variant) -> None:
        """Unless the storage has as much of it, or something better in its place."""
        if self.is_off or self.loader.is_paused:
            return
        chunk = self._chunk(identity)
        old = self.index.get(chunk, variant.head, variant.prefix)
        if old is None:
            is_wanted = self.index.wants(
                chunk, variant.head, variant.prefix, preprocessed=variant.preprocessed, nbytes=variant.nbytes
            )
        else:
            known = _Known(variant.preprocessed, variant.scored, variant.outward is not None)
            is_wanted = known.replaces(self._known(old))
        place = Place(*chunk, variant.head, variant.prefix, variant.preprocessed)
        heads = self._heads if variant.scores is not None or variant.outward is not None else ()
        name = self._names.entry(place, variant.scored, variant.outward is not None, heads)
        if not is_wanted or name in self._under_way:
            return
        entry = _entry(variant, heads)
        row = Row(name, place, entry.num_tokens, 0, variant.scored, variant.outward is not None, heads)
        if self.loader.write(Write(row, entry, self._num_cleared)):
            self._under_way.add(name)

    def _written(self, job: Write) -> None:
        """The entry is there: the index has it, and another one leaves for it."""
        row = job.row
        self._under_way.discard(row.name)
        if not job.is_confirmed:
            return
        if job.tag != self._num_cleared:
            self.loader.delete([row.name])
            return
        chunk = _chunk_of(row.place)
        old = self.index.get(chunk, row.place.head, row.place.prefix)
        if old is not None and not _known_of(row).replaces(self._known(old)):
            if old.blob.row.name != row.name:
                self.loader.delete([row.name])
            return
        stored = _stored(row, old.reuse if old else 0.0, old.num_uses if old else 0)
        if old is not None:
            self.index.drop(old)
        if self.index.put(chunk, stored):
            self._note(stored)
        else:
            self.loader.delete([row.name])

    def _load(self, identity: ChunkIdentity, variant: Variant, num_tokens: int) -> Load | None:
        """None: it is under way, or the store would not have it, or too much is."""
        row: Row = variant.blob.row
        is_wanted = self._store.wants(
            identity,
            variant.head,
            variant.prefix,
            preprocessed=variant.preprocessed,
            nbytes=num_tokens * self._layout.token_bytes,
        )
        if row.name in self._under_way or not is_wanted:
            return None
        load = Load(row.name, row.num_bytes, num_tokens, self._layout, _Purpose(identity, variant, self._era))
        if not self.loader.load(load):
            return None
        self._under_way.add(row.name)
        return load

    def _loaded(self, job: Load) -> None:
        """Into the store with it, unless it is no entry: then the storage has none."""
        self._under_way.discard(job.name)
        purpose: _Purpose = job.tag
        if job.entry is None:
            if job.problem not in (FAILED, PAUSED):
                self.index.drop(purpose.variant)
            return
        if purpose.era == self._era:
            self._store.put(purpose.identity, _variant(job.entry, purpose.variant, self._heads))

    def _note(self, variant: Variant) -> None:
        name = variant.blob.row.name
        self._used[name] = Use(name, variant.reuse, variant.num_uses)

    def _tell_uses(self) -> None:
        self.loader.use(list(self._used.values()))
        self._used.clear()

    def _chunk(self, identity: ChunkIdentity) -> StoredChunk:
        if identity[1:] != self._tenant[0]:  # a request's chunks have one
            self._tenant = identity[1:], self._names.tenant(*identity[1:])
        return StoredChunk(self._model, self._tenant[1], identity.chunk)

    def _known(self, stored: Variant) -> _Known:
        row: Row = stored.blob.row
        return _known_of(row if row.heads in ((), self._heads) else row._replace(scored=0, has_outward=False))


def _known_of(row: Row) -> _Known:
    return _Known(row.place.preprocessed, row.scored, row.has_outward)


def _chunk_of(place: Place) -> StoredChunk:
    return StoredChunk(place.model, place.tenant, place.chunk)


def _stored(row: Row, reuse: float, num_uses: int) -> Variant:
    place = row.place
    return Variant(
        place.prefix,
        Stored(row),
        preprocessed=place.preprocessed,
        head=place.head,
        reuse=reuse,
        num_uses=num_uses,
    )


def _entry(variant: Variant, heads: tuple[Head, ...]) -> Entry:
    keys, values = variant.blob.read()
    scores: ChunkScores | None = variant.scores  # type: ignore[assignment]
    if scores is None:
        return Entry(keys, values, outward=variant.outward, heads=heads)
    masses = Masses(scores.inter, scores.prefix_lens, scores.intra, scores.head, scores.head_len)
    return Entry(keys, values, masses, scores.context, scores.received, variant.outward, heads)


def _variant(entry: Entry, stored: Variant, heads: tuple[Head, ...]) -> Variant:
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
