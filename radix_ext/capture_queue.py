"""Which chunks of a tree are copied into the store, and in which order: queued with their request,
made later.

    add ──► waits ──► next_batch ──► is copied ──► put

A chunk that waits or is being copied is not queued again. A queued node is not locked: on an idle
server a prompt that needs its slots would wait for a forward that never comes. A node that was
evicted meanwhile is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from radix_ext.cfo import Attention, Scored
from radix_ext.sources import ChunkCopies, CopyFacts
from radix_ext.variant_index import VariantIndex
from radix_ext.variants import Identity, Variant


class Waiting(NamedTuple):
    """A chunk node to be copied."""

    node: Any
    preprocessed: bool
    scored: Scored  # how much is to be measured of it


class CaptureQueue:
    """The queue of one rank.

    Args:
        scored: how much is measured at least, whatever the request reads: what the server's own
            selector does.
        max_waiting: chunks that wait. More are dropped.
        part_of: how much of what one batch may take a chunk does; one that takes more than 1 is a
            batch of its own.
        token_bytes: of one token's KV.
    """

    def __init__(
        self,
        copies: ChunkCopies,
        store: VariantIndex,
        len_of: Callable[[Any], int],
        *,
        scored: Scored,
        max_waiting: int,
        part_of: Callable[[Waiting], float],
        token_bytes: int,
    ) -> None:
        self._copies, self._store, self._len_of = copies, store, len_of
        self._scored, self._token_bytes = scored, token_bytes
        self._max_waiting, self._part_of = max_waiting, part_of
        self._queue: deque[Waiting] = deque()
        self.num_dropped = self.num_without_room = 0

    def add(
        self,
        chunks: Sequence[Any],
        keep: Collection[int],
        *,
        is_preprocessing: bool,
        scored: Scored = Scored.NOTHING,
    ) -> None:
        """Queue those of a request's chunk nodes that have earned it (`keep`) and bring the store
        something new.

        In place of a chunk that was moved, its latest copy: what it was moved from, if that is on
        the device. `scored` is how much the request's selector reads.
        """
        scored = self.at_least(scored)
        for index in sorted(keep):
            if index >= len(chunks):
                break
            node = chunks[index]
            identity, facts = self._copies.identity_of(node), self._copies.facts_of(node)
            if not is_preprocessing and not self._copies.holds(node):
                node = next(iter(self._copies.find(identity, facts.head, 1)), node)
                facts = self._copies.facts_of(node)
            if facts.is_waiting:
                continue
            # Alone it has seen no neighbour.
            entry = Waiting(node, is_preprocessing and bool(facts.prefix), scored)
            if identity is None or not self._is_wanted(entry, identity, facts):
                if identity is None or self._store.get(identity, facts.head, facts.prefix):
                    continue
                self.num_without_room += entry.preprocessed
                if self._copies.holds(node) and not entry.preprocessed:
                    self._store.turned_away(self._token_bytes * self._len_of(node))
            elif len(self._queue) >= self._max_waiting:
                self.num_dropped += 1
            else:
                facts.is_waiting = True
                self._queue.append(entry)

    def next_batch(self) -> list[Waiting]:
        """What comes first in the queue. Each counts as waiting until it is `put` or given up."""
        batch: list[Waiting] = []
        taken = 0.0
        while self._queue:
            entry = self._queue[0]
            if not self._copies.holds(entry.node):
                self.num_dropped += 1
                self._queue.popleft()
                continue
            taken += self._part_of(entry)
            if batch and taken > 1:
                break
            batch.append(self._queue.popleft())
        return batch

    def put(self, entry: Waiting, blob: Any, scores: Attention | None) -> bool:
        """The chunk is copied: into the store with it. Whether it is there."""
        facts, identity = self._copies.facts_of(entry.node), self._copies.identity_of(entry.node)
        facts.is_waiting, facts.scores = False, scores
        variant = Variant(
            facts.prefix,
            blob,
            head=facts.head,
            start=facts.start,
            scores=scores,
            outward=facts.outward,
            preprocessed=entry.preprocessed,
        )
        return self._store.put(identity, variant)

    def give_up(self, batch: Iterable[Waiting]) -> None:
        """These could not be copied. Another request may queue them again."""
        for entry in batch:
            self._copies.facts_of(entry.node).is_waiting = False

    def at_least(self, scored: Scored) -> Scored:
        """How much is measured of what a request that reads that much has queued."""
        return max(scored, self._scored)

    def clear(self) -> None:
        self.give_up(self._queue)
        self._queue.clear()

    def stats(self) -> dict[str, int]:
        """Chunks that wait now; since the start those dropped, and preprocessed ones that the
        store has no room for."""
        return {
            "pending": len(self._queue),
            "dropped": self.num_dropped,
            "no_room": self.num_without_room,
        }

    def _is_wanted(self, entry: Waiting, identity: Identity, facts: CopyFacts) -> bool:
        return self._copies.holds(entry.node) and self._store.wants(
            identity,
            facts.head,
            facts.prefix,
            scored=entry.scored,
            has_outward=facts.outward is not None,
            preprocessed=entry.preprocessed,
            nbytes=self._token_bytes * self._len_of(entry.node),
        )
