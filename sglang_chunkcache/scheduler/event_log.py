"""A rank's log of cache events, for the front's mirror to read (wire/events.py).

A log that outgrows `max_events` forgets its oldest events. The reader sees a gap and drops its mirror of the rank, as it does
after a new epoch.
"""

from __future__ import annotations

import secrets
from collections import deque
from dataclasses import dataclass, field
from itertools import islice

from sglang_chunkcache.wire.events import Acknowledgement, Batch, Event

MAX_EVENTS_PER_ANSWER = 2048
"""About 0.3 MB. An acknowledgement is as old as its request's time in the queue, so a backlog is told piece by piece."""


@dataclass
class EventLog:
    """Events since the last acknowledged one."""

    max_events: int
    epoch: int = field(default_factory=lambda: secrets.randbits(48))
    _next: int = 0
    _events: deque[Event] = field(default_factory=deque)

    @property
    def seq(self) -> int:
        """Number of the next event."""
        return self._next

    def append(self, event: Event) -> None:
        """Number and keep an event."""
        self._events.append(event)
        self._next += 1
        if len(self._events) > self.max_events:
            self._events.popleft()

    def unread(self, ack: Acknowledgement) -> Batch:
        """The events after `ack`, oldest first and no more than an answer should carry. Those that `ack` covers are forgotten."""
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
