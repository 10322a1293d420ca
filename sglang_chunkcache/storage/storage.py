"""A rank's storage on the scheduler's side: what it holds, what is under way, what leaves.

    fusion/tier.py               chunk KV that is moved ──┐
    scheduler/stored_chains.py   exact chains ────────────┴──► index, one budget in bytes
                                                               ──► loader.py: the thread

The index knows every entry of the manifest and what was found of others', and none of their KV. By
priority others leave it for what comes. Who has written an entry deletes it for its budget, others
only forget it. Nothing raises; a start and the end alone wait.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from radix_ext import ChunkId
from radix_ext.cfo import Prefix
from radix_ext.loading import LoadTimes, WaitPolicy
from radix_ext.prefetches import Prefetches
from radix_ext.variant_index import VariantIndex
from radix_ext.variants import Identity, Variant
from sglang_chunkcache.rank_metrics import RankMetrics
from sglang_chunkcache.storage.entry import OVERHEAD_BYTES, Entry, Layout
from sglang_chunkcache.storage.jobs import FAILED, PAUSED, Load, Lookup, Write
from sglang_chunkcache.storage.key import Names, StoredChunk
from sglang_chunkcache.storage.loader import Loader
from sglang_chunkcache.storage.manifest import Row, Use
from sglang_chunkcache.storage.ranks import Ranks
from sglang_chunkcache.wire.state import Cleared

logger = logging.getLogger(__name__)

LOOKED_UP_S = 10.0
"""How long what was looked up counts as known: a miss costs one question."""
MAX_LOOKED_UP = 10_000
"""Chunks of which that is remembered, about three megabytes."""
RESERVED_S = 10.0
"""A place in the queue for what a request will write: as long as the front waits for one."""
MAX_PREFETCH_BYTES = 64 << 20
"""That one tenant may have under way for requests that may come. A hint costs its client nothing,
so it must not keep the disk from requests that wait: a second of a fast network."""
START_S = 10.0
"""What a start may spend on loading the entries that were used most: some gigabytes from a disk."""
MAX_OVERHEAD_BYTES = 1 << 20
"""What an entry may have beside twice its KV, if another server tells of it."""


@dataclass(frozen=True, slots=True)
class Stored:
    """In place of an entry's KV and of what was measured of it."""

    row: Row
    is_own: bool
    """Whether this server has written it."""

    @property
    def nbytes(self) -> int:
        """What others have written is in their budgets."""
        return self.row.num_bytes if self.is_own else 0


@dataclass(eq=False)
class Asked:
    """What was asked of the storage for one request."""

    loads: list[Load] = field(default_factory=list)
    lookup: Lookup | None = None
    is_planned: bool = False
    """What comes from now on is late."""
    goes_on: Callable[[], None] | None = None
    """Loads what found no room, when something of it has come. None: all did."""
    is_skipped: bool = False
    """Something was not loaded, since computing it is faster."""
    is_prefetch: bool = False
    """The request may come. False: it is here."""
    tenant: tuple[str | None, ...] = ()
    """Whose it is: extra_key and cache_salt."""
    computed_s: float = 0.0
    """What computing is estimated to take, if nothing comes."""
    end: int | None = None
    """Of what was asked for, in the prompt. None: it is not one stretch."""
    until: float | None = None
    """When its request waits no longer. None: it did not wait yet."""


class _Reserved(NamedTuple):
    """A place in the queue of writes."""

    size: int
    until: float


class Known(NamedTuple):
    """What there is of one variant."""

    preprocessed: bool
    scored: int
    has_outward: bool

    def replaces(self, old: Known) -> bool:
        """As in a store, except that nothing that was measured is lost:
        a backend joins no entries."""
        if self.preprocessed != old.preprocessed:
            return self.preprocessed
        return self != old and self.scored >= old.scored and self.has_outward >= old.has_outward


