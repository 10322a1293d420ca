"""The thread that reads and writes a rank's storage, beside its scheduler: loads before writes, one after the other.

    scheduler   load, write, ...  ──► bounded queues ──► thread: backend, checks, manifest ──► poll ──► scheduler

The scheduler gives and polls, and never waits. Whatever the backend raises is counted here. After `PAUSE_AFTER` failures
in a row the storage pauses: jobs fail at once, and after `PAUSE_S` the next one tries again. A backend that hangs stops the
thread, and so all that waits, but nobody else.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor

from sglang_chunkcache.storage.backend import Backend
from sglang_chunkcache.storage.entry import Entry, Layout, RefusedEntryError, read, write
from sglang_chunkcache.storage.manifest import Manifest, Row, Use

logger = logging.getLogger(__name__)

MAX_WAITING = 64
"""Loads, and likewise writes, that are asked for and not polled yet. More are not taken."""
MAX_WAITING_BYTES = 512 << 20
"""Of loads, and likewise of writes: they hold memory beside the store's. One is taken whatever its size."""
PAUSE_AFTER = 4
"""Failures in a row."""
PAUSE_S = 30.0
"""A backend that restarts takes about as long."""
CLOSE_S = 5.0
"""What the end waits for: SGLang kills a scheduler that takes 15 seconds to end."""

GONE, FAILED, PAUSED = "gone", "failed", "paused"
"""Why there is no entry, beside every `Refusal`: it is not there; the backend failed; it was not asked."""


@dataclass(eq=False)
class Load:
    """An entry that is asked for."""

    name: str
    num_bytes: int
    num_tokens: int
    layout: Layout
    tag: Any = None
    """The asker's own."""
    is_done: bool = False
    """Polled."""
    is_late: bool = False
    """Its request did not wait for it."""
    entry: Entry | None = None
    problem: str = ""
    """Why there is none."""


@dataclass(eq=False)
class Write:
    """An entry to be kept. Its tensors are not written to any more."""

    row: Row
    """Without the number of bytes, which it gets with them."""
    entry: Entry
    tag: Any = None
    is_confirmed: bool = False
    problem: str = ""


Job = Load | Write


