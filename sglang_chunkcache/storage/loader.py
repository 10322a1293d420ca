"""The thread that reads and writes a rank's storage, beside its scheduler: loads before writes, one
after the other.

    scheduler   look_up, load, write, ...  ──► bounded queues ──► thread: backend, checks, manifest
                                           ──► poll ──► scheduler

The scheduler gives and polls, and never waits. Whatever the backend raises is counted (worker.py).
After failures in a row the storage pauses (breaker.py). A backend that hangs stops the thread, and
so all that waits, but nobody else.
"""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from radix_ext.backlog import Backlog, Bounds
from radix_ext.loading import LoadTimes
from sglang_chunkcache.config import MAX_SHARE, MAX_WAITING, MAX_WAITING_BYTES, MAX_WAITING_S
from sglang_chunkcache.storage.backend import Backend
from sglang_chunkcache.storage.breaker import Breaker
from sglang_chunkcache.storage.jobs import Job, Load, Lookup, Write
from sglang_chunkcache.storage.manifest import Manifest, Row, Use
from sglang_chunkcache.storage.pointer import Pointers
from sglang_chunkcache.storage.ranks import Ranks
from sglang_chunkcache.storage.worker import Worker

logger = logging.getLogger(__name__)

DELETED_AT_ONCE = 64
"""Entries: a load that has come meanwhile waits for no more."""
CLOSE_S = 5.0
"""What the end waits for: SGLang kills a scheduler that takes 15 seconds to end."""


