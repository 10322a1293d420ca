"""A rank's storage on the scheduler's side: what it holds, what is loaded, what leaves.

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
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from radix_ext.cfo import Prefix
from radix_ext.costs import explores
from radix_ext.loading import WaitPolicy
from radix_ext.prefetches import Prefetches
from radix_ext.variant_index import VariantIndex
from radix_ext.variants import Identity, Variant
from sglang_chunkcache.rank_metrics import RankMetrics
from sglang_chunkcache.storage.entry import Entry, Layout
from sglang_chunkcache.storage.held import variant_of_row
from sglang_chunkcache.storage.jobs import FAILED, PAUSED, Load
from sglang_chunkcache.storage.key import Names
from sglang_chunkcache.storage.loader import Loader
from sglang_chunkcache.storage.manifest import Row, Use
from sglang_chunkcache.storage.naming import Naming
from sglang_chunkcache.storage.others import Others
from sglang_chunkcache.storage.ranks import Ranks
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
    """Of one rank.

    Args:
        index: empty.
        wait_policy: how long a request waits. None: not at all.
        model_of: as in `Naming`.
        rows: what the manifest has, the most used first.
        metrics: shown what `stats` says, with it and when it is due while there are requests.
            None: no Prometheus.
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
        self.ranks, self.prefetches = ranks, Prefetches(self._max_prefetched)
        self.index, self.loader, self.names, self.layout = index, loader, names, layout
        self.pays = True
        """The last load that was thought of."""
        self.num_skipped = 0
        self._under_way: dict[str, Load | None] = {}
        """Names that are being loaded or, None, written."""
        self.naming = Naming(names, model_of, layout, ranks)
        self.waits = Waits(wait_policy or WaitPolicy(0.0), loader.times, clock)
        self.others = Others(index, loader, self.naming, layout, clock)
        self.writes = Writes(index, loader, self.naming, self._under_way, layout, self._note, clock)
        self._metrics = metrics
        self._used: dict[str, Use] = {}
        """Not told to the thread yet."""
        self._asked: list[tuple[Identity, str, Prefix]] = []
        """Not counted yet."""
        self._going_on = deque[PendingLoads]()
        """Who waits for room in the loader's queue, the first comes first."""
        self._is_clearing = False
        index.watchers.append(self._index_changed)
        left = index.restore_all(
            (row.place.stored_chunk, variant_of_row(row, row.priority, row.num_uses))
            for row in rows
        )
        if left:  # the limit is lower than it was
            loader.delete([variant.blob.row for variant in left])

    @property
    def is_off(self) -> bool:
        """As `Naming.is_off`."""
        return self.naming.is_off

    # A rank's life

    def start(self, weights: int | None, heads: tuple[tuple[int, int], ...] = ()) -> None:
        """From now on with these weights (their fingerprint; None: unknown, as `stop`) and
        calibrated heads. What is under way for others is not used."""
        self.stop()
        if weights is not None:
            self.naming.start(weights, heads)

    def stop(self) -> None:
        """Until `start` nothing is written or loaded."""
        self.naming.stop()
        self._going_on.clear()  # for other weights

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

    def load(
        self,
        variant: Variant,
        num_tokens: int,
        done: Callable[[Entry | None], None],
        into: Callable[[Entry], None] | None = None,
        asked: PendingLoads | None = None,
        layout: Layout | None = None,
    ) -> bool:
        """Load one of the index's, for what was asked for. The thread calls `into` where there is
        an entry. `done` is told: None, there is none, or it is of other weights by now. False: it
        is under way, or too much is. `layout`: as in `Writes.write`."""
        if not self.takes(variant, asked):
            self.join(variant, asked)
            return False
        row: Row = variant.blob.row
        prefetched_by = asked.tenant if asked is not None and asked.is_prefetch else None
        then = partial(self._loaded, self.naming.era, variant, done, prefetched_by)
        job = Load(row.name, row.num_bytes, num_tokens, layout or self.layout, into, then)
        if not self.loader.load(job):
            return False
        self._under_way[row.name] = job
        if prefetched_by is not None:
            self.prefetches.begin(prefetched_by, row.num_bytes, row.place.stored_chunk)
        if asked is not None:
            asked.loads.append(job)
        return True

    def join(self, variant: Variant, asked: PendingLoads | None) -> bool:
        """If it is on its way for another request, this one waits for it, too. Whether it is, or is
        being written."""
        job = self._under_way.get(variant.blob.row.name)
        if job is not None and asked is not None and job not in asked.loads:
            asked.loads.append(job)
        return variant.blob.row.name in self._under_way

    def takes(self, variant: Variant, asked: PendingLoads | None) -> bool:
        """Whether it may be loaded: not if it is under way, or ahead if loads wait or the tenant
        has too much under way."""
        row: Row = variant.blob.row
        if row.name in self._under_way or self.loader.is_full:
            return False
        if asked is None or not asked.is_prefetch:
            return True
        return self.loader.has_spare and self.prefetches.has_room(asked.tenant, row.num_bytes)

    def goes_on(self, asked: PendingLoads, rest: Callable[[], None], num_left: int) -> None:
        """Call `rest`, which would make so many loads more, when there is room for some, unless its
        request is planned before."""
        asked.num_left += num_left
        if any(self._under_way.values()):  # else nothing would tell that there is room
            asked.goes_on.append(rest)
            self._going_on.append(asked)

    def is_under_way(self, name: str) -> bool:
        """Whether the entry is being written or loaded."""
        return name in self._under_way

    def tries(self, *, pays: bool) -> bool:
        """Whether to make a load that was thought of: it pays, or is tried all the same."""
        self.pays = pays
        if pays:
            return True
        self.num_skipped += 1
        return explores(self.num_skipped)

    def awaits(self, *asked: PendingLoads | None) -> bool:
        """As `Waits.awaits`. Those of a group of ranks do not wait, whose clocks differ."""
        parts = [each for each in asked if each is not None]
        if not parts or self.ranks is not None:
            return False
        self.poll()
        return self.waits.awaits(parts, (job for job in self._under_way.values() if job))

    def watch(self, *asked: PendingLoads | None) -> Callable[[], bool]:
        """As `Waits.watch`."""
        return self.waits.watch(list(filter(None, asked)), self.loader, self.poll)

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
        self.naming.clear()
        self.writes.clear()
        rows = [variant.blob.row for variant in self.index.held]
        self._is_clearing = True
        self.index.clear()
        self._is_clearing = False
        self._used.clear()
        self.others.clear()
        self.loader.delete(rows)
        return Cleared(held.num_chunks, held.num_variants, held.num_bytes)

    def stats(self) -> dict[str, Any]:
        """What it holds, counts since the start, and what waits."""
        self._take_in()
        held = self.index.stats()
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
            "load_ms_per_mib": None
            if (taken := self.waits.times.seconds(1 << 20)) is None
            else 1000 * taken,
            "off": self.is_off,
            "prefetch": self.prefetches.stats(),
            "prefetch_bytes": self.prefetches.num_bytes,
            **({"found": self.others.num_found} if self.loader.is_shared else {}),
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
            if self.loader.is_full:
                self._going_on.append(asked)
                continue
            with self.guard("nothing more is loaded, the rest is computed"):
                for rest in asked.take_rest():  # which may stay, in its place
                    rest()

    def _index_changed(self, identity: Identity, variant: Variant, is_here: bool) -> None:
        if self._is_clearing:
            return
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
        prefetched_by: tuple[str | None, ...] | None,
        job: Load,
    ) -> None:
        """Unless it is no entry: then the storage has none."""
        self._under_way.pop(job.name, None)
        if prefetched_by is not None:
            chunk = variant.blob.row.place.stored_chunk
            self.prefetches.end(prefetched_by, job.num_bytes, chunk, has_come=job.entry is not None)
        if job.entry is None and job.problem not in (FAILED, PAUSED):
            self.index.drop(variant)
            if not variant.blob.is_own:  # nobody can use it
                self.loader.delete([variant.blob.row])
        done(job.entry if era == self.naming.era else None)

    def _max_prefetched(self) -> float:
        num_bytes = self.waits.times.bytes_within(MAX_PREFETCH_S)
        return MAX_PREFETCH_BYTES if num_bytes is None else num_bytes

    def _note(self, variant: Variant) -> None:
        if variant.blob.is_own:  # others have no row
            self._used[variant.blob.row.name] = Use(
                variant.blob.row.name, variant.priority, variant.num_uses
            )

    def _tell_uses(self) -> None:
        self.loader.use(list(self._used.values()))
        self._used.clear()
