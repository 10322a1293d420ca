"""A rank's log of what entered and left its tree, read by the front's mirror.

    scheduler: append, append, …            front: apply in order, acknowledge with its next request to that rank
    answer carries every event after the last acknowledged one, so that a lost answer costs nothing

Sequence numbers count events within an epoch. A flush or restart draws a new epoch; a log that outgrows `max_events`
forgets its oldest, which the reader sees as a gap: both make it drop that rank's mirror and start again.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple, cast

from radix_ext import ChainId, ChunkId
from sglang_chunkcache.wire.spans import Acknowledgement

MAX_EVENTS_PER_ANSWER = 2048
"""About 0.3 MB. An answer's acknowledgement is as old as its request's time in the queue, so a backlog is told piece by piece."""


class Inserted(NamedTuple):
    """A chunk node is in the rank's tree, behind `parent` or, if that is None, first in its namespace."""

    chunk: ChunkId
    num_tokens: int
    parent: ChainId | None
    namespace: str
    promoted: bool


class Evicted(NamedTuple):
    """A chunk node has left the rank's tree."""

    chain: ChainId


Event = tuple[int | str | bool | None, ...]
"""`Inserted` or `Evicted` on the way: a plain tuple."""


class Batch(NamedTuple):
    """What an answer carries: `events[0]` has number `start`. Plain tuples, since it is pickled between processes."""

    epoch: int
    start: int
    events: tuple[Event, ...]


@dataclass
class EventLog:
    """The scheduler's side."""

    max_events: int
    epoch: int = field(default_factory=lambda: secrets.randbits(48))
    _next: int = 0
    _events: deque[Event] = field(default_factory=deque)

    @property
    def seq(self) -> int:
        """Number of the next event."""
        return self._next

    def append(self, event: Inserted | Evicted) -> None:
        self._events.append(tuple(cast(Event, event)))
        self._next += 1
        if len(self._events) > self.max_events:
            self._events.popleft()

    def unread(self, ack: Acknowledgement) -> Batch:
        """What comes after `ack`, oldest first and no more than an answer should carry; what `ack` covers is forgotten."""
        start = self._next - len(self._events)
        if ack.epoch == self.epoch:
            while start < min(ack.seq, self._next):
                self._events.popleft()
                start += 1
        return Batch(self.epoch, start, tuple(islice(self._events, MAX_EVENTS_PER_ANSWER)))

    def restart(self) -> None:
        """A new epoch: the tree is empty."""
        self.epoch, self._next = secrets.randbits(48), 0
        self._events.clear()