class Loader:
    """The thread of one rank. All methods are the scheduler thread's.

    Args:
        secret: as `key.secret_of` gives it.
        pointers: None: nobody else has the storage.
        ranks: of a tensor-parallel group. None: this is the only one.
        memory_bytes: of the pool that is loaded into and written from.
        empty: makes the tensors of loaded keys and values; torch.empty's arguments.
        clock: seconds.
    """

    def __init__(
        self,
        backend: Backend,
        manifest: Manifest,
        *,
        secret: bytes,
        pointers: Pointers | None = None,
        ranks: Ranks | None = None,
        memory_bytes: int = sys.maxsize,
        empty: Callable[..., Tensor] = torch.empty,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pointers, self._ranks, self._manifest = pointers, ranks, manifest
        # No locks: `append` and `popleft` of a deque are atomic, and a queue has one reader.
        self._loads: deque[Load | Lookup] = deque()
        self._others: deque[Write | Callable[[], None]] = deque()
        """Writes, and changes of what is kept, in their order."""
        self._done: deque[Job] = deque()
        bounds = Bounds(
            MAX_WAITING, MAX_WAITING_S, MAX_WAITING_BYTES, int(MAX_SHARE * memory_bytes)
        )
        self._waiting = {kind: Backlog(bounds) for kind in (Load, Write, Lookup)}
        """The scheduler thread's alone."""
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._is_open, self._is_at_work = True, False
        self.num_full = self.num_unwritten = 0
        self.breaker = Breaker(clock)
        self.worker = Worker(
            backend,
            manifest,
            self.breaker,
            self._done,
            secret=secret,
            pointers=pointers,
            empty=empty,
            clock=clock,
        )
        # A daemon: a backend that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="chunkcache-storage", daemon=True)
        self._thread.start()

    def load(self, job: Load) -> bool:
        """Read it, before all that is to be written. False: too much waits."""
        return self._ask(job)

    def look_up(self, job: Lookup) -> bool:
        """Find what others have written, where there are others.
        False: there are none, or too much waits."""
        return self.is_shared and self._ask(job)

    def write(self, job: Write) -> bool:
        """Keep it, unless the entry is there. False: too much waits."""
        if not self._takes(job):
            self.num_unwritten += 1
            return False
        self._do(job)
        return True

    def delete(self, rows: Sequence[Row]) -> None:
        """Of entries that are not wanted any more the rows, then what points to them,
        then the bytes."""
        for start in range(0, len(rows), DELETED_AT_ONCE):
            self._do(partial(self.worker.delete, rows[start : start + DELETED_AT_ONCE]))

    def use(self, uses: Sequence[Use]) -> None:
        """Note what was used."""
        self._do(lambda: self._manifest.use(uses))

    def poll(self, *, is_round: bool = False) -> Iterator[Job]:
        """What is done since the last time. Of several ranks: what all have done, and only with
        `is_round`, which all say at once."""
        for job in self._taken(is_round):
            seconds = 0.0 if isinstance(job, Lookup) else job.seconds
            self._waiting[type(job)].end(job.size, seconds)
            if not isinstance(job, Write):
                job.is_done = True
            yield job

    @property
    def has_done(self) -> bool:
        """Whether `poll` would tell something."""
        return bool(self._done)

    def drain(self, seconds: float) -> bool:
        """Wait until nothing is left to do: for a start and for tests. False: that takes longer."""
        done = threading.Event()
        self._do(done.set)
        return done.wait(seconds)

    @property
    def times(self) -> LoadTimes:
        """Of loads."""
        return self._waiting[Load].times

    @property
    def is_shared(self) -> bool:
        """Whether other servers may use the storage."""
        return self._pointers is not None

    def is_refused(self, name: str) -> bool:
        """Whether there are bytes under this name that nobody can use or delete."""
        return name in self.worker.refused

    @property
    def is_paused(self) -> bool:
        """Whether jobs fail at once, on any rank."""
        return self.breaker.is_open if self._ranks is None else self._ranks.is_paused

    @property
    def is_full(self) -> bool:
        """Whether another load waits for a `poll`."""
        return self._waiting[Load].is_full

    @property
    def has_spare(self) -> bool:
        """Whether half of the loads that may wait do not."""
        return self._waiting[Load].has_spare

    @property
    def is_behind(self) -> bool:
        """Whether half of the writes that may wait do."""
        return not self._waiting[Write].has_spare

    def has_room(self, num: int, num_bytes: int) -> bool:
        """Whether so many writes more would be taken."""
        return self._waiting[Write].has_room(num, num_bytes)

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits or is at work."""
        return not (self._loads or self._others or self._is_at_work)

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and what waits now: to be done, or to be polled."""
        return {
            "loaded": self.worker.num_loaded,
            "written": self.worker.num_written,
            "problems": dict(self.worker.problems),
            "full": self.num_full,
            "unwritten": self.num_unwritten,
            **({"unshared": self.worker.num_unshared} if self.is_shared else {}),
            # Nothing waits only when the scheduler knows what has become of it: a load that was
            # refused is written anew, a lookup
            # is followed by loads.
            "queue": max(
                len(self._loads) + len(self._others),
                sum(each.num for each in self._waiting.values()),
            ),
            "pauses": self.breaker.num_pauses,
            "paused": self.is_paused,
        }

    def close(self, seconds: float = CLOSE_S) -> None:
        """Finish what waits, for so long, and end. What is not finished was never confirmed."""
        if not self._is_open:
            return
        self._is_open = False
        self._wake.put(False)
        self._thread.join(seconds)
        if self._thread.is_alive():
            logger.warning(
                "chunk cache: the storage does not answer, %d writes are lost", len(self._others)
            )

    # Private: the scheduler's

    def _taken(self, is_round: bool) -> Iterator[Job]:
        if self._ranks is None:
            while self._done:
                yield self._done.popleft()
        elif is_round:
            num_loads, num_writes = self._waiting[Load].num, self._waiting[Write].num
            yield from self._ranks.done_by_all(
                self._done,
                num_loads=num_loads,
                num_writes=num_writes,
                is_paused=self.breaker.is_open,
            )

    def _ask(self, job: Load | Lookup) -> bool:
        if not self._takes(job):
            return False
        self._loads.append(job)
        self._wake.put(True)
        return True

    def _takes(self, job: Job) -> bool:
        waiting = self._waiting[type(job)]
        if self._is_open and waiting.has_room(1, job.size):
            waiting.begin(job.size)
            return True
        self.num_full += 1
        return False

    def _do(self, job: Write | Callable[[], None]) -> None:
        self._others.append(job)
        self._wake.put(True)

    # Private: the thread's

    def _run(self) -> None:
        torch.set_num_threads(1)  # this thread's alone: a codec takes no cores from a forward
        while self._wake.get():  # once a job, so all are done before the end
            # Before the job leaves its queue, else `is_idle` could see neither.
            self._is_at_work = True
            self._do_next()
            self._is_at_work = False
        self.worker.close()

    def _do_next(self) -> None:
        job = self._loads.popleft() if self._loads else self._others.popleft()
        if isinstance(job, Load):
            self.worker.load(job)
        elif isinstance(job, Lookup):
            self.worker.look_up(job)
        elif isinstance(job, Write):
            self.worker.write(job)
        else:
            self.worker.do(job)
