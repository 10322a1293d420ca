"""The front's view of one rank: applies the rank's event log to the global tree, in order and each
event once.

Answers may arrive late or not at all; since each carries everything unread, only sequence numbers
matter. A new epoch drops what the tree records about this rank. So does a gap, and the rank tells
its nodes again. It does so as well where the mirror has all events and other nodes than the rank,
which every batch shows: the tree is bounded and may have forgotten some.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from radix_ext import ChainId, Chunk, ChunkPrefixTree, Tier
from sglang_chunkcache.front.request import Planned
from sglang_chunkcache.wire.events import Acknowledgement, Batch, Event, Inserted, Moved, Reading
from sglang_chunkcache.wire.state import RankState

MAX_REPEATED = 65_536
"""Events that are applied once more after a part of a rank's nodes,
which is of a moment before them. As many as a rank keeps."""


class RankMirror:
    """One rank's part of the tree."""

    def __init__(self, tree: ChunkPrefixTree, rank: int) -> None:
        self._tree, self.rank = tree, rank
        self.host_worth = 1.0
        """Of a token in host memory, if one on the device is worth 1: the rank tells it."""
        self.border = 0
        """Tokens that a match may lack of its last chunk: it ends with a page."""
        self._epoch, self._seq = 0, 0
        self._rank_seq = 0
        """The rank's, as far as is known."""
        self._part: int | None = None
        """Of the rank's nodes, told again, what is to come next. None: they are not being told."""
        self._since: deque[Event] = deque(maxlen=MAX_REPEATED)
        """The last events that were applied while they are being told."""
        self._resynced_at: int | None = None
        self.num_restarts = self.num_gaps = self.num_resyncs = 0

    @property
    def acknowledgement(self) -> Acknowledgement:
        """What the next request to this rank tells it."""
        return Acknowledgement(self._epoch, self._seq)

    @property
    def reading(self) -> Reading:
        """What the rank is told where its state is asked for."""
        return Reading(self.rank, self.acknowledgement, self._part)

    @property
    def is_behind(self) -> bool:
        """Whether the rank has something to tell that will not come by itself."""
        return self._part is not None or self._seq < self._rank_seq

    def apply(self, batch: Batch) -> None:
        """Apply the events that are new.
        Late batches, of this epoch or an older one, change nothing."""
        if batch.epoch < self._epoch:
            return
        if batch.epoch > self._epoch:
            self.restart(batch.epoch)
        self._rank_seq = max(self._rank_seq, batch.seq)
        # what was evicted between is not known, so nothing of the rank is believed any more
        if batch.start > self._seq:
            self._tree.drop_rank(self.rank)
            self._seq = batch.start
            self._begin_parts()
            self.num_gaps += 1
        # a batch repeats what no request had acknowledged when it was made
        for event in batch.events[self._seq - batch.start :]:
            self._apply_one(event)
            self._seq += 1
            if self._part is not None:
                self._since.append(event)
        self._compare(batch)

    def hear(self, state: RankState) -> None:
        """Take what a rank's state brings. A part of its nodes is of the moment after the events
        that come with it. Later ones may have come first, since a state is read when all ranks have
        told theirs: they are applied once more."""
        self.apply(state.events)
        self.border = state.counts.get("border", 0)
        part, num_later = state.part, self._seq - state.events.seq
        # an answer to an earlier question, or of a cache that was emptied since
        if part is None or part.first != self._part or self._epoch != state.events.epoch:
            return
        if not 0 <= num_later <= len(self._since):
            return  # it will be asked for again
        if part.first == 0:
            self._tree.drop_rank(self.rank)
        later = [*self._since][len(self._since) - num_later :]
        for event in (*part.nodes, *later):
            self._apply_one(event)
        self._part = part.next
        if self._part is None:
            self._resynced_at = self._seq
            self.num_resyncs += 1

    def restart(self, epoch: int) -> None:
        """The rank's cache was flushed or the rank restarted: it holds nothing."""
        self._tree.drop_rank(self.rank)
        self.num_restarts += bool(self._epoch)
        self._epoch, self._seq, self._rank_seq = epoch, 0, 0
        self._part = self._resynced_at = None

    def compared(self, state: RankState) -> dict[str, Any]:
        """How far the mirror is from what the rank says of itself,
        once it has the events that come with it."""
        self.hear(state)
        held, told = self._tree.holdings.digest(self.rank), state.events
        return {
            "chunk_nodes": held[0],
            "events_behind": told.seq - self._seq,
            "agrees": held == (told.num_nodes, told.digest) if told.seq == self._seq else None,
            "restarts": self.num_restarts,
            "gaps": self.num_gaps,
            "resyncs": self.num_resyncs,
        }

    def holds_behind(self, namespace: str) -> bool:
        """Whether it is taken to hold any chunk behind this head. A rank that reports is never
        corrected, so nobody asks of it."""
        return False

    def answered(self, planned: Planned, cached: int | None) -> None:
        """The prompt is computed. `cached`: tokens of it that were found; None: not known. A rank
        that reports tells what became of it."""

    def ended(self, planned: Planned, cached: int, num_new: int) -> None:
        """The answer, of so many tokens, is over."""

    # Private, in order of use

    def _compare(self, batch: Batch) -> None:
        """Have the rank's nodes told again if the mirror has others. Not where it would have them
        no better: a tree that is full forgets as many as it learns. And not again before there were
        as many events as nodes, whatever the reason is."""
        num_held, digest = self._tree.holdings.digest(self.rank)
        is_same = (num_held, digest) == (batch.num_nodes, batch.digest)
        if self._part is not None or self._seq != batch.seq or is_same:
            return
        room = self._tree.max_nodes - (len(self._tree.nodes) - num_held)
        # a tree that is too small for all gets at least twice what it has
        is_of_use = batch.num_nodes <= room or 2 * num_held < room
        since = self._resynced_at
        if is_of_use and (since is None or self._seq - since >= batch.num_nodes):
            self._begin_parts()

    def _begin_parts(self) -> None:
        self._part = 0
        self._since.clear()

    def _apply_one(self, event: Event) -> None:
        if isinstance(event, Inserted):
            self._insert(event)
        elif self._part is not None and not self._holds(event.chain):
            pass  # it is yet to be told, or never will be
        elif isinstance(event, Moved):
            self._tree.move(event.chain, rank=self.rank, tier=event.tier)
        else:
            self._tree.evict(event.chain, rank=self.rank)

    def _insert(self, event: Inserted) -> None:
        if self._holds(event.chain):  # it comes back from host memory, or is told again
            self._tree.move(event.chain, rank=self.rank, tier=Tier.DEVICE)
            return
        # else its parent is yet to be told, and it comes in a part behind that
        if event.parent is None or self._part is None or self._holds(event.parent):
            chunk = Chunk(event.chunk, event.num_tokens)
            self._place(event.namespace, event.parent, chunk, Tier.DEVICE, int(event.promoted))

    def _place(
        self, namespace: str, parent: ChainId | None, chunk: Chunk, tier: Tier, promoted_len: int
    ) -> None:
        """A chunk into the tree, behind its parent or first in its namespace."""
        where: dict[str, Any] = {"rank": self.rank, "tier": tier, "promoted_len": promoted_len}
        if parent is None:
            self._tree.insert(namespace, [chunk], **where)
        else:
            self._tree.extend(parent, [chunk], **where)

    def _holds(self, chain: ChainId) -> bool:
        node = self._tree.nodes.find(chain)
        return node is not None and node.is_held(self.rank)
