"""A storage below host memory in a fused replay: one disk, whose transfers take time, and what is
written to it and loaded from it. No KV: bytes are counted.

What is worth loading, how much may wait, how long a request waits and what stays are the server's
own decisions (radix_ext/loading.py, backlog.py, variant_index.py), in the order of
storage/storage.py, fusion/tier.py and scheduler/stored_chains.py. Not modelled: other servers,
failures, hints, time in which the scheduler does not look.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any, NamedTuple

from eval.replay.fused_host import FusedHost
from radix_ext import ChainId, Chunk, ChunkId, Span
from radix_ext.backlog import Backlog, Bounds
from radix_ext.cfo import Prefix
from radix_ext.chunk import extend_chain, root_chain
from radix_ext.costs import Costs, Phase, Work, explores, extend_work
from radix_ext.exact_chains import ChainPlace, ChainVariant
from radix_ext.loading import (
    WaitPolicy,
    came_at,
    load_in_order,
    loading_pays,
    pay_together,
    sizes_to_last,
    worth_loading,
)
from radix_ext.pool_slots import PoolSlots
from radix_ext.sources import ChunkSources, Coming
from radix_ext.variant_index import VariantIndex
from radix_ext.variants import Identity, Variant
from sglang_chunkcache.config import MAX_LOADED_VARIANTS


class Stored(NamedTuple):
    """In place of an entry's KV."""

    nbytes: int
    num_tokens: int


@dataclass(eq=False)
class Transfer:
    """A load, or a write, of so many bytes."""

    size: int
    done: Callable[[], None]
    is_done: bool = False
    ended: float = 0.0


class Disk:
    """One transfer after the other, loads before writes, at one rate.

    Args:
        bounds: of loads, and likewise of writes.
    """

    def __init__(self, bytes_s: float, bounds: Bounds) -> None:
        self.loads, self.writes = Backlog(bounds), Backlog(bounds)
        self.now = self.busy_s = self._end = 0.0
        self._bytes_s = bytes_s
        self._queues = {id(each): deque[Transfer]() for each in (self.loads, self.writes)}
        self._at_work: tuple[Transfer, Backlog] | None = None

    def begin(self, backlog: Backlog, job: Transfer) -> bool:
        """It is queued. False: too much waits."""
        if not backlog.has_room(1, job.size):
            return False
        backlog.begin(job.size)
        self._queues[id(backlog)].append(job)
        return True

    def advance(self, until: float, is_enough: Callable[[], bool] = lambda: False) -> float:
        """Do what is done by then, or until it is enough. The time."""
        while not is_enough():
            if self._at_work is None:
                found = (each for each in (self.loads, self.writes) if self._queues[id(each)])
                backlog = next(found, None)
                if backlog is None:
                    break
                job = self._queues[id(backlog)].popleft()
                self._at_work, self._end = (job, backlog), self.now + job.size / self._bytes_s
            if self._end > until:
                break
            (job, backlog), self._at_work = self._at_work, None
            seconds = job.size / self._bytes_s
            self.now, self.busy_s, job.is_done = self._end, self.busy_s + seconds, True
            job.ended = self.now
            backlog.end(job.size, seconds)
            job.done()
        else:
            return self.now
        self.now = max(self.now, until)
        return self.now


@dataclass(eq=False)
class Asked:
    """What is loaded for one request."""

    jobs: list[Transfer] = field(default_factory=list)
    rest: list[Callable[[], None]] = field(default_factory=list)
    """Load what found no room."""
    left: list[int] = field(default_factory=list)
    """Bytes of these."""
    variants: defaultdict[ChunkId, list[Variant]] = field(default_factory=lambda: defaultdict(list))
    """What of chunks is to be moved."""
    saved_s: float = 0.0
    """What its coming is estimated to save of the time to the first token, loading aside."""


