"""A rank's log of cache events for the front's mirror, and the nodes they leave (wire/events.py).

    events   + a   + b   ~ a   - b   + c   numbered; forgotten once an arriving request acknowledges
    nodes    a (host)    c                 in the order of their birth: parents first

Fused nodes of two questions may be one chain to the front, which is told of the first that comes
and of the last that goes.

A log that outgrows `max_events` forgets its oldest events. The reader sees a gap, drops its mirror
of the rank and has the nodes told again, part by part. A part begins at a birth: whatever comes and
goes meanwhile, a node that was born before has been told, one that was born later is yet to be.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from itertools import islice

from radix_ext import ChainId, Tier
from sglang_chunkcache.wire.events import Acknowledgement, Batch, Event, Inserted, Moved, Part

MAX_EVENTS_PER_ANSWER = 2048
"""About 0.3 MB. What is left goes with the next answer, or when the front asks for it."""


@dataclass(eq=False, slots=True)
class _Node:
    birth: int
    chain: ChainId
    event: Inserted
    tier: Tier = Tier.DEVICE
    num_alike: int = 1


class EventLog:
    """At most `max_events` events since the last acknowledged one, of which a message has at most
    `max_told`, and what is held."""

    def __init__(self, max_events: int, *, max_told: int = MAX_EVENTS_PER_ANSWER) -> None:
        self.max_events, self.max_told = max_events, max_told
        self.epoch = 0
        self.restart()

    def restart(self) -> None:
        """A new epoch, later than those before: the tree is empty."""
        # A restarted rank remembers no epoch, but the clock is later. It may have been set back.
        self.epoch = max(self.epoch + 1, time.time_ns())
        self.seq = 0  # number of the next event
        self.digest = 0  # XOR of the chain ids that are held
        self._events: deque[Event] = deque()
        self._held: dict[ChainId, _Node] = {}
        self._by_birth: list[_Node] = []  # with some that have left

    def holds(self, chain: ChainId) -> bool:
        return chain in self._held

    @property
    def num_nodes(self) -> int:
        return len(self._held)

    def append(self, event: Event) -> None:
        """Number and keep an event, unless it is of one of several nodes of its chain."""
        node = self._held.get(event.chain)
        if node is not None and node.tier is Tier.DEVICE:
            if isinstance(event, Inserted):
                node.num_alike += 1
                return
            if node.num_alike > 1:
                # Others of its chain are still held, so to the front nothing has left.
                node.num_alike -= 1
                return
        self._follow(event)
        self._events.append(event)
        # Last: `_follow` takes the event's number for the birth of a new node.
        self.seq += 1
        if len(self._events) > self.max_events:
            self._events.popleft()

    def acknowledge(self, ack: Acknowledgement) -> None:
        # Of another epoch: its numbers are of events that are gone.
        if ack.epoch == self.epoch:
            # At most what there is: an acknowledgement may be nonsense. Below 0, range is empty.
            for _ in range(min(ack.seq, self.seq) - (self.seq - len(self._events))):
                self._events.popleft()

    def unread(self) -> Batch:
        """What is not acknowledged, oldest first, and no more than a message should carry."""
        events = tuple(islice(self._events, self.max_told))
        return Batch(
            self.epoch, self.seq - len(self._events), events, self.seq, self.num_nodes, self.digest
        )

    def part(self, first: int) -> Part:
        """What is held now, from birth `first` on and no more than a message should carry."""
        told: list[Event] = []
        start = bisect_left(self._by_birth, first, key=lambda node: node.birth)
        for at in range(start, len(self._by_birth)):
            node = self._by_birth[at]
            # A chain that left and came back has a second entry, later than this one.
            if self._held.get(node.chain) is not node:
                continue
            # One less: a node takes two events where it has moved.
            if len(told) >= self.max_told - 1:
                return Part(first, tuple(told), node.birth)
            told.append(node.event)
            if node.tier is not Tier.DEVICE:
                told.append(Moved(node.chain, node.tier))
        return Part(first, tuple(told), None)

    def _follow(self, event: Event) -> None:
        chain = event.chain
        node = self._held.get(chain)
        if isinstance(event, Inserted):
            if node is None:
                self._held[chain] = node = _Node(self.seq, chain, event)
                self._by_birth.append(node)
                # XOR takes a chain out as it put it in, in any order.
                self.digest ^= chain
            node.tier = Tier.DEVICE  # it may come back from host memory
        elif node is None:
            return
        elif isinstance(event, Moved):
            node.tier = event.tier
        else:
            del self._held[chain]
            self.digest ^= chain
            # Not at every eviction: taking one out of a list moves all behind it.
            if len(self._by_birth) > 2 * len(self._held) + self.max_told:
                self._by_birth = [
                    each for each in self._by_birth if self._held.get(each.chain) is each
                ]
