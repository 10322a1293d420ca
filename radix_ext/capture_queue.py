"""Which chunks of a tree are copied into the store, and in which order: queued with their request, made later.

A queued node is not locked: on an idle server a prompt that needs its slots would wait for a forward that never comes. A node
that was evicted meanwhile is dropped.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from radix_ext.sources import ChunkCopies
from radix_ext.variants import VariantIndex


class CaptureQueue:
    """The queue of one rank.

    Args:
        is_scoring: what is captured is scored.
        max_waiting: chunks that wait. More are dropped.
        max_tokens: of the chunks of one batch; a longer chunk is a batch of its own.
        token_bytes: of one token's KV.
    """

    def __init__(
        self,
        copies: ChunkCopies,
        store: VariantIndex,
        len_of: Callable[[Any], int],
        *,
        is_scoring: bool,
        max_waiting: int,
        max_tokens: int,
        token_bytes: int,
    ) -> None:
        self._token_bytes = token_bytes
        self._copies, self._store, self._len_of = copies, store, len_of
        self._is_scoring, self._max_waiting, self._max_tokens = is_scoring, max_waiting, max_tokens
        self._queue: deque[tuple[Any, bool]] = deque()
        self.num_dropped = 0

    def add(self, chunks: Sequence[Any], keep: Collection[int], *, is_preprocessing: bool) -> None:
        """Queue those of a request's chunk nodes that have earned it (`keep`) and bring the store something new.

        In place of a chunk that was moved, its latest copy: what it was moved from, if that is on the device.
        """
        for index in sorted(keep):
            if index >= len(chunks):
                break
            node = chunks[index]
            if not is_preprocessing and not self._copies.holds(node):
                copies = self._copies.find(self._copies.identity_of(node), self._copies.facts_of(node).head, 1)
                node = copies[0] if copies else node
            # Alone it has seen no neighbour.
            preprocessed = is_preprocessing and bool(self._copies.facts_of(node).prefix)
            if self._copies.facts_of(node).is_waiting or not self._is_wanted(node, preprocessed):
                continue
            if len(self._queue) >= self._max_waiting:
                self.num_dropped += 1
                continue
            self._copies.facts_of(node).is_waiting = True
            self._queue.append((node, preprocessed))

    def next_batch(self) -> list[tuple[Any, bool]]:
        """What comes first in the queue, as (node, whether it is preprocessed); it waits no longer."""
        batch: list[tuple[Any, bool]] = []
        num_tokens = 0
        while self._queue:
            node, _ = self._queue[0]
            is_gone = not self._copies.holds(node)
            if not is_gone and batch and num_tokens + self._len_of(node) > self._max_tokens:
                break
            entry = self._queue.popleft()
            if is_gone:
                self.num_dropped += 1
                continue
            self._copies.facts_of(node).is_waiting = False
            batch.append(entry)
            num_tokens += self._len_of(node)
        return batch

    def clear(self) -> None:
        """Drop what waits."""
        for node, _ in self._queue:
            self._copies.facts_of(node).is_waiting = False
        self._queue.clear()

    def stats(self) -> dict[str, int]:
        """Chunks that wait now, and those dropped since the start."""
        return {"pending": len(self._queue), "dropped": self.num_dropped}

    def _is_wanted(self, node: Any, preprocessed: bool) -> bool:
        identity = self._copies.identity_of(node)
        if identity is None or not self._copies.holds(node):
            return False
        facts = self._copies.facts_of(node)
        return self._store.wants(
            identity,
            facts.head,
            facts.prefix,
            scored=self._is_scoring,
            preprocessed=preprocessed,
            nbytes=self._token_bytes * self._len_of(node),
        )
