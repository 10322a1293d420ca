"""The store's chunk KV in the rank's storage: what is written, what is loaded and for whom.

    store   ──► variant has come ──► write
    request ──► its chunks that neither device nor store has ──► load ──► store
                  └─► what is in no index either ──► look up what other servers have written

What comes too late serves the next request.

What is estimated to take longer to load than to compute is not loaded, except now and then.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import asdict, replace

from radix_ext import ChunkId, text_before
from radix_ext.cfo import Prefix, Scored
from radix_ext.costs import Costs, Phase, Work, extend_work
from radix_ext.loading import load_in_order, loading_pays, pay_together, worth_loading
from radix_ext.moved_plan import ReusePlan
from radix_ext.sources import ChunkSources
from radix_ext.variants import Variant
from sglang_chunkcache.config import MAX_LOADED_VARIANTS
from sglang_chunkcache.fusion.measure import Head
from sglang_chunkcache.fusion.store import ChunkScores
from sglang_chunkcache.scheduler.host_nodes import HostNodes
from sglang_chunkcache.scheduler.host_slots import HostSlots
from sglang_chunkcache.scheduler.node import ChunkIdentity, state
from sglang_chunkcache.storage.codec import NONE
from sglang_chunkcache.storage.entry import Entry, Masses
from sglang_chunkcache.storage.key import Place, StoredChunk
from sglang_chunkcache.storage.manifest import Row
from sglang_chunkcache.storage.naming import POSITIONED
from sglang_chunkcache.storage.storage import START_S, Storage
from sglang_chunkcache.storage.waits import PendingLoads

if TYPE_CHECKING:
    from sglang.srt.managers.schedule_batch import Req

    from sglang_chunkcache.wire.spans import RequestSpans


class _Missing(NamedTuple):
    """A chunk of a request that neither device nor store has behind this head."""

    identity: ChunkIdentity
    head: str
    before: Sequence[ChunkId]
    num_tokens: int
    is_plain: bool
    is_elsewhere: bool
    """Behind another head it can be had without a load."""
    computed_s: float | None
    """What computing it takes more than recomputing its share. None: it is moved in any case."""
    saved_s: float
    """What moving and recomputing it takes less, if it is here."""


class StorageTier:
    """Of one rank.

    Args:
        host: the store, in host memory. `StoreKeeper` has what comes into it written. Entries of
            another codec are others, and are not found.
        max_gap_tokens: of a plan, as in `Limits`.
    """

    def __init__(
        self,
        storage: Storage,
        host: HostNodes,
        *,
        max_gap_tokens: int = sys.maxsize,
    ) -> None:
        self.storage, self._store, self._host = storage, host.index, host
        self._max_gap_tokens = max_gap_tokens
        codec = host.pool.codec.name
        self._layout = replace(storage.layout, codec=codec)
        self._how = POSITIONED if codec == NONE.name else (*POSITIONED, codec)
        storage.naming.keeps(self._how, self._layout)

    def load_most_used(self, seconds: float = START_S, *, share: float = 1.0) -> int:
        """Fill at most this share of the store with the entries that are to leave last, before
        there are requests: the one method that waits, so long at most. Returns how many have come.
        Entries of tenants are loaded when they ask: no file says who they are."""
        mine = self._chunk(ChunkIdentity(ChunkId(""), None, None))[:2]
        held = (each for each in self.storage.index.held if each.blob.row.place[:2] == mine)
        found = [each for each in held if not each.is_exact]
        found.sort(key=lambda v: (v.is_reserved, v.priority, v.last_used), reverse=True)
        before = self._store.stats()
        room = share * self._store.held.max_bytes - before.num_bytes

        def load(variant: Variant) -> bool:
            nonlocal room
            row: Row = variant.blob.row
            room -= row.num_tokens * self._host.pool.token_bytes
            if room >= 0:
                self._load(ChunkIdentity(row.place.chunk, None, None), variant, row.num_tokens)
            return room >= 0

        self.storage.fill((partial(load, variant) for variant in found), seconds)
        return self._store.stats().num_added - before.num_added

    def ask(
        self, req: Req, spans: RequestSpans, sources: ChunkSources, costs: Costs | None
    ) -> PendingLoads:
        """Load what the storage has of chunks that are nowhere else behind the same head."""
        tenant = req.extra_key, req.cache_salt
        asked = PendingLoads(is_prefetch=state(req).is_prefetch, tenant=tenant)
        with self.storage.guard("nothing is loaded, the prompt is computed"):
            self.storage.poll()
            if self._is_closed:
                return asked
            missing_chunks = list(_missing_chunks(req, spans, sources, costs))
            left = {
                self._chunk(each.identity): each
                for each in missing_chunks
                if not any(variant.head == each.head for variant in self._found(each))
            }
            self._load_for(missing_chunks, asked)
            lens = {chunk: each.num_tokens for chunk, each in left.items()}
            self.storage.others.look_up(lens, partial(self._load_for, missing_chunks, asked), asked)
            if asked.lookup is not None:  # they may be there
                asked.saved_s += sum(each.saved_s for each in left.values())
        return asked

    def has(self, identity: ChunkIdentity, head: str, prefix: Prefix, scored: Scored) -> bool:
        """Whether it has the chunk as it is preprocessed after these, so much of it measured."""
        stored = self.storage.index.get(self._chunk(identity), head, prefix)
        if stored is None or self.storage.is_off:
            return False
        known = self.storage.naming.in_these_heads(stored.blob.row)
        is_kept = stored.is_exact or known.place.preprocessed == bool(prefix)
        return is_kept and known.scored >= scored

    def fetch(self, req: Req, spans: RequestSpans, sources: ChunkSources) -> bool:
        """`ask` for what a chunk to preprocess is moved after. Whether to wait for some of it."""
        self.ask(req, spans, sources, None)
        return not self._is_closed and any(
            self._is_wanted(missing.identity, variant, missing.num_tokens)
            for missing in _missing_chunks(req, spans, sources, None)
            for variant in self._found(missing)
        )

    def reserve(self, identity: ChunkIdentity, head: str, prefix: Prefix, num_tokens: int) -> bool:
        """As `Writes.reserve`, for what a request will preprocess."""
        nbytes = num_tokens * self._layout.token_bytes
        return self.storage.writes.reserve(self._chunk(identity), head, prefix, nbytes)

    def is_skipped(
        self, req: Req, spans: RequestSpans, sources: ChunkSources, costs: Costs | None
    ) -> bool:
        """Whether `ask` would leave something that it knows of. Asks nobody."""
        if self.storage.is_off:
            return False
        missing_chunks = list(_missing_chunks(req, spans, sources, costs))
        return not self._pay_together(missing_chunks) and any(
            not self._is_faster(missing, variant.blob.row)
            for missing in missing_chunks
            for variant in self._found(missing)
        )

    def count_asked(self, chunks: Iterable[tuple[ChunkIdentity, str, Prefix]]) -> None:
        """As `VariantIndex.ask` of the store, for the same request."""
        self.storage.ask((self._chunk(identity), head, prefix) for identity, head, prefix in chunks)

    def count_uses(self, plan: ReusePlan, extra_key: str | None, cache_salt: str | None) -> None:
        """As `ChunkSources.count_uses`: a source's twin in the storage is used with it.
        One that is not there is written."""
        for piece in plan.pieces:
            if piece.source is None or piece.chunk is None:
                continue
            identity = ChunkIdentity(piece.chunk, extra_key, cache_salt)
            place = piece.source.facts.head, piece.source.facts.prefix
            twin = self.storage.index.get(self._chunk(identity), *place)
            if twin is not None:
                self.storage.use(twin)
            elif (variant := self._store.get(identity, *place)) and not variant.is_exact:
                self.write(identity, variant)

    def write(self, identity: ChunkIdentity, variant: Variant) -> None:
        """Keep one of the store's, unless it is kept."""
        if self.storage.is_off:
            return
        is_measured = variant.scores is not None or variant.outward is not None
        heads = self.storage.naming.heads if is_measured else ()
        place = Place(*self._chunk(identity), variant.head, variant.prefix, variant.preprocessed)
        measured = variant.scored, variant.outward is not None, heads
        name, num_tokens = self.storage.names.entry(place, *measured), variant.blob.num_tokens
        row = Row(name, place, num_tokens, 0, *measured, start=variant.start)
        told = partial(self._tell_store, place, variant)
        variant.blob.hold()
        if not self.storage.writes.write(row, entry_of(variant, heads), told, self._layout):
            told()

    @property
    def _is_closed(self) -> bool:
        return self.storage.is_off or self.storage.loader.is_paused

    def _found(self, missing: _Missing) -> list[Variant]:
        """Best first."""
        return worth_loading(
            self.storage.index.find(self._chunk(missing.identity)),
            missing.before,
            missing.head,
            max_variants=MAX_LOADED_VARIANTS,
            alone=missing.is_plain,
            is_elsewhere=missing.is_elsewhere,
        )

    def _load_for(
        self,
        missing_chunks: Sequence[_Missing],
        asked: PendingLoads,
        begun: dict[int, bool | None] | None = None,
    ) -> None:
        """Load what the index has, where that pays: what finds no room in the queue when there is
        some, if it pays by what is known then."""
        is_first, begun = begun is None, begun or {}
        todo = [each for i, each in enumerate(missing_chunks) if begun.get(i, False) is False]
        left = load_in_order(
            missing_chunks,
            partial(self._begin, asked, self._pay_together(todo)),
            begun,
            max_gap_tokens=self._max_gap_tokens,
        )
        if is_first:
            tried = (each for i, each in enumerate(missing_chunks) if begun.get(i) is not None)
            asked.saved_s = max(asked.saved_s, sum(each.saved_s for each in tried))
        if left:
            rest = partial(self._load_for, missing_chunks, asked, begun)
            found = (variant for i in left for variant in self._found(missing_chunks[i]))
            self.storage.goes_on(asked, rest, [each.blob.row.num_bytes for each in found])
        if asked.is_planned:
            self.storage.waits.planned(asked)

    def _pay_together(self, missing_chunks: Sequence[_Missing]) -> bool:
        found = [(each, self._found(each)) for each in missing_chunks]
        times, variants = self.storage.waits.times, [each for _, part in found for each in part]
        return pay_together(
            [times.seconds(variant.blob.row.num_bytes) for variant in variants],
            [each.computed_s for each, part in found if part],
        )

    def _begin(self, asked: PendingLoads, is_sooner: bool, missing: _Missing) -> bool | None:
        """As `load` of `load_in_order`. `is_sooner`: to load all is."""
        found: list[bool] = []
        for variant in self._found(missing):
            pays = is_sooner or self._is_faster(missing, variant.blob.row)
            asked.is_skipped |= not pays
            if self.storage.tries(pays=pays):
                asked.variants[missing.identity.chunk].append(variant)
                found.append(self._load(missing.identity, variant, missing.num_tokens, asked))
        return all(found) if found else None

    def _is_faster(self, missing: _Missing, row: Row) -> bool:
        return loading_pays(self.storage.waits.times.seconds(row.num_bytes), missing.computed_s)

    def _tell_store(self, place: Place, variant: Variant) -> None:
        """Its bytes are read. If it is kept, others may take its place."""
        variant.blob.let_go()
        stored = self.storage.index.get(place.stored_chunk, place.head, place.prefix)
        if stored is not None and stored.preprocessed == variant.preprocessed:
            self._store.held.set_below(variant)

    def _load(
        self,
        identity: ChunkIdentity,
        variant: Variant,
        num_tokens: int,
        asked: PendingLoads | None = None,
    ) -> bool:
        """Unless it is under way, or not wanted. False: too much is, or there is no room for it."""
        if not self._is_wanted(identity, variant, num_tokens):
            return True
        if not self.storage.takes(variant, asked):
            return self.storage.join(variant, asked)
        blob = self._host.room(num_tokens)
        if blob is None:
            return False

        def done(entry: Entry | None) -> None:
            loaded = None
            try:
                if entry is not None:
                    loaded = variant_of(entry, variant, self.storage.naming.heads, blob)
                    self._store.put(identity, loaded)
            finally:
                # not by what `put` returned: a watcher may have raised once it was there
                if not (loaded and loaded in self._store.held):
                    blob.give_back()
                blob.let_go()

        into = blob.writer()
        blob.hold()
        is_begun = self.storage.load(variant, num_tokens, done, into, asked, self._layout)
        if not is_begun:
            done(None)
        return is_begun

    def _is_wanted(self, identity: ChunkIdentity, variant: Variant, num_tokens: int) -> bool:
        nbytes = num_tokens * self._host.pool.token_bytes
        place = variant.head, variant.prefix
        return self._store.wants(identity, *place, preprocessed=variant.preprocessed, nbytes=nbytes)

    def _chunk(self, identity: ChunkIdentity) -> StoredChunk:
        return self.storage.naming.chunk(
            self._how, identity.extra_key, identity.cache_salt, identity.chunk
        )