class Loader:
    """The thread of one rank. All methods are the scheduler thread's.

    Args:
        secret: as `key.secret_of` gives it.
        empty: makes the tensors of loaded keys and values; torch.empty's arguments.
        clock: seconds.
    """

    def __init__(
        self,
        backend: Backend,
        manifest: Manifest,
        *,
        secret: bytes,
        empty: Callable[..., Tensor] = torch.empty,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend, self._manifest, self._secret, self._empty, self._clock = backend, manifest, secret, empty, clock
        self._loads: deque[Load] = deque()
        self._others: deque[Write | Callable[[], None]] = deque()
        """Writes, and changes of what is kept, in their order."""
        self._done: deque[Job] = deque()
        self._waiting = {Load: [0, 0], Write: [0, 0]}  # number, bytes; the scheduler thread's alone
        self._wake: SimpleQueue[bool] = SimpleQueue()
        self._in_a_row = 0
        self._paused_until: float | None = None
        self._is_open = True
        self.problems: Counter[str] = Counter()
        """Loads and writes that came to nothing, by reason. Written by the thread."""
        self.num_loaded = self.num_written = self.num_full = self.num_pauses = 0
        self._thread = threading.Thread(target=self._run, name="chunkcache-storage", daemon=True)
        self._thread.start()

    def load(self, job: Load) -> bool:
        """Read it, before all that is to be written. False: too much waits."""
        if not self._takes(job, job.num_bytes):
            return False
        self._loads.append(job)
        self._wake.put(True)
        return True

    def write(self, job: Write) -> bool:
        """Keep it, unless the entry is there. False: too much waits."""
        if not self._takes(job, _num_bytes(job.entry)):
            return False
        self._do(job)
        return True

    def delete(self, names: Sequence[str]) -> None:
        """Of entries that are not wanted any more the rows, then the bytes."""

        def delete() -> None:
            self._manifest.drop(names)
            for name in names:
                with self._attempt():
                    self._backend.delete(name)

        self._do(delete)

    def use(self, uses: Sequence[Use]) -> None:
        """Note what was used."""
        self._do(lambda: self._manifest.use(uses))

    def halve(self) -> None:
        """Every f_r."""
        self._do(self._manifest.halve)

    def poll(self) -> Iterator[Job]:
        """What is done since the last time, in the order in which it was done."""
        while self._done:
            job = self._done.popleft()
            num_bytes = job.num_bytes if isinstance(job, Load) else _num_bytes(job.entry)
            waiting = self._waiting[type(job)]
            waiting[0], waiting[1] = waiting[0] - 1, waiting[1] - num_bytes
            if isinstance(job, Load):
                job.is_done = True
            yield job

    def drain(self, seconds: float) -> bool:
        """Wait until nothing is left to do: for a start and for tests. False: that takes longer."""
        done = threading.Event()
        self._do(done.set)
        return done.wait(seconds)

    @property
    def is_paused(self) -> bool:
        """Whether jobs fail at once."""
        until = self._paused_until
        return until is not None and self._clock() < until

    @property
    def is_full(self) -> bool:
        """Whether another load waits for a `poll`."""
        num, num_bytes = self._waiting[Load]
        return num >= MAX_WAITING or num_bytes >= MAX_WAITING_BYTES // 2

    @property
    def is_idle(self) -> bool:
        """Whether nothing waits."""
        return not (self._loads or self._others)

    def stats(self) -> dict[str, Any]:
        """Counts since the start, and what waits now."""
        return {
            "loaded": self.num_loaded,
            "written": self.num_written,
            "problems": dict(self.problems),
            "full": self.num_full,
            "queue": len(self._loads) + len(self._others),
            "pauses": self.num_pauses,
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
            logger.warning("chunk cache: the storage does not answer, %d writes are lost", len(self._others))

    # Private: the scheduler's

    def _takes(self, job: Job, num_bytes: int) -> bool:
        waiting = self._waiting[type(job)]
        if self._is_open and (
            not waiting[0] or (waiting[0] < MAX_WAITING and waiting[1] + num_bytes <= MAX_WAITING_BYTES)
        ):
            waiting[0], waiting[1] = waiting[0] + 1, waiting[1] + num_bytes
            return True
        self.num_full += 1
        return False

    def _do(self, job: Write | Callable[[], None]) -> None:
        self._others.append(job)
        self._wake.put(True)

    # Private: the thread's

    def _run(self) -> None:
        while self._wake.get():  # once a job, so all are done before the end
            if self._loads:
                self._load(self._loads.popleft())
                continue
            job = self._others.popleft()
            if isinstance(job, Write):
                self._write(job)
                continue
            try:
                job()
            except Exception as error:
                self._tell(FAILED, "the storage failed: %r", error)
        for part in (self._backend, self._manifest):
            try:
                part.close()
            except Exception:
                logger.exception("chunk cache: the storage did not close")

    def _load(self, job: Load) -> None:
        try:
            with self._attempt():
                data = self._backend.get(job.name, job.num_bytes)
            if data is None:
                job.problem = self._tell(GONE, "%s is gone from the storage", job.name)
            else:
                job.entry = read(
                    data,
                    job.name,
                    layout=job.layout,
                    num_tokens=job.num_tokens,
                    secret=self._secret,
                    empty=self._empty,
                )
                self.num_loaded += 1
        except RefusedEntryError as error:
            job.problem = self._tell(error.reason.value, "%s is not used: %s", job.name, error)
        except _PausedError:
            job.problem = self._tell(PAUSED, "%s was not read, the storage pauses", job.name)
        except Exception as error:
            job.problem = self._tell(FAILED, "%s was not read: %r", job.name, error)
        self._done.append(job)

    def _write(self, job: Write) -> None:
        try:
            data = write(job.entry, job.row.name, secret=self._secret)
            with self._attempt():
                self._backend.set(job.row.name, data)
                job.row = job.row._replace(num_bytes=len(data))
                self._manifest.put(job.row)
            job.is_confirmed = True
            self.num_written += 1
        except _PausedError:
            job.problem = self._tell(PAUSED, "%s was not written, the storage pauses", job.row.name)
        except Exception as error:
            job.problem = self._tell(FAILED, "%s was not written: %r", job.row.name, error)
        self._done.append(job)

    @contextmanager
    def _attempt(self) -> Iterator[None]:
        """Asks the backend, unless the storage pauses."""
        if self.is_paused:
            raise _PausedError
        try:
            yield
        except RefusedEntryError:  # the backend is well
            self._succeeded()
            raise
        except Exception:
            self._in_a_row += 1
            if self._in_a_row >= PAUSE_AFTER:
                if self._paused_until is None:
                    logger.warning(
                        "chunk cache: the storage pauses after %d failures, and is tried again every %g s",
                        self._in_a_row,
                        PAUSE_S,
                    )
                    self.num_pauses += 1
                self._paused_until = self._clock() + PAUSE_S
            raise
        self._succeeded()

    def _succeeded(self) -> None:
        self._in_a_row = 0
        if self._paused_until is not None:
            self._paused_until = None
            logger.warning("chunk cache: the storage answers again")

    def _tell(self, problem: str, message: str, *args: object) -> str:
        """Counts all, logs the first of each."""
        self.problems[problem] += 1
        if self.problems[problem] == 1:
            logger.warning(f"chunk cache: {message} (further ones are counted)", *args)
        return problem


class _PausedError(Exception):
    """Nobody was asked."""


def _num_bytes(entry: Entry) -> int:
    return sum(each.nbytes for each in entry.tensors())
