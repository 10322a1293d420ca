"""The front's view of one rank: applies the rank's event log to the global tree, in order and each event once.

Answers may arrive late or not at all; since each carries everything unread, only sequence numbers matter. A new epoch or
a gap drops what the tree records about this rank, and the tree fills again from what enters the rank's cache from then on.
"""

from __future__ import annotations

from collections import deque
from typing import Any

from radix_ext import Chunk, ChunkPrefixTree, Tier, extend_chain, root_chain
from sglang_chunkcache.wire.events import Acknowledgement, Batch, Event, Evicted, Moved
from sglang_chunkcache.wire.state import RankState


class RankMirror:
    """One rank's part of the tree."""

    def __init__(self, tree: ChunkPrefixTree, rank: int) -> None:
        self._tree, self.rank = tree, rank
        self.host_worth = 1.0
        """Of a token in host memory, if one on the device is worth 1: the rank tells it."""
        self._epoch, self._seq = 0, 0
        self._past: deque[int] = deque(maxlen=64)
        self.num_restarts = self.num_gaps = 0

    @property
    def acknowledgement(self) -> Acknowledgement:
        """What the next request to this rank tells it."""
        return Acknowledgement(self._epoch, self._seq)

    def apply(self, batch: Batch) -> None:
        """Apply the events that are new. Late batches, of this epoch or an older one, change nothing."""
        if batch.epoch in self._past:
            return
        if batch.epoch != self._epoch:
            self.restart(batch.epoch)
        if batch.start > self._seq:
            self._tree.drop_rank(self.rank)
            self._seq = batch.start
            self.num_gaps += 1
        for event in batch.events[self._seq - batch.start :]:
            self._apply_one(event)
            self._seq += 1

    def restart(self, epoch: int) -> None:
        """The rank's cache was flushed or the rank restarted: it holds nothing. An epoch that is over does not come back."""
        if epoch in self._past:
            return
        self._past.append(self._epoch)
        self._tree.drop_rank(self.rank)
        self.num_restarts += bool(self._epoch)
        self._epoch, self._seq = epoch, 0

    def compared(self, state: RankState) -> dict[str, Any]:
        """How far the mirror is from what the rank says of itself, once it has the events that come with it. A new epoch restarts
        it."""
        if state.events is not None:
            self.apply(state.events)
        if self._epoch and self._epoch != state.epoch:
            self.restart(state.epoch)
        nodes, digest = self._tree.digest(self.rank)
        behind = state.seq - self._seq
        return {
            "chunk_nodes": nodes,
            "events_behind": behind,
            "agrees": (nodes, digest) == (state.chunk_nodes, state.digest) if behind == 0 else None,
            "restarts": self.num_restarts,
            "gaps": self.num_gaps,
        }

    def _apply_one(self, event: Event) -> None:
        if isinstance(event, Evicted):
            self._tree.evict(event.chain, rank=self.rank)
            return
        if isinstance(event, Moved):
            self._tree.move(event.chain, rank=self.rank, tier=event.tier)
            return
        parent = root_chain(event.namespace) if event.parent is None else event.parent
        node = self._tree.find(extend_chain(parent, event.chunk))
        if node is not None and node.is_held(self.rank):  # it comes back from host memory
            self._tree.move(node.chain, rank=self.rank, tier=Tier.DEVICE)
            return
        chunks, promoted_len = [Chunk(event.chunk, event.num_tokens)], int(event.promoted)
        if event.parent is None:
            self._tree.insert(event.namespace, chunks, rank=self.rank, tier=Tier.DEVICE, promoted_len=promoted_len)
        else:
            self._tree.extend(event.parent, chunks, rank=self.rank, tier=Tier.DEVICE, promoted_len=promoted_len)
