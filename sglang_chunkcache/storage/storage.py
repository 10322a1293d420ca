"""A rank's storage on the scheduler's side: what it holds, what is loaded, what leaves.

    fusion/tier.py               chunk KV that is moved ──┐
    scheduler/stored_chains.py   exact chains ────────────┴──► index, one budget in bytes
                                                               ──► loader.py: the thread

The index knows every entry of the manifest and what was found of others', and none of their KV. Who
has written an entry deletes it when it leaves, others only forget it. Nothing raises; a start and
the end alone wait.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from radix_ext.cfo import Prefix
from radix_ext.costs import explores
from radix_ext.loading import LoadTimes, WaitPolicy
from radix_ext.prefetches import Prefetches
from radix_ext.variant_index import VariantIndex
from radix_ext.variants import Identity, Variant
from sglang_chunkcache.rank_metrics import NO_METRICS, RankMetrics
from sglang_chunkcache.storage.entry import Entry, Layout
from sglang_chunkcache.storage.held import variant_of_row
from sglang_chunkcache.storage.jobs import FAILED, PAUSED, Load
from sglang_chunkcache.storage.loader import Loader
from sglang_chunkcache.storage.manifest import Row
from sglang_chunkcache.storage.naming import Naming
from sglang_chunkcache.storage.others import Others
from sglang_chunkcache.storage.waits import PendingLoads, Waits
from sglang_chunkcache.storage.writes import Writes
from sglang_chunkcache.wire.state import Cleared

logger = logging.getLogger(__name__)

MAX_PREFETCH_S = 1.0
"""That one tenant may have under way for requests that may come. A hint costs its client nothing,
so it must not keep the disk from requests that wait."""
MAX_PREFETCH_BYTES = 64 << 20
"""Where nobody knows yet what loads take."""
START_S = 10.0
"""What a start may spend on loading the entries that were used most: some gigabytes from a disk."""


class Storage:
    """Of one rank. `index` is empty, `rows` is what the manifest has, the most used first, and
    `metrics` is shown what `stats` says."""

    def __init__(
        self,
        index: VariantIndex,
        loader: Loader,
        naming: Naming,
        rows: Iterable[Row],
        wait_policy: WaitPolicy,
        metrics: RankMetrics = NO_METRICS,
    ) -> None:
        self.index, self.loader, self.ranks, self.naming = index, loader, loader.ranks, naming
        self.names, self.layout = naming.names, naming.layout
        self.pays = True  # the last load that was thought of
        self.num_skipped = 0
        self.under_way: dict[str, Load | None] = {}  # names that are being loaded or, None, written
        times = loader.waiting[Load].times
        self.prefetches = Prefetches(partial(_max_prefetched, times))
        self.waits = Waits(wait_policy, times, loader.worker.clock)
        self.others = Others(index, loader, naming)
        self.writes = Writes(index, loader, naming, self.under_way, self._note)
        self._metrics = metrics
        # Not told to the thread yet; not counted yet.
        self._used: dict[str, tuple[float, int]] = {}
        self._asked: list[tuple[Identity, str, Prefix]] = []
        self._going_on = deque[PendingLoads]()  # who waits for room in the loader's queue
        index.watchers.append(self._index_changed)
        left = index.restore_all((row.place.stored_chunk, variant_of_row(row)) for row in rows)
        if left:  # the limit is lower than it was
            loader.delete([variant.blob.row for variant in left])

    @property
    def is_off(self) -> bool:
        return self.naming.is_off

    # A rank's life

    def start(self, weights: int | None, heads: tuple[tuple[int, int], ...] = ()) -> None:
        """From now on with these weights (their fingerprint; None: unknown, as `stop`) and
        calibrated heads. What is under way for others is not used."""
        self.stop()
        if weights is not None:
            of_all = weights if self.ranks is None else self.ranks.fingerprint(weights)
            self.naming.start(of_all, heads)

    def stop(self) -> None:
        """Until `start` nothing is written or loaded."""
        self.naming.stop()
        while self._going_on:  # for other weights
            self._going_on.popleft().take_rest()

    def fill(self, loads: Iterable[Callable[[], bool]], seconds: float = START_S) -> None:
        """Do these loads, at a start, until one says False. Waits, so long at most."""
        deadline = time.monotonic() + seconds

        def is_over() -> bool:
            mine = time.monotonic() > deadline
            return mine if self.ranks is None else any(self.ranks.of_all(mine))

        for load in loads:
            while self._is_full and not is_over():
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

    # Loads

    def load(
        self,
        variant: Variant,
        num_tokens: int,
        done: Callable[[Entry | None], None],
        into: Callable[[Entry], None] | None = None,
        asked: PendingLoads | None = None,
        layout: Layout | None = None,
    ) -> bool:
        """Load one of the index's. The thread calls `into` where there is an entry. `done` is told:
        None, there is none, or it is of other weights by now. False: it is under way, or too much
        is. `layout`: as in `Writes.write`."""
        if not self.takes(variant, asked):
            self.join(variant, asked)
            return False
        row: Row = variant.blob.row
        then = partial(self._loaded, self.naming.era, variant, done, asked)
        job = Load(row.name, row.num_bytes, num_tokens, layout or self.layout, into, done=then)
        if not self.loader.load(job):
            return False
        self.under_way[row.name] = job
        if asked is not None:
            asked.loads.append(job)
            if asked.is_prefetch:
                self.prefetches.begin(asked.tenant, row.num_bytes, row.place.stored_chunk)
        return True

    def join(self, variant: Variant, asked: PendingLoads | None) -> bool:
        """Wait, too, for what is on its way for another request. Whether it is under way."""
        name = variant.blob.row.name
        job = self.under_way.get(name)
        if job is not None and asked is not None and job not in asked.loads:
            asked.loads.append(job)
        return name in self.under_way

    def takes(self, variant: Variant, asked: PendingLoads | None) -> bool:
        """Whether it may be loaded. Ahead of requests: if few loads wait, and few of the tenant."""
        row: Row = variant.blob.row
        if row.name in self.under_way or self._is_full:
            return False
        if asked is None or not asked.is_prefetch:
            return True
        has_spare = self.loader.waiting[Load].has_spare
        return has_spare and self.prefetches.has_room(asked.tenant, row.num_bytes)

    def goes_on(self, asked: PendingLoads, rest: Callable[[], None], left: Sequence[int]) -> None:
        """Call `rest`, which would make loads of so many bytes each, when there is room for some,
        unless the request is planned before."""
        asked.left += left
        if any(self.under_way.values()):  # else nothing would tell that there is room
            asked.goes_on.append(rest)
            self._going_on.append(asked)

    def tries(self, *, pays: bool) -> bool:
        """Whether to make a load that was thought of: it pays, or is tried now and then."""
        self.pays = pays
        self.num_skipped += not pays
        return pays or explores(self.num_skipped)

    def awaits(self, asked: Sequence[PendingLoads]) -> bool:
        """As `Waits.awaits`. Those of a group of ranks do not wait, whose clocks differ."""
        if not asked or self.ranks is not None:
            return False
        self.poll()
        return self.waits.awaits(asked, [job for job in self.under_way.values() if job])

    def is_over(self, asked: Sequence[PendingLoads]) -> bool:
        """Whether a request that awaits these is to be looked at, as `Waits.is_over`."""
        self.poll()
        return self.waits.is_over(asked)

    # Requests

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
        """Take in what the thread has done, as `Loader.poll`."""
        self._take_in(is_round)
        if self._metrics.is_due:
            self.stats()

    # Operators

    def clear(self) -> Cleared:
        """Delete every entry that this server knows, of whatever model, those under way and those
        of others included."""
        held, rows = self.index.stats(), [variant.blob.row for variant in self.index.held]
        self.index.watchers.remove(self._index_changed)  # which deletes one by one
        self.index.clear()
        self.index.watchers.append(self._index_changed)
        self._used.clear()
        for part in (self.naming, self.writes, self.others):
            part.clear()
        self.loader.delete(rows)
        return Cleared(held.num_chunks, held.num_variants, held.num_bytes)

    def stats(self) -> dict[str, Any]:
        """What it holds, counts since the start, and what waits."""
        self._take_in()
        held, taken = self.index.stats(), self.waits.times.seconds(1 << 20)
        found = {
            "num_entries": held.num_variants,
            "num_bytes": held.num_bytes,
            **self.naming.bytes_by_kind(held.num_bytes),
            "max_bytes": self.index.held.max_bytes,
            "max_entries": self.index.held.max_entries,
            "num_evicted": held.num_evicted,
            "late": self.waits.num_late,
            "left": self.waits.num_left,
            "waits": self.waits.policy.num_waits,
            "waits_in_vain": self.waits.policy.num_in_vain,
            "skipped": self.num_skipped,
            "pays": self.pays,
            "load_ms_per_mib": None if taken is None else 1000 * taken,
            "off": self.is_off,
            "prefetch": self.prefetches.stats(),
            "prefetch_bytes": self.prefetches.num_bytes,
            **({"found": self.others.num_found} if self.loader.is_shared else {}),
            **self.loader.stats(),
        }
        self._metrics.show(found)
        return found

    @contextmanager
    def guard(self, message: str) -> Iterator[None]:
        """The scheduler must not die of what can be computed. Ranks of a group would differ."""
        try:
            yield
        except Exception:
            if self.ranks is not None:
                raise
            logger.exception(f"chunk cache: {message}")

    # Private, in order of use

    @property
    def _is_full(self) -> bool:
        return self.loader.waiting[Load].is_full

    def _take_in(self, is_round: bool = False) -> None:
        is_any = False
        for job in self.loader.poll(is_round=is_round):
            is_any = True
            with self.guard("what the storage has done is lost"):
                job.done(job)
        # of a group's ranks each polls now and then alone, and then nothing is done
        if is_any:
            self._go_on()
        if self._used and self.loader.is_idle:
            self._tell_uses()

    def _go_on(self) -> None:
        going_on, self._going_on = self._going_on, deque()
        for asked in going_on:
            if self._is_full:
                self._going_on.append(asked)
                continue
            with self.guard("nothing more is loaded, the rest is computed"):
                for rest in asked.take_rest():  # which may stay, in its place
                    rest()

    def _index_changed(self, identity: Identity, variant: Variant, is_here: bool) -> None:
        if variant.blob.is_own:
            self.naming.count(variant.blob.row, 1 if is_here else -1)
        if not is_here:
            self._used.pop(variant.blob.row.name, None)
            if variant.blob.is_own:
                self.loader.delete([variant.blob.row])

    def _loaded(
        self,
        era: int,
        variant: Variant,
        done: Callable[[Entry | None], None],
        asked: PendingLoads | None,
        job: Load,
    ) -> None:
        self.under_way.pop(job.name, None)
        row: Row = variant.blob.row
        if asked is not None and asked.is_prefetch:
            chunk, has_come = row.place.stored_chunk, job.entry is not None
            self.prefetches.end(asked.tenant, job.size, chunk, has_come=has_come)
        if job.entry is None and job.problem not in (FAILED, PAUSED):  # there is none
            self.index.drop(variant)
            if not variant.blob.is_own:  # nobody can use it
                self.loader.delete([row])
        done(job.entry if era == self.naming.era else None)

    def _note(self, variant: Variant) -> None:
        if variant.blob.is_own:  # others have no row
            self._used[variant.blob.row.name] = variant.priority, variant.num_uses

    def _tell_uses(self) -> None:
        self.loader.use(self._used.copy())
        self._used.clear()


def _max_prefetched(times: LoadTimes) -> float:
    num_bytes = times.bytes_within(MAX_PREFETCH_S)
    return MAX_PREFETCH_BYTES if num_bytes is None else num_bytes
