"""What a storage's thread does with a job: ask the backend, check bytes, keep rows and pointers. It
raises nothing but in `delete`: a job says what has become of it."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence

from torch import Tensor

from sglang_chunkcache.storage.backend import Backend
from sglang_chunkcache.storage.breaker import Breaker, PausedError, UnmadeError
from sglang_chunkcache.storage.entry import RefusedEntryError, read, write
from sglang_chunkcache.storage.jobs import FAILED, GONE, PAUSED, Job, Load, Lookup, Write
from sglang_chunkcache.storage.manifest import Manifest, Row
from sglang_chunkcache.storage.pointer import Pointers

logger = logging.getLogger(__name__)

MAX_REFUSED = 10_000
"""Names of refused bytes that could not be deleted: about a megabyte.
The oldest is asked for again."""


class Worker:
    """Of one rank.

    Args:
        done: takes the jobs that are done.
        secret, pointers, empty, clock: as in `Loader`.
    """

    def __init__(
        self,
        backend: Backend,
        manifest: Manifest,
        breaker: Breaker,
        done: deque[Job],
        *,
        secret: bytes,
        pointers: Pointers | None,
        empty: Callable[..., Tensor],
        clock: Callable[[], float],
    ) -> None:
        self._backend, self._manifest, self._breaker = backend, manifest, breaker
        self._done, self._secret, self._pointers = done, secret, pointers
        self._empty, self._clock = empty, clock
        self.refused: dict[str, str] = {}
        """Name of bytes that nobody can use or delete -> why."""
        self.problems: Counter[str] = Counter()
        """Loads and writes that came to nothing, by reason."""
        self.num_loaded = self.num_written = self.num_unshared = 0

    def look_up(self, job: Lookup) -> None:
        assert self._pointers is not None
        try:
            for chunk in job.chunks:
                with self._breaker.attempt():
                    job.found[chunk] = self._pointers.find(chunk)
        except PausedError:
            self._tell(PAUSED, "what others have written was not asked for, the storage pauses")
        except Exception as error:
            self._tell(FAILED, "what others have written is not known: %r", error)
        self._done.append(job)

    def load(self, job: Load) -> None:
        began = self._clock()
        try:
            with self._breaker.attempt():
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
                if job.into is not None:
                    job.into(job.entry)
                self.num_loaded += 1
                job.seconds = self._clock() - began
        except RefusedEntryError as error:
            # The scheduler reads it in between (`is_refused`): one operation on a dict is atomic.
            self.refused[job.name] = error.reason.value
            if len(self.refused) > MAX_REFUSED:
                del self.refused[next(iter(self.refused))]
            job.problem = self._tell(error.reason.value, "%s is not used: %s", job.name, error)
        except PausedError:
            job.problem = self._tell(PAUSED, "%s was not read, the storage pauses", job.name)
        except Exception as error:
            job.entry, job.problem = (
                None,
                self._tell(FAILED, "%s was not read: %r", job.name, error),
            )
        self._done.append(job)

    def write(self, job: Write) -> None:
        if job.row.name in self.refused:  # what is there stays
            job.problem = self.refused[job.row.name]
            self._done.append(job)
            return
        began = self._clock()
        try:
            with self._breaker.attempt():
                others = self._of_another(job.row)
                # Written again it would count in two budgets: `set` keeps the bytes that are there.
                if others is not None:
                    job.row, job.is_own = others, False
                else:
                    data = self._made(job)
                    # Bytes, row, pointer: a kill in between leaves no name of what is not there.
                    self._backend.set(job.row.name, data)
                    job.row = job.row._replace(num_bytes=len(data))
                    self._manifest.put(job.row)
                    self.num_written += 1
                    job.seconds = self._clock() - began
                # Even if its pointer fails: others do not find the entry, this server does.
                job.is_confirmed = True
                if self._pointers is not None and job.is_own:
                    self.num_unshared += not self._pointers.add(job.row)
        except PausedError:
            job.problem = self._tell(PAUSED, "%s was not written, the storage pauses", job.row.name)
        except Exception as error:
            job.problem = self._tell(FAILED, "%s was not written: %r", job.row.name, error)
        self._done.append(job)

    def delete(self, rows: Sequence[Row]) -> None:
        """The rows, then what points to the entries, then the bytes."""
        # Rows first: after a failure below there are bytes without a row, and never the reverse.
        self._manifest.drop([row.name for row in rows])
        for row in rows:
            with self._breaker.attempt():
                if self._pointers is not None:
                    self._pointers.remove(row)
                if self._backend.delete(row.name):
                    self.refused.pop(row.name, None)

    def do(self, change: Callable[[], None]) -> None:
        """A change of what is kept."""
        try:
            change()
        except Exception as error:
            self._tell(FAILED, "the storage failed: %r", error)

    def close(self) -> None:
        """The thread ends."""
        for part in (self._backend, self._manifest):
            try:
                part.close()
            except Exception:
                logger.exception("chunk cache: the storage did not close")

    # Private, in order of use

    def _made(self, job: Write) -> Tensor:
        try:
            return write(job.entry(), job.row.name, secret=self._secret)
        except Exception as error:
            raise UnmadeError(repr(error)) from error

    def _of_another(self, row: Row) -> Row | None:
        """The very entry, where another server has written it."""
        if self._pointers is None:
            return None
        found = [
            each for each in self._pointers.find(row.place.pointed_from[0]) if each.name == row.name
        ]
        return found[0] if found and self._backend.exists(row.name) else None

    def _tell(self, problem: str, message: str, *args: object) -> str:
        """Counts all, logs the first of each."""
        self.problems[problem] += 1
        if self.problems[problem] == 1:
            logger.warning(f"chunk cache: {message} (further ones are counted)", *args)
        return problem
