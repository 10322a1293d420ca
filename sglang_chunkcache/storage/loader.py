"""The thread that reads and writes a rank's storage, beside its scheduler: loads before writes, one
after the other.

    scheduler   look_up, load, write, ...  ──► bounded queues ──► thread: worker.py
                                           ──► poll ──► scheduler

The scheduler gives and polls, and never waits. A backend that hangs stops the thread, and so all
that waits, but nobody else.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeAlias

import torch

from radix_ext.backlog import Backlog, Bounds
from sglang_chunkcache.config import MAX_SHARE, MAX_WAITING, MAX_WAITING_BYTES, MAX_WAITING_S
from sglang_chunkcache.storage.jobs import Job, Load, Lookup, Write
from sglang_chunkcache.storage.manifest import Row
from sglang_chunkcache.storage.ranks import Ranks
from sglang_chunkcache.storage.worker import Worker

logger = logging.getLogger(__name__)

DELETED_AT_ONCE = 64
"""Entries: a load that has come meanwhile waits for no more."""
CLOSE_S = 5.0
"""What the end waits for: SGLang kills a scheduler that takes 15 seconds to end."""

_Queue: TypeAlias = deque[Callable[[], object]]


class Loader:
    """The thread of one rank, which has the worker and closes it. All methods are the scheduler
    thread's.

    Args:
        ranks: of a tensor-parallel group. None: this is the only one.
        memory_bytes: of the pool that is loaded into and written from.
    """

    def __init__(
        self, worker: Worker, *, ranks: Ranks | None = None, memory_bytes: int = sys.maxsize
    ) -> None:
        self.worker, self.ranks, self.is_shared = worker, ranks, worker.is_shared
        # No locks: `append` and `popleft` of a deque are atomic, and a queue has one reader.
        self._loads: _Queue = deque()  # lookups, too
        self._others: _Queue = deque()  # writes, and changes of what is kept, in their order
        bounds = Bounds(
            MAX_WAITING, MAX_WAITING_S, MAX_WAITING_BYTES, int(MAX_SHARE * memory_bytes)
        )
        # Asked for and not polled yet.
        self.waiting = {kind: Backlog(bounds) for kind in (Load, Write, Lookup)}
        self._num_full = Counter[type[Job]]()
        self._wake = SimpleQueue[bool]()
        self._is_open, self._is_at_work = True, False
        # A daemon: a backend that hangs must not keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="chunkcache-storage", daemon=True)
        self._thread.start()

    def load(self, job: Load) -> bool:
        """Read it, before all that is to be written. False: too much waits."""
        return self._ask(job, self._loads, self.worker.load)

    def look_up(self, job: Lookup) -> bool:
        """Find what others have written. False: there are none, or too much waits."""
        return self.is_shared and self._ask(job, self._loads, self.worker.look_up)

    def write(self, job: Write) -> bool:
        """Keep it, unless the entry is there. False: too much waits."""
        return self._ask(job, self._others, self.worker.write)

    def delete(self, rows: Sequence[Row]) -> None:
        """Entries that are not wanted any more."""
        for start in range(0, len(rows), DELETED_AT_ONCE):
            self._do(partial(self.worker.delete, rows[start : start + DELETED_AT_ONCE]))

    def use(self, uses: Mapping[str, tuple[float, int]]) -> None:
        """As `Manifest.use`."""
        self._do(partial(self.worker.manifest.use, uses))

    def poll(self, *, is_round: bool = False) -> Iterator[Job]:
        """What is done since the last time. Of several ranks: what all have done, and only with
        `is_round`, which all say at once."""
        for job in self._taken(is_round):
            self.waiting[type(job)].end(job.size, job.seconds)
            job.is_done = True
            yield job

    def drain(self, seconds: float) -> bool:
        """Wait until nothing is left to do: for a start and for tests. False: that takes longer."""
        done = threading.Event()
        self._do(done.set)
        return done.wait(seconds)

    @property
    def is_paused(self) -> bool:
        """Whether jobs fail at once, on any rank."""
        return self.worker.breaker.is_open if self.ranks is None else self.ranks.is_paused

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
            "full": self._num_full.total(),
            "unwritten": self._num_full[Write],
            **({"unshared": self.worker.num_unshared} if self.is_shared else {}),
            # Nothing waits only when the scheduler knows what has become of it: a load that was
            # refused is written anew, a lookup is followed by loads.
            "queue": max(
                len(self._loads) + len(self._others),
                sum(each.num for each in self.waiting.values()),
            ),
            "pauses": self.worker.breaker.num_pauses,
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
        done = self.worker.done
        if self.ranks is None:
            while done:
                yield done.popleft()
        elif is_round:
            yield from self.ranks.done_by_all(
                done,
                is_asked=self.waiting[Load].num + self.waiting[Write].num > 0,
                is_paused=self.worker.breaker.is_open,
            )

    def _ask(self, job: Job, queue: _Queue, work: Callable[[Any], None]) -> bool:
        waiting = self.waiting[type(job)]
        if not (self._is_open and waiting.has_room(1, job.size)):
            self._num_full[type(job)] += 1
            return False
        waiting.begin(job.size)
        self._do(partial(work, job), queue)
        return True

    def _do(self, work: Callable[[], object], queue: _Queue | None = None) -> None:
        (self._others if queue is None else queue).append(work)
        self._wake.put(True)

    # Private: the thread's

    def _run(self) -> None:
        torch.set_num_threads(1)  # this thread's alone: a codec takes no cores from a forward
        while self._wake.get():  # once a job, so all are done before the end
            # Before the job leaves its queue, else `is_idle` could see neither.
            self._is_at_work = True
            self.worker.do((self._loads or self._others).popleft())
            self._is_at_work = False
        self.worker.close()
