"""The storage below the store in host memory, on the scheduler's side: what is written, what is loaded and for whom, what leaves.

    store   ──► variant has come ──► write ──► is confirmed ──► index              by f_r others leave the index for it
    request ──► its chunks that neither device nor store has ──► load ──► store    what comes too late serves the next request
                  └─► what is in no index either ──► look up ──► index             what other servers on the storage have written

The index knows every entry of the manifest and what was found of others', and none of their KV. Who has written an entry deletes
it for its budget, others only forget it. What is estimated to take longer to load than to compute is not loaded, except now and
then. The thread beside the scheduler (storage/loader.py) does all that takes time. Nothing here waits or raises.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from radix_ext import ChunkId, FusionRequest, text_before
from radix_ext.cfo import Prefix
from radix_ext.costs import TRIED_EVERY, Costs, Phase, extend_work
from radix_ext.loading import LoadTimes, worth_loading
from radix_ext.moved_plan import ReusePlan
from radix_ext.sources import ChunkSources
from radix_ext.variants import Identity, Variant, VariantIndex
from sglang_chunkcache.fusion.measure import Head
from sglang_chunkcache.fusion.stored import Known, entry_of, known_of, stored_of, variant_of
from sglang_chunkcache.scheduler.node import ChunkIdentity
from sglang_chunkcache.storage.entry import Layout
from sglang_chunkcache.storage.key import Names, Place, StoredChunk
from sglang_chunkcache.storage.loader import FAILED, PAUSED, Load, Loader, Lookup, Write
from sglang_chunkcache.storage.manifest import Row, Use

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_chunkcache.wire.spans import RequestSpans

logger = logging.getLogger(__name__)

MAX_LOADED_VARIANTS = 2
"""Of one chunk, for one request."""
START_S = 10.0
"""What a start may spend on loading the entries that were used most: some gigabytes from a disk."""


LOOKED_UP_S = 10.0
"""How long what was looked up counts as known: a miss costs one question."""
MAX_LOOKED_UP = 10_000
"""Chunks of which that is remembered, about three megabytes."""
SHOWN_S = 1.0
"""Between two figures for Prometheus, which reads them less often."""
MAX_OVERHEAD_BYTES = 1 << 20
"""What an entry may have beside twice its KV, if another server tells of it."""


@dataclass(eq=False)
class Asked:
    """What was asked of the storage for one request."""

    loads: list[Load] = field(default_factory=list)
    is_planned: bool = False
    """What comes from now on is late."""
    is_unpaid: bool = False
    """Something was not loaded, since computing it is faster."""


class _Wish(NamedTuple):
    """A chunk of a request that neither device nor store has behind this head."""

    identity: ChunkIdentity
    head: str
    before: Sequence[ChunkId]
    """The chunks before it."""
    num_tokens: int
    is_plain: bool
    is_elsewhere: bool
    """Behind another head it can be had without a load."""
    computed_s: float | None
    """What computing it takes. None: it is moved whatever that takes."""


class _Purpose(NamedTuple):
    """Of a load."""

    identity: ChunkIdentity
    variant: Variant
    """The index's."""
    era: int


class _Question(NamedTuple):
    """Of a lookup."""

    wishes: Sequence[_Wish]
    asked: Asked
    era: int


