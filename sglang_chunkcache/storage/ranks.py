"""Tensor-parallel ranks take in what their storages have done at the same moment: one reduction a
round, of what all have. A round is after each forward, and with each request that arrives or asks
for the state.

    rank 0   load 1 done   load 2 done     load 3        write 1 done
    rank 1   load 1 done   load 2 failed   load 3 done   write 1        ──► both take in load 1, and
                                                                        load 2 as failed

What a rank asks of its thread follows from requests and from what was taken in, so all ask the
same, in the same order; and a thread does loads in the order in which they were asked for, and
writes likewise. No decision looks at a rank's own clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, TypeVar

import torch

from sglang_chunkcache.config import MAX_WAITING
from sglang_chunkcache.storage.jobs import FAILED, GONE, PAUSED, Job, Load, Write
from sglang_chunkcache.storage.manifest import Row

T = TypeVar("T")

_FAILED, _GONE = -1e6, -1e9
"""In place of the seconds that a load took, below zero: it may be had another time, or never."""


class Ranks:
    """Of one tensor-parallel group, SGLang's GroupCoordinator, as one of them sees it. All call the
    same methods in the same order."""

    def __init__(self, group: Any) -> None:
        self._group = group
        self._finished: dict[type, deque[Any]] = {Load: deque(), Write: deque()}  # by this rank
        self.shard = f"-{group.rank_in_group:03}of{group.world_size:03}"
        """Ends the names of this rank's entries, all of one length: an entry's size contains it."""
        self.is_paused = False  # whether a rank's storage failed jobs at once, in the last round

    # At the start

    def of_all(self, value: T) -> list[T]:
        """Each rank's value, by rank."""
        found: list[T] = self._group.all_gather_object(value)
        return found

    def fingerprint(self, weights: int) -> int:
        """Of the weights of all, from that of this rank's."""
        text = " ".join(map(str, self.of_all(weights)))
        return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")

    def common(self, rows: Sequence[Row]) -> tuple[list[Row], list[Row]]:
        """(the rows that every rank has, in the first rank's order and with its priority,
        the others)."""
        mine = {row.name.removesuffix(self.shard): row for row in rows}
        facts = [(name, row.num_bytes, row.priority, row.num_uses) for name, row in mine.items()]
        of_all = self.of_all(facts)
        there = set.intersection(*({fact[:2] for fact in each} for each in of_all))
        kept = [
            mine.pop(name)._replace(priority=priority, num_uses=num_uses)
            for name, size, priority, num_uses in of_all[0]
            if (name, size) in there
        ]
        return kept, list(mine.values())

    # In each round

    def done_by_all(self, done: deque[Job], *, is_asked: bool, is_paused: bool) -> Iterator[Job]:
        """What all ranks have done, each as it went where it went worst. Empties `done`.
        `is_asked`: loads or writes are."""
        # Kept until all ranks have done it: threads go in order, so the first ones are the same.
        while done:
            job = done.popleft()
            self._finished[type(job)].append(job)
        # All ranks have asked for the same, and paused by one reduction: all return here, or none.
        if not (is_asked or self.is_paused):
            return
        # One tensor of one size, whatever each rank has done: float64 holds counts and seconds.
        told = torch.zeros(len(self._finished), 2 + MAX_WAITING, dtype=torch.float64)
        for row, jobs in zip(told, self._finished.values(), strict=True):
            mine = [not is_paused, len(jobs), *map(_outcome, jobs)]
            row[: len(mine)] = torch.tensor(mine, dtype=torch.float64)
        # Between CPUs: a reduction on the device would wait for the forward that is queued.
        self._group.cpu_group.allreduce([told], torch.distributed.ReduceOp.MIN).wait()
        self.is_paused = not told[0, 0]
        for jobs, (_, num, *outcomes) in zip(self._finished.values(), told.tolist(), strict=True):
            for outcome in outcomes[: int(num)]:
                yield _went(jobs.popleft(), outcome)


def _outcome(job: Load | Write) -> float:
    """The least is the worst."""
    if isinstance(job, Write):
        return job.is_confirmed
    if job.entry is not None:
        return -job.seconds
    return _FAILED if job.problem in (FAILED, PAUSED) else _GONE


def _went(job: Load | Write, outcome: float) -> Load | Write:
    """The job as it went on the rank where it went worst."""
    if isinstance(job, Write):
        job.is_confirmed, job.seconds = bool(outcome), 0.0
    elif outcome > _FAILED:
        job.seconds = -outcome
    else:
        job.entry, job.seconds = None, 0.0  # only this rank has a time, and all must estimate alike
        if outcome > _GONE:
            job.problem = FAILED
        # It is gone on another rank, so the indices of all drop it.
        elif job.problem in ("", FAILED, PAUSED):
            job.problem = GONE
    return job
