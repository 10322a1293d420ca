"""What a storage's thread does: ask the backend, check bytes, keep rows and pointers. A job says
what has become of it, and problems are counted."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

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
        secret: as `key.secret_of` gives it.
        pointers: None: nobody else has the storage.
        clock: seconds.
    """

    def __init__(
        self,
        backend: Backend,
        manifest: Manifest,
        *,
        secret: bytes,
        pointers: Pointers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._backend, self.manifest, self._pointers = backend, manifest, pointers
        self._secret, self.clock = secret, clock
        self.is_shared = pointers is not None
        self.breaker = Breaker(clock)
        self.done = deque[Job]()  # not polled yet
        self.refused: dict[str, str] = {}  # name of bytes that nobody can use or delete -> why
        self.problems = Counter[str]()  # what came to nothing, by reason
        self.num_loaded = self.num_written = self.num_unshared = 0

    def look_up(self, job: Lookup) -> None:
        assert self._pointers is not None
        with self._attempted(job, "what others have written", "looked up"):
            for chunk in job.chunks:
                with self.breaker.attempt():
                    job.found[chunk] = self._pointers.find(chunk)

    def load(self, job: Load) -> None:
        with self._attempted(job, job.name, "read"):
            began = self.clock()
            with self.breaker.attempt():
                data = self._backend.get(job.name, job.size)
            if data is None:
                job.problem = self._tell(GONE, "%s is gone from the storage", job.name)
                return
            entry = read(
                data,
                job.name,
                layout=job.layout,
                num_tokens=job.num_tokens,
                secret=self._secret,
            )
            if job.into is not None:
                job.into(entry)
            job.entry = entry
            self.num_loaded += 1
            job.seconds = self.clock() - began

    def write(self, job: Write) -> None:
        with self._attempted(job, job.row.name, "written"):
            if job.row.name in self.refused:  # what is there stays
                job.problem = self.refused[job.row.name]
                return
            began = self.clock()
            with self.breaker.attempt():
                others = self._of_another(job.row)
                # Written again it would count in two budgets: `set` keeps the bytes that are there.
                if others is not None:
                    job.row, job.is_own = others, False
                else:
                    data = self._made(job)
                    # Bytes, row, pointer: a kill in between leaves no name of what is not there.
                    self._backend.set(job.row.name, data)
                    job.row = job.row._replace(num_bytes=len(data))
                    self.manifest.put(job.row)
                    self.num_written += 1
                    job.seconds = self.clock() - began
                # Even if its pointer fails: others do not find the entry, this server does.
                job.is_confirmed = True
                if self._pointers is not None and job.is_own:
                    self.num_unshared += not self._pointers.add(job.row)

    def delete(self, rows: Sequence[Row]) -> None:
        """The rows, then what points to the entries, then the bytes."""
        # Rows first: after a failure below there are bytes without a row, and never the reverse.
        self.manifest.drop([row.name for row in rows])
        for row in rows:
            with self.breaker.attempt():
                if self._pointers is not None:
                    self._pointers.remove(row)
                if self._backend.delete(row.name):
                    self.refused.pop(row.name, None)

    def do(self, work: Callable[[], object]) -> None:
        """Any of the above. Raises nothing."""
        try:
            work()
        except Exception as error:
            self._tell(FAILED, "the storage failed: %r", error)

    def close(self) -> None:
        """The thread ends."""
        for part in (self._backend, self.manifest):
            try:
                part.close()
            except Exception:
                logger.exception("chunk cache: the storage did not close")

    # Private, in order of use

    @contextmanager
    def _attempted(self, job: Job, name: str, verb: str) -> Iterator[None]:
        """Around all of a job, which is done then: what is raised is its problem."""
        try:
            yield
        except RefusedEntryError as error:
            # The scheduler reads it in between: one operation on a dict is atomic.
            self.refused[name] = error.reason.value
            if len(self.refused) > MAX_REFUSED:
                del self.refused[next(iter(self.refused))]
            job.problem = self._tell(error.reason.value, "%s is not used: %s", name, error)
        except PausedError:
            job.problem = self._tell(PAUSED, "%s was not %s, the storage pauses", name, verb)
        except Exception as error:
            job.problem = self._tell(FAILED, "%s was not %s: %r", name, verb, error)
        job.ended = self.clock()
        self.done.append(job)

    def _made(self, job: Write) -> Tensor:
        try:
            return write(job.entry(), job.row.name, secret=self._secret)
        except Exception as error:
            raise UnmadeError(repr(error)) from error

    def _of_another(self, row: Row) -> Row | None:
        """The very entry, where another server has written it."""
        if self._pointers is None:
            return None
        pointed = self._pointers.find(row.place.pointed_from[0])
        found = next((each for each in pointed if each.name == row.name), None)
        return found if found is not None and self._backend.exists(row.name) else None

    def _tell(self, problem: str, message: str, *args: object) -> str:
        """Counts all, logs the first of each."""
        self.problems[problem] += 1
        if self.problems[problem] == 1:
            logger.warning(f"chunk cache: {message} (further ones are counted)", *args)
        return problem