class Storage:
    """Of one rank.

    Args:
        index: empty.
        wait_policy: how long a request waits. None: not at all.
        model_of: names model, weights (by their fingerprint) and what else KV depends on.
        rows: what the manifest has, the most used first.
        metrics: told what `stats` says, with it and when it is due while there are requests. None:
            nobody is.
        ranks: as the loader has them.
        clock: seconds.
    """

    def __init__(
        self,
        index: VariantIndex,
        loader: Loader,
        names: Names,
        *,
        layout: Layout,
        model_of: Callable[..., str],
        wait_policy: WaitPolicy | None = None,
        rows: Iterable[Row] = (),
        metrics: RankMetrics | None = None,
        ranks: Ranks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.ranks, self.prefetches = ranks, Prefetches(MAX_PREFETCH_BYTES)
        self.index, self.loader, self.names, self.layout = index, loader, names, layout
        self._model_of, self._weights, self._models = model_of, 0, dict[tuple[str, ...], str]()
        self.heads: tuple[tuple[int, int], ...] = ()
        """What was measured in others is not used."""
        self.is_off = True
        """Nobody knows the weights, so nothing can be named: nothing is written or loaded."""
        self.pays = True
        """The last load that was thought of."""
        self.num_late = self.num_skipped = self.num_found = 0
        self._tenant: tuple[tuple[str | None, str | None], str] = (
            (None, None),
            names.tenant(None, None),
        )
        """The last one, and its name."""
        self._wait_policy = wait_policy or WaitPolicy(0.0)
        self._under_way: dict[str, Load | None] = {}
        """Names that are being loaded or, None, written."""
        self._looked_up: dict[StoredChunk, float] = {}
        """When that is asked again. The oldest first."""
        self._times, self._metrics, self._clock = LoadTimes(), metrics, clock
        self._used: dict[str, Use] = {}
        """Not told to the thread yet."""
        self._asked: list[tuple[Identity, str, Prefix]] = []
        """Not counted yet."""
        self._writing_bytes = 0
        self._reserved: dict[tuple[StoredChunk, str, Prefix], _Reserved] = {}
        self._era = self._num_cleared = 0
        self._kinds: dict[str, tuple[tuple[str, ...], int]] = {}
        """What KV depends on, and bytes saved of each token."""
        self._num_bytes, self._num_tokens = Counter[str](), Counter[str]()
        """Of own entries, by model."""
        self._is_clearing = False
        index.watchers.append(self._index_changed)
        left = index.restore_all(
            (row.place.stored_chunk, _variant(row, row.priority, row.num_uses)) for row in rows
        )
        if left:  # the limit is lower than it was
            loader.delete([variant.blob.row for variant in left])

    # A rank's life

    def start(self, weights: int | None, heads: tuple[tuple[int, int], ...] = ()) -> None:
        """From now on with these weights (their fingerprint; None: unknown, as `stop`) and
        calibrated heads. What is under way for others is not used."""
        self.stop()
        if weights is not None:
            self._weights = weights if self.ranks is None else self.ranks.fingerprint(weights)
            self.heads, self.is_off = heads, False
            self._models.clear()

    def stop(self) -> None:
        """Until `start` nothing is written or loaded."""
        self.is_off = True
        self._era += 1

    def fill(self, loads: Iterable[Callable[[], bool]], seconds: float = START_S) -> None:
        """Do these loads, before there are requests, until one says False:
        the one method that waits, so long at most."""
        deadline = time.monotonic() + seconds

        def is_over() -> bool:
            mine = time.monotonic() > deadline
            return mine if self.ranks is None else self.ranks.any(mine)

        for load in loads:
            while self.loader.is_full and not is_over():
                self.loader.drain(0.05)
                self.poll(is_round=True)
            if is_over() or self.loader.is_paused or not load():
                break
        self.loader.drain(max(0.0, deadline - time.monotonic()))
        self.poll(is_round=True)

    def close(self) -> None:
        """The end: what waits is written, within `loader.CLOSE_S`."""
        self._tell_uses()
        self.loader.close()

    # Entries

    def keeps(self, kind: str, how: tuple[str, ...], layout: Layout | None = None) -> None:
        """Entries whose `chunk` was told `how` count as of this kind.
        `layout`: theirs; None: the pool's."""
        self._kinds[kind] = how, self.layout.token_bytes - (layout or self.layout).token_bytes

    def chunk(
        self, how: tuple[str, ...], extra_key: str | None, cache_salt: str | None, chunk: ChunkId
    ) -> StoredChunk:
        """What a tenant's entries of a chunk are found by.
        `how`: what KV depends on beside model, weights and tokens."""
        if (extra_key, cache_salt) != self._tenant[0]:  # a request's chunks have one
            self._tenant = (extra_key, cache_salt), self.names.tenant(extra_key, cache_salt)
        return StoredChunk(self._model(how), self._tenant[1], chunk)

    def has(self, row: Row, layout: Layout | None = None) -> bool:
        """Whether the storage has as much of it, or something better in its place,
        or would not take it."""
        old = self.index.get(row.place.stored_chunk, row.place.head, row.place.prefix)
        if old is not None:
            return not _known(row).replaces(self.known(old))
        return not self.index.wants(
            row.place.stored_chunk,
            row.place.head,
            row.place.prefix,
            preprocessed=row.place.preprocessed,
            nbytes=row.num_tokens * (layout or self.layout).token_bytes,
        )

    def known(self, stored: Variant) -> Known:
        """What can be used of one of the index's."""
        return _known(self._in_these_heads(stored.blob.row))

    @property
    def is_behind(self) -> bool:
        """Whether it has much to write: what would be written now may soon find no place in its
        queue."""
        return not (self.is_off or self.loader.is_paused) and self.loader.is_behind

    def reserve(self, chunk: StoredChunk, head: str, prefix: Prefix, num_bytes: int) -> bool:
        """Whether an entry of so many bytes, which a request will make, finds a place in the queue,
        beside those of others that were told so in the last `RESERVED_S` and have not written
        yet."""
        if self.is_off or self.loader.is_paused:
            return True
        now, key = self._clock(), (chunk, head, prefix)
        others = {
            each: held for each, held in self._reserved.items() if each != key and held.until > now
        }
        size = num_bytes + OVERHEAD_BYTES
        has_room = not self.loader.is_behind and self.loader.has_room(
            1 + len(others), size + sum(each.size for each in others.values())
        )
        self._reserved = {**others, key: _Reserved(size, now + RESERVED_S)} if has_room else others
        return has_room

    def write(
        self,
        row: Row,
        entry: Callable[[], Entry],
        done: Callable[[], object] = lambda: None,
        layout: Layout | None = None,
    ) -> bool:
        """Keep it, unless `has`. The thread calls `entry`, the scheduler `done` when the index
        knows what has become of it. False: nothing is written. `layout`: of the entry; None: the
        pool's."""
        self._reserved.pop((row.place.stored_chunk, row.place.head, row.place.prefix), None)
        if (
            self.is_off
            or self.loader.is_paused
            or row.name in self._under_way
            or self.has(row, layout)
        ):
            return False
        num_bytes = row.num_tokens * (layout or self.layout).token_bytes + OVERHEAD_BYTES
        if not self.loader.write(
            Write(row, entry, num_bytes, partial(self._written, self._num_cleared, done))
        ):
            return False
        self._under_way[row.name] = None
        self._writing_bytes += num_bytes
        return True

    def is_under_way(self, name: str) -> bool:
        """Whether the entry is being written or loaded."""
        return name in self._under_way

    def gains(self, chunk: StoredChunk, num_tokens: int) -> bool:
        """Whether there is room beside what is being written, or it is asked for more often than
        what would leave."""
        return self.index.gains(
            chunk, num_tokens * self.layout.token_bytes + OVERHEAD_BYTES + self._writing_bytes
        )

    def load(
        self,
        variant: Variant,
        num_tokens: int,
        done: Callable[[Entry | None], None],
        into: Callable[[Entry], None] | None = None,
        asked: Asked | None = None,
        layout: Layout | None = None,
    ) -> bool:
        """Load one of the index's, for what was asked for. The thread calls `into` where there is
        an entry. `done` is told: None, there is none, or it is of other weights by now. False: it
        is under way, or too much is. `layout`: as in `write`."""
        if not self.takes(variant, asked):
            self.join(variant, asked)
            return False
        row: Row = variant.blob.row
        prefetched_by = asked.tenant if asked is not None and asked.is_prefetch else None
        then = partial(self._loaded, self._era, variant, done, prefetched_by)
        job = Load(row.name, row.num_bytes, num_tokens, layout or self.layout, into, then)
        if not self.loader.load(job):
            return False
        self._under_way[row.name] = job
        if prefetched_by is not None:
            self.prefetches.begin(prefetched_by, row.num_bytes, row.place.stored_chunk)
        if asked is not None:
            asked.loads.append(job)
        return True

    def join(self, variant: Variant, asked: Asked | None) -> None:
        """If it is on its way for another request, this one waits for it, too."""
        job = self._under_way.get(variant.blob.row.name)
        if job is not None and asked is not None and job not in asked.loads:
            asked.loads.append(job)

    def takes(self, variant: Variant, asked: Asked | None) -> bool:
        """Whether it may be loaded: not if it is under way, or ahead if loads wait or the tenant
        has too much under way."""
        row: Row = variant.blob.row
        if row.name in self._under_way or self.loader.is_full:
            return False
        if asked is None or not asked.is_prefetch:
            return True
        return self.loader.has_spare and self.prefetches.has_room(asked.tenant, row.num_bytes)

    def look_up(
        self, chunks: Mapping[StoredChunk, int], then: Callable[[], None], asked: Asked
    ) -> None:
        """Ask what others have of these chunks of so many tokens, unless that is known or being
        asked. `then` is told when the index knows it."""
        if not self.loader.is_shared:
            return
        now = self._clock()
        unknown = {
            chunk: number
            for chunk, number in chunks.items()
            if now >= self._looked_up.get(chunk, now)
        }
        job = Lookup(list(unknown), partial(self._found, self._era, unknown, then))
        if not unknown or not self.loader.look_up(job):
            return
        asked.lookup = job
        for chunk in unknown:
            self._looked_up.pop(chunk, None)
            self._looked_up[chunk] = now + LOOKED_UP_S
        while len(self._looked_up) > MAX_LOOKED_UP:
            del self._looked_up[next(iter(self._looked_up))]

    def seconds(self, num_bytes: int) -> float | None:
        """What loading them is estimated to take. None: nothing was loaded yet."""
        return self._times.seconds(num_bytes)

    def left_out(self) -> int:
        """A load is estimated to take longer than computing. Returns how many there were."""
        self.pays = False
        self.num_skipped += 1
        return self.num_skipped

    def awaits(self, *asked: Asked | None) -> bool:
        """Whether a request, which could be admitted, waits for what was asked for it. If not, it
        is `planned` next. Those of a group of ranks do not wait, whose clocks differ."""
        parts = [each for each in asked if each is not None and not each.is_planned]
        if not parts or self.ranks is not None:
            return False
        jobs = [job for each in parts for job in (each.lookup, *each.loads) if job is not None]
        is_coming = not all(job.is_done for job in jobs)
        now, first = self._clock(), parts[0]
        if first.until is not None:
            is_waiting = is_coming and now < first.until
            if not is_waiting:
                self._wait_policy.ended(in_vain=is_coming)
            return is_waiting
        if not is_coming:
            return False
        loads = [
            self._times.seconds(job.num_bytes)
            for job in self._under_way.values()
            if job is not None
        ]
        load_s = None if None in loads else sum(filter(None, loads))
        wait_s = self._wait_policy.seconds(load_s, max(each.computed_s for each in parts))
        first.until = now + wait_s
        return wait_s > 0

    def planned(self, asked: Asked | None) -> None:
        """The request is planned with what has come:
        what is under way for it serves the next one."""
        if asked is None:
            return
        asked.is_planned = True
        for load in asked.loads:
            if not load.is_done and not load.is_late:
                load.is_late = True
                self.num_late += 1

    def ask(
        self, chunks: Iterable[tuple[Identity, str, Prefix]], *, is_request: bool = True
    ) -> None:
        """Count one request, as `VariantIndex.ask`; or what is to be counted with the next one."""
        self._asked += chunks
        if not is_request:
            return
        self.index.ask(self._asked)
        for chunk, _, _ in self._asked:
            self.prefetches.asked(chunk)
        self.prefetches.next_request()
        self._asked.clear()

    def use(self, variant: Variant) -> None:
        """As `HeldVariants.use`, kept in the manifest too."""
        self.index.held.use(variant)
        self._note(variant)

    def poll(self, *, is_round: bool = False) -> None:
        """Take in what the thread has done.
        Of several ranks, what all threads have: only with `is_round`, after each forward."""
        self._take_in(is_round)
        if self._metrics is not None and self._metrics.is_due:
            self.stats()

    # Operators

    def clear(self) -> Cleared:
        """Delete every entry that this server knows, of whatever model, those under way and those
        of others included. What others have written and this one never asked for stays."""
        held = self.index.stats()
        self._era += 1
        self._num_cleared += 1
        rows = [variant.blob.row for variant in self.index.held]
        self._is_clearing = True
        self.index.clear()
        self._is_clearing = False
        self._num_bytes.clear()
        self._num_tokens.clear()
        self._used.clear()
        self._looked_up.clear()
        self.loader.delete(rows)
        return Cleared(held.num_chunks, held.num_variants, held.num_bytes)

    def stats(self) -> dict[str, Any]:
        """What it holds, counts since the start, and what waits."""
        self._take_in()
        held = self.index.stats()
        found = {
            "num_entries": held.num_variants,
            "num_bytes": held.num_bytes,
            **self._bytes_by_kind(held.num_bytes),
            "max_bytes": self.index.held.max_bytes,
            "max_entries": self.index.held.max_entries,
            "num_evicted": held.num_evicted,
            "late": self.num_late,
            "waits": self._wait_policy.num_waits,
            "waits_in_vain": self._wait_policy.num_in_vain,
            "skipped": self.num_skipped,
            "pays": self.pays,
            "load_ms_per_mib": None
            if (taken := self._times.seconds(1 << 20)) is None
            else 1000 * taken,
            "off": self.is_off,
            "prefetch": self.prefetches.stats(),
            "prefetch_bytes": self.prefetches.num_bytes,
            **({"found": self.num_found} if self.loader.is_shared else {}),
            **self.loader.stats(),
        }
        if self._metrics is not None:
            self._metrics.show(found)
        return found

    @contextmanager
    def guard(self, message: str) -> Iterator[None]:
        """The scheduler must not die of what can be computed.
        Ranks of a group would differ, and end."""
        try:
            yield
        except Exception:
            if self.ranks is not None:
                raise
            logger.exception(f"chunk cache: {message}")

    # Private, in order of use

    def _take_in(self, is_round: bool = False) -> None:
        for job in self.loader.poll(is_round=is_round):
            with self.guard("what the storage has done is lost"):
                job.done(job)
        if self._used and self.loader.is_idle:
            self._tell_uses()

    def _model(self, how: tuple[str, ...]) -> str:
        if how not in self._models:
            self._models[how] = self._model_of(self._weights, *how)
        return self._models[how]

    def _bytes_by_kind(self, num_bytes: int) -> dict[str, dict[str, int]]:
        """Of all other entries nobody knows what they would take as plain KV."""
        models = {kind: self._model(how) for kind, (how, _) in self._kinds.items()}
        found = {kind: self._num_bytes[model] for kind, model in models.items()}
        saved = {
            kind: self._num_tokens[models[kind]] * each for kind, (_, each) in self._kinds.items()
        }
        return {"bytes": {**found, "other": num_bytes - sum(found.values())}, "saved_bytes": saved}

    def _index_changed(self, identity: Identity, variant: Variant, is_here: bool) -> None:
        if self._is_clearing:
            return
        if variant.blob.is_own:
            row: Row = variant.blob.row
            self._num_bytes[row.place.model] += row.num_bytes if is_here else -row.num_bytes
            self._num_tokens[row.place.model] += row.num_tokens if is_here else -row.num_tokens
        if not is_here:
            self._used.pop(variant.blob.row.name, None)
            if variant.blob.is_own:
                self.loader.delete([variant.blob.row])

    def _written(self, num_cleared: int, done: Callable[[], object], job: Write) -> None:
        """The entry is there: the index has it, and another one leaves for it."""
        row = job.row
        self._under_way.pop(row.name, None)
        self._writing_bytes -= job.size
        try:
            self._take_written(num_cleared, job)
        finally:
            done()

    def _take_written(self, num_cleared: int, job: Write) -> None:
        row = job.row
        if not job.is_confirmed:
            if row.num_bytes:  # another rank could not, or the manifest has it not
                self._delete_own(job)
            return
        if num_cleared != self._num_cleared:
            self._delete_own(job)
            return
        old = self.index.get(row.place.stored_chunk, row.place.head, row.place.prefix)
        if old is not None and old.blob.row.name == row.name:
            if old.blob.is_own or not job.is_own:
                return
        elif old is not None and not _known(row).replaces(self.known(old)):
            self._delete_own(job)
            return
        stored = _variant(
            row, old.priority if old else 0.0, old.num_uses if old else 0, is_own=job.is_own
        )
        if old is not None:
            self.index.drop(old)
        if self.index.put(row.place.stored_chunk, stored):
            self._note(stored)
        else:
            self._delete_own(job)

    def _delete_own(self, job: Write) -> None:
        if job.is_own:
            self.loader.delete([job.row])

    def _loaded(
        self,
        era: int,
        variant: Variant,
        done: Callable[[Entry | None], None],
        prefetched_by: tuple[str | None, ...] | None,
        job: Load,
    ) -> None:
        """Unless it is no entry: then the storage has none."""
        self._under_way.pop(job.name, None)
        if prefetched_by is not None:
            chunk = variant.blob.row.place.stored_chunk
            self.prefetches.end(prefetched_by, job.num_bytes, chunk, has_come=job.entry is not None)
        if job.entry is not None:
            self._times.observe(job.num_bytes, job.seconds)
        elif job.problem not in (FAILED, PAUSED):
            self.index.drop(variant)
            if not variant.blob.is_own:  # nobody can use it
                self.loader.delete([variant.blob.row])
        done(job.entry if era == self._era else None)

    def _found(
        self, era: int, chunks: Mapping[StoredChunk, int], then: Callable[[], None], job: Lookup
    ) -> None:
        for chunk in job.chunks:
            if era != self._era or chunk not in job.found:  # the storage has failed
                self._looked_up.pop(chunk, None)
        if era != self._era:
            return
        for chunk, rows in job.found.items():
            for row in rows:
                self._take_over(row, chunks[chunk])
        then()

    def _take_over(self, row: Row, num_tokens: int) -> None:
        """Another server tells of this entry: the index has it, if it has nothing as good there.
        Nothing leaves for it."""
        room = 2 * num_tokens * self.layout.token_bytes + MAX_OVERHEAD_BYTES
        if row.num_tokens != num_tokens or row.num_bytes > room or self.loader.is_refused(row.name):
            return
        old = self.index.get(row.place.stored_chunk, row.place.head, row.place.prefix)
        if old is not None and not _known(self._in_these_heads(row)).replaces(self.known(old)):
            return
        if old is not None:
            self.index.drop(old)
        self.num_found += self.index.restore(
            row.place.stored_chunk, _variant(row, 0.0, 0, is_own=False)
        )

    def _note(self, variant: Variant) -> None:
        if variant.blob.is_own:  # others have no row
            self._used[variant.blob.row.name] = Use(
                variant.blob.row.name, variant.priority, variant.num_uses
            )

    def _tell_uses(self) -> None:
        self.loader.use(list(self._used.values()))
        self._used.clear()

    def _in_these_heads(self, row: Row) -> Row:
        return row if row.heads in ((), self.heads) else row._replace(scored=0, has_outward=False)


def _known(row: Row) -> Known:
    return Known(row.place.preprocessed, row.scored, row.has_outward)


def _variant(row: Row, priority: float, num_uses: int, *, is_own: bool = True) -> Variant:
    place = row.place
    return Variant(
        place.prefix,
        Stored(row, is_own),
        preprocessed=place.preprocessed,
        head=place.head,
        start=row.start,
        priority=priority,
        num_uses=num_uses,
    )
