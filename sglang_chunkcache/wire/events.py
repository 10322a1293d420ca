"""Cache events: what entered and left a rank's tree, numbered within an epoch.

    rank     every answer carries the events after the last acknowledged one, so that a lost answer costs nothing;
             its state carries them, too: the first request is ordered by what a start has loaded
    front    applies them in order, acknowledges with its next request to that rank

A flush or a restart draws a new epoch. scheduler/event_log.py keeps the events, front/rank_mirror.py applies them.
"""

from __future__ import annotations

from radix_ext import ChainId, ChunkId, Tier
from sglang_chunkcache.wire.message import Record


class Acknowledgement(Record, frozen=True):
    """How far the front has read a rank's event log."""

    epoch: int
    seq: int


NOTHING_READ = Acknowledgement(0, 0)
"""Of a front that has heard nothing, or does not say."""


class Inserted(Record, frozen=True, array_like=True, tag="+"):
    """A chunk node is in the rank's tree, new or back from host memory. It follows `parent` or, if that is None, is first in its
    namespace.

    Where its KV is approximate, `chunk` is `fused_chunk` of its recipe; no question is part of that.
    """

    chunk: ChunkId
    num_tokens: int
    parent: ChainId | None
    namespace: str
    promoted: bool


class Moved(Record, frozen=True, array_like=True, tag="~"):
    """A chunk node's KV has left the device and is in this tier from now on."""

    chain: ChainId
    tier: Tier


class Evicted(Record, frozen=True, array_like=True, tag="-"):
    """The rank has a chunk node in no tier any more."""

    chain: ChainId


Event = Inserted | Moved | Evicted


class Batch(Record, frozen=True):
    """Events of one rank: `events[0]` has number `start`."""

    epoch: int
    start: int
    events: tuple[Event, ...]
