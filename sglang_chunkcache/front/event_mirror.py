"""The front's view of a rank whose tree is SGLang's own and publishes KV events.

    batches 0 1 2 ...   pages (block_index.py) ── chunks that end in them ── the front's tree
    a hole, nonsense    nothing is believed any more: what the least recent use lets expect, as
                        without events (stock_mirror.py), until SGLang empties its cache

What an answer has found corrects it: not all that is stored is always found (sliding windows). A
wrong view costs hits, never an answer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from radix_ext import ChunkPrefixTree
from sglang_chunkcache.front.block_index import BlockIndex, Place
from sglang_chunkcache.front.request import Planned
from sglang_chunkcache.front.stock_mirror import StockMirror
from sglang_chunkcache.wire.kv_events import AllBlocksCleared, BlockStored, decode_batch
from sglang_chunkcache.wire.state import RankState

logger = logging.getLogger(__name__)


class EventMirror(StockMirror):
    """One rank's part of the tree.

    Args:
        tells_adapter: events say whose adapter they are of. None says an `extra_key`: such requests
            are not mirrored.
        dropped: is told why nothing is believed any more: `gap`, `malformed`, `foreign`,
            `repeated`, or `silent` (nothing comes).
    """

    def __init__(
        self,
        tree: ChunkPrefixTree,
        rank: int,
        *,
        tells_adapter: bool,
        dropped: Callable[[str], None],
    ) -> None:
        super().__init__(tree, rank)
        self._tells_adapter, self._dropped = tells_adapter, dropped
        self.host_worth = 0.99  # nobody has measured a load: of equal chains that on the device
        self.next_seq = 0
        """Of the batch that comes next."""
        self.is_told, self.is_lost = False, False
        """Whether events say what is there; whether they did, and are not believed any more."""
        self._blocks: BlockIndex | None = None
        """None: the rank has not said how large its pages are."""

    def hear(self, state: RankState) -> None:
        super().hear(state)
        if self._blocks is None:
            size, max_places = state.counts["page_size"], self._tree.max_nodes
            is_paired = state.counts["border"] >= size
            self._blocks = BlockIndex(size, is_paired=is_paired, max_places=max_places)

    def take(self, seq: int, payload: bytes) -> None:
        """The next batch, of this number; once the rank has been heard."""
        assert self._blocks is not None
        try:
            batch = decode_batch(payload)
            if batch.attn_dp_rank not in (None, self.rank):
                self.drop("foreign")
                return
            if seq != self.next_seq:
                self.drop("gap" if seq > self.next_seq else "repeated")
            # Believed as much as the rest: what is lost may begin anew with any number.
            self.next_seq = seq + 1
            if not self.is_told and not self.is_lost:
                self._begin()  # the first: a cache begins empty
            for event in batch.events:
                if isinstance(event, AllBlocksCleared):
                    self._begin()
                elif not self.is_told:
                    continue
                elif isinstance(event, BlockStored):
                    self._show(self._blocks.store(event))
                else:
                    self._show(self._blocks.remove(event))
        except ValueError as error:
            logger.warning("chunk cache: KV events of rank %d: %s", self.rank, error)
            self.drop("malformed")

    def drop(self, reason: str) -> None:
        """Nothing of what the rank has told is believed any more."""
        if self.is_lost:
            return
        until = (
            "Until /flush_cache the front assumes that what was used least recently leaves first"
        )
        logger.warning("chunk cache: KV events of rank %d: %s. %s", self.rank, reason, until)
        self._dropped(reason)
        self._forget_all()
        self.is_told, self.is_lost = False, True

    def answered(self, planned: Planned, cached: int | None) -> None:
        if not planned.chain or not self._is_mirrored(planned):
            return
        if not self.is_told:
            super().answered(planned, cached)
        elif cached is not None:
            self._correct(planned, cached)
        if self._blocks is None or self.is_lost:
            return
        places = self._blocks.follow(planned)
        if self.is_told:
            self._show(places)
        if self._blocks.is_ignored():
            self.drop("silent")

    def ended(self, planned: Planned, cached: int, num_new: int) -> None:
        if not self.is_told and self._is_mirrored(planned):
            super().ended(planned, cached, num_new)

    def compared(self, state: RankState) -> dict[str, object]:
        found = super().compared(state)
        blocks = self._blocks.media if self._blocks is not None and self.is_told else ()
        return {**found, "events": self.next_seq, "is_told": self.is_told, "blocks": len(blocks)}

    # Private, in order of use

    def _is_mirrored(self, planned: Planned) -> bool:
        identity = planned.draft.identity
        return identity.extra_key is None and (identity.lora is None or self._tells_adapter)

    def _begin(self) -> None:
        """The cache is empty, and from now on nothing is missed."""
        self.restart(self._epoch + 1)
        self.is_told, self.is_lost = True, False
        self._show(self._forget_all())

    def _forget_all(self) -> list[Place]:
        """Returns what is taken for found all the same."""
        self._tree.drop_rank(self.rank)
        self._entries.clear()
        self.num_tokens = 0
        return [] if self._blocks is None else self._blocks.clear()

    def _show(self, places: Iterable[Place]) -> None:
        """To the tree: where these chunks are now."""
        assert self._blocks is not None
        tree, rank = self._tree, self.rank
        for place in places:
            tier = self._blocks.tier(place)
            if self._holds(place.chain):
                if tier is None:
                    tree.evict(place.chain, rank=rank)
                else:
                    tree.move(place.chain, rank=rank, tier=tier)
            elif tier is None or place.chunk is None:
                continue
            # else what it is behind has left
            elif place.parent is None or self._holds(place.parent):
                node = tree.nodes.find(place.chain)
                promoted = int(node is not None and node.promoted)
                self._place(place.namespace, place.parent, place.chunk, tier, promoted)