class _Missing(NamedTuple):
    """A chunk that neither device nor store has behind the request's head."""

    chunk: ChunkId
    head: str
    before: Prefix
    num_tokens: int
    is_elsewhere: bool
    computed_s: float
    saved_s: float


class FusedDisk:
    """Of one rank.

    Args:
        index: empty, of the disk's size.
        store: in host memory; `host` has its KV, where there is one.
        token_bytes: of an entry.
        share: of a moved token's computation, what moving it saves.
        max_gap_tokens: of a plan.
    """

    def __init__(
        self,
        disk: Disk,
        index: VariantIndex,
        policy: WaitPolicy,
        costs: Costs,
        *,
        store: VariantIndex,
        host: FusedHost | None,
        sources: ChunkSources,
        token_bytes: int,
        share: float,
        max_gap_tokens: int,
    ) -> None:
        self.disk, self.index, self._policy, self._costs = disk, index, policy, costs
        self._store, self._host, self._sources = store, host, sources
        self._token_bytes, self._share = token_bytes, share
        self._max_gap_tokens = max_gap_tokens
        self._under_way: dict[tuple[Identity, str, Prefix], Transfer | None] = {}
        """Places that are being loaded or, None, written."""
        self._asked = Asked()
        self.counts = Counter[str]()
        """Chunks: `found` on the disk and nowhere else, `loaded` for their request in time, `late`,
        `left` without room, `skipped` as computing is faster, `tried` all the same; `written`,
        `unwritten`."""
        self.wait_s = 0.0
        store.watchers.append(self._store_changed)

    # A request's life

    def arrive(
        self,
        chunks: Sequence[Chunk],
        spans: Sequence[Span],
        head: str,
        *,
        is_fused: bool,
        at: float,
    ) -> None:
        """The request waits from now on."""
        self.disk.advance(at)
        self._asked = Asked()
        ids = tuple(chunk.id for chunk in chunks)
        self.index.ask((chunk, head, ids[:i]) for i, chunk in enumerate(ids))
        if self._host is not None:
            self._use_chain(ids, head)
            self._load_chain(ids, spans, head)
        if is_fused:
            missing = list(self._missing(ids, spans, head))
            self.counts["found"] += sum(bool(self._found(each)) for each in missing)
            self._load_for(missing)

    def wait(self, at: float, saved_s: Callable[[Coming], float | None]) -> float:
        """The request could be admitted: when it is, and what comes after that is late.
        `saved_s`: as `Planner.saved_s`, of these."""
        now, asked = self.disk.advance(at), self._asked

        def has_come() -> bool:
            return _came_at(asked) is not None

        if not has_come():
            if asked.variants and (saved := saved_s(asked.variants)) is not None:
                asked.saved_s = saved
            under_way = [job for job in self._under_way.values() if job is not None]
            sizes = sizes_to_last(under_way, asked.jobs, asked.left)
            load_s = self.disk.loads.times.all_seconds(sizes)
            if wait_s := self._policy.seconds(load_s, asked.saved_s, now, partial(_came_at, asked)):
                now = self.disk.advance(at + wait_s, has_come)
                self._policy.ended(in_vain=not has_come())
        self.wait_s += now - at
        self.counts["loaded"] += sum(job.is_done for job in asked.jobs)
        self.counts["late"] += sum(not job.is_done for job in asked.jobs)
        self.counts["left"] += len(asked.left)
        self._asked = Asked()
        return now

    def count_uses(self, pieces: Sequence[Any]) -> None:
        """As `StorageTier.count_uses`."""
        for piece in pieces:
            if piece.source is None:
                continue
            facts = piece.source.facts
            place = piece.chunk, facts.head, facts.prefix
            if (twin := self.index.get(*place)) is not None:
                self.index.held.use(twin)
            elif (variant := self._store.get(*place)) and not variant.is_exact:
                self._write(place, variant)

    def saved(self, host: ChainVariant) -> None:
        """An exact node was copied to host memory: written, behind what precedes it."""
        self._write_chain((*host.prefix, ChunkId(str(host.identity))), host.head, ())

    # Private, in order of use

    def _use_chain(self, ids: Prefix, head: str) -> None:
        """As `StoredChains._use`."""
        assert self._host is not None
        places = [(chunk, head, ids[:i]) for i, chunk in enumerate(ids)]
        found = [*takewhile(lambda place: self._has_exact(*place), places)]
        for place in reversed(found):
            self.index.held.use(self.index.get(*place))  # type: ignore[arg-type]
        self._write_chain(ids[len(found) :], head, ids[: len(found)])

    def _write_chain(self, ids: Prefix, head: str, before: Prefix) -> None:
        """What follows there, up to what is neither on the disk nor in host memory."""
        assert self._host is not None
        key = _chain_key(head, before)
        for i, chunk in enumerate(ids):
            key = extend_chain(key, chunk)
            if not self._has_exact(chunk, head, (*before, *ids[:i])):
                host = self._host.nodes.get(key)
                if host is None or not host.is_here or not self._write_exact(host):
                    return

    def _load_chain(self, ids: Prefix, spans: Sequence[Span], head: str) -> None:
        """As `StoredChains._load`: what neither device nor host memory has."""
        assert self._host is not None
        keys = [_chain_key(head, ())]
        for chunk in ids:
            keys.append(extend_chain(keys[-1], chunk))
        missing = list[int]()
        for i in range(self._host.num_on_device(head, ids), len(ids)):
            if self._is_in_host(keys[i + 1]):
                continue
            if not self._has_exact(ids[i], head, ids[:i]):
                break
            missing.append(i)
        if not missing:
            return
        lens = [spans[i].end - spans[i].start for i in missing]
        loads = [self.disk.loads.times.seconds(self._token_bytes * each) or 0.0 for each in lens]
        work = extend_work(spans[missing[0]].start, spans[missing[-1]].end)._replace(calls=0)
        computed_s = self._costs[Phase.EXTEND].seconds(work)
        copied = self._costs[Phase.LOAD].seconds(Work(1, work.tokens))
        if not self._tries(pays=loading_pays(sum(loads) and sum(loads) + copied, computed_s)):
            return
        self._asked.saved_s = max(0.0, computed_s - copied)
        for number, i in enumerate(missing):
            if not self._claim(keys[i + 1], keys[i], ids[i], head, ids[:i], spans[i]):
                rest = partial(self._load_chain, ids, spans, head)
                left = (spans[i].end - spans[i].start for i in missing[number:])
                self._goes_on(rest, [self._token_bytes * each for each in left])
                return

    def _claim(
        self,
        key: ChainId,
        parent: ChainId,
        chunk: ChunkId,
        head: str,
        prefix: Prefix,
        span: Span,
    ) -> bool:
        """As `StoredChains._claim`."""
        assert self._host is not None
        if self._host.nodes.get(key) is not None:
            return True
        if self.disk.loads.is_full:
            return False
        num_tokens = span.end - span.start
        place = ChainPlace(key, parent, parent, span.start, chunk, head, prefix)
        host = self._host.nodes.claim(place, num_tokens)
        if host is None:
            return False

        def came() -> None:
            self._under_way.pop((chunk, head, prefix), None)
            assert self._host is not None
            self._host.came(host)
            self._go_on()

        return self._begin((chunk, head, prefix), num_tokens, came)

    def _missing(self, ids: Prefix, spans: Sequence[Span], head: str) -> list[_Missing]:
        """As `tier._missing_chunks`."""
        found = []
        for i, (chunk, span) in enumerate(zip(ids, spans, strict=True)):
            there = self._sources.candidates(chunk, head)
            if any(each.facts.head == head for each in there):
                continue
            work = extend_work(span.start, span.end)._replace(calls=0)
            computed_s = self._costs[Phase.EXTEND].seconds(work)
            moved_s = (1 - self._share) * self._costs[Phase.RECOMPUTE].seconds(work)
            moved_s += self._costs[Phase.HOST].seconds(Work(1, work.tokens))
            times = self._share * computed_s, max(0.0, computed_s - moved_s)
            num_tokens = span.end - span.start
            found.append(_Missing(chunk, head, ids[:i], num_tokens, bool(there), *times))
        return found

    def _found(self, missing: _Missing) -> list[Variant]:
        return worth_loading(
            self.index.find(missing.chunk),
            missing.before,
            missing.head,
            max_variants=MAX_LOADED_VARIANTS,
            is_elsewhere=missing.is_elsewhere,
        )

    def _load_for(
        self, missing_chunks: Sequence[_Missing], begun: dict[int, bool | None] | None = None
    ) -> None:
        """As `StorageTier._load_for`."""
        is_first, begun = begun is None, begun or {}
        todo = [each for i, each in enumerate(missing_chunks) if begun.get(i, False) is False]
        found, times = [(each, self._found(each)) for each in todo], self.disk.loads.times
        is_sooner = pay_together(
            [times.seconds(variant.blob.nbytes) for _, part in found for variant in part],
            [each.computed_s for each, part in found if part],
        )
        left = load_in_order(
            missing_chunks,
            partial(self._begin_missing, is_sooner),
            begun,
            max_gap_tokens=self._max_gap_tokens,
        )
        if is_first:
            tried = [each for i, each in enumerate(missing_chunks) if begun.get(i) is not None]
            saved_s = sum(each.saved_s for each in tried)
            self._asked.saved_s = max(self._asked.saved_s, saved_s)
        if left:
            variants = (each for i in left for each in self._found(missing_chunks[i]))
            sizes = [variant.blob.nbytes for variant in variants]
            self._goes_on(partial(self._load_for, missing_chunks, begun), sizes)

    def _begin_missing(self, is_sooner: bool, missing: _Missing) -> bool | None:
        found: list[bool] = []
        for variant in self._found(missing):
            load_s = self.disk.loads.times.seconds(variant.blob.nbytes)
            pays = is_sooner or loading_pays(load_s, missing.computed_s)
            if self._tries(pays=pays):
                self._asked.variants[missing.chunk].append(variant)
                found.append(self._load(missing.chunk, variant))
        return all(found) if found else None

    def _tries(self, *, pays: bool) -> bool:
        """As `Storage.tries`."""
        if pays:
            return True
        self.counts["skipped"] += 1
        is_tried = explores(self.counts["skipped"])
        self.counts["tried"] += is_tried
        return is_tried

    def _load(self, chunk: ChunkId, stored: Variant) -> bool:
        """As `StorageTier._load`."""
        place, num_tokens = (chunk, stored.head, stored.prefix), stored.blob.num_tokens
        nbytes = num_tokens * self._token_bytes
        if not self._store.wants(*place, preprocessed=stored.preprocessed, nbytes=nbytes):
            return True
        if place in self._under_way:
            if (job := self._under_way[place]) is not None and job not in self._asked.jobs:
                self._asked.jobs.append(job)
            return True
        if self.disk.loads.is_full:
            return False
        blob: Stored | PoolSlots | None = Stored(nbytes, num_tokens)
        if self._host is not None:
            blob = self._host.nodes.room(num_tokens)
        if blob is None:
            return False
        if isinstance(blob, PoolSlots):
            blob.hold()

        def came() -> None:
            self._under_way.pop(place, None)
            loaded = _copy(stored, blob, num_uses=stored.num_uses, is_below=True)
            self._store.put(chunk, loaded)
            if isinstance(blob, PoolSlots):
                if loaded not in self._store.held:
                    blob.give_back()
                blob.let_go()
            self._go_on()

        is_begun = self._begin(place, num_tokens, came)
        if isinstance(blob, PoolSlots) and not is_begun:
            blob.give_back()
            blob.let_go()
        return is_begun

    def _begin(
        self, place: tuple[Identity, str, Prefix], num_tokens: int, came: Callable[[], None]
    ) -> bool:
        job = Transfer(num_tokens * self._token_bytes, came)
        if not self.disk.begin(self.disk.loads, job):
            return False
        self._under_way[place] = job
        self._asked.jobs.append(job)
        return True

    def _goes_on(self, rest: Callable[[], None], left: Sequence[int]) -> None:
        self._asked.left += left
        if any(self._under_way.values()):
            self._asked.rest.append(rest)

    def _go_on(self) -> None:
        """As `Storage._go_on`, of the one request that waits."""
        if not self.disk.loads.is_full:
            rest, self._asked.rest, self._asked.left = self._asked.rest, [], []
            for each in rest:
                each()

    def _store_changed(self, identity: Identity, variant: Variant, is_here: bool) -> None:
        if is_here and not variant.is_exact and not variant.is_below:
            self._write((identity, variant.head, variant.prefix), variant)

    def _write(self, place: tuple[Identity, str, Prefix], variant: Variant) -> None:
        """As `Writes.write` and `StorageTier.write`."""
        nbytes = variant.blob.nbytes
        old, preprocessed = self.index.get(*place), variant.preprocessed
        if old is not None and (old.is_exact or old.preprocessed >= preprocessed):
            self._store.held.set_below(variant)
            return
        if place in self._under_way or not self.index.wants(
            *place, preprocessed=preprocessed, nbytes=nbytes
        ):
            return
        num_tokens = nbytes // self._token_bytes
        stored = _copy(variant, Stored(nbytes, num_tokens))

        def written() -> None:
            if self.index.put(place[0], stored) and variant in self._store.held:
                self._store.held.set_below(variant)

        self._begin_write(place, variant.blob, written)

    def _write_exact(self, host: ChainVariant) -> bool:
        """As `StoredChains._write`: whether it is being written."""
        place = host.identity, host.head, host.prefix
        if place in self._under_way:
            return True
        if not self.index.gains(*place, host.blob.nbytes + self.disk.writes.num_bytes):
            return False
        blob = Stored(host.blob.nbytes, host.blob.num_tokens)
        stored = _copy(host, blob, is_exact=True)
        return self._begin_write(place, host.blob, lambda: self.index.insert(place[0], stored))

    def _begin_write(
        self, place: tuple[Identity, str, Prefix], blob: Any, keep: Callable[[], object]
    ) -> bool:
        def done() -> None:
            self._under_way.pop(place, None)
            keep()
            self.counts["written"] += 1
            if isinstance(blob, PoolSlots):
                blob.let_go()

        if not self.disk.begin(self.disk.writes, Transfer(blob.nbytes, done)):
            self.counts["unwritten"] += 1
            return False
        self._under_way[place] = None
        if isinstance(blob, PoolSlots):
            blob.hold()
        return True

    def _has_exact(self, chunk: Identity, head: str, prefix: Prefix) -> bool:
        found = self.index.get(chunk, head, prefix)
        return found is not None and found.is_exact

    def _is_in_host(self, key: ChainId) -> bool:
        assert self._host is not None
        host = self._host.nodes.get(key)
        return host is not None and host.is_here


def _came_at(asked: Asked) -> float | None:
    return None if asked.rest else came_at(asked.jobs)


def _chain_key(head: str, ids: Prefix) -> ChainId:
    key = root_chain(head)
    for chunk in ids:
        key = extend_chain(key, chunk)
    return key


def _copy(of: Variant, blob: Any, **fields: Any) -> Variant:
    """Of the KV alone: what is measured of it stays with the original."""
    place: Any = {"head": of.head, "start": of.start, "preprocessed": of.preprocessed}
    return Variant(of.prefix, blob, **place, **fields)
