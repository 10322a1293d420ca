"""Cache events: what entered and left a rank's tree, numbered within an epoch.

    rank    every answer carries the events after the last acknowledged one, so that a lost answer
            costs nothing; its state carries them, too: the first request is ordered by what a start
            has loaded
    front   applies them in order, acknowledges with its next request to that rank, which counts
            when it arrives; where answers do not suffice, it asks for the rank's state until it has
            all
    rank    on demand tells its nodes again, a part with each state
    front   takes a part if it has the very events that came with it: so an eviction before the part
            is in the part, and one after it comes as an event

A flush or a restart draws a new epoch. scheduler/event_log.py keeps the events,
front/rank_mirror.py applies them.
"""

from __future__ import annotations

from radix_ext import ChainId, ChunkId, Tier, extend_chain, root_chain
from sglang_chunkcache.wire.message import Record


class Acknowledgement(Record, frozen=True):
    """How far the front has read a rank's event log."""

    epoch: int
    """A flushed or restarted cache has a later one."""
    seq: int


# epochs are times in nanoseconds, so no cache has this one
NOTHING_READ = Acknowledgement(0, 0)
"""Of a front that has heard nothing, or does not say."""


# As lists, without the names of fields: an answer may carry 2,048 events.
class Inserted(Record, frozen=True, array_like=True, tag="+"):
    """A chunk node is in the rank's tree, new or back from host memory. It follows `parent` or, if
    that is None, is first in its namespace.

    Where its KV is approximate, `chunk` is `fused_chunk` of its recipe; no question is part of
    that.
    """

    chunk: ChunkId
    num_tokens: int
    parent: ChainId | None
    namespace: str
    promoted: bool

    @property
    def chain(self) -> ChainId:
        """The node's own."""
        return extend_chain(
            root_chain(self.namespace) if self.parent is None else self.parent, self.chunk
        )


class Moved(Record, frozen=True, array_like=True, tag="~"):
    """A chunk node's KV has left the device and is in this tier from now on."""

    chain: ChainId
    tier: Tier


class Evicted(Record, frozen=True, array_like=True, tag="-"):
    """The rank has a chunk node in no tier any more."""

    chain: ChainId


Event = Inserted | Moved | Evicted


class Batch(Record, frozen=True):
    """Events of one rank: `events[0]` has number `start`.
    The rest says what the rank has, at this moment."""

    epoch: int
    start: int
    events: tuple[Event, ...]
    seq: int
    """Number of the rank's next event. There may be more before it than `events` has."""
    num_nodes: int
    digest: int
    """XOR of the chain ids of its nodes; the mirror has one to compare."""


class Part(Record, frozen=True):
    """Some of the nodes that a rank has, parents first:
    an `Inserted` each, and a `Moved` where its KV is not on the device."""

    first: int
    """As it was asked for."""
    nodes: tuple[Event, ...]
    next: int | None
    """Where the next part begins. None: this was the last."""


class Reading(Record, frozen=True):
    """How far the front is with one rank."""

    dp_rank: int
    ack: Acknowledgement
    part: int | None = None
    """The rank's nodes are to be told again, from here on; 0: all of them. None: events suffice."""
