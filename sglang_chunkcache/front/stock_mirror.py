"""The front's view of a rank whose tree is SGLang's own and tells nothing: what answers have shown,
and what the least recent use lets expect.

An answer's `cached_tokens` say how much of its prompt was found. What the view has beyond that has
left the tree, with all behind it; what was computed is in the tree from now on. The pool holds so
many tokens; of more, the least recently used have left, chains from their ends:

    used in this order     what follows the chunks, the chunks backwards, the head
    more than the pool     the first of all used leave

Requests to `/v1` take room that is not seen here, and other tiers keep what has left: answers
correct both. A wrong view costs hits, never an answer.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import Any

from radix_ext import ChainId, ChainNode, ChunkPrefixTree, Tier
from sglang_chunkcache.front.rank_mirror import RankMirror
from sglang_chunkcache.front.request import Planned
from sglang_chunkcache.wire.report import Fallback
from sglang_chunkcache.wire.state import RankState

Entry = ChainId | str | tuple[int]
"""A chunk's node; a namespace, for its head; a number, for what follows a request's chunks."""


class StockMirror(RankMirror):
    """One rank's part of the tree. Of its events there are none, of its cache one epoch."""

    def __init__(self, tree: ChunkPrefixTree, rank: int) -> None:
        super().__init__(tree, rank)
        self._epoch = 1
        self._entries = OrderedDict[Entry, int]()
        """Tokens of each, least recently used first."""
        self.num_tokens = self.num_corrections = self.num_assumed_evictions = self._num_tails = 0
        self._pool: int | None = None
        """Tokens that the rank can hold. None: it has not said."""

    def holds_behind(self, namespace: str) -> bool:
        root = self._tree.nodes.root(namespace)
        return root is not None and root.has_held_child(self.rank)

    def answered(self, planned: Planned, cached: int | None) -> None:
        """What was found is there, and so is what was computed."""
        if not planned.chain:
            return
        if cached is not None:
            self._correct(planned, cached)
        path = self._tree.match(planned.namespace, (chunk.id for chunk in planned.chain))
        self._tree.insert(
            planned.namespace,
            planned.chain,
            rank=self.rank,
            tier=Tier.DEVICE,
            # marked when the request began
            promoted_len=sum(node.promoted for node in path),
            hit_len=0,  # counted by the bookkeeper
        )
        self._use_chain(planned)
        self._evict()

    def ended(self, planned: Planned, cached: int, num_new: int) -> None:
        """The answer of so many tokens is in the tree, too."""
        end = planned.area[-1].end if planned.area else 0
        self._num_tails += 1
        self._use((self._num_tails,), max(0, len(planned.input_ids) - max(end, cached)) + num_new)
        self._use_chain(planned)
        self._evict()

    def hear(self, state: RankState) -> None:
        """Take what the rank says of itself."""
        self._pool, self.border = state.counts["pool"], state.counts["border"]

    def compared(self, state: RankState) -> dict[str, Any]:
        """What is assumed of the rank, and how often answers have corrected that."""
        self.hear(state)
        return {
            "chunk_nodes": self._tree.holdings.digest(self.rank)[0],
            "assumed_tokens": self.num_tokens,
            "corrections": self.num_corrections,
            "assumed_evictions": self.num_assumed_evictions,
            "agrees": None,
        }

    # Private, in order of use

    def _correct(self, planned: Planned, cached: int) -> None:
        """Drop what would have been found: what came after it was planned is there all the same."""
        area, expected, held_len = planned.area, planned.expected, planned.held_len
        # a match of less than a page says nothing of chunks that end in that page
        found = sum(span.end - planned.border <= cached for span in area)
        if (
            found == len(area)
            or held_len is None
            or planned.is_short
            or (
                # it may well be there: SGLang does not look so far
                expected is not None and expected.reasons[found].fallback is Fallback.MUST_COMPUTE
            )
        ):
            return
        lost: Iterable[ChainNode] = ()
        if cached + self.border < area[0].start:  # without its head nothing of a namespace is there
            root = self._tree.nodes.root(planned.namespace)
            lost = () if root is None else root.child_nodes()
        elif found < held_len:
            path = self._tree.match(planned.namespace, (each.id for each in planned.chain))
            lost = path[found : found + 1]
        for node in lost:
            if node.is_held(self.rank):
                self.num_corrections += 1
                self._drop(node)

    def _use_chain(self, planned: Planned) -> None:
        ids = (chunk.id for chunk in planned.chain)
        for node in reversed(self._tree.match(planned.namespace, ids, rank=self.rank)):
            self._use(node.chain, node.num_tokens)
        if planned.area:
            self._use(planned.namespace, planned.area[0].start)

    def _use(self, entry: Entry, num_tokens: int) -> None:
        self._forget(entry)
        self._entries[entry] = num_tokens
        self.num_tokens += num_tokens

    def _forget(self, entry: Entry) -> None:
        self.num_tokens -= self._entries.pop(entry, 0)

    def _evict(self) -> None:
        while self._pool is not None and self.num_tokens > self._pool:
            entry, num_tokens = self._entries.popitem(last=False)
            self.num_tokens -= num_tokens
            self.num_assumed_evictions += 1
            node = self._tree.nodes.find(entry) if isinstance(entry, int) else None
            if node is not None and node.is_held(self.rank):
                self._drop(node)

    def _drop(self, node: ChainNode) -> None:
        """With all below it."""
        lost = [node]
        for each in lost:  # grows meanwhile
            self._forget(each.chain)
            lost += [child for child in each.child_nodes() if child.is_held(self.rank)]
        self._tree.evict(node.chain, rank=self.rank)