def _missing_chunks(
    req: Req, spans: RequestSpans, sources: ChunkSources, costs: Costs | None
) -> Iterator[_Missing]:
    """The request's chunks that neither device nor store has behind the same head."""
    fusion = spans.fusion
    assert fusion is not None
    heads = text_before(spans.namespace, spans.spans, req.origin_input_ids)
    before = [span.chunk for span in spans.spans]
    compares = not (costs is None or fusion.always or fusion.plain)
    share = fusion.expected_ratio if fusion.recomputes else 0.0
    for index, (span, head) in enumerate(zip(spans.spans, heads, strict=True)):
        if index in fusion.fresh:
            continue
        identity = ChunkIdentity(span.chunk, req.extra_key, req.cache_salt)
        there = sources.candidates(identity, head, alone=fusion.plain)
        if fusion.plain:
            there = [each for each in there if each.facts.is_alone]
        if any(each.facts.head == head for each in there):
            continue
        # Its tokens in a prefill that runs in any case.
        work, computed_s, moved_s = extend_work(span.start, span.end)._replace(calls=0), 0.0, 0.0
        if costs is not None:
            computed_s = costs[Phase.EXTEND].seconds(work)
            moved_s = share * costs[Phase.RECOMPUTE].seconds(work)
            moved_s += costs[Phase.HOST].seconds(Work(1, work.tokens))
        yield _Missing(
            identity,
            head,
            before[:index],
            span.end - span.start,
            fusion.plain,
            bool(there),
            (1 - share) * computed_s if compares else None,
            max(0.0, computed_s - moved_s),
        )