class StorageTier:
    """Of one rank.

    Args:
        store: in host memory. Its `watch` is taken.
        index: of the storage, empty; with the store's window.
        window: as theirs.
        model_of: the name of model and weights, given the weights' fingerprint.
        rows: what the manifest has, the most used first.
        show: told what `stats` says, with it and every `SHOWN_S` while there are requests. None: nobody is.
        clock: seconds.
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
        show: Callable[[Mapping[str, Any]], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.index, self.loader = index, loader
        self._store, self._names, self._window = store, names, window
        self._layout, self._model_of, self._model = layout, model_of, ""
        self._heads: tuple[Head, ...] = ()
        self._tenant: tuple[tuple[str | None, str | None], str] = (None, None), names.tenant(None, None)
        """The last one, and its name."""
        self._under_way: set[str] = set()
        """Names that are being loaded or written."""
        self._looked_up: dict[StoredChunk, float] = {}
        """When that is asked again. The oldest first."""
        self._times, self._clock = LoadTimes(), clock
        self._show, self._shown_at = show, 0.0
        self._used: dict[str, Use] = {}
        """Not told to the thread yet."""
        self._num_asked = self._era = self._num_cleared = 0
        self.is_off = True
        """Nothing is written or loaded."""
        self.num_late = self.num_unpaid = self.num_found = 0
        self._pays = True
        """The last load that was thought of."""
        store.watch = self._store_changed
        left = [
            row for row in rows if not index.restore(row.place.stored_chunk, stored_of(row, row.reuse, row.num_uses))
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

    def ask(
        self, req: Req, spans: RequestSpans, fusion: FusionRequest, sources: ChunkSources, costs: Costs | None
    ) -> Asked:
        """Load what the storage has of the request's chunks, where neither device nor store has any behind the same head."""
        asked = Asked()
        try:
            self.poll()
            if not (self.is_off or self.loader.is_paused):
                wishes = list(self._wishes(req, spans, fusion, sources, costs))
                self._look_up([wish for wish in wishes if not self._load_for(wish, asked)], asked)
        except Exception:  # the scheduler must not die of what can be computed
            logger.exception("chunk cache: nothing is loaded, the prompt is computed")
        return asked

    def is_unpaid(
        self, req: Req, spans: RequestSpans, fusion: FusionRequest, sources: ChunkSources, costs: Costs | None
    ) -> bool:
        """Whether `ask` would leave something that it knows of. Asks nobody."""
        wishes = () if self.is_off else self._wishes(req, spans, fusion, sources, costs)
        return any(not self._is_faster(wish, variant.blob.row) for wish in wishes for variant in self._found(wish))

    def planned_without(self, asked: Asked | None) -> None:
        """The request that has asked for this is planned: what is under way for it is late."""
        if asked is None:
            return
        asked.is_planned = True
        for load in asked.loads:
            if not load.is_done and not load.is_late:
                load.is_late = True
                self.num_late += 1

    def count_asked(self, chunks: Iterable[tuple[ChunkIdentity, str, Prefix]]) -> None:
        """As `VariantIndex.ask` of the store, for the same request."""
        self.index.ask((self._chunk(identity), head, prefix) for identity, head, prefix in chunks)
        self._num_asked += 1
        if self._num_asked % self._window == 0:
            self._tell_uses()  # as they were before the index has halved them
            self.loader.halve()

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
            elif isinstance(job, Lookup):
                self._found_of_others(job)
            else:
                self._written(job)
        if self._used and self.loader.is_idle:
            self._tell_uses()
        if self._show is not None and self._clock() >= self._shown_at:
            self._show_figures()

    # Operators

    def clear(self) -> None:
        """Delete every entry that this server knows, of whatever model, those under way and those of others included. What
        others have written and this one never asked for stays."""
        self._era += 1
        self._num_cleared += 1
        rows = [variant.blob.row for variant in self.index.variants()]
        self.index.watch = lambda identity, variant, is_here: None
        self.index.clear()
        self.index.watch = self._index_changed
        self._used.clear()
        self._looked_up.clear()
        self.loader.delete(rows)

    def stats(self) -> dict[str, Any]:
        """Of the storage: what it holds, counts since the start, and what waits."""
        self.poll()
        self._show_figures()
        return self._figures()

    # Private, in order of use

    def _show_figures(self) -> None:
        if self._show is None:
            return
        self._shown_at = self._clock() + SHOWN_S
        try:
            self._show(self._figures())
        except Exception:
            self._show = None
            logger.exception("chunk cache: the storage's figures are shown no more")

    def _figures(self) -> dict[str, Any]:
        held = self.index.stats()
        return {
            "num_entries": held.num_variants,
            "num_bytes": held.num_bytes,
            "max_bytes": self.index.max_bytes,
            "num_evicted": held.num_evicted,
            "late": self.num_late,
            "unpaid": self.num_unpaid,
            "pays": self._pays,
            "load_ms_per_mib": None if (taken := self._times.seconds(1 << 20)) is None else 1000 * taken,
            "off": self.is_off,
            **({"found": self.num_found} if self.loader.is_shared else {}),
            **self.loader.stats(),
        }

    def _store_changed(self, identity: Identity, variant: Variant, is_here: bool) -> None:
        if is_here:
            assert isinstance(identity, ChunkIdentity)
            self._write(identity, variant)

    def _index_changed(self, identity: Identity, variant: Variant, is_here: bool) -> None:
        if not is_here:
            self._used.pop(variant.blob.row.name, None)
            if variant.blob.is_own:
                self.loader.delete([variant.blob.row])

    def _wishes(
        self, req: Req, spans: RequestSpans, fusion: FusionRequest, sources: ChunkSources, costs: Costs | None
    ) -> Iterator[_Wish]:
        heads = text_before(spans.namespace, spans.spans, req.origin_input_ids)
        before = [span.chunk for span in spans.spans]
        line = None if costs is None or fusion.always or fusion.plain else costs[Phase.EXTEND]
        for index, (span, head) in enumerate(zip(spans.spans, heads, strict=True)):
            if index in fusion.fresh:
                continue
            identity = ChunkIdentity(span.chunk, req.extra_key, req.cache_salt)
            there = sources.candidates(identity, head, alone=fusion.plain)
            if fusion.plain:
                there = [each for each in there if not (each.prefix or each.preprocessed)]
            if any(each.head == head for each in there):
                continue
            # Its tokens in a prefill that runs in any case.
            computed_s = None if line is None else line.seconds(extend_work(span.start, span.end)._replace(calls=0))
            yield _Wish(identity, head, before[:index], span.end - span.start, fusion.plain, bool(there), computed_s)

    def _found(self, wish: _Wish) -> list[Variant]:
        """What the index has for it, best first."""
        found = worth_loading(
            self.index.find(self._chunk(wish.identity)),
            wish.before,
            wish.head,
            max_variants=MAX_LOADED_VARIANTS,
            alone=wish.is_plain,
        )
        return [] if wish.is_elsewhere and found and found[0].head != wish.head else found

    def _load_for(self, wish: _Wish, asked: Asked) -> bool:
        """Load what the index has, where that pays. Whether it has anything behind this head."""
        found = self._found(wish)
        for variant in found:
            if not self._is_faster(wish, variant.blob.row):
                asked.is_unpaid = True
                self._pays = False
                self.num_unpaid += 1
                if self.num_unpaid % TRIED_EVERY:
                    continue
            else:
                self._pays = True
            if load := self._load(wish.identity, variant, wish.num_tokens):
                asked.loads.append(load)
        return bool(found) and found[0].head == wish.head

    def _is_faster(self, wish: _Wish, row: Row) -> bool:
        """Whether loading it is estimated to take no longer than computing it. What was never tried is taken to be."""
        expected = self._times.seconds(row.num_bytes)
        return wish.computed_s is None or expected is None or expected <= wish.computed_s

    def _look_up(self, wishes: Iterable[_Wish], asked: Asked) -> None:
        """Ask what others have of these chunks, unless that is known or being asked."""
        now, unknown = self._clock(), dict[StoredChunk, _Wish]()
        for wish in wishes if self.loader.is_shared else ():
            chunk = self._chunk(wish.identity)
            if now >= self._looked_up.get(chunk, now):
                unknown[chunk] = wish
        if unknown and self.loader.look_up(Lookup(list(unknown), _Question(list(unknown.values()), asked, self._era))):
            for chunk in unknown:
                self._looked_up.pop(chunk, None)
                self._looked_up[chunk] = now + LOOKED_UP_S
            while len(self._looked_up) > MAX_LOOKED_UP:
                del self._looked_up[next(iter(self._looked_up))]

    def _found_of_others(self, job: Lookup) -> None:
        """Know it from now on, and load it."""
        question: _Question = job.tag
        if question.era != self._era:
            for chunk in job.chunks:
                self._looked_up.pop(chunk, None)
            return
        for chunk, wish in zip(job.chunks, question.wishes, strict=True):
            if chunk not in job.found:  # the storage has failed
                self._looked_up.pop(chunk, None)
            for row in job.found.get(chunk, ()):
                self._take_over(row, wish.num_tokens)
            num_before = len(question.asked.loads)
            self._load_for(wish, question.asked)
            if question.asked.is_planned:
                for load in question.asked.loads[num_before:]:
                    load.is_late = True
                    self.num_late += 1

    def _take_over(self, row: Row, num_tokens: int) -> None:
        """Another server tells of this entry: the index has it, if it has nothing as good there. Nothing leaves for it."""
        room = 2 * num_tokens * self._layout.token_bytes + MAX_OVERHEAD_BYTES
        if row.num_tokens != num_tokens or row.num_bytes > room or self.loader.is_refused(row.name):
            return
        old = self.index.get(row.place.stored_chunk, row.place.head, row.place.prefix)
        if old is not None and not known_of(self._in_these_heads(row)).replaces(self._known(old)):
            return
        if old is not None:
            self.index.drop(old)
        self.num_found += self.index.restore(row.place.stored_chunk, stored_of(row, 0.0, 0, is_own=False))

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
            known = Known(variant.preprocessed, variant.scored, variant.outward is not None)
            is_wanted = known.replaces(self._known(old))
        place = Place(*chunk, variant.head, variant.prefix, variant.preprocessed)
        heads = self._heads if variant.scores is not None or variant.outward is not None else ()
        name = self._names.entry(place, variant.scored, variant.outward is not None, heads)
        if not is_wanted or name in self._under_way:
            return
        entry = entry_of(variant, heads)
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
            self._delete_own(job)
            return
        old = self.index.get(row.place.stored_chunk, row.place.head, row.place.prefix)
        if old is not None and old.blob.row.name == row.name:
            if old.blob.is_own or not job.is_own:
                return
        elif old is not None and not known_of(row).replaces(self._known(old)):
            self._delete_own(job)
            return
        stored = stored_of(row, old.reuse if old else 0.0, old.num_uses if old else 0, is_own=job.is_own)
        if old is not None:
            self.index.drop(old)
        if self.index.put(row.place.stored_chunk, stored):
            self._note(stored)
        else:
            self._delete_own(job)

    def _delete_own(self, job: Write) -> None:
        if job.is_own:
            self.loader.delete([job.row])

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
                if not purpose.variant.blob.is_own:  # nobody can use it
                    self.loader.delete([purpose.variant.blob.row])
            return
        self._times.observe(job.num_bytes, job.seconds)
        if purpose.era == self._era:
            self._store.put(purpose.identity, variant_of(job.entry, purpose.variant, self._heads))

    def _note(self, variant: Variant) -> None:
        name = variant.blob.row.name
        if variant.blob.is_own:  # others have no row
            self._used[name] = Use(name, variant.reuse, variant.num_uses)

    def _tell_uses(self) -> None:
        self.loader.use(list(self._used.values()))
        self._used.clear()

    def _chunk(self, identity: ChunkIdentity) -> StoredChunk:
        if identity[1:] != self._tenant[0]:  # a request's chunks have one
            self._tenant = identity[1:], self._names.tenant(*identity[1:])
        return StoredChunk(self._model, self._tenant[1], identity.chunk)

    def _known(self, stored: Variant) -> Known:
        return known_of(self._in_these_heads(stored.blob.row))

    def _in_these_heads(self, row: Row) -> Row:
        return row if row.heads in ((), self._heads) else row._replace(scored=0, has_outward=False)