def entry_of(variant: Variant, heads: tuple[Head, ...]) -> Callable[[], Entry]:
    """Makes the entry, with what is measured by now."""
    blob: HostSlots = variant.blob
    scores: ChunkScores | None = variant.scores
    measured = {"outward": variant.outward, "heads": heads, "codec": blob.codec}
    if scores is not None:
        shares = scores.inter, scores.prefix_lens, scores.intra
        masses = Masses(*shares, scores.head, scores.head_len)
        measured |= {"masses": masses, "context": scores.context, "received": scores.received}
    read = blob.reader()
    return lambda: Entry(read(), **measured)


def variant_of(entry: Entry, stored: Variant, heads: tuple[Head, ...], blob: HostSlots) -> Variant:
    """As it was written, with its uses, and with what was measured if that was in these heads.
    `blob` holds its KV."""
    scores, outward = None, None
    if entry.heads in ((), heads):
        outward = entry.outward
        of = entry.masses
        if of is not None and len(of.inter) == len(of.prefix_lens) == len(stored.prefix):
            assert entry.context is not None
            scores = ChunkScores(**asdict(of), context=entry.context, received=entry.received)
    return Variant(
        stored.prefix,
        blob,
        scores=scores,
        preprocessed=stored.preprocessed,
        head=stored.head,
        start=stored.start,
        outward=outward,
        num_uses=stored.num_uses,
        is_below=True,
    )
